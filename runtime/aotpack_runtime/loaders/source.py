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
from aotpack_runtime.format.tree import class_fields, flatten
from aotpack_runtime.loaders.inputs import unflatten
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
        unwrap_weights(self._module)
        with weights.lock:
            weights.bind(self._rebind)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        generation = self._weights.gate.enter()
        replaced: dict[str, torch.Tensor] = {}
        try:
            module, buffers = self._module, self._buffers
            try:
                result = select_outputs(module(*args, **kwargs), self._entry.output_names)
                return _own_memory(result, module)
            finally:
                replaced = self._written_back(buffers)
        finally:
            self._weights.gate.leave(generation)
            if replaced:
                self._weights.replace(self._weights.check(replaced))

    def _rebind(self) -> None:
        """A copy of the module over the current tensors: running calls keep the one they started with."""
        self._module = copy_over(self._module, self._weights.tensors)
        self._buffers = [
            (f"{path}.{name}".removeprefix("."), owner, name, tensor)
            for path, owner in self._module.named_modules()
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]

    def _written_back(
        self, buffers: Sequence[tuple[str, torch.nn.Module, str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Write buffers that forward() replaced by other tensors back to the shared ones; those that no program writes
        are not shared as state, and returned to be replaced like weights."""
        replaced: dict[str, torch.Tensor] = {}
        for name, owner, leaf, shared in buffers:
            found = owner._buffers.get(leaf)
            if found is shared:
                continue
            owner._buffers[leaf] = shared
            if found is None:
                raise ArtifactError(name, "was a buffer until forward() removed it, which a bundle cannot follow")
            if name in self._weights.set.state:
                with torch.no_grad():
                    shared.copy_(found)
            else:
                replaced[name] = found
        return replaced


def load(entry: Entry, weights: TorchWeights) -> SourceExecutable:
    """Import and construct the source; ArtifactError with the reason when it cannot be."""
    with torch.inference_mode(False):
        return SourceExecutable(entry, weights)


def _own_memory(result: object, module: torch.nn.Module) -> object:
    """`result` with copies of what lies in the memory of a weight, as compiled variants return it: what a caller holds
    must not follow the next call or update, and what a caller writes must not reach the weights."""
    leaves: list[Any] = []
    tree = flatten(result, leaves)
    weights = {_address(tensor) for tensor in (*module.parameters(), *module.buffers())} - {0}
    shared = [isinstance(leaf, torch.Tensor) and _address(leaf) in weights for leaf in leaves]
    if not any(shared):
        return result
    return unflatten(tree, [leaf.clone() if inside else leaf for leaf, inside in zip(leaves, shared, strict=True)])


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 for a tensor without memory of its own (sparse, inside vmap)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:
        return 0


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


def unwrap_weights(module: torch.nn.Module) -> None:
    """Take apart weights that are tensors made of tensors (torchao's int8 with its scales): each becomes plain weights,
    `parametrizations.weight.original0` and so on in the place of `weight`, of which the module makes it at each use."""
    for owner in list(module.modules()):
        wrapped = [weight for weight in owner.parameters(recurse=False) if hasattr(weight, "__tensor_flatten__")]
        if wrapped:
            from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

            for weight in wrapped:
                weight.requires_grad_(False)
            unwrap_tensor_subclass_parameters(owner)
            owner.get_submodule("parametrizations").train(owner.training)  # what is new begins in train mode


def copy_over(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of `module` whose parameters and buffers are `tensors` themselves, by name."""
    memo: dict[int, Any] = {}
    for name, old in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        new = tensors.get(name)
        if new is None:
            raise ArtifactError(name, "is a weight of the source that the bundle does not hold")
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ArtifactError(
                name, f"is {old.dtype} {list(old.shape)} in the source, {new.dtype} {list(new.shape)} here"
            )
        is_parameter = isinstance(old, torch.nn.Parameter)
        memo[id(old)] = torch.nn.Parameter(new, requires_grad=False) if is_parameter else new
    return copy.deepcopy(module, memo)


def select_outputs(result: Any, names: Sequence[str] | None) -> object:
    """A dict of the named fields of a result, in the order of `names`; the result itself without names.

    ArtifactError when the result has not what is named: names stand for the items of a tuple or list, in order, and
    for the keys or fields of anything else.
    """
    if names is None:
        return result
    if isinstance(result, tuple | list) and not hasattr(result, "_fields"):
        if len(result) != len(names):
            raise ArtifactError("outputs", f"there are {len(names)} names for the {len(result)} results of the model")
        return dict(zip(names, result, strict=True))
    if isinstance(result, torch.Tensor) and len(names) == 1:
        return {names[0]: result}
    found = result if isinstance(result, Mapping) else {name: getattr(result, name) for name in _fields(result)}
    missing = [name for name in names if name not in found]
    if missing:
        known = f"has {', '.join(map(str, found))}" if found else f"is one {type(result).__name__}"
        raise ArtifactError("outputs", f"there is no {missing[0]!r} in the result of the model, which {known}")
    return {name: found[name] for name in names}


def _fields(result: object) -> Sequence[str]:
    if isinstance(result, torch.Tensor):
        return ()
    return class_fields(type(result)) or list(getattr(result, "__dict__", ()))


def _check_files(entry: Entry) -> None:
    for name, wanted in entry.source.files.items():
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None:
            continue
        if hashlib.sha256(Path(file).read_bytes()).hexdigest() != wanted:
            raise ArtifactError(
                entry.source.text, f"{file} is not the file the bundle was built from", hint="build again"
            )
