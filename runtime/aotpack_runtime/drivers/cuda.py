"""The CUDA driver through cuda.bindings: contexts, modules, launches. No torch, no compiler.

Everything here takes and returns plain numbers (device ordinals, addresses, handles). A context is the device's primary
one, which torch and the CUDA runtime use too, so that memory, streams and graphs are shared with them.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from cuda.bindings import driver as cu

from aotpack_runtime.errors import AotpackError
from aotpack_runtime.format.launch import DESCRIPTOR_BYTES

LOST_CONTEXT = (3, 201, 400, 709)
"""CUDA_ERROR_NOT_INITIALIZED, INVALID_CONTEXT, INVALID_HANDLE, CONTEXT_IS_DESTROYED: what a launch says in a thread
that has no current context, or another device's."""

DEFAULT_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a kernel may have without asking for more."""

PORTABLE_CLUSTER = 8
"""Blocks that a cluster may have without asking for more."""


class DriverError(AotpackError):
    """The driver refused; the message has its own words."""


def call(function: Callable[..., Any], *args: Any) -> Any:
    """The results of a driver function, without its status; DriverError with the status's name and text."""
    status, *results = function(*args)
    if status:
        _, name = cu.cuGetErrorName(status)
        _, text = cu.cuGetErrorString(status)
        words = f"{name.decode()}: {text.decode()}" if name and text else str(status)
        raise DriverError(f"{function.__name__}: {words}")
    return results[0] if len(results) == 1 else tuple(results)


@cache
def device_count() -> int:
    call(cu.cuInit, 0)
    return int(call(cu.cuDeviceGetCount))


class Device:
    """One GPU and its primary context, kept until the process ends: captured graphs and other libraries live in it."""

    def __init__(self, ordinal: int) -> None:
        call(cu.cuInit, 0)
        self.ordinal = ordinal
        self.handle = call(cu.cuDeviceGet, ordinal)
        self.context = call(cu.cuDevicePrimaryCtxRetain, self.handle)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is the thread's current one inside, and what was before is again afterwards."""
        call(cu.cuCtxPushCurrent, self.context)
        try:
            yield
        finally:
            call(cu.cuCtxPopCurrent)

    def is_current(self) -> bool:
        status, found = cu.cuCtxGetCurrent()
        return not status and int(found) == int(self.context)


@cache
def device(ordinal: int) -> Device:
    """The device numbered `ordinal` among those that are visible."""
    return Device(ordinal)


