"""AOTInductor packages, unpacked: one .so, loaded through torch's C++ runner without importing `torch._inductor`.

`torch._C._aoti` is private: RUNNER_GATE says for which torch versions its calls were read and tried. Outside of it,
or where the class is not there, torch's public `aoti_load_package` is not used silently: the variant is refused and
the fallback serves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from aotpack_runtime.errors import ArtifactError, MissingDependency
from aotpack_runtime.format.index import Variant
from aotpack_runtime.loaders.tensors import TorchWeights, size_tensor

try:
    import torch
except ImportError as error:
    raise MissingDependency("torch", needed_for="aoti artifacts", install="'aotpack-runtime[torch]'") from error

RUNNER_GATE = ((2, 11), (2, 15))
"""First torch minor version the runner's calls are known for, and the first they are not."""

LIBRARY = "model.so"


class AotiExecutable:
    """A loaded package. `run` is the runner's own method: it lets go of the GIL and may be called from many threads."""

    def __init__(self, variant: Variant, path: str, weights: TorchWeights, *, concurrency: int) -> None:
        runner_class = _runner_class()
        try:
            self._runner = runner_class(path, concurrency)
        except Exception as error:
            raise ArtifactError(variant.id, _words(error), hint=_hint(error, path)) from error
        self._constants = dict(variant.constants)
        self._weights = weights
        self._check_constants(variant)
        self.run: Callable[[list[Any]], Any] = self._runner.run
        self._bound = False
        with weights.lock:
            weights.bind(self._rebind)

    def size_tensor(self, size: int) -> torch.Tensor:
        return size_tensor(size)

    def _check_constants(self, variant: Variant) -> None:
        """A constant without its weight is a crash at the first call, so it is refused here."""
        asked = set(self._runner.get_constant_names_to_original_fqns())
        missing = sorted(asked - self._constants.keys())
        if missing:
            raise ArtifactError(variant.id, f"asks for constants the index does not name: {', '.join(missing[:5])}")

    def _rebind(self) -> None:
        """Bind the current weights without a copy. The first time there is nothing to swap; later the other buffer is
        filled and swapped in, which waits for running calls, so that a call sees one set whole."""
        tensors = {constant: self._weights.tensors[name] for constant, name in self._constants.items()}
        if tensors:
            self._runner.update_constant_buffer(tensors, self._bound, True, True)
            if self._bound:
                self._runner.swap_constant_buffer()
        self._held, self._bound = tensors, True


def load(variant: Variant, files: Mapping[str, str], weights: TorchWeights) -> AotiExecutable:
    """Open the library and bind the weights; ArtifactError with the loader's own words."""
    stateful = bool(weights.set.state)
    return AotiExecutable(variant, files[LIBRARY], weights, concurrency=1 if stateful else _concurrency())


def _concurrency() -> int:
    """Calls of one variant that run at a time; each takes a model object of a few kB."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


def _runner_class() -> Any:
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not RUNNER_GATE[0] <= found < RUNNER_GATE[1]:
        raise ArtifactError(
            f"torch {torch.__version__}",
            "its AOTInductor runner was not tried with this aotpack-runtime",
            hint="upgrade aotpack-runtime",
        )
    return torch._C._aoti.AOTIModelContainerRunnerCpu  # type: ignore[attr-defined]


def _words(error: Exception) -> str:
    """The first line of a C++ exception, without its stack."""
    text = str(error).split("\nException raised from")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__


def _hint(error: Exception, path: str) -> str:
    if "failed to map segment" in str(error):
        return f"{path} is on a file system mounted noexec; put the bundle, or AOTPACK_CACHE_DIR, on another"
    return ""
