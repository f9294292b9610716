"""AOTInductor packages, unpacked: one .so, loaded through torch's C++ runner without importing `torch._inductor`.

`torch._C._aoti` is private: RUNNER_GATE says for which torch versions its calls were read and tried. Outside of it,
or where the class is not there, torch's public loader is the way back (`loaders/public.py`), and says so in the log.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from aotpack_runtime import forks
from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format.index import Variant
from aotpack_runtime.loaders.container import Container, CudaContainer
from aotpack_runtime.loaders.tensors import TorchWeights, size_tensor

log = logging.getLogger("aotpack.load")

RUNNER_GATE = ((2, 11), (2, 15))
"""First torch minor version the runner's calls are known for, and the first they are not."""

LIBRARY = "model.so"

GIL_LIMIT_NS = 200_000
"""A call that takes longer than this is made without the GIL; a choice, not a measured optimum."""
QUICK_CALLS = 8
"""Calls of a variant of fixed sizes that must all be quick before they are no longer timed."""


class AotiExecutable:
    """A loaded package. `run` may be called from many threads; it is replaced once it is known how long calls take."""

    def __init__(self, variant: Variant, path: str, weights: TorchWeights, *, concurrency: int) -> None:
        try:
            self._runner = open_runner(path, concurrency, weights.device)
        except Exception as error:
            raise ArtifactError(variant.id, _words(error), hint=_hint(error, path)) from error
        self._variant, self._path, self._concurrency = variant, path, concurrency
        self._weights = weights
        check_constants(variant, self._runner.get_constant_names_to_original_fqns())
        self._bound = False
        self._container: Container | None = None
        self._quick = 0
        # Operators without a C shim call back into torch, and perhaps Python, which the runner knows how to do; on a
        # GPU it also knows which stream is the caller's.
        on_cpu = weights.device.type == "cpu"
        self._may_leave = on_cpu and variant.artifact.files.keys() == {LIBRARY}
        self._device: Callable[[], AbstractContextManager[Any]] = (
            nullcontext if on_cpu else partial(torch.cuda.device, weights.device)
        )
        self._turn = forks.lock(forks.LAST)
        self.run: Callable[[list[Any]], Any] = self._timed if self._may_leave else self._in_turn
        with weights.lock:
            weights.bind(self._rebind)

    def _timed(self, inputs: list[Any]) -> Any:
        """Run with the GIL, and see how long that was: the first call that takes long is the last that holds it."""
        start = time.perf_counter_ns()
        results = self._runner.run(inputs)
        if time.perf_counter_ns() - start > GIL_LIMIT_NS:
            self._leave_gil()
        elif self._variant.guards.static:
            self._quick += 1
            if self._quick >= QUICK_CALLS:
                self.run = self._runner.run
        return results

    def _in_turn(self, inputs: list[Any]) -> Any:
        """Run alone: while an operator runs Python, the runner would wait for it with the GIL that it needs. The stream
        is that of the current device, so that is the package's meanwhile."""
        with self._turn, self._device():
            return self._runner.run(inputs)

    def _leave_gil(self) -> None:
        with self._weights.lock:
            if self._weights.closed:  # the last calls end as they began
                return
            if self._container is None:
                container = Container.open(self._path, self._variant.id, self._concurrency, self._weights.device)
                if container is not None:
                    container.bind(self._tensors())
                self._container = container
        self.run = self._container.run if self._container is not None else self._runner.run

    def size_tensor(self, size: int) -> torch.Tensor:
        return size_tensor(size)

    def release(self) -> None:
        """Follow the weights no longer; calls that run meanwhile keep it."""
        self._weights.unbind(self._rebind)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return self._weights.named(self._variant.constants)

    def _rebind(self) -> None:
        """Bind the current weights without a copy. The first time there is nothing to swap; later the other buffer is
        filled and swapped in, which waits for running calls, so that a call sees one set whole."""
        tensors = self._tensors()
        if tensors:
            with self._turn:
                self._runner.update_constant_buffer(tensors, self._bound, True, True)
                if self._bound:
                    self._runner.swap_constant_buffer()
            if self._container is not None:
                self._container.bind(tensors)
        self._bound = True


