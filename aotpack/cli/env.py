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
    "nvidia-cuda-nvrtc-cu12",
    "cuda-bindings",
    "safetensors",
    "numpy",
    "transformers",
    "pydantic",
    "typer",
)
_VARIABLES = (
    "AOTPACK_MODE", "AOTPACK_ALLOW", "AOTPACK_CACHE_DIR", "AOTPACK_CHECK", "AOTPACK_JOBS", "AOTPACK_LOG",
    "AOTPACK_MISS_LOG", "AOTPACK_JIT_JOBS", "AOTPACK_JIT_NICE", "CXX", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Those of aotpack in the order of the README's table; what else is set and begins like them may be a misspelling."""


def command(as_json: bool = JSON_OPTION, debug: bool = DEBUG_OPTION) -> None:
    """Print versions of everything that matters, the settings in force, and what this host offers."""
    from aotpack_runtime.machine import cache_dir, this_machine

    machine = this_machine()
    packages = {name: _version(name) for name in _PACKAGES}
    value = {
        "packages": packages,
        "python": platform.python_version(),
        "machine": {
            "arch": machine.arch,
            "cpus": len(os.sched_getaffinity(0)),
            "glibc": machine.glibc,
            "libstdcxx": machine.libstdcxx,
            "cxx": shutil.which(os.environ.get("CXX", "g++")),
            "levels": _levels(machine.cpu_flags),
            "torch_cuda": machine.torch_cuda if packages["torch"] else None,
            "gpus": [f"{gpu.name} sm_{gpu.capability[0]}{gpu.capability[1]}" for gpu in machine.gpus],
        },
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "unknown_variables": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith("AOTPACK_") and name not in _VARIABLES
        },
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
