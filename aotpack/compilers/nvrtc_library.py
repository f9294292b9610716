"""NVRTC as it is loaded here: which one, its version, the headers that go with it.

It is the one of the wheel nvidia-cuda-nvrtc-cu12 where that is installed, whatever else a system has; without it the
one that cuda.bindings finds. `@cuda` among the include folders stands for the CUDA headers of that NVRTC's own major
version, which come in a wheel of their own: headers of another major compile, and then do not work.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotpack_runtime.errors import MissingDependency, SourceError

CUDA = "@cuda"
_WHEEL = "nvidia-cuda-nvrtc-cu12"
_UNVERSIONED = "nvidia-cuda-nvrtc"  # from CUDA 13 on
_HEADERS: Mapping[int, str] = {12: "nvidia-cuda-runtime-cu12", 13: "nvidia-cuda-runtime"}
"""NVRTC's major version -> the distribution with the headers of that version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvrtc:
    """The library that is loaded; `version` as it says itself, `supported` the architectures it compiles for."""

    api: Any
    version: tuple[int, int]
    distribution: str | None
    supported: tuple[int, ...]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


@functools.cache
def load_nvrtc() -> Nvrtc:
    """Load NVRTC into this process; MissingDependency when there is none."""
    try:
        api = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise MissingDependency("cuda-bindings", needed_for="nvrtc entries") from error
    distribution = _preload()
    try:
        (major, minor), supported = call(api.nvrtcVersion()), call(api.nvrtcGetSupportedArchs())
    except Exception as error:  # what cuda-pathfinder raises where there is no library is its own business
        raise MissingDependency(_WHEEL, needed_for="nvrtc entries") from error
    if distribution is None and _major(_UNVERSIONED) == major:
        distribution = _UNVERSIONED
    return Nvrtc(api=api, version=(major, minor), distribution=distribution, supported=tuple(supported))


def _preload() -> str | None:
    """Load the wheel's library first: cuda.bindings takes what is loaded, and would search the system otherwise.

    The name of the wheel, None when it is not installed.
    """
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    libraries = [path for path in files if path.name.startswith("libnvrtc") and ".alt." not in path.name]
    # Its headers in machine form are a second library, which it would otherwise look for by name.
    for path in sorted(libraries, key=lambda path: "builtins" not in path.name):
        ctypes.CDLL(str(path.locate()), ctypes.RTLD_GLOBAL)
    return _WHEEL if libraries else None


def _major(distribution: str) -> int | None:
    """The major version of an installed distribution, None when it is not installed."""
    try:
        return int(importlib.metadata.version(distribution).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def call(answer: Any) -> Any:
    """The values of a call of cuda.bindings; RuntimeError when it did not succeed."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def header_folder(nvrtc: Nvrtc, source: str) -> tuple[Path, str]:
    """(the folder that `@cuda` stands for, the distribution it comes from)."""
    major = nvrtc.version[0]
    name = _HEADERS.get(major, f"nvidia-cuda-runtime-cu{major}")
    if _major(name) != major:
        raise MissingDependency(
            name, needed_for=f"{CUDA} of {source} with NVRTC {nvrtc.name}", install=f"'{name}=={major}.*'"
        )
    for path in importlib.metadata.files(name) or ():
        if path.name == "cuda_fp16.h":
            return Path(str(path.locate())).resolve().parent, name
    raise SourceError(source, f"{name} has no cuda_fp16.h for {CUDA}")


def known_architectures(nvrtc: Nvrtc) -> list[str]:
    """Every spelling that the library takes, `compute_` in the place of `sm_` for PTX: sm_90, sm_90a, sm_100f..."""
    return [
        f"sm_{number}{suffix}"
        for number in nvrtc.supported
        for suffix in ("", *(("a",) if number >= 90 else ()), *(("f",) if number >= 100 else ()))
    ]
