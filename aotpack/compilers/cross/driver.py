"""What Triton asks of a driver, answered without a device: the target, its limits, and what ptxas says of a cubin.

Kernels are compiled and never launched. Whoever launches one anyway gets a RuntimeError.
"""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

from aotpack.compilers.cubin import read_cubin


class PretendedDriver(CudaDriver):  # type: ignore[misc]  # a subclass: Inductor asks isinstance(active, CudaDriver)
    """The driver of one device `properties`, as torch names them."""

    def __init__(self, properties: Any) -> None:
        self._properties = properties
        self.utils, self.launcher_cls = _Utils(properties), _NoLauncher
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device=0: 0
        self.get_device_capability = lambda device=0: (properties.major, properties.minor)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._properties.major * 10 + self._properties.minor, self._properties.warp_size)


class _NoLauncher:
    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a kernel was launched in a build without a GPU")


class _Utils:
    def __init__(self, properties: Any) -> None:
        self._properties = properties

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
        """(module, function, registers a thread, words it spills, threads a block may have)."""
        kernel = read_cubin(cubin).kernels[name]
        return object(), object(), kernel.registers, kernel.stack_bytes // 4, self._properties.max_threads_per_block

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._properties.shared_memory_per_block_optin,
            "multiprocessor_count": self._properties.multi_processor_count,
            "max_num_regs": self._properties.regs_per_multiprocessor,
            "warpSize": self._properties.warp_size,
        }
