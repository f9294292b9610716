"""Sizes of one export: which to trace with, which to leave open, and what guards say of them afterwards.

A trace must not see 0 or 1 for a size that is to stay open; dims of the manifest become torch.export's own, and sizes
of guards are named (`x.shape[0]`), those that follow others beside those that vary by themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.export import Dim

from aotpack.compilers.flat import Shape
from aotpack.compilers.shapes import IntLeaf, LeafSpec, TensorLeaf
from aotpack_runtime.format.expression import parse, variable
from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard
from aotpack_runtime.format.output import Outputs, Size, Value
from aotpack_runtime.loaders.inputs import make_leaves

Json = Any
T = TypeVar("T")


Dims = Mapping[str, tuple[int, int | None, int]]
"""Dim name -> (min, max, opt)."""


def example_sizes(shape: Shape, variants: Sequence[Json]) -> dict[str, int]:
    """A size of 2 or more for each dim: the opt of its widest range, since a hot shape is one the model takes."""
    sizes: dict[str, int] = {}
    for name in distinct(name for variant in variants for name in variant["dims"]):
        ranges = [variant["dims"][name] for variant in variants if name in variant["dims"]]
        widest = max(ranges, key=lambda bounds: math.inf if bounds[1] is None else bounds[1] - bounds[0])
        sizes[name] = max(
            2, max((inside(bounds) for bounds in ranges), default=2) if widest[0] == widest[1] else inside(widest)
        )
    return sizes


def inside(bounds: Sequence[int | None]) -> int:
    """The opt of a range, or the size nearest to it that is not 0 or 1: a trace at those fixes the dim."""
    low, high, opt = bounds
    assert low is not None
    if low == high:
        return low
    wanted = max(opt or 0, 2)
    return wanted if high is None else min(wanted, high)


def size_at(size: int | str, sizes: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else parse(size)(sizes)


def example_of(leaf: LeafSpec, sizes: Mapping[str, int]) -> tuple[int, ...] | int | None:
    match leaf:
        case TensorLeaf():
            return tuple(size_at(size, sizes) for size in leaf.shape)
        case IntLeaf():
            return min(max(2, (leaf.low + leaf.high) // 2), leaf.high)
        case _:
            return None


def trace_inputs(shape: Shape, sizes: Mapping[str, int], fills: Mapping[str, Json]) -> list[torch.Tensor]:
    """Real tensors to trace with."""
    return example_tensors(shape.leaves, [example_of(leaf, sizes) for leaf in shape.leaves], fills)


def example_tensors(
    specs: Sequence[LeafSpec], example: Sequence[tuple[int, ...] | int | None], fills: Mapping[str, Json]
) -> list[torch.Tensor]:
    """The tensors that a program takes, of the sizes of `example`."""
    leaves: list[Any] = []
    for leaf, size in zip(specs, example, strict=True):
        if isinstance(size, int):
            leaves.append(torch.empty(size, 0))
        elif isinstance(leaf, TensorLeaf):
            guard = TensorGuard(
                path=leaf.path, dtype=leaf.dtype, dims=size or (), device=leaf.device, layout=leaf.layout
            )
            guards = Guards(("*",), (guard,))
            leaves += make_leaves(guards, (size,), fills)
    return leaves


def flat_tensors(guards: Guards, leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Leaves of a call -> the tensors a program takes."""
    tensors = []
    for guard, leaf in zip(guards.leaves, leaves, strict=True):
        if isinstance(guard, TensorGuard):
            tensors.append(leaf)
        elif isinstance(guard, IntGuard):
            tensors.append(torch.empty(leaf, 0))
    return tensors


def auto_dims(shape: Shape, *, open_fixed: bool) -> list[Any]:
    """Every dim left to the exporter; with `open_fixed` also the sizes that the manifest fixes."""
    specs: list[Any] = []
    for leaf in shape.leaves:
        if isinstance(leaf, TensorLeaf):
            specs.append(
                tuple(
                    Dim.AUTO if isinstance(size, str) or (open_fixed and size > 1) else Dim.STATIC
                    for size in leaf.shape
                )
            )
        elif isinstance(leaf, IntLeaf):
            specs.append((Dim.AUTO, Dim.STATIC))
    return specs


