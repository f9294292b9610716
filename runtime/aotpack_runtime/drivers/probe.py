"""Which GPUs the driver shows, through libcuda itself: no package is needed to judge a bundle."""

from __future__ import annotations

import ctypes

from aotpack_runtime.format.gpu import Gpu

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


def find_gpus() -> tuple[Gpu, ...]:
    """The devices in the driver's order; none where there is no driver, or it says that it cannot start."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, driver = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(driver)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    version = (driver.value // 1000, driver.value % 1000 // 10)
    return tuple(_gpu(cuda, number, version) for number in range(count.value))


def _gpu(cuda: ctypes.CDLL, number: int, driver: tuple[int, int]) -> Gpu:
    device, value, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), number)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    cuda.cuDeviceGetName(name, len(name), device)
    return Gpu((capability[0], capability[1]), driver, name.value.decode(errors="replace"))
