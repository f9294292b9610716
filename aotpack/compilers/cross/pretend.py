"""A context in which Inductor takes a GPU to be there: every name of torch and Triton that is replaced, in one place.

Nothing may run on the pretended device. Kernels are compiled and saved, tensors are fake, and everything is put back
on exit. Which names were needed was found by leaving out one after another (torch 2.11); all but those of `torch.cuda`
are private, so a version is used only where a record says that its code was run on a GPU (`gate.py`).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from aotpack.compilers.cross.choices import Choices
from aotpack.compilers.cross.constants import folder_on_host, same_fake_tensor
from aotpack.compilers.cross.gate import OPTIONS
from aotpack.compilers.cross.headers import cuda_headers
from aotpack_runtime.errors import CompileError

Json = Any


@contextmanager
def pretended(properties: SimpleNamespace, choices: Choices) -> Iterator[None]:
    """A GPU of `properties` (by torch's own names) for Inductor, not for anything that runs; `choices` picks the
    configuration of each kernel. Not for use beside other threads."""
    if torch.cuda.is_available():
        raise CompileError("cross build", "this process sees a GPU, and would compile for it")
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import graph
    from torch._inductor.codegen import wrapper
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_heuristics
    from torch.utils import cpp_extension
    from triton.backends.nvidia.driver import CudaDriver

    from aotpack.compilers.cross.driver import PretendedDriver

    interface, zero, here = device_interface.CudaInterface, _always(0), _always(properties)
    replaced = [
        # What the device is. Inductor reads these all over; torch.cuda.is_available() stays False.
        *_each(torch.cuda, current_device=lambda: 0, device_count=lambda: 1, synchronize=lambda device=None: None),
        *_each(torch.cuda, get_device_properties=lambda device=None: properties),
        *_each(torch.cuda, get_device_capability=lambda device=None: (properties.major, properties.minor)),
        *_each(torch.cuda, get_device_name=lambda device=None: properties.name),
        # Dynamo's view of it, which holds references taken when it was imported.
        *_each(interface, is_available=_always(True), is_bf16_supported=_always(properties.major >= 8)),
        *_each(interface, get_device_properties=here, device_count=_always(1), synchronize=_always(None)),
        *_each(interface, current_device=zero, exchange_device=zero, maybe_exchange_device=zero),
        *_each(interface.Worker, get_device_properties=here, current_device=zero),
        *_each(CudaDriver, is_active=_always(True)),
        # Kernels are compiled and saved, never run.
        *_each(wrapper.PythonWrapperCodegen, generate_and_run_autotune_block=choices.in_place_of_tuning),
        *_each(triton_heuristics.CachingAutotuner, _dynamic_scale_rblock=lambda tuner: None),
        # What looks at the data of constants, which are fake here.
        *_each(graph, is_same_tensor=same_fake_tensor),
        *_each(joint_graph, UniformValueConstantFolder=folder_on_host(joint_graph.UniformValueConstantFolder)),
        *_each(cpp_extension, CUDA_HOME=str(cuda_headers())),
    ]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aotpack-cross-"))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(os.environ, _environment(Path(folder))))
        stack.enter_context(torch._inductor.config.patch(_known(OPTIONS)))
        driver = triton.runtime.driver
        before = driver._active
        driver.set_active(PretendedDriver(properties))
        _forget()
        try:
            yield
        finally:
            driver._active = before
            _forget()


def _each(owner: Any, **values: Any) -> list[tuple[Any, str, Any]]:
    return [(owner, name, value) for name, value in values.items()]


def _always(value: Any) -> Any:
    """A method that gives `value`, whatever it is called with."""
    return staticmethod(lambda *args, **kwargs: value)


def _known(options: Mapping[str, Json]) -> dict[str, Json]:
    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


def _environment(folder: Path) -> dict[str, str]:
    """The linker finds a stub of libcuda, and Triton keeps what it compiles where it is thrown away."""
    stub_of_libcuda(folder)
    found = [str(folder), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    return {
        "LIBRARY_PATH": ":".join(found),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


_DRIVER_FUNCTIONS = (
    "cuCtxGetCurrent cuCtxSetCurrent cuDeviceGet cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuFuncGetAttribute "
    "cuFuncSetAttribute cuFuncSetCacheConfig cuGetErrorName cuGetErrorString cuInit cuLaunchKernel cuLaunchKernelEx "
    "cuModuleGetFunction cuModuleLoad cuModuleLoadData cuModuleUnload cuTensorMapEncodeTiled"
)
"""The driver's functions that generated code calls."""


def stub_of_libcuda(folder: Path) -> None:
    """A libcuda.so in `folder` to link against, so that the library asks for the driver's libcuda.so.1. Not shipped."""
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in _DRIVER_FUNCTIONS.split()))
    command = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(folder / "libcuda.so")]
    done = subprocess.run([os.environ.get("CC", "gcc"), *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError("cross build", f"no stub of libcuda can be made: {done.stderr.strip()[-300:]}")


def _forget() -> None:
    """Empty what keeps an answer about the device for the life of the process."""
    import triton
    from torch._dynamo import device_interface
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton as triton_facts

    kept: list[Callable[..., Any]] = [*vars(triton_facts).values(), triton.compiler.compiler.max_shared_mem]
    for function in (*kept, DeviceProperties.create):
        getattr(function, "cache_clear", lambda: None)()
    device_interface.caching_worker_device_properties.pop("cuda", None)