def traced(export: Callable[[list[Any]], T], shape: Shape, dims: Dims, steps: Guards | None = None) -> T:
    """What `export` makes with named dims; where torch cannot follow a relation through them (`n // 2 <= n`), what it
    makes with dims left open between the same bounds."""
    try:
        return export(_named_dims(shape, dims, steps))
    except Exception as error:
        text = str(error)
        if "Constraints violated" not in text or re.search("must always be equal|specialized it to be", text):
            raise
        try:
            return export(_bounded_dims(shape, dims))
        except Exception:
            raise error from None


def _bounded_dims(shape: Shape, dims: Dims) -> list[Any]:
    specs: list[Any] = []
    for leaf in shape.leaves:
        if isinstance(leaf, TensorLeaf):
            specs.append(tuple(_bounded_dim(size, dims) for size in leaf.shape))
        elif isinstance(leaf, IntLeaf):
            specs.append((Dim.AUTO(min=max(leaf.low, 0), max=leaf.high), Dim.STATIC))
    return specs


def _bounded_dim(size: int | str, dims: Dims) -> Any:
    form = parse(str(size))
    low, high, _ = dims[next(iter(form.names))] if form.names else (0, 0, 0)
    if low == high:
        return Dim.STATIC
    (name,) = form.names
    return Dim.AUTO(min=form({name: low}), max=None if high is None else form({name: high}))


def _named_dims(shape: Shape, dims: Dims, guards: Guards | None = None) -> list[Any]:
    """torch.export's own named dims for ranges, fixed sizes fixed; multiples of k for a dim that `guards` want to be
    divisible by k, which torch would refuse otherwise."""
    factors = _factors(shape, guards) if guards else {}
    named = {
        name: _multiples(name, bounds, factors.get(name, 1)) for name, bounds in dims.items() if bounds[0] != bounds[1]
    }
    specs: list[Any] = []
    taken = set(dims)
    for leaf in shape.leaves:
        if isinstance(leaf, TensorLeaf):
            specs.append(tuple(_named_dim(size, named) for size in leaf.shape))
        elif isinstance(leaf, IntLeaf):
            identifier = re.sub(r"\W", "_", leaf.path)
            while identifier in taken:  # a dim of the same name has bounds of its own
                identifier += "_"
            taken.add(identifier)
            specs.append((Dim(identifier, min=max(leaf.low, 0), max=leaf.high), Dim.STATIC))
    return specs


DIVISIBLE = re.compile(r"(?P<size>\S+) % (?P<by>\d+) == 0")


def _factors(shape: Shape, guards: Guards) -> dict[str, int]:
    """Dim name -> what it has to be divisible by; only dims that no shape scales or shifts."""
    uses = [
        (size, variable(leaf.path, axis))
        for leaf in shape.leaves
        if isinstance(leaf, TensorLeaf)
        for axis, size in enumerate(leaf.shape)
        if isinstance(size, str)
    ]
    plain = {text for text, _ in uses} - {name for text, _ in uses for name in parse(text).names if name != text}
    found: dict[str, int] = {}
    for match in filter(None, (DIVISIBLE.fullmatch(relation.text) for relation in guards.where)):
        for text, place in uses:
            if place == match["size"] and text in plain:
                found[text] = math.lcm(found.get(text, 1), int(match["by"]))
    return found


