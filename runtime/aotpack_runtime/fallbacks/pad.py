"""Serve a miss by padding its arguments up to a size that a variant takes, and cutting the results back.

Only where the manifest says so: `on_miss: {policy: pad, pad: {seq: 64}}` claims that what is padded (with 0, or with
`pad_values`) does not reach the part of the results that is kept, and verification holds it to that. The builder
refuses it for entries that write state or arguments, or return anything but tensors of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotpack_runtime.dispatch import Dispatcher, Hit, Miss
from aotpack_runtime.fallbacks import Context, Prepared
from aotpack_runtime.format.expression import variable
from aotpack_runtime.format.guard import TensorGuard
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.output import Result
from aotpack_runtime.format.tensor import Call, Leaf, TensorMeta, contiguous_strides
from aotpack_runtime.format.tree import LEAF, Tree, flatten
from aotpack_runtime.record import replace

Json = Any


class Fallback:
    """`on_miss["pad"]` maps the path of a tensor to (axis, multiple or sizes) pairs, as the builder wrote it."""

    tier = "pad"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._axes: Mapping[str, Sequence[Json]] = context.record.on_miss.get("pad") or {}
        self._values: Mapping[str, Json] = context.record.on_miss.get("pad_values") or {}
        self._dispatcher = Dispatcher(context.record.parameter_names, context.variants)
        self._paths = [guard.path for guard in context.variants[0].guards.leaves] if context.variants else []

    def prepare(self, miss: Miss, values: tuple[object, ...]) -> Prepared | str:
        if miss.call.state or len(miss.call.leaves) != len(self._paths):
            return "it cannot be padded"
        padded = self._padded(miss.call)
        decision = self._dispatcher.choose(padded)
        if not isinstance(decision, Hit):
            return "no variant takes it padded"
        run = self._context.serve_for(decision.variant, counted=False)
        return Prepared(self._serve(run, decision.variant, miss.call, padded))

    def _padded(self, call: Call) -> Call:
        leaves: list[Leaf] = []
        for path, leaf in zip(self._paths, call.leaves, strict=True):
            if isinstance(leaf, TensorMeta) and path in self._axes and not leaf.odd:
                shape = list(leaf.shape)
                for axis, sizes in self._axes[path]:
                    if axis < len(shape):
                        shape[axis] = _padded_size(shape[axis], sizes)
                strides = contiguous_strides(tuple(shape))
                leaves.append(replace(leaf, shape=tuple(shape), strides=strides, offset=0))
            else:
                leaves.append(leaf)
        return Call(call.trees, tuple(leaves), call.state)

    def _serve(self, run: Callable[..., object], variant: Variant, call: Call, padded: Call) -> Callable[..., object]:
        """Pad, run, cut. The sizes are those of `call`: guards judge every call that is remembered alike."""
        fills = [
            (wanted.shape, self._values.get(path, 0))
            if isinstance(leaf, TensorMeta) and isinstance(wanted, TensorMeta) and wanted.shape != leaf.shape
            else None
            for path, leaf, wanted in zip(self._paths, call.leaves, padded.leaves, strict=True)
        ]
        env: dict[str, int] = {}
        for guard, leaf in zip(variant.guards.leaves, call.leaves, strict=True):
            if isinstance(guard, TensorGuard) and isinstance(leaf, TensorMeta):
                env.update({variable(guard.path, axis): size for axis, size in enumerate(leaf.shape)})
        shapes = [
            tuple(size(env) for size in out.shape)
            for out in variant.outputs.leaves
            if isinstance(out, Result) and out.shape is not None
        ]
        tick = self._context.counter(self.tier)

        def serve(*leaves: Any) -> object:
            given = [leaf if fill is None else _pad(leaf, *fill) for leaf, fill in zip(leaves, fills, strict=True)]
            results: list[Any] = []
            tree = flatten(run(*given), results)
            kept = iter([_cut(result, shape) for result, shape in zip(results, shapes, strict=True)])
            tick()
            return _rebuilt(tree, lambda: next(kept))

        return serve


def _padded_size(size: int, sizes: Json) -> int:
    """The next multiple, or the smallest listed size that is not below; the size itself where there is none."""
    if isinstance(sizes, int):
        return -(-size // sizes) * sizes
    return min((wanted for wanted in sizes if wanted >= size), default=size)


def _pad(tensor: Any, shape: tuple[int, ...], value: Json) -> Any:
    whole = tensor.new_full(shape, value)
    whole[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return whole


def _cut(tensor: Any, shape: tuple[int, ...]) -> Any:
    """The first `shape` of a result, in memory of its own."""
    if tuple(tensor.shape) == shape:
        return tensor
    return tensor[tuple(slice(0, size) for size in shape)].contiguous()


def _rebuilt(tree: Tree, leaf: Callable[[], object]) -> object:
    match tree:
        case ("tuple", *items):
            return tuple(_rebuilt(item, leaf) for item in items)
        case ("list", *items):
            return [_rebuilt(item, leaf) for item in items]
        case ("dict", keys, *items):
            return {key: _rebuilt(item, leaf) for key, item in zip(keys, items, strict=True)}
        case _ if tree == LEAF:
            return leaf()
    raise ValueError(f"a result cannot be {tree!r}")