class Library:
    """A cubin or PTX text, loaded once a process; its kernels run in the context of any device they fit."""

    def __init__(self, data: bytes) -> None:
        call(cu.cuInit, 0)
        self._data = data if data.endswith(b"\0") or data.startswith(b"\x7fELF") else data + b"\0"
        log = bytes(4096)
        options = [cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER, cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        status, library = cu.cuLibraryLoadData(self._data, options, [log, len(log)], len(options), [], [], 0)
        if status:
            said = log.split(b"\0")[0].decode(errors="replace").strip().splitlines()
            _, name = cu.cuGetErrorName(status)
            raise DriverError(f"the driver does not load it: {name.decode()}" + (f": {said[0]}" if said else ""))
        self._library = library

    def function(self, symbol: str, on: Device, parameters: Sequence[int]) -> Function:
        """The kernel `symbol` on a device, loaded there now: a graph may be capturing later.

        `parameters` are the sizes that launches will pass, in bytes: the driver copies as many as the kernel has, from
        where it is told, so a table that is not the kernel's own is refused (DriverError).
        """
        kernel = call(cu.cuLibraryGetKernel, self._library, symbol.encode())
        with on.current():
            found = _parameter_sizes(kernel)
            if found is not None and found != list(parameters):
                raise DriverError(f"{symbol} takes parameters of {found} bytes, the index says {list(parameters)}")
            return Function(call(cu.cuKernelGetFunction, kernel), on)


def _parameter_sizes(kernel: Any) -> list[int] | None:
    """The sizes of a kernel's parameters, None where the driver cannot say (before CUDA 12.4)."""
    ask = getattr(cu, "cuKernelGetParamInfo", None)
    if ask is None:
        return None
    sizes: list[int] = []
    while True:
        try:
            status, _, size = ask(kernel, len(sizes))
        except RuntimeError:  # the driver has no such function
            return None
        if status == cu.CUresult.CUDA_ERROR_INVALID_VALUE:  # there is no parameter of that number
            return sizes
        if status:
            return None
        sizes.append(int(size))


_shared: dict[int, int] = {}
"""Handle of a function -> the dynamic shared memory that launches may ask for: the driver keeps one limit for all that
hold the handle, and the highest must stay."""
_shared_lock = threading.Lock()


class Function:
    """A kernel on one device."""

    def __init__(self, handle: Any, on: Device) -> None:
        self.handle, self.device = handle, on

    def allow_shared(self, size_bytes: int) -> None:
        """Let launches ask for that much dynamic shared memory; DriverError when the device has not as much."""
        with _shared_lock:
            if size_bytes > _shared.get(int(self.handle), DEFAULT_SHARED_BYTES):
                self._set(cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size_bytes)
                _shared[int(self.handle)] = size_bytes

    def launcher(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        *,
        cluster: Sequence[int],
        cooperative: bool,
        overlap: bool,
    ) -> Callable[[int, int], tuple[Any]]:
        """`launch(stream, pointers)` for a kernel that is launched with a cluster, cooperatively, or overlapping the
        one before it."""
        kinds = cu.CUlaunchAttributeID
        attributes = []
        if tuple(cluster) != (1, 1, 1):
            attribute = _attribute(kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster
            attributes.append(attribute)
            if cluster[0] * cluster[1] * cluster[2] > PORTABLE_CLUSTER:
                self._set(cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        if cooperative:
            attributes.append(attribute := _attribute(kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE))
            attribute.value.cooperative = 1
        if overlap:
            attributes.append(attribute := _attribute(kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION))
            attribute.value.programmaticStreamSerializationAllowed = 1
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.attrs, config.numAttrs = shared_bytes, attributes, len(attributes)
        lock = threading.Lock()

        def launch_with(stream: int, pointers: int) -> tuple[Any]:
            with lock:  # the configuration holds the stream
                config.hStream = cu.CUstream(stream)
                result: tuple[Any] = cu.cuLaunchKernelEx(config, self.handle, pointers, 0)
            return result

        return launch_with

    def _set(self, attribute: Any, value: int) -> None:
        with self.device.current():
            call(cu.cuFuncSetAttribute, self.handle, attribute, value)


def _attribute(kind: Any) -> Any:
    attribute = cu.CUlaunchAttribute()
    attribute.id = kind
    return attribute


class Block:
    """Memory for the parameters of one launch at a time: `pack_into` it, then launch with `pointers`."""

    __slots__ = ("_pointers", "memory", "pointers")

    def __init__(self, size_bytes: int, offsets: Sequence[int], *, align: int = 8) -> None:
        raw = bytearray(size_bytes + align)
        base = ctypes.addressof((ctypes.c_char * len(raw)).from_buffer(raw))
        start = -base % align
        self.memory = memoryview(raw)[start : start + size_bytes]
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*[base + start + offset for offset in offsets])
        self.pointers = ctypes.addressof(self._pointers)


def packer(layout: Sequence[tuple[int, str]], size_bytes: int) -> Callable[..., None]:
    """`pack(memory, 0, *values)` for values at (offset, code), with nothing between them."""
    text, end = "<", 0
    for offset, code in layout:
        text += f"{offset - end}x" * (offset > end) + code
        end = offset + struct.calcsize(f"<{code}")
    return struct.Struct(text + f"{size_bytes - end}x" * (size_bytes > end)).pack_into


def encode_tensor_map(
    address: int, sizes: Sequence[int], steps: Sequence[int], box: Sequence[int], *, element: int, swizzle: int
) -> bytes:
    """The CUtensorMap of a tensor, as a kernel is given it; dims are outermost first, `steps` in bytes, without the
    innermost. Settings are those of Triton's launcher, which compiles its kernels for them."""
    rank = len(sizes)
    made = call(
        cu.cuTensorMapEncodeTiled,
        cu.CUtensorMapDataType(element), rank, address,
        [cu.cuuint64_t(size) for size in reversed(sizes)], [cu.cuuint64_t(step) for step in reversed(steps)],
        [cu.cuuint32_t(size) for size in reversed(box)], [cu.cuuint32_t(1)] * rank,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, cu.CUtensorMapSwizzle(swizzle),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    return ctypes.string_at(made.getPtr(), DESCRIPTOR_BYTES)


launch = cu.cuLaunchKernel
"""(function, grid x y z, block x y z, shared bytes, stream, pointers to the parameters, 0) -> (status,)."""
