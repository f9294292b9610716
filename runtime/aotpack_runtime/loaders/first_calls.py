"""A tiny call of each library of NVIDIA's that a model calls, made beside the weights' way to the GPU.

What they set up at their first call (cuBLAS a handle and kernels: 70 ms of BERT's first call on an H200, torch 2.11) is
there then. Handles go back to libtorch's pool with the thread that made the call, and to the next one that asks, with
their memory (32 MiB of cuBLAS): so each call is made once a process.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import Self

from aotpack_runtime.drivers.probe import enter_context
from aotpack_runtime.format.tensor import contiguous_strides
from aotpack_runtime.loaders.libtorch import Libtorch, int64s, open_libtorch


def get_ready(device: str, packages: Iterable[str]) -> None:
    """Call what the `packages`, AOTInductor's libraries, say that they call. ArtifactError says what went wrong."""
    library = open_libtorch()
    library.open_cuda()
    library.delete(library.empty("uint8", (1,), (1,), device))  # the CUDA runtime and the caching allocator
    names = {name for path in packages for name in _CALLS if _says(path, name)}
    new = sorted(name for name in names if (device, name) not in _made)
    _made.update((device, name) for name in new)
    ordinal = int(device.partition(":")[2] or 0)
    enter_context(ordinal)  # cuBLAS warns in a thread that has none
    with library.on_gpu(ordinal):
        for name in new:
            _CALLS[name](library, device)


def _says(path: str, name: bytes) -> bool:
    """Is `name` part of a function's that the library at `path` asks for? Only looked for, not understood."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(name) >= 0


def _multiply(library: Libtorch, device: str) -> None:
    call = library.open_cuda().aoti_torch_cuda_mm_out
    call.restype, call.argtypes = c_int32, (c_void_p, c_void_p, c_void_p)
    with _Tensors(library, device) as tensors:
        library.check(call(tensors.empty(16, 16), tensors.empty(16, 16), tensors.empty(16, 16)), "multiplying")


def _convolve(library: Libtorch, device: str) -> None:
    call = library.open_cuda().aoti_torch_cuda_convolution
    call.restype = c_int32
    ones, zeros, two, result = int64s((1, 1)), int64s((0, 0)), c_int64(2), c_void_p()
    with _Tensors(library, device) as tensors:
        image, weight = c_void_p(tensors.empty(1, 8, 8, 8)), c_void_p(tensors.empty(8, 8, 3, 3))
        status = call(
            image, weight, None, ones, two, ones, two, ones, two, c_int32(0), zeros, two, c_int64(1), byref(result)
        )
        library.check(status, "a convolution")
        tensors.handles.append(result.value or 0)


_CALLS: dict[bytes, Callable[[Libtorch, str], None]] = {
    b"mm_out": _multiply,  # addmm, bmm and baddbmm as well
    b"cuda_convolution": _convolve,
}


_made: set[tuple[str, bytes]] = set()


class _Tensors:
    """Tensors of float16, whatever is in them, deleted at the end."""

    def __init__(self, library: Libtorch, device: str) -> None:
        self._library, self._device = library, device
        self.handles: list[int] = []

    def empty(self, *shape: int) -> int:
        handle = self._library.empty("float16", shape, contiguous_strides(shape), self._device)
        self.handles.append(handle)
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            self._library.delete(handle)
