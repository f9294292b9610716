"""The entry's own source as eager: the last to serve a miss, with the bundle's weights and state.

It reaches what no program of the bundle does (another dtype, another rank, an argument that was absent), where the
module can be imported. Its files must be those the bundle was built from: another version of a model would answer
with other numbers.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format.index import Entry
from aotpack_runtime.loaders.tensors import TorchWeights


class SourceExecutable:
    """The model itself. Calls take the arguments as the caller gave them."""

    def __init__(self, entry: Entry, weights: TorchWeights) -> None:
        self._entry, self._weights = entry, weights
        self.state_lock = weights.state_lock
        self._module = build_module(entry.source.text, entry.source.args)
        _check_files(entry)
        self._module.train(entry.training)
        if weights.set.dtype:
            self._module.to(getattr(torch, weights.set.dtype))
        with weights.lock:
            weights.bind(self._rebind)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        generation = self._weights.gate.enter()
        try:
            module = self._module
            result = module(*args, **kwargs)
            self._keep_state(module)
        finally:
            self._weights.gate.leave(generation)
        return select_outputs(result, self._entry.output_names)

    def _rebind(self) -> None:
        """A copy of the module over the current tensors: running calls keep the one they started with."""
        fresh = copy_over(self._module, self._weights.tensors)
        self._module = fresh

    def _keep_state(self, module: torch.nn.Module) -> None:
        """A buffer that forward() replaced by another tensor is written back to the shared one."""
        for name in self._weights.set.state:
            owner, _, leaf = name.rpartition(".")
            parent = module.get_submodule(owner)
            shared, found = self._weights.tensors[name], getattr(parent, leaf)
            if found is not shared:
                with torch.no_grad():
                    shared.copy_(found)
                setattr(parent, leaf, shared)


def load(entry: Entry, weights: TorchWeights) -> SourceExecutable:
    """Import and construct the source; ArtifactError with the reason when it cannot be."""
    return SourceExecutable(entry, weights)


def build_module(source: str, args: Mapping[str, Any]) -> torch.nn.Module:
    """`pkg.mod:name` called with `args`, or the module itself when it is one. Weights that it draws are seeded."""
    name, _, attribute = source.partition(":")
    if not attribute:
        raise ArtifactError(source, "a saved program has no source besides itself")
    try:
        found = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ArtifactError(source, f"cannot be imported: {type(error).__name__}: {error}") from error
    if isinstance(found, torch.nn.Module):
        return found
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = found(**args)  # type: ignore[operator]
    if not isinstance(module, torch.nn.Module):
        raise ArtifactError(source, f"returned {type(module).__name__}, expected a torch.nn.Module")
    return module


def copy_over(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of `module` whose parameters and buffers are `tensors` themselves, by name."""
    memo: dict[int, Any] = {}
    for name, old in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        new = tensors.get(name)
        if new is None:
            raise ArtifactError(name, "is a weight of the source that the bundle does not hold")
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ArtifactError(name, f"is {old.dtype} {list(old.shape)} in the source, {new.dtype} {list(new.shape)} here")
        is_parameter = isinstance(old, torch.nn.Parameter)
        memo[id(old)] = torch.nn.Parameter(new, requires_grad=False) if is_parameter else new
    return copy.deepcopy(module, memo)


def select_outputs(result: Any, names: Sequence[str] | None) -> object:
    """A dict of the named fields of a result, in the order of `names`; the result itself without names."""
    if names is None:
        return result
    if isinstance(result, Mapping):
        return {name: result[name] for name in names}
    if isinstance(result, tuple | list) and not hasattr(result, "_fields"):
        return dict(zip(names, result, strict=True))
    if isinstance(result, torch.Tensor) and len(names) == 1:
        return {names[0]: result}
    return {name: getattr(result, name) for name in names}


def _check_files(entry: Entry) -> None:
    for name, wanted in entry.source.files.items():
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None:
            continue
        if hashlib.sha256(Path(file).read_bytes()).hexdigest() != wanted:
            raise ArtifactError(entry.source.text, f"{file} is not the file the bundle was built from", hint="build again")
