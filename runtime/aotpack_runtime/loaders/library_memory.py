"""Arrays in memory of libtorch's own: results of models, and copies on a device from its caching allocator there."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from aotpack_runtime.array import Array, byte_strides
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, contiguous_strides
from aotpack_runtime.loaders.libtorch import Libtorch, open_libtorch, row_major

LARGE_BYTES = 1 << 20
"""Memory of this size is freed without the GIL: giving it back to the system takes a while."""


def put(array: Array, device: str) -> Array:
    """A row-major copy of `array` on `device`, made when what was queued for the array is done; it is there, for all
    streams, when this returns."""
    library = open_libtorch()
    if device.startswith("cuda"):
        library.open_cuda()
    library.synchronize(array.device)
    dense = contiguous_strides(array.shape)
    handle = library.empty(array.dtype, array.shape, dense, device)
    owner = memory_type(span_bytes(array.dtype, array.shape, dense), library).from_address(library.address(handle) or 1)
    owner.handle = handle
    steps = byte_strides(array.dtype, dense)
    copy = Array.over(library.address(handle), array.dtype, array.shape, steps, owner, device=device)
    write(copy, array)
    return copy


def write(target: Array, source: Array) -> None:
    """Copy the elements of one array into another of the same dtype and shape, wherever they lie; done when this
    returns. What was queued for them before is not waited for."""
    if not target.size:
        return
    if target.device == source.device == "cpu" and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.address, source.address, target.nbytes)
        return
    library = open_libtorch()
    handles: list[int] = []
    try:
        for array in (target, source.forwards()):
            strides = tuple(step // ITEMSIZE_BYTES[array.dtype] for step in array.strides)
            steps = row_major(array.shape, strides)
            handles.append(library.over(array.address, array.dtype, array.shape, steps, array.device))
        library.copy(*handles)
    finally:
        for handle in handles:
            library.delete(handle)
    if "cpu" not in (target.device, source.device):  # a copy from or to the host is waited for by libtorch itself
        library.synchronize(target.device)


def memory_type(size_bytes: int, library: Libtorch) -> Any:
    """The type of memory of a result: a buffer of that size, which deletes its tensor when nobody sees it any more."""
    return _memory_type(size_bytes, library.folder)


@lru_cache(maxsize=4096)
def _memory_type(size_bytes: int, folder: str) -> Any:
    library = open_libtorch()
    api = library.quick if size_bytes < LARGE_BYTES else library.slow
    delete = api.aoti_torch_delete_tensor_object

    def free(self: Any, delete: Any = delete) -> None:
        delete(self.handle)

    def to_host(self: Any, array: Array) -> Array:
        return library.to_host(array)

    return type(
        "Memory", (ctypes.c_char * size_bytes,), {"__slots__": ("handle",), "__del__": free, "to_host": to_host}
    )


def span_bytes(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """From the first byte of a tensor to the last."""
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * ITEMSIZE_BYTES[dtype]
