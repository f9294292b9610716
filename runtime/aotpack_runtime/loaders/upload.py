"""Host memory to a GPU through libcuda itself: torch's libraries are not needed, and may be opened meanwhile."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Mapping
from ctypes import byref, c_size_t, c_uint64, c_void_p

from aotpack_runtime.array import Array, byte_strides
from aotpack_runtime.drivers.probe import retain_context, start_driver
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.format.tensor import contiguous_strides

ALIGNMENT_BYTES = 256
"""Between tensors: as much as a tensor of its own would have (cudaMalloc)."""


class UploadError(AotpackError):
    """The driver refused; the message has its own words."""


def upload(arrays: Mapping[str, Array], ordinal: int) -> dict[str, Array]:
    """Row-major copies of arrays of the host on a device, in one piece of memory that is freed with the last of them;
    there for all streams when this returns."""
    dense = {name: array if array.is_contiguous() else array.copy() for name, array in arrays.items()}
    places: dict[str, int] = {}
    total = 0
    for name in sorted(dense, key=lambda name: dense[name].address):
        places[name] = total
        total += -(-dense[name].nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = DeviceMemory(max(total, 1), ordinal)
    for place, address, size_bytes in _joined(
        (places[name], dense[name].address, dense[name].nbytes) for name in places
    ):
        memory.fill(memory.address + place, address, size_bytes)
    memory.finish()
    copies: dict[str, Array] = {}
    for name, array in arrays.items():
        steps = byte_strides(array.dtype, contiguous_strides(array.shape))
        address = memory.address + places[name]
        copies[name] = Array.over(address, array.dtype, array.shape, steps, memory, device=f"cuda:{ordinal}")
    return copies


def _joined(parts: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """(where to, where from, bytes) of each part, as one those that follow each other in both places: after each copy
    another thread may keep the GIL for 5 ms."""
    to = source = size = 0
    for next_to, next_source, next_size in parts:
        if (next_to, next_source) == (to + size, source + size):
            size += next_size
            continue
        yield to, source, size
        to, source, size = next_to, next_source, next_size
    yield to, source, size


class DeviceMemory:
    """Memory on a device, freed when nobody holds it; what was queued to read it is done by then (cuMemFree waits)."""

    def __init__(self, size_bytes: int, ordinal: int) -> None:
        self._context = retain_context(ordinal)
        self.size_bytes = size_bytes
        place = c_uint64()
        try:
            self._do("cuMemAlloc_v2", byref(place), c_size_t(size_bytes))
        except UploadError as error:
            what = f"the weights, {size_bytes / 1e6:.0f} MB, do not go to cuda:{ordinal}: {error}"
            raise UploadError(what, hint="free memory there, or name another device") from error
        self.address: int = place.value
        weakref.finalize(self, _do, self._context, "cuMemFree_v2", place).atexit = False

    def fill(self, address: int, source: int, size_bytes: int) -> None:
        if size_bytes:
            self._do("cuMemcpyHtoD_v2", c_uint64(address), c_void_p(source), c_size_t(size_bytes))

    def finish(self) -> None:
        """Return when what was copied is there: the driver copies from memory of its own at the end."""
        self._do("cuCtxSynchronize")

    def to_host(self, array: Array) -> Array:
        """A row-major copy of an array in this memory, made when all that was queued is done."""
        self._do("cuCtxSynchronize")
        copy = Array(bytearray(array.nbytes), array.dtype, array.shape)
        if array.size:
            self._do("cuMemcpyDtoH_v2", c_void_p(copy.address), c_uint64(array.address), c_size_t(array.nbytes))
        return copy

    def _do(self, name: str, *arguments: object) -> None:
        _do(self._context, name, *arguments)


def _do(context: c_void_p | None, name: str, *arguments: object) -> None:
    """A function of the driver, in a context; UploadError with the driver's own words."""
    driver = start_driver()
    if driver is None or context is None:
        raise UploadError("the CUDA driver gives no context")
    before = c_void_p()
    driver.cuCtxPushCurrent_v2(context)
    status = getattr(driver, name)(*arguments)
    driver.cuCtxPopCurrent_v2(byref(before))
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, byref(text))
        raise UploadError(f"{name.partition('_')[0]}: {(text.value or b'').decode() or f'error {status}'}")