class CudaExecutable:
    """A loaded package on a GPU. A call queues the model's work on torch's current stream and returns.

    The C interface serves from the first call on: each container loads the kernels by itself, so changing from one to
    another would stall a call.
    """

    def __init__(self, variant: Variant, container: CudaContainer, weights: TorchWeights) -> None:
        self._variant, self._container, self._weights = variant, container, weights
        check_constants(variant, container.constant_names())
        several = torch.cuda.device_count() > 1
        self.run: Callable[[list[Any]], Any] = self._on_device if several else container.run
        with weights.lock:
            weights.bind(self._rebind)

    def size_tensor(self, size: int) -> torch.Tensor:
        return size_tensor(size)

    def release(self) -> None:
        """Follow the weights no longer; calls that run meanwhile keep it."""
        self._weights.unbind(self._rebind)

    def _on_device(self, inputs: list[Any]) -> Any:
        with torch.cuda.device(self._weights.device):
            return self._container.run(inputs)

    def _rebind(self) -> None:
        self._container.bind(self._weights.named(self._variant.constants))


def load(variant: Variant, files: Mapping[str, str], weights: TorchWeights) -> AotiExecutable | CudaExecutable:
    """Open the library and bind the weights; ArtifactError with the loader's own words."""
    if LIBRARY not in files:
        raise ArtifactError(variant.id, f"holds no {LIBRARY}")
    path = files[LIBRARY]
    if weights.device.type == "cuda" and files.keys() == {LIBRARY} and _is_tried():
        try:
            with torch.cuda.device(weights.device):  # a container leaves its device as the current one
                container = CudaContainer.open(path, variant.id, 1, weights.device)
        except OSError as error:
            raise ArtifactError(variant.id, _words(error), hint=_hint(error, path)) from error
        if container is not None:
            return CudaExecutable(variant, container, weights)
    return AotiExecutable(variant, path, weights, concurrency=1 if weights.set.state else _concurrency())


def check_constants(variant: Variant, asked: Iterable[str]) -> None:
    """A constant without its weight is a crash at the first call, so it is refused here."""
    missing = sorted(set(asked) - dict(variant.constants).keys())
    if missing:
        raise ArtifactError(variant.id, f"asks for constants the index does not name: {', '.join(missing[:5])}")


def _concurrency() -> int:
    """Calls of one variant that run at a time; each takes a model object of a few kB."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


def open_runner(path: str, concurrency: int, device: torch.device) -> Any:
    """torch's C++ runner for the library at `path`, or torch's public loader where the runner is not known."""
    found: Any = getattr(torch._C, "_aoti", None)
    if _is_tried() and device.type == "cuda" and hasattr(found, "AOTIModelContainerRunnerCuda"):
        with torch.cuda.device(device):
            return found.AOTIModelContainerRunnerCuda(path, concurrency, str(device), os.path.dirname(path))
    if _is_tried() and device.type == "cpu" and hasattr(found, "AOTIModelContainerRunnerCpu"):
        return found.AOTIModelContainerRunnerCpu(path, concurrency)
    from aotpack_runtime.loaders.public import PublicRunner

    log.warning(
        "torch %s: its AOTInductor runner was not tried here; loading through torch's public way", torch.__version__
    )
    return PublicRunner(path, device)


def _is_tried() -> bool:
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return RUNNER_GATE[0] <= found < RUNNER_GATE[1]


def _words(error: Exception) -> str:
    """The first line of a C++ exception, without its stack."""
    text = str(error).split("\nException raised from")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__


def _hint(error: Exception, path: str) -> str:
    if "failed to map segment" in str(error):
        return f"{path} is on a file system mounted noexec; put the bundle, or AOTPACK_CACHE_DIR, on another"
    return ""
