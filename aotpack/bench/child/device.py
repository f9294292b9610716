"""Arrays on a GPU for processes without torch: memory straight from the driver."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver as cu

from aotpack_runtime import Array
from aotpack_runtime.drivers import cuda


class Gpu:
    """One GPU, whose context is the thread's current one from now on."""

    def __init__(self, ordinal: int) -> None:
        self._name, self._device = f"cuda:{ordinal}", cuda.device(ordinal)
        cuda.call(cu.cuCtxSetCurrent, self._device.context)

    def put(self, array: Array) -> Array:
        """A copy of a row-major array of the host."""
        address = int(cuda.call(cu.cuMemAlloc, max(array.nbytes, 1)))
        if array.nbytes:
            cuda.call(cu.cuMemcpyHtoD, address, array.address, array.nbytes)
        return Array.over(address, array.dtype, array.shape, array.strides, self, device=self._name)

    def to_host(self, array: Array) -> Array:
        """A copy in host memory, once all work is done (what `Array.cpu` asks the owner of its memory for)."""
        self.wait()
        memory = bytearray(array.nbytes)
        if array.nbytes:
            place = (ctypes.c_char * len(memory)).from_buffer(memory)
            cuda.call(cu.cuMemcpyDtoH, ctypes.addressof(place), array.address, array.nbytes)
            del place
        return Array(memory, array.dtype, array.shape)

    def wait(self) -> None:
        """Until the GPU has done what it was given."""
        cuda.call(cu.cuCtxSynchronize)
