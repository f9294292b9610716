"""Artifact -> executable, one artifact kind a file. The table holds dotted names: listing kinds imports none.

Loaders of models have `load(variant, files, weights) -> Executable`, where `files` are checked paths by name and
`weights` the `TorchWeights` that all variants of a weight set share; those of kernels `load(variant, files, ordinal)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from aotpack_runtime.errors import MissingDependency

LOADERS: Mapping[str, str] = {
    "aoti": "aotpack_runtime.loaders.aoti",
    "cubin": "aotpack_runtime.loaders.cubin",
    "exported": "aotpack_runtime.loaders.exported",
    "ptx": "aotpack_runtime.loaders.cubin",
}
TORCH_LAUNCH = "aotpack_runtime.loaders.torch_launch"
KERNEL_OPERATORS = "aotpack_runtime.loaders.kernel_operators"
AOTI_ARRAYS = "aotpack_runtime.loaders.aoti_arrays"
ARRAY_INPUTS = "aotpack_runtime.loaders.array_inputs"
ARRAY_WEIGHTS = "aotpack_runtime.loaders.array_weights"
FIRST_CALLS = "aotpack_runtime.loaders.first_calls"
LIBTORCH = "aotpack_runtime.loaders.libtorch"
LIBRARY_MEMORY = "aotpack_runtime.loaders.library_memory"
CROSSING = "aotpack_runtime.loaders.crossing"
WEIGHTS = "aotpack_runtime.loaders.tensors"
REFERENCE = "aotpack_runtime.loaders.reference"
SOURCE = "aotpack_runtime.loaders.source"
INPUTS = "aotpack_runtime.loaders.inputs"
SAMPLES = "aotpack_runtime.loaders.samples"
OPERATORS = "aotpack_runtime.loaders.operators"


def loader(name: str) -> Any:
    """The module called `name`, imported now; MissingDependency when what it stands on is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise MissingDependency("torch", needed_for="torch entries", install="'aotpack-runtime[torch]'") from error
        if error.name in ("cuda", "cuda.bindings"):
            extra = "'aotpack-runtime[cuda]'"
            raise MissingDependency("cuda-bindings", needed_for="kernel entries", install=extra) from error
        raise
