"""`aotpack env`: versions and settings for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, result

_PACKAGES = (
    "aotpack",
    "aotpack-runtime",
    "torch",
    "triton",
    "safetensors",
    "numpy",
    "transformers",
    "pydantic",
    "typer",
)
_VARIABLES = (
    "AOTPACK_MODE", "AOTPACK_ALLOW", "AOTPACK_CACHE_DIR", "AOTPACK_CHECK", "AOTPACK_JOBS", "CXX", "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS",
)  # fmt: skip


def command(as_json: bool = JSON_OPTION, debug: bool = DEBUG_OPTION) -> None:
    """Print versions of everything that matters, the settings in force, and what this host offers."""
    from aotpack_runtime.machine import cache_dir, this_machine

    machine = this_machine()
    value = {
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": {
            "arch": machine.arch,
            "cpus": len(os.sched_getaffinity(0)),
            "glibc": machine.glibc,
            "libstdcxx": machine.libstdcxx,
            "cxx": shutil.which(os.environ.get("CXX", "g++")),
            "levels": _levels(machine.cpu_flags),
        },
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "cache_dir": str(cache_dir()),
    }
    lines = [
        f"{group}.{name}: {' '.join(text) if isinstance(text, list) else text}"
        for group, items in value.items()
        if isinstance(items, dict)
        for name, text in items.items()
    ]
    lines += [f"python: {value['python']}", f"cache_dir: {value['cache_dir']}"]
    result(value, as_json=as_json, text="\n".join(lines))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _levels(flags: frozenset[str]) -> list[str]:
    from aotpack_runtime.format.target import X86_64_LEVELS, cpu_flags

    return [level for level in X86_64_LEVELS if cpu_flags(level) <= flags]
