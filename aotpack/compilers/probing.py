"""What no trace says of itself, tried against eager: sizes 0 and 1, and arguments in other layouts.

A program for a GPU is tried in host memory, where an index that is out of range raises. On a GPU it would end the
process with the first call that eager refuses, and trying such calls is what this is for.
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
from aotpack.compilers.failures import first_line
from aotpack.compilers.flat import Flat
from aotpack.compilers.modules import move_module
from aotpack.compilers.programs import Program, program_weights, resized
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
from aotpack_runtime.format.guard import Guards, Range, TensorGuard
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
        the trace itself allows (a named dim from 1) are tried as well, and taken out where eager disagrees.
        """
        trial = self._trial(program)
        guards = program.guards
        for size in (1, 0):
            lowered = [name for name in open_sizes(guards) if trial.agrees({name: size})]
            if lowered and len(lowered) > 1 and not trial.agrees(dict.fromkeys(lowered, size)):
                lowered = []
            guards = with_low(guards, lowered, size)
        return replace(program, guards=_with_any_layout(trial, program, guards))

    def _trial(self, program: Program) -> Trial:
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
            return trial
        log.info("tried on its own device, since in host memory it is not what eager is there")
        return native


class Trial:
    """One program beside eager: the same made-up arguments to both, on `place` ("" for where the program's are)."""

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

    def agrees(self, sizes: Mapping[str, int], arrange: Arrange = torch.clone) -> bool:
        """Does the program give eager's result with these sizes, and arguments in memory as `arrange` copies them?
        False too where eager refuses."""
        program = self._program
        example = resized(program, sizes)
        if example is None:
            return False
        leaves = make_leaves(program.guards, example, self._fills)
        tensors = [tensor.to(self._place or tensor.device) for tensor in flat_tensors(program.guards, leaves)]
        flat = Flat(self._module, program.shape, self._outputs)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_state(self._module) as restore:
            try:
                torch.manual_seed(0)
                wanted = flat(*map(arrange, tensors))
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


def _with_any_layout(trial: Trial, program: Program, guards: Guards) -> Guards:
    """`guards` that take arguments in any layout where the program computes what eager does with them: it does not
    where the model asks for strides, or made nothing of `x.contiguous()` when it was traced."""
    few = {name: max(2, dim.low) for name, dim in named_sizes(guards) if isinstance(dim, Range)}
    sizes = few if resized(program, few) else {}
    if not all(trial.agrees(sizes, arrange) for arrange in (reversed_layout, gapped_layout, channels_last_layout)):
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
