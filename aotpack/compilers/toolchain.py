"""The tools a job is compiled with, and the CPU it is compiled for, as named facts for fingerprints and targets."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotpack_runtime.errors import MissingDependency, SourceError
from aotpack_runtime.format.gpu import parse_arch
from aotpack_runtime.format.target import X86_64_LEVELS, cpu_flags
from aotpack_runtime.machine import this_machine

Json = Any


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """What a CPU target asks of the compiler, and what its artifacts ask of a host."""

    march: str
    simd_bits: int
    needs: str


_SIMD_BITS = {None: 0, "avx2": 256, "avx512": 512}
_SIMD_FLAGS = {"avx2": "avx2 fma f16c", "avx512": "avx512f avx512bw avx512cd avx512dq avx512vl fma f16c"}


def cpu_level(march: str, simd: str | None) -> CpuLevel:
    """`x86-64-v3` -> AVX2 code of 256 bits. A CPU name that archspec knows is written as its features.

    SourceError when the name says nothing about the host that will serve ("native"), or is unknown.
    """
    if march == "native":
        raise SourceError("targets", "march 'native' is the CPU of the build machine; a bundle names the CPU it is for",
                          hint="x86-64-v3 is AVX2, x86-64-v4 is AVX-512")  # fmt: skip
    flags = cpu_flags(march) if march in X86_64_LEVELS else set(_archspec_features(march).split())
    needs = march if march in X86_64_LEVELS else " ".join(sorted(flags))
    if simd is None:
        simd = "avx512" if set(_SIMD_FLAGS["avx512"].split()) <= flags else "avx2" if "avx2" in flags else None
    if simd not in _SIMD_BITS:
        raise SourceError("targets", f"simd {simd!r} is not supported here; supported: avx2, avx512")
    extra = set(_SIMD_FLAGS.get(simd or "", "").split()) - flags
    return CpuLevel(march, _SIMD_BITS[simd], " ".join([needs, *sorted(extra)]))


def _archspec_features(march: str) -> str:
    import archspec.cpu

    names = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "popcnt", "ssse3", "sse4_1", "sse4_2"}
    for name, target in archspec.cpu.TARGETS.items():
        if march in (name, name.replace("_", "-")):
            return " ".join(
                sorted(feature for feature in target.features if feature in names or feature.startswith("avx"))
            )
    raise SourceError(
        "targets",
        f"march {march!r} is unknown",
        hint=f"use {', '.join(X86_64_LEVELS)}, or a name that gcc and archspec know",
    )


def compiler_command() -> str:
    """The C++ compiler torch would use: CXX, else g++. MissingDependency when there is none."""
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise MissingDependency(
            name, needed_for="compiling torch entries", install="it with your system's packages (g++)"
        )
    return found


@functools.cache
def compiler_version() -> str:
    """First line of `g++ --version`."""
    out = subprocess.run([compiler_command(), "--version"], capture_output=True, text=True, check=False).stdout
    return out.splitlines()[0] if out else "unknown"


@functools.cache
def torch_version() -> str:
    """Version of the installed torch, read without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependency("torch", needed_for="torch entries", install="'aotpack[torch]'") from None


def toolchain() -> dict[str, str]:
    """Everything outside of us that decides what a compile gives."""
    return {"torch": torch_version(), "cxx": compiler_version(), "machine": platform.machine()}


def gpu_tools() -> dict[str, str]:
    """What decides, beside `toolchain`, what a compile for the GPU of this host gives: Inductor times its kernels."""
    machine = this_machine()
    return {
        "cuda": machine.torch_cuda or "none",
        "triton": importlib.metadata.version("triton"),
        "gpu": machine.gpu.name if machine.gpu else "none",
    }


def missing_for_gpu(arch: str) -> str | None:
    """Why torch entries for `arch` cannot be built on this host, None when they can: AOTInductor compiles for the GPU
    at hand, and what was not run on one is not packed."""
    machine, wanted = this_machine(), parse_arch(arch).capability
    if machine.gpu is None:
        return f"needs a GPU of capability {_dotted(wanted)}; this host has no CUDA device"
    if machine.gpu.capability != wanted:
        return f"needs a GPU of capability {_dotted(wanted)}; this host's {machine.gpu.name} has {machine.gpu}"
    if machine.torch_cuda is None:
        return f"needs a CUDA build of torch; {torch_version()} is a CPU build"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def needs_of_library(path: Path) -> Mapping[str, str]:
    """What a shared library asks of its host, read from its ELF: `glibc`, `libstdcxx`, and `needed` library names."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    newest: dict[str, tuple[int, ...]] = {}
    needed: list[str] = []
    with path.open("rb") as file:
        elf = ELFFile(file)
        for section in elf.iter_sections():
            if isinstance(section, GNUVerNeedSection):
                for _, versions in section.iter_versions():
                    for version in versions:
                        prefix, _, number = version.name.partition("_")
                        if prefix in ("GLIBC", "GLIBCXX") and number[:1].isdigit():
                            found = tuple(int(part) for part in number.split("."))
                            newest[prefix] = max(newest.get(prefix, ()), found)
        dynamic: Any = elf.get_section_by_name(".dynamic")
        if dynamic is not None:
            needed = [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
    facts = {"needed": " ".join(needed)}
    for prefix, name in (("GLIBC", "glibc"), ("GLIBCXX", "libstdcxx")):
        if prefix in newest:
            facts[name] = ".".join(map(str, newest[prefix]))
    return facts