def _multiples(name: str, bounds: tuple[int, int | None, int], factor: int) -> Any:
    low, high, _ = bounds
    if factor == 1:
        return Dim(name, min=low, max=high)
    return factor * Dim(f"_{name}", min=-(-low // factor), max=None if high is None else high // factor)


def _named_dim(size: int | str, named: Mapping[str, Any]) -> Any:
    if isinstance(size, int):
        return Dim.STATIC
    form = parse(size)
    (name,) = form.names
    if name not in named:
        return Dim.STATIC
    offset = form({name: 0})
    scale = form({name: 1}) - offset
    scaled = named[name] if scale == 1 else scale * named[name]
    return scaled if offset == 0 else scaled + offset


_EQUAL = re.compile(r"(?P<left>\S+) == (?P<right>.+)")


def tied_sizes(guards: Guards) -> dict[str, Any]:
    """Size -> the expression it equals, for sizes that follow others."""
    tied = {}
    for relation in guards.where:
        match = _EQUAL.fullmatch(relation.text)
        if match and match["left"] in relation.names:
            tied[match["left"]] = parse(match["right"])
    return tied


def open_sizes(guards: Guards) -> list[str]:
    """Names of the sizes that may vary by themselves."""
    tied = tied_sizes(guards)
    names = [name for name, dim in named_sizes(guards) if isinstance(dim, Range)]
    return [name for name in names if name not in tied]


def named_sizes(guards: Guards) -> Iterator[tuple[str, Any]]:
    for guard in guards.leaves:
        if isinstance(guard, TensorGuard):
            for axis, dim in enumerate(guard.dims):
                yield f"{guard.path}.shape[{axis}]", dim
        elif isinstance(guard, IntGuard):
            yield guard.path, guard.dim


def sizes_of(guards: Guards, example: Sequence[tuple[int, ...] | int | None]) -> dict[str, int]:
    """The sizes of `example` by name."""
    env: dict[str, int] = {}
    for guard, size in zip(guards.leaves, example, strict=True):
        if isinstance(guard, TensorGuard) and isinstance(size, tuple):
            env.update({f"{guard.path}.shape[{axis}]": value for axis, value in enumerate(size)})
        elif isinstance(guard, IntGuard) and isinstance(size, int):
            env[guard.path] = size
    return env


def output_numbers(outputs: Outputs, env: Mapping[str, int]) -> list[Any]:
    """The results of a program that are no tensors, None in the place of those that are."""
    return [
        leaf.size(env) if isinstance(leaf, Size) else leaf.value if isinstance(leaf, Value) else None
        for leaf in outputs.leaves
    ]


def distinct(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))


def with_low(guards: Guards, agreed: Sequence[str], size: int) -> Guards:
    """Guards whose open sizes begin at `size` where eager was found to agree, and above it where it was not."""
    tied = {name: form.text for name, form in tied_sizes(guards).items()}

    def lowered(name: str, dim: Any) -> Any:
        if not isinstance(dim, Range):
            return dim
        if tied.get(name, name) in agreed and dim.low == size + 1:
            return Range(size, dim.high)
        if tied.get(name, name) not in agreed and dim.low <= size:
            return Range(size + 1, dim.high)
        return dim

    leaves: list[Any] = []
    for guard in guards.leaves:
        if isinstance(guard, TensorGuard):
            dims = tuple(lowered(f"{guard.path}.shape[{axis}]", dim) for axis, dim in enumerate(guard.dims))
            leaves.append(replace(guard, dims=dims))
        elif isinstance(guard, IntGuard):
            leaves.append(replace(guard, dim=lowered(guard.path, guard.dim)))
        else:
            leaves.append(guard)
    return replace(guards, leaves=tuple(leaves))


def covers(dim: int | Range, size: int | str, dims: Dims) -> bool:
    if isinstance(size, int):
        return size == dim if isinstance(dim, int) else size in dim
    form = parse(size)
    (name,) = form.names
    low, high, _ = dims[name]
    if low == high:
        return form({name: low}) == dim if isinstance(dim, int) else form({name: low}) in dim
    if isinstance(dim, int) or form({name: low}) not in dim:
        return False
    return dim.high is None or (high is not None and form({name: high}) in dim)


def reversed_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose first dim is innermost in memory."""
    axes = tuple(reversed(range(tensor.dim())))
    return tensor.permute(axes).clone(memory_format=torch.contiguous_format).permute(axes)


def gapped_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with gaps between its rows."""
    if not tensor.dim():
        return tensor.clone()
    return torch.stack([tensor, tensor], dim=1).select(1, 0)


def channels_last_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is channels-last where it has the dims for it, and contiguous if not."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.clone(memory_format=formats.get(tensor.dim(), torch.contiguous_format))
