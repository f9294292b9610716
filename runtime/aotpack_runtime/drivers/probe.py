"""Which GPUs the driver shows, through libcuda itself: no package is needed to judge a bundle."""

from __future__ import annotations

import ctypes
from functools import cache

from aotpack_runtime.format.gpu import Gpu
from aotpack_runtime.shared_library import open_library

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""
_USED = (
    "cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2", "cuCtxSetCurrent", "cuCtxSynchronize", "cuDeviceGet",
    "cuDeviceGetAttribute", "cuDeviceGetCount", "cuDeviceGetName", "cuDevicePrimaryCtxRetain", "cuDriverGetVersion",
    "cuGetErrorString", "cuInit", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemcpyHtoD_v2", "cuPointerGetAttribute",
    "cuStreamSynchronize", "cuThreadExchangeStreamCaptureMode",
)  # fmt: skip
"""What is called while libraries are opened; see `open_library` for why it is looked up before."""
_ORDINAL = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL."""


def find_gpus() -> tuple[Gpu, ...]:
    """The devices in the driver's order; none where there is no driver, or it says that it cannot start."""
    cuda = start_driver()
    count, driver = ctypes.c_int(), ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(driver)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    version = (driver.value // 1000, driver.value % 1000 // 10)
    return tuple(_gpu(cuda, number, version) for number in range(count.value))


def device_of_address(address: int) -> int | None:
    """Ordinal of the device whose memory is at `address`; None where the driver does not know it."""
    ordinal = ctypes.c_int()  # not through cuda.bindings: 13.0 answers 0 for memory of any device
    ask = getattr(open_driver(), "cuPointerGetAttribute", None)
    if ask is None or ask(ctypes.byref(ordinal), _ORDINAL, ctypes.c_void_p(address)):
        return None
    return ordinal.value


@cache
def retain_context(ordinal: int) -> ctypes.c_void_p | None:
    """The primary context of a device, which torch and the CUDA runtime use too, kept until the process ends; None
    where the driver makes none. The first time takes a tenth of a second."""
    cuda, device, context = start_driver(), ctypes.c_int(), ctypes.c_void_p()
    if cuda is None or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    return None if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) else context


def enter_context(ordinal: int) -> None:
    """Make the device's context this thread's current one."""
    cuda, context = start_driver(), retain_context(ordinal)
    if cuda is not None and context is not None:
        cuda.cuCtxSetCurrent(context)


def wait_for(stream: int, ordinal: int) -> int:
    """Return when all that was queued on a stream of a device is done: 0, or the driver's number of what went wrong."""
    cuda, before = start_driver(), ctypes.c_void_p()
    context = retain_context(ordinal)
    if cuda is None or context is None:
        return 0  # nothing was queued where there is no device
    cuda.cuCtxPushCurrent_v2(context)
    status: int = cuda.cuStreamSynchronize(ctypes.c_void_p(stream))
    cuda.cuCtxPopCurrent_v2(ctypes.byref(before))
    return status


def start_driver() -> ctypes.CDLL | None:
    """libcuda, ready for calls; None where there is no driver, or it says that it cannot start."""
    cuda = open_driver()
    return cuda if cuda is not None and not cuda.cuInit(0) else None


@cache
def open_driver() -> ctypes.CDLL | None:
    """libcuda, perhaps not ready yet; None where there is none."""
    try:
        driver = open_library("libcuda.so.1")
    except OSError:
        return None
    for name in _USED:
        getattr(driver, name, None)
    return driver


def _gpu(cuda: ctypes.CDLL, number: int, driver: tuple[int, int]) -> Gpu:
    device, value, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), number)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    cuda.cuDeviceGetName(name, len(name), device)
    return Gpu((capability[0], capability[1]), driver, name.value.decode(errors="replace"))
