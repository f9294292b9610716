"""Copies of the arguments of one call, handed to another process through memory: nothing of a request is written to a
disk."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotpack_runtime.format.tensor import channels_last_strides

Json = Any
LIMIT_BYTES = 64 << 20
"""Larger arguments are not copied: made-up ones are used in their place."""


def copy(leaves: Sequence[Any]) -> Callable[[], tuple[int, list[Json]]] | None:
    """What saves the leaves as they are now, whenever it is called and by whichever thread; None where they are too
    large. A call does no more than copy them where they are: on a GPU that is queued, and waited for when they are
    saved."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if sum([tensor.nbytes for tensor in tensors]) > LIMIT_BYTES:
        return None
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def save_copies() -> tuple[int, list[Json]]:
        for event in events:
            event.synchronize()
        return save(copies)

    return save_copies


def save(leaves: Sequence[Any]) -> tuple[int, list[Json]]:
    """(descriptor, a record of each leaf). The caller closes the descriptor."""
    descriptor = os.memfd_create("aotpack-sample")
    try:
        return descriptor, [_save(leaf, descriptor) for leaf in leaves]
    except BaseException:
        os.close(descriptor)
        raise


def load(descriptor: int, records: Sequence[Json]) -> list[Any]:
    """The leaves that `save` was given, tensors on the CPU, None for those that are no tensor."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return [_load(record, file) for record in records]


def _save(leaf: Any, descriptor: int) -> Json:
    if not isinstance(leaf, torch.Tensor):
        return None
    with torch.no_grad():
        last = leaf.dim() in (4, 5) and not leaf.is_contiguous() and _is_channels_last(leaf)
        order = (0, *range(2, leaf.dim()), 1) if last else tuple(range(leaf.dim()))
        packed = leaf.detach().permute(order).cpu().contiguous()
    data = memoryview((ctypes.c_char * (packed.numel() * packed.itemsize)).from_address(packed.data_ptr() or 1))
    while data.nbytes:
        data = data[os.write(descriptor, data) :]
    dtype = str(leaf.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(packed.shape), "order": list(order)}


def _load(record: Json, file: Any) -> Any:
    if record is None:
        return None
    dtype, shape = getattr(torch, record["dtype"]), tuple(record["shape"])
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        data = bytearray(file.read(tensor.numel() * tensor.itemsize))
        tensor = torch.frombuffer(data, dtype=dtype).view(shape)
    return tensor.permute([record["order"].index(axis) for axis in range(len(shape))])


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tuple(tensor.stride()) == channels_last_strides(tuple(tensor.shape))
