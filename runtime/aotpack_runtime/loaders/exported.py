"""Exported programs without weights: run by torch, operator by operator, with the bundle's weights.

The program's graph takes weights and arguments as one flat list, so replacing weights is replacing a tuple, and what
it writes in place (state, arguments) is written to the shared tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from aotpack_runtime.format.index import Variant
from aotpack_runtime.loaders.programs import move, read_program
from aotpack_runtime.loaders.tensors import TorchWeights, size_tensor


class ExportedExecutable:
    """A loaded program. `run` may be called from many threads."""

    def __init__(self, variant: Variant, path: str, weights: TorchWeights) -> None:
        self._graph = read_program(path).graph_module
        if weights.device.type != "cpu":
            move(self._graph, weights.device.type, weights.device)
        self._names = [name for _, name in variant.constants]
        self._weights = weights
        self._bound: tuple[Any, ...] = ()
        self.run: Callable[[list[Any]], Any] = self._run
        with weights.lock:
            weights.bind(self._rebind)

    def size_tensor(self, size: int) -> torch.Tensor:
        return size_tensor(size)

    def _run(self, inputs: list[Any]) -> Any:
        generation = self._weights.gate.enter()
        try:
            return self._graph(*self._bound, *inputs)
        finally:
            self._weights.gate.leave(generation)

    def _rebind(self) -> None:
        self._bound = tuple(self._weights.tensors[name] for name in self._names)


def load(variant: Variant, files: Mapping[str, str], weights: TorchWeights) -> ExportedExecutable:
    """Read the program and bind the weights; ArtifactError when torch cannot read it."""
    (path,) = files.values()
    return ExportedExecutable(variant, path, weights)
