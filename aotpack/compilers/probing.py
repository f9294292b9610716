"""What no trace says of itself, tried against eager: sizes 0 and 1, and arguments in other layouts.

A program for a GPU is tried in host memory, where an index that is out of range raises. On a GPU it would end the
process with the first call that eager refuses, and trying such calls is what this is for. What is let in there is asked
of eager once more where it will run: operators of a GPU may refuse what those of a CPU take (grouped attention of no
rows, torch 2.11).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from aotpack.compilers.compare import difference
from aotpack.compilers.flat import Flat
from aotpack.compilers.modules import move_module
from aotpack.compilers.programs import Example, Program, custom_operators_of, program_weights, resized
from aotpack.compilers.shapes import IntLeaf, TensorLeaf
from aotpack.compilers.sizes import (
    channels_last_layout,
    flat_tensors,
    gapped_layout,
    named_sizes,
    open_sizes,
    output_numbers,
    reversed_layout,
    sizes_of,
    with_low,
)
from aotpack.compilers.user_errors import first_line
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.expression import parse, variable
from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.loaders.programs import move

Json = Any
Arrange = Callable[[torch.Tensor], torch.Tensor]
log = logging.getLogger("aotpack.export")


class Probe:
    """Calls programs of one model, and the model itself, with sizes and layouts that may not be theirs."""

    def __init__(
        self,
        module: torch.nn.Module,
        weights: Callable[[], Mapping[str, torch.Tensor]],
        *,
        outputs: Sequence[str] | None,
        fills: Mapping[str, Json],
    ) -> None:
        self._module, self._weights, self._outputs, self._fills = module, weights, outputs, fills
        self._on_host: torch.nn.Module | None = None

    def relaxed(self, program: Program) -> Program:
        """`program` with its guards let down to sizes 1 and 0, and to any layout, where it computes what eager does.

        A trace takes every open size to be 2 or more and leaves no sign of where that mattered (`squeeze` of a dim of
        1 is the plainest case), so it is tried against eager: each size alone, then all of them together. Sizes that
        the trace itself allows (a named dim from 1) are tried as well, and taken out where eager disagrees. 0 is tried
        for what the manifest lets vary only: nothing else asks for a model without heads or channels, and operators
        may divide by their number and end the process (grouped attention, torch 2.11).
        """
        program = replace(program, guards=_bound(self._trial(program), program))
        trial = self._trial(program)
        if trial.agrees({}) and trial.contradicted(_masked):
            raise CompileError(
                type(self._module).__name__,
                "gives another result than eager where a bool argument is set: it goes another way when it is exported",
                hint="nn.TransformerEncoder does with a padding mask: construct it with enable_nested_tensor=False",
            )
        guards = program.guards
        varying = _varying(program)
        for size in (1, 0):
            tried = [name for name in open_sizes(guards) if size or name in varying]
            lowered = [name for name in tried if trial.agrees({name: size}) and trial.takes_there({name: size})]
            if lowered and len(lowered) > 1 and not trial.agrees(dict.fromkeys(lowered, size)):
                lowered = []
            guards = with_low(guards, lowered, size)
        lowest = replace(program, guards=guards)
        lows = [{name: low} for name, low in _open_lows(guards)]
        small = [resized(lowest, {**trial.base, **sizes}) for sizes in lows if trial.takes(sizes)]
        examples = dict.fromkeys([program.example, *[example for example in small if example is not None]])
        tried_elsewhere = trial.there is not None and any(custom_operators_of(program.exported))
        free = guards if tried_elsewhere else _with_any_layout(trial, guards)
        return replace(lowest, guards=free, examples=tuple(examples))

    def _trial(self, program: Program) -> Trial:
        trial = self._on_its_place(program)
        small = _small_sizes(program)
        if trial.agrees(small):
            trial.base = small
        return trial

    def _on_its_place(self, program: Program) -> Trial:
        graph = program.exported.graph_module
        bound = [self._weights()[name] for name in program_weights(program.exported)]
        kinds = {guard.device for guard in program.guards.leaves if isinstance(guard, TensorGuard)}
        native = Trial(program, self._module, graph, bound, "", outputs=self._outputs, fills=self._fills)
        if kinds <= {"cpu"}:
            return native
        if self._on_host is None:
            self._on_host = copy.deepcopy(self._module)
            for kind in kinds:
                move_module(self._on_host, "cpu", kind)
        moved = copy.deepcopy(graph)
        for kind in kinds:
            move(moved, kind, torch.device("cpu"))
        bound = [tensor.cpu() for tensor in bound]
        trial = Trial(program, self._on_host, moved, bound, "cpu", outputs=self._outputs, fills=self._fills)
        if trial.agrees({}):
            trial.there = native
            return trial
        log.info("tried on its own device, since in host memory it is not what eager is there")
        return native


class Trial:
    """One program beside eager: the same made-up arguments to both, on `place` ("" for where the program's are).

    Sizes that are not said are those of `base`, as small as both take, else those that the program was traced with.
    """

    def __init__(
        self,
        program: Program,
        module: torch.nn.Module,
        graph: torch.fx.GraphModule,
        bound: Sequence[torch.Tensor],
        place: str,
        *,
        outputs: Sequence[str] | None,
        fills: Mapping[str, Json],
    ) -> None:
        self._program, self._module, self._graph, self._bound, self._place = program, module, graph, bound, place
        self._outputs, self._fills = outputs, fills
        self._taken: set[Example] = set()
        self.base: Mapping[str, int] = {}
        self.there: Trial | None = None
        """The same on the program's own device, where this one is not there."""

    def takes(self, sizes: Mapping[str, int]) -> bool:
        """Does eager take these sizes? A trace may leave open what it refuses: two batches that are never compared."""
        example = resized(self._program, {**self.base, **sizes})
        tensors = self._tensors(example)
        if example is None or tensors is None:
            return False
        if example in self._taken:
            return True
        with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_state(self._module):
            try:
                Flat(self._module, self._program.shape, self._outputs)(*tensors)
            except Exception:
                return False
        return True

    def contradicted(self, arrange: Arrange) -> bool:
        """Does eager take the arguments with what `arrange` makes of them, and give another result?"""
        example = resized(self._program, self.base)
        self._taken -= {example}
        return not self.agrees({}, arrange) and example in self._taken

    def takes_there(self, sizes: Mapping[str, int]) -> bool:
        """Does eager take these sizes on the program's own device? To be asked after `agrees`, which has seen that no
        index is out of range."""
        return self.there is None or self.there.takes({**self.base, **sizes})

    def _tensors(self, example: Example | None) -> list[torch.Tensor] | None:
        if example is None:
            return None
        leaves = make_leaves(self._program.guards, example, self._fills)
        return [tensor.to(self._place or tensor.device) for tensor in flat_tensors(self._program.guards, leaves)]

    def agrees(self, sizes: Mapping[str, int], arrange: Arrange = torch.clone) -> bool:
        """Does the program give eager's result with these sizes, and arguments in memory as `arrange` copies them?
        False too where eager refuses."""
        program = self._program
        example = resized(program, {**self.base, **sizes})
        tensors = self._tensors(example)
        if example is None or tensors is None:
            return False
        flat = Flat(self._module, program.shape, self._outputs)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_state(self._module) as restore:
            try:
                torch.manual_seed(0)
                wanted = flat(*map(arrange, tensors))
                self._taken.add(example)
                restore()
                torch.manual_seed(0)
                found = self._graph(*self._bound, *map(arrange, tensors))
            except Exception as error:
                log.debug("sizes %s: %s", dict(sizes), first_line(error))
                return False
        numbers = output_numbers(program.outputs, sizes_of(program.guards, example))
        told = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.capture.leaves]
        return difference((flat.capture.tree, told), (program.outputs.tree, numbers)) is None and (
            difference(tuple(wanted), tuple(found)) is None
        )


