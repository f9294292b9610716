"""The ways of starting a server that are compared: what each needs, and whose caches are filled before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Caches = Literal["empty", "filled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """`caches`: compiler caches of a sample are empty, or a copy of those that one process filled before. `fill` is
    what that process runs. `compiler` when it may run a C++ compiler."""

    name: str
    what: str
    caches: Caches = "empty"
    fill: str = ""
    compiler: bool = False
    source: bool = True


MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
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
            fill="artifacts", compiler=True,
        ),
        Mode(
            name="aot-compile", what="torch.compile(...).aot_compile, saved and loaded: one file a shape", fill="aot",
            compiler=True,
        ),
        Mode(name="package-cold", what="aoti_load_package, compiler cache empty", fill="package", compiler=True),
        Mode(
            name="package-warm", what="aoti_load_package, compiler cache copied", caches="filled", fill="package",
            compiler=True,
        ),
        Mode(name="import-torch", what="import torch and nothing else: the floor of all others", source=False),
    )
}  # fmt: skip


def unmeasurable(mode: Mode, *, source: str) -> str | None:
    """Why a mode cannot be measured here, None when it can."""
    if mode.source and source.endswith(".pt2"):
        return "the source is a saved program, which has no eager model"
    compiler = os.environ.get("CXX", "g++")
    if mode.compiler and shutil.which(compiler) is None:
        return f"{compiler} is missing"
    return None
