"""Arrays to torch's tensors and back, over the same memory: how a call for arrays is served through torch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from aotpack_runtime.array import Array, byte_strides
from aotpack_runtime.array_kinds import Form, OwnKind
from aotpack_runtime.errors import CallError
from aotpack_runtime.host_arrays import read_array, why_not_torch
from aotpack_runtime.streams import said_stream


class Crossing:
    """One call's way to torch and back. What goes over and comes back is the caller's own object."""

    def __init__(self, entry: str, kind: OwnKind, paths: Mapping[int, str], written: Collection[str]) -> None:
        """`paths` has the place of each leaf by its id, `written` the places of those that the model writes."""
        self._entry, self._kind, self._paths, self._written = entry, kind, paths, written
        self._own: dict[int, Any] = {}
        self._there: dict[int, Any] = {}

    def to_torch(self, leaf: Any) -> Any:
        """A tensor over the memory of an array, of a copy where torch has no such tensors; CallError for an array that
        torch cannot see."""
        if id(leaf) in self._there:
            return self._there[id(leaf)]
        found = read_array(leaf)
        if found is None:
            return leaf
        path = self._paths.get(id(leaf), "an argument")
        reason = why_not_torch(found, written=path in self._written)
        array = found.array
        if reason or array is None:
            raise CallError(f"{self._entry}: {path} {reason}")
        if min(array.strides, default=0) < 0:
            array = array.forwards()
        elif array.read_only:
            array = array.twin()
        tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
        self._own[id(tensor)] = leaf
        self._there[id(leaf)] = tensor
        return tensor

    def from_torch(self, leaf: Any) -> Any:
        """An array over the memory of a tensor."""
        if id(leaf) in self._own:
            return self._own[id(leaf)]
        if not isinstance(leaf, torch.Tensor):
            return leaf
        plain = leaf.detach().resolve_conj().resolve_neg()
        if plain.layout is not torch.strided:
            raise CallError(f"a result is a tensor of layout {plain.layout}, which is no array")
        dtype = str(plain.dtype).removeprefix("torch.")
        wrap = self._kind.wrapper(Form.of(dtype, tuple(plain.shape), tuple(plain.stride()), str(plain.device)))
        return wrap(plain.data_ptr(), memory_of(plain))


def array_over(tensor: torch.Tensor) -> Array:
    """An array over the memory of a plain strided tensor, on any device."""
    plain = tensor.detach()
    dtype, steps = str(plain.dtype).removeprefix("torch."), tuple(plain.stride())
    owner = memory_of(plain)
    shape, device = tuple(plain.shape), str(plain.device)
    return Array.over(plain.data_ptr(), dtype, shape, byte_strides(dtype, steps), owner, device=device)


def memory_of(tensor: torch.Tensor) -> Any:
    """What keeps a tensor's memory alive; on the CPU a buffer over its elements."""
    if tensor.device.type != "cpu":
        return _OnDevice(tensor)
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = (ctypes.c_char * (span * tensor.itemsize if tensor.numel() else 0)).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memory


class _OnDevice:
    """A tensor on a device, as the owner of an array."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def to_host(self, array: Array) -> Array:
        torch.cuda.synchronize(self._tensor.device)
        return array_over(torch.from_dlpack(array).cpu().contiguous())  # type: ignore[attr-defined]


@contextlib.contextmanager
def undisturbed(device: str) -> Iterator[None]:
    """As arrays are served without torch: no gradients, no autocast, and on the stream that is said where one is."""
    kind, said = device.partition(":")[0], said_stream()
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        if kind == "cpu" or said is None:
            yield
            return
        own: Any = torch.cuda.ExternalStream  # its constructor has no types
        with torch.cuda.stream(own(said, device=device) if said else torch.cuda.default_stream(device)):
            yield