def _bound(trial: Trial, program: Program) -> Guards:
    """`program`'s guards, with sizes that may not vary alone bound to those that the manifest gives the same name, or
    else fixed.

    A trace leaves a size open where only values decide: rows of a mask that are looked up by number may be fewer than
    there are numbers. Eager may look them up only where it must (a mask of ones is passed over), the program always.
    """
    same: dict[str, list[str]] = {}
    for leaf in program.shape.leaves:
        if isinstance(leaf, TensorLeaf):
            for axis, size in enumerate(leaf.shape):
                same.setdefault(str(size), []).append(variable(leaf.path, axis))
    partners = {place: places for size, places in same.items() if not size.isdecimal() for place in places}
    guards = program.guards
    usual = {**sizes_of(guards, program.example), **trial.base}
    for name, low in list(_open_lows(guards)):
        alone = [{name: max(low, 2)}, {name: usual[name] + 1}]
        if all(trial.agrees(sizes) or not trial.takes(sizes) for sizes in alone):
            continue
        first, *others = partners.get(name, [name])
        if others:
            relation = parse(f"{others[0] if name == first else name} == {first}")
            guards = replace(guards, where=tuple(dict.fromkeys((*guards.where, relation))))
        else:
            guards = _fixed(guards, name, sizes_of(guards, program.example)[name])
    return guards


