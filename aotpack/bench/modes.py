"""The ways of starting a server that are compared: what each needs, and whose caches are filled before."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aotpack_runtime.format.index import Entry

Caches = Literal["empty", "filled"]
Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """`caches`: compiler caches of a sample are empty, or a copy of those that one process filled before. `fill` is
    what that process runs, started as the mode `filled_by` (its own, where that is not said). `compiler` when it may
    run a C++ compiler, `source` when it imports the source, `needs` a package that it imports."""

    name: str
    what: str
    caches: Caches = "empty"
    fill: str = ""
    filled_by: str = ""
    compiler: bool = False
    source: bool = True
    needs: str = ""
    do: str = "sample"
    environment: Mapping[str, str] = field(default_factory=dict)


def _table(*modes: Mode) -> dict[str, Mode]:
    return {mode.name: mode for mode in modes}


IMPORT_TORCH = Mode(name="import-torch", what="import torch and nothing else: the floor of all others", source=False)

MODES: Mapping[str, Mode] = _table(
    Mode(name="bundle", what="aotpack_runtime.load, first call a hit", source=False),
    Mode(
        name="bundle-arrays", what="the same without importing torch: arrays in, arrays out", fill="arrays",
        source=False,
    ),
    Mode(name="eager", what="import the model's library, construct it, call it"),
    Mode(name="compile-cold", what="torch.compile, all caches empty", compiler=True),
    Mode(
        name="compile-copied", what="torch.compile, caches copied from a process that ran all",
        caches="filled", fill="compile-cold", compiler=True,
    ),
    Mode(
        name="compile-artifacts", what="torch.compile after torch.compiler.load_cache_artifacts",
        fill="artifacts", filled_by="compile-cold", compiler=True,
    ),
    Mode(
        name="aot-compile", what="torch.compile(...).aot_compile, saved and loaded: one file a shape", fill="aot",
        compiler=True,
    ),
    Mode(
        name="package-cold", what="aoti_load_package, compiler cache empty", fill="package", filled_by="package-cold",
        compiler=True,
    ),
    Mode(
        name="package-warm", what="aoti_load_package, compiler cache copied", caches="filled", fill="package",
        filled_by="package-cold", compiler=True,
    ),
    IMPORT_TORCH,
)  # fmt: skip
"""Of models."""

KERNEL_MODES: Mapping[str, Mode] = _table(
    Mode(
        name="bundle", what="aotpack_runtime.load, first launch a hit; neither torch nor a compiler is imported",
        source=False, do="kernel",
    ),
    Mode(name="bundle-torch", what="the same in a process that has torch", source=False, do="kernel"),
    Mode(name="triton-cold", what="Triton's own JIT, its cache empty", needs="triton", do="kernel"),
    Mode(
        name="triton-warm", what="Triton's own JIT, its cache copied from a process that ran all", needs="triton",
        caches="filled", fill="triton", filled_by="triton-cold", do="kernel",
    ),
    Mode(
        name="nvrtc-cold", what="the text compiled by NVRTC at its first use, launched as the bundle is",
        needs="cuda.bindings", do="kernel",
    ),
    Mode(
        name="ptx", what="the bundle's PTX, compiled by the driver at its first use, its cache empty", source=False,
        do="kernel", environment={"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1"},
    ),
    IMPORT_TORCH,
)  # fmt: skip
"""Of kernels."""


def modes_of(entry: Entry) -> Mapping[str, Mode]:
    """The modes that there are for a model, or for a kernel of its language."""
    if entry.kernel is None:
        return MODES
    other = "triton" if entry.kernel.suffix != ".py" else "nvrtc"
    return {name: mode for name, mode in KERNEL_MODES.items() if not name.startswith(other)}


def unmeasurable(mode: Mode, entry: Entry, settings: Mapping[str, Json]) -> str | None:
    """Why a mode cannot be measured here, None when it can; `settings` are those of the run."""
    if mode.source and entry.source.text.endswith(".pt2"):
        return "the source is a saved program, which has no eager model"
    if mode.needs and importlib.util.find_spec(mode.needs.partition(".")[0]) is None:
        return f"{mode.needs} is missing"
    if mode.name == "nvrtc-cold" and not settings.get("nvrtc"):
        return "a bundle does not say how its text is compiled; name the manifest with --manifest"
    if mode.name == "ptx" and not any(variant.artifact.kind == "ptx" for variant in entry.variants):
        return "the bundle has no PTX of this entry; a target with `ptx:` builds it"
    compiler = os.environ.get("CXX", "g++")
    if mode.compiler and shutil.which(compiler) is None:
        return f"{compiler} is missing"
    return None
