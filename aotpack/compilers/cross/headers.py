"""Where the headers of CUDA are: beside torch in NVIDIA's wheels, else a toolkit's. Nothing is imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from aotpack_runtime.errors import MissingDependency

_NEEDED = Path("include", "crt", "host_defines.h")


def cuda_headers() -> Path:
    """The folder whose `include` has them; MissingDependency where none has."""
    for folder in _folders():
        if (folder / _NEEDED).exists():
            return folder
    raise MissingDependency(
        "CUDA headers", needed_for="compiling torch entries for a GPU that is not here",
        install="torch for CUDA from PyPI, which brings them, or a CUDA toolkit (CUDA_HOME)",
    )  # fmt: skip


def _folders() -> Iterator[Path]:
    if os.environ.get("CUDA_HOME"):
        yield Path(os.environ["CUDA_HOME"])
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(Path(place).parent.glob("nvidia/cu[0-9]*"))
        yield Path(place).parent / "nvidia" / "cuda_runtime"
    yield Path("/usr/local/cuda")