def _fixed(guards: Guards, name: str, size: int) -> Guards:
    """Guards that take one size where they took a range."""
    leaves: list[Any] = []
    for leaf in guards.leaves:
        if isinstance(leaf, TensorGuard):
            dims = (size if variable(leaf.path, axis) == name else dim for axis, dim in enumerate(leaf.dims))
            leaves.append(replace(leaf, dims=tuple(dims)))
        elif isinstance(leaf, IntGuard) and variable(leaf.path) == name:
            leaves.append(replace(leaf, dim=Range(size, size)))
        else:
            leaves.append(leaf)
    return replace(guards, leaves=tuple(leaves))


def _varying(program: Program) -> set[str]:
    """The sizes that the manifest gives a name or a range."""
    found: set[str] = set()
    for leaf in program.shape.leaves:
        if isinstance(leaf, TensorLeaf):
            found |= {variable(leaf.path, axis) for axis, size in enumerate(leaf.shape) if parse(str(size)).names}
        elif isinstance(leaf, IntLeaf):
            found.add(variable(leaf.path))
    return found


def _small_sizes(program: Program) -> dict[str, int]:
    """Sizes of 3 and more for the open dims that the manifest names, another for each."""
    dims: dict[str, int] = {}
    found: dict[str, int] = {}
    for leaf in program.shape.leaves:
        for axis, size in enumerate(leaf.shape if isinstance(leaf, TensorLeaf) else ()):
            form = parse(str(size))
            for name in form.names:
                dims.setdefault(name, 3 + len(dims))
            if form.names:
                found[variable(leaf.path, axis)] = form(dims)
    return {name: found[name] for name, _ in _open_lows(program.guards) if name in found}


def _open_lows(guards: Guards) -> Iterator[tuple[str, int]]:
    """The sizes that may vary by themselves, and their smallest."""
    lows = {name: dim.low for name, dim in named_sizes(guards) if isinstance(dim, Range)}
    return ((name, lows[name]) for name in open_sizes(guards))


def _masked(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, of a bool tensor with the last of each row set, as padding is."""
    tensor = tensor.clone()
    if tensor.dtype == torch.bool and tensor.dim() and tensor.shape[-1] > 1:
        tensor[..., -1] = True
    return tensor


def _with_any_layout(trial: Trial, guards: Guards) -> Guards:
    """`guards` that take arguments in any layout where the program computes what eager does with them: it does not
    where the model asks for strides, or made nothing of `x.contiguous()` when it was traced."""
    if not all(trial.agrees({}, arrange) for arrange in (reversed_layout, gapped_layout, channels_last_layout)):
        return guards
    leaves = [replace(leaf, layout="any") if isinstance(leaf, TensorGuard) else leaf for leaf in guards.leaves]
    return replace(guards, leaves=tuple(leaves))


@contextmanager
def kept_state(module: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Buffers are what they were before, however often and whatever is run inside; gives what puts them back."""
    saved = {name: tensor.clone() for name, tensor in module.named_buffers()}
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in saved}
    tensors = dict(module.named_buffers())

    def restore() -> None:
        for name, value in saved.items():
            tensors[name].copy_(value)
            owners[name]._buffers[name.rpartition(".")[2]] = tensors[name]

    try:
        yield restore
    finally:
        with torch.no_grad():
            restore()
