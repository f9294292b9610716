"""Sizes that only a run can judge: 0 and 1, for which a trace goes wrong unseen, and those to verify a variant at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from aotpack.compilers.compare import difference
from aotpack.compilers.shapes import IntLeaf, LeafSpec, TensorLeaf
from aotpack.compilers.sizes import Dims, example_of, example_tensors
from aotpack_runtime.format.expression import parse, variable
from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard
from aotpack_runtime.format.output import Outputs, Result, View
from aotpack_runtime.format.tensor import same_layout

Json = Any
Example = tuple[tuple[int, ...] | int | None, ...]


def tried_out(  # noqa: PLR0917 - each of them is another fact of the one job
    runner: Any,
    module: Any,
    guards: Guards,
    leaves: Sequence[LeafSpec],
    dims: Dims,
    fills: Mapping[str, Json],
    views: Sequence[tuple[int, View]],
) -> Guards:
    """`guards` without the sizes 0 and 1 for which the library, and the views made of what it gives, are not what the
    program computes.

    Compiled code takes an open size to be 2 or more where it matters (`squeeze` of a dim of 1), whatever was declared.
    Weights are zeros here: what they hide is found when the variant is verified.
    """

    def differs(example: Example) -> bool:
        if not _fits(guards, example):
            return False
        tensors = example_tensors(leaves, example, fills)
        wanted, again, found = [_results(run, tensors) for run in (module.run, module.run, runner.run)]
        random = difference(wanted, again) is not None
        if difference(_floats(wanted), _floats(found), rtol=0.05, atol=0.05, values=not random):
            return True
        whole, sizes = _results(module.program_results, tensors), _sizes(guards, example)
        return whole is None or not all(_is_in_place(view, whole[index], sizes) for index, view in views)

    opt = {name: bounds[2] for name, bounds in dims.items()}
    for name, (low, high, _) in dims.items():
        for size in (1, 0):
            example = tuple(example_of(leaf, {**opt, name: size}) for leaf in leaves)
            if low != high and size >= low and differs(example):
                guards = _from_size(guards, leaves, name, size + 1)
                break
    for position, guard in enumerate(guards.leaves):
        for size in (1, 0):
            example = tuple(size if n == position else example_of(leaf, opt) for n, leaf in enumerate(leaves))
            if isinstance(guard, IntGuard) and differs(example):
                above = replace(guard, dim=guard.dim.meet(Range(size + 1, None)))
                guards = replace(guards, leaves=(*guards.leaves[:position], above, *guards.leaves[position + 1 :]))
                break
    return guards


def views_of(program: Outputs, compiled: Outputs) -> list[tuple[int, View]]:
    """(number of the program's result, the view that stands for it)."""
    pairs = zip(program.leaves, compiled.leaves, strict=True)
    return [(whole.index, own) for whole, own in pairs if isinstance(whole, Result) and isinstance(own, View)]


def _is_in_place(view: View, result: torch.Tensor, sizes: Mapping[str, int]) -> bool:
    shape, strides = [tuple(form(sizes) for form in forms) for forms in (view.shape, view.strides)]
    return shape == tuple(result.shape) and same_layout(shape, strides, result.stride())


def _results(run: Callable[[list[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]) -> list[Any] | None:
    """What `run` gives, None when it refuses."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return list(run([tensor.clone() for tensor in tensors]))
    except Exception:
        return None


def _floats(results: Sequence[torch.Tensor] | None) -> list[torch.Tensor] | None:
    """The same with whole numbers blotted out: an argmax of zeros is any of them."""
    if results is None:
        return None
    return [t if t.is_floating_point() or t.is_complex() else torch.zeros_like(t) for t in results]


def _from_size(guards: Guards, leaves: Sequence[LeafSpec], name: str, low: int) -> Guards:
    """Guards that turn down sizes below `low` of the dim `name`."""

    def raised(size: int | str, dim: int | Range) -> int | Range:
        form = parse(str(size))
        return dim.meet(Range(form({name: low}), None)) if isinstance(dim, Range) and form.names == {name} else dim

    found = [
        replace(guard, dims=tuple(map(raised, leaf.shape, guard.dims)))
        if isinstance(guard, TensorGuard) and isinstance(leaf, TensorLeaf)
        else guard
        for guard, leaf in zip(guards.leaves, leaves, strict=True)
    ]
    return replace(guards, leaves=tuple(found))


# ----------------------------------------------------------------------------------------------- sizes to verify


def sample_sizes(leaves: Sequence[LeafSpec], dims: Dims, guards: Guards) -> list[Example]:
    """Sizes to run the variant at, first its opt: then min and max of its ranges, and 0, 1 and 2 where they are inside,
    since that is where a trace goes wrong unseen. Only sizes that its guards let through."""
    opt = {name: bounds[2] for name, bounds in dims.items()}
    low = {name: bounds[0] for name, bounds in dims.items()}
    high = {name: max(2 * bounds[2], 64) if bounds[1] is None else bounds[1] for name, bounds in dims.items()}
    candidates = [opt, low, high]
    for name, (least, most, _) in dims.items():
        if least != most:
            small = [size for size in (0, 1, 2) if least <= size and (most is None or size <= most)]
            candidates += [{**opt, name: size} for size in small]
    ints = [leaf for leaf in leaves if isinstance(leaf, IntLeaf)]
    examples: dict[Example, None] = {}
    for sizes in candidates:
        example = tuple(example_of(leaf, sizes) for leaf in leaves)
        for choice in _int_choices(example, leaves) if ints else [example]:
            if _fits(guards, choice):
                examples.setdefault(choice)
    return list(examples)


def _int_choices(example: Example, leaves: Sequence[LeafSpec]) -> Iterator[Example]:
    for pick in (None, "low", "high"):
        yield tuple(
            getattr(leaf, pick) if pick and isinstance(leaf, IntLeaf) else size
            for size, leaf in zip(example, leaves, strict=True)
        )


def _sizes(guards: Guards, example: Example) -> dict[str, int]:
    """The sizes of `example` by name."""
    env: dict[str, int] = {}
    for guard, size in zip(guards.leaves, example, strict=True):
        if isinstance(size, tuple):
            env.update({variable(guard.path, axis): value for axis, value in enumerate(size)})
        elif isinstance(size, int):
            env[variable(guard.path)] = size
    return env


def _fits(guards: Guards, example: Example) -> bool:
    for guard, size in zip(guards.leaves, example, strict=True):
        if isinstance(guard, TensorGuard) and isinstance(size, tuple):
            for dim, value in zip(guard.dims, size, strict=True):
                if value != dim if isinstance(dim, int) else value not in dim:
                    return False
        elif isinstance(guard, IntGuard) and isinstance(size, int) and size not in guard.dim:
            return False
    env = _sizes(guards, example)
    try:
        return all(relation(env) for relation in guards.where)
    except ZeroDivisionError:
        return False
