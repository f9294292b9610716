"""Serve a miss from an exported program of the bundle, run by torch operator by operator."""

from __future__ import annotations

from aotpack_runtime.dispatch import Dispatcher, Hit, Miss
from aotpack_runtime.fallbacks import Context, Prepared
from aotpack_runtime.format.guard import TensorGuard
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.tensor import OVERRIDDEN, SUBCLASS, Call, TensorMeta
from aotpack_runtime.record import replace


class Fallback:
    """Programs are more forgiving than compiled variants: torch's operators honour autocast and grad mode, so a call is
    judged here by its dtypes, ranks, sizes and layouts alone."""

    tier = "program"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._dispatcher = Dispatcher(context.record.parameter_names, context.programs)

    def prepare(self, miss: Miss, values: tuple[object, ...]) -> Prepared | str:
        for reason in (*miss.call.state, *[leaf.odd for leaf in miss.call.leaves if isinstance(leaf, TensorMeta)]):
            if OVERRIDDEN in reason:
                return f"its programs know operators only: {reason}"
        decision = self._dispatcher.choose(_forgiving(miss.call))
        if isinstance(decision, Hit):
            if _has_subclass(miss.call) and self._writes(decision.variant):
                return "its programs write in place, and what that gives of a subclass of torch.Tensor is another class"
            return Prepared(self._context.serve_for(decision.variant), program=decision.variant)
        reasons = "; ".join(decision.reasons.values())
        return f"its programs do not reach this call: {reasons}" if reasons else "it holds no program"

    def _writes(self, program: Variant) -> bool:
        """Arguments or state?"""
        written = any(isinstance(guard, TensorGuard) and guard.written for guard in program.guards.leaves)
        return written or bool(self._context.weights(program.weights).set.state)


def _has_subclass(call: Call) -> bool:
    return any(isinstance(leaf, TensorMeta) and SUBCLASS in leaf.odd for leaf in call.leaves)


def _forgiving(call: Call) -> Call:
    """The call with what torch's operators take care of themselves left out."""
    leaves = [
        replace(leaf, offset=0, odd="", needs_grad=False, shared=False, locked=False)
        if isinstance(leaf, TensorMeta) and _operators_take(leaf)
        else leaf
        for leaf in call.leaves
    ]
    return Call(call.trees, tuple(leaves), ())


def _operators_take(leaf: TensorMeta) -> bool:
    """Ordinary tensors, subclasses and transformed ones; another layout could make a program take another branch."""
    return not leaf.odd.startswith(("has layout", "is a nested"))
