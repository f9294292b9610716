"""An entry as a callable: judge the call, run the variant it hits, or serve the miss."""

from __future__ import annotations

import logging
import threading
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from aotpack_runtime.arguments import compile_entry, container_key, describe, flatten_all, is_plain_key
from aotpack_runtime.assemble import Serve, assemble
from aotpack_runtime.bundle import Bundle
from aotpack_runtime.counters import Counter
from aotpack_runtime.dispatch import Dispatcher, Hit, Miss
from aotpack_runtime.errors import AotpackError, ArtifactError, GuardMiss, SessionClosed
from aotpack_runtime.fallbacks import FALLBACKS, POLICIES
from aotpack_runtime.format import index
from aotpack_runtime.format.guard import TensorGuard
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.tree import LEAF
from aotpack_runtime.loaders import LOADERS, loader

log = logging.getLogger("aotpack.dispatch")

MEMO_LIMIT = 4096
"""Judged calls remembered for an entry (or four for each variant, if that is more); then the memo starts again."""


class Entry:
    """A callable of a bundle. Calls bind like the model's own forward(), and return what eager returns.

    Raises TypeError as Python does for arguments that do not bind, GuardMiss when nothing may serve the call,
    ArtifactError when an artifact does not load, and whatever the model itself raises.
    """

    __call__: ClassVar[Callable[..., Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Entry:  # noqa: PYI034 - of a class of its own
        # Calling looks `__call__` up on the class: each entry has a class of its own, whose `__call__` is the
        # function compiled for its signature. A dispatch in between would cost every call.
        return super().__new__(type("Entry", (cls,), {"__doc__": cls.__doc__}))

    def __init__(
        self,
        record: index.Entry,
        *,
        bundle: Bundle,
        device: str,
        policy: str,
        source_policy: str,
        weights: Callable[[str], Any],
        variants: Sequence[Variant],
        programs: Sequence[Variant],
        skipped: Sequence[tuple[str, str]],
        torch_present: Callable[[], bool],
    ) -> None:
        self.record, self.device, self.policy, self.source_policy = record, device, policy, source_policy
        self.variants, self.programs, self.weights = tuple(variants), tuple(programs), weights
        self._bundle, self._skipped, self._torch_present = bundle, list(skipped), torch_present
        self._lock = threading.RLock()
        self._memo: dict[object, Serve] = {}
        self._memo_limit = max(MEMO_LIMIT, 4 * len(variants))
        self._serves: dict[tuple[str, bool], Serve] = {}
        self._executables: dict[str, Any] = {}
        self._counters: dict[str, Counter] = {}
        self._reasons: Tally[str] = Tally()
        self._dispatcher = Dispatcher(record.parameter_names, self.variants, self._skipped)
        self._fallbacks = [import_module(FALLBACKS[way]).Fallback(self) for way in POLICIES[policy]]
        self._written = self._any("written")
        self._leaf_kinds = _leaf_kinds(record, (*self.variants, *self.programs))
        self._bind = compile_entry(record.parameters, None, aligned=False, memo={}, slow=lambda key, values: values)
        self._install(compile_entry(record.parameters, None, aligned=False, memo={}, slow=self._call))
        self._fast = False

    def __repr__(self) -> str:
        return f"<aotpack entry {self.record.name!r}: {len(self.variants)} variants on {self.device}>"

    def explain(self, /, *args: Any, **kwargs: Any) -> Hit | Miss:
        """Which variant this call would hit, or why each was turned down. Runs and loads nothing."""
        values = self._bind(*args, **kwargs)
        trees, leaves = flatten_all(values)  # type: ignore[arg-type]
        return self._dispatcher.choose(describe(trees, leaves, self.device))

    def counts(self) -> dict[str, Any]:
        """Calls served so far: hits by variant, misses by what served them and by their reason."""
        hits = {variant.id: self._value(variant.id) for variant in self.variants}
        programs = sum(self._value(program.id) for program in self.programs)
        fallbacks = {"program": programs} | {
            way.tier: self._value(way.tier) for way in self._fallbacks if way.tier != "program"
        }
        return {
            "hits": sum(hits.values()),
            "hits_by_variant": {name: count for name, count in hits.items() if count},
            "misses": sum(fallbacks.values()) + self._value("error"),
            "misses_by_tier": {tier: count for tier, count in fallbacks.items() if count},
            "misses_by_reason": dict(self._reasons.most_common(20)),
            "errors": self._value("error"),
            "loaded": sorted(self._executables),
            "skipped": dict(self._skipped),
        }

    # ------------------------------------------------------------------------------------------- for the session

    def load(self, variant: Variant) -> None:
        """Load a variant now rather than at its first call."""
        self.serve_for(variant)

    def serve_for(self, variant: Variant, *, counted: bool = True) -> Serve:
        """The function that serves calls judged to fit `variant`, loaded once however many threads ask; its calls are
        counted as calls of the variant, or (for a way that counts for itself) not."""
        key = (variant.id, counted)
        serve = self._serves.get(key)
        if serve is None:
            with self._lock:
                serve = self._serves.get(key)
                if serve is None:
                    weights = self.weights(variant.weights)
                    executable = self._executables.get(variant.id)
                    if executable is None:
                        module = loader(LOADERS[variant.artifact.kind])
                        executable = module.load(variant, self._bundle.files(variant), weights)
                        self._executables[variant.id] = executable
                    tick = self.counter(variant.id) if counted else int
                    serve = self._serves[key] = assemble(variant, executable, tick=tick, lock=weights.state_lock)
        return serve

    def counter(self, name: str) -> Callable[[], object]:
        """The tick of the counter called `name`."""
        return self._counters.setdefault(name, Counter()).tick

    def close(self) -> None:
        """Let go of every executable; calls raise SessionClosed from now on."""

        def closed(*args: Any, **kwargs: Any) -> object:
            raise SessionClosed(f"{self.record.name}: the session is closed", hint="load the bundle again")

        self._install(closed)
        with self._lock:
            self._memo.clear()
            self._serves.clear()
            self._executables.clear()
            self._fallbacks.clear()

    # ------------------------------------------------------------------------------------------------ a call

    def _call(self, key: tuple[object, ...] | None, values: tuple[object, ...]) -> object:
        """A call that the memo did not answer: judge it in full, serve it, remember the judgement."""
        if not self._fast and self._torch_present():
            self._go_fast()
        trees, leaves = flatten_all(values)
        if self._leaf_kinds is None:
            key = container_key(trees, leaves, written=self._written)
            known = self._memo.get(key) if key is not None else None
            if known is not None:
                return known(*leaves)
        serve, remember = self._judge(describe(trees, leaves, self.device), values)
        if (
            remember
            and key is not None
            and is_plain_key(key)
            and all(tree == LEAF for tree in trees) | (self._leaf_kinds is None)
        ):
            if len(self._memo) >= self._memo_limit:
                self._memo.clear()
            self._memo[key] = serve
        return serve(*leaves)

    def _judge(self, call: Any, values: tuple[object, ...]) -> tuple[Serve, bool]:
        """What serves this call, and whether the same serves every call judged alike."""
        while True:
            decision = self._dispatcher.choose(call)
            if isinstance(decision, Miss):
                return self._serve_miss(decision, values)
            try:
                return self.serve_for(decision.variant), True
            except ArtifactError as error:
                self._set_aside(decision.variant, error)

    def _set_aside(self, variant: Variant, error: AotpackError) -> None:
        """A variant that does not load is skipped from now on, with its reason: a bundle is an advisory artifact."""
        with self._lock:
            if variant.id in dict(self._skipped):
                return
            log.warning("%s does not load and is skipped: %s", variant.id, error)
            self._skipped.append((variant.id, f"does not load: {error}"))
            remaining = [item for item in self._dispatcher.variants if item.id != variant.id]
            self._dispatcher = Dispatcher(self.record.parameter_names, remaining, self._skipped)

    def _serve_miss(self, miss: Miss, values: tuple[object, ...]) -> tuple[Serve, bool]:
        self._reasons[_category(miss)] += 1
        log.debug("%s: %s", self.record.name, miss)
        problems: list[str] = []
        for way in self._fallbacks:
            prepared = way.prepare(miss, values)
            if not isinstance(prepared, str):
                return prepared.serve, prepared.remember
            problems.append(prepared)
        self.counter("error")()
        why = "; ".join(problems) or "and a miss is an error (mode strict, or on_miss: error)"
        raise GuardMiss(self.record.name, miss.reasons, why=why)

    def _go_fast(self) -> None:
        """torch is there now: answer judged calls from a function compiled for its tensors."""
        with self._lock:
            if self._fast:
                return
            kinds = self._leaf_kinds
            self._install(
                compile_entry(
                    self.record.parameters, kinds, memo=self._memo, slow=self._call,
                    aligned=self._any("aligned"), written=self._written,
                )
            )  # fmt: skip
            self._fast = True

    def _any(self, field: str) -> bool:
        """Does a variant ask this of a tensor?"""
        guards = (guard for variant in self.variants for guard in variant.guards.leaves)
        return any(getattr(guard, field) for guard in guards if isinstance(guard, TensorGuard))

    def _install(self, function: Callable[..., object]) -> None:
        type(self).__call__ = staticmethod(function)

    def _value(self, name: str) -> int:
        counter = self._counters.get(name)
        return counter.value if counter else 0


def _leaf_kinds(record: index.Entry, variants: Sequence[Variant]) -> tuple[str, ...] | None:
    """For each parameter what variants expect: "tensor", "scalar" or "mixed"; None when any takes containers."""
    seen: list[set[bool]] = [set() for _ in record.parameters]
    for variant in variants:
        if any(tree != LEAF for tree in variant.guards.trees):
            return None
        for kinds, guard in zip(seen, variant.guards.leaves, strict=True):
            kinds.add(isinstance(guard, TensorGuard))
    return tuple("mixed" if len(kinds) != 1 else "tensor" if True in kinds else "scalar" for kinds in seen)


def _category(miss: Miss) -> str:
    """What turned the call down, without its values: "x.shape[0]", "x.dtype". Of the widest variant, tried last."""
    if miss.call.state:
        return miss.call.state[0].partition(";")[0].partition(" with ")[0]
    reasons: Mapping[str, str] = miss.reasons
    return list(reasons.values())[-1].partition(":")[0].partition(" is ")[0] if reasons else "no variants"
