"""The jobs of a kernel entry: its source is looked at once, then compiled for each architecture.

Triton compiles one variant a job; NVRTC compiles all instantiations for one architecture at once, in one program.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from aotpack.compilers.headers import header_files
from aotpack.jobs import Job
from aotpack.kernel_plan import CONFIG_FIELDS, KernelPlan, KernelVariant
from aotpack.manifest_kernels import NvrtcEntry, TritonEntry
from aotpack.revisions import NVRTC_REVISION, TRITON_REVISION
from aotpack_runtime.errors import MissingDependency
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.kernel_recipe import MOST_FILES, check_path

Json = Any

_PACKAGES = {"triton": ("triton",), "nvrtc": ("nvidia-cuda-nvrtc-cu12", "cuda-bindings")}
_CHOICES = {"nvidia-cuda-nvrtc-cu12": ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")}
_OWN_TOOLS: Mapping[str, tuple[str, ...]] = {
    "triton": ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH"), "nvrtc": (),
}  # fmt: skip
"""Variables by which whoever builds may put tools of their own in the place of Triton's."""
_REVISIONS = {"triton": TRITON_REVISION, "nvrtc": NVRTC_REVISION}


def kernel_tools(kind: str) -> dict[str, str]:
    """Versions of what compiles kernels of this kind; MissingDependency for what is not installed."""
    found = {}
    for package in _PACKAGES[kind]:
        for name in _CHOICES.get(package, (package,)):
            try:
                found[name] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        else:
            raise MissingDependency(package, needed_for=f"{kind} entries", install=f"'aotpack[{kind}]'")
    return found


def source_job(entry: KernelPlan, folder: Path) -> Job:
    """Look at the source: its digest, its parameters, the files it depends on."""
    record = entry.record
    wanted: dict[str, Json] = {"source": record.source}
    if isinstance(record, NvrtcEntry):
        wanted |= {"include_dirs": list(record.include_dirs), "headers": dict(record.headers)}
    return Job(
        kind=f"{entry.kind}_source",
        name=f"{entry.entry}/source",
        target=entry.target,
        parts={
            **wanted,
            "folder": str(folder),
            "headers_there": _names(record.include_dirs, folder) if isinstance(record, NvrtcEntry) else "",
            "toolchain": _toolchain(entry.kind),
        },
        payload={**wanted, "entry": entry.entry, "folder": str(folder)},
        variants=tuple(variant.id for variant in entry.variants),
    )


def compile_jobs(entry: KernelPlan, source: Json, folder: Path) -> list[Job]:
    """Compile its variants; a job's record is found again by `job_name`."""
    if isinstance(entry.record, NvrtcEntry):
        grouped = groupby(entry.variants, key=lambda variant: variant.arch)
        return [_nvrtc_job(entry, entry.record, source, folder, arch, list(group)) for arch, group in grouped]
    return [_triton_job(entry, variant, source, folder) for variant in entry.variants]


def source_files(record: Json, folder: Path) -> tuple[list[str], str]:
    """(what a miss has to have beside it to compile the source again, why there is nothing) of a source's record:
    files outside of the manifest's folder cannot be carried, and a library of headers is not."""
    paths = sorted(record["depends"]["files"])
    if len(paths) > MOST_FILES:
        return [], f"its source is read from {len(paths)} files, at most {MOST_FILES} are carried"
    for path in paths:
        try:
            check_path(path)
        except ValueError:
            return [], f"its source is read from {path}, which is not beside the manifest"
    return paths, ""


def job_name(entry: KernelPlan, variant: KernelVariant) -> str:
    """Name of the job that compiles `variant`."""
    return variant.id if entry.kind == "triton" else f"{entry.entry}/{entry.target}/{variant.arch}"


def _triton_job(entry: KernelPlan, variant: KernelVariant, source: Json, folder: Path) -> Job:
    record = entry.record
    assert isinstance(record, TritonEntry)
    words = variant.words
    options = {name: variant.axes[name] for name in CONFIG_FIELDS if variant.axes.get(name) is not None}
    wanted = {
        "signature": {
            name: "constexpr" if word.kind in ("constexpr", "literal") else word.type for name, word in words.items()
        },
        "constants": {name: variant.axes[name] for name, word in words.items() if word.kind == "constexpr"}
        | {name: word.value for name, word in words.items() if word.kind == "literal"},
        "divisible": [name for name, word in words.items() if word.divisor > 1],
        "options": {**options, **record.options},
        "arch": variant.arch.replace("compute_", "sm_"),
        "ptx": variant.arch.startswith("compute_"),
    }
    return Job(
        kind="triton",
        name=variant.id,
        target=entry.target,
        parts={**wanted, "source": source["digest"], "toolchain": _toolchain("triton")},
        payload={
            **wanted, "entry": entry.entry, "variant": variant.id, "folder": str(folder), "source": record.source,
        },
        variants=(variant.id,),
    )  # fmt: skip


def _nvrtc_job(
    entry: KernelPlan, record: NvrtcEntry, source: Json, folder: Path, arch: str, variants: list[KernelVariant]
) -> Job:
    name = job_name(entry, variants[0])
    payload = nvrtc_payload(entry, record, folder, arch, variants, name)
    wanted = {key: value for key, value in payload.items() if key not in ("entry", "variant", "folder", "source")}
    return Job(
        kind="nvrtc",
        name=name,
        target=entry.target,
        parts={**wanted, "source": source["digest"], "toolchain": _toolchain("nvrtc")},
        payload=payload,
        variants=tuple(variant.id for variant in variants),
    )


def nvrtc_payload(
    entry: KernelPlan, record: NvrtcEntry, folder: Path, arch: str, variants: Sequence[KernelVariant], name: str
) -> dict[str, Json]:
    """What NVRTC is told to compile: the instantiations of `variants`, in one program."""
    return {
        "expressions": sorted({variant.expression for variant in variants}),
        "options": list(record.options or ()),
        "include_dirs": list(record.include_dirs),
        "headers": dict(record.headers),
        "ptx" if arch.startswith("compute_") else "arch": arch,
        "entry": entry.entry,
        "variant": name,
        "folder": str(folder),
        "source": record.source,
    }


def _toolchain(kind: str) -> dict[str, Json]:
    own = {name: os.environ[name] for name in _OWN_TOOLS[kind] if name in os.environ}
    return {**kernel_tools(kind), **own, "aotpack": _REVISIONS[kind]}


def _names(include_dirs: Sequence[str], folder: Path) -> str:
    """Digest of the names below include folders: a header that is new may be found before one that was."""
    found = [
        [path.relative_to(folder / each).as_posix() for path in header_files(folder / each)]
        for each in include_dirs
        if not each.startswith("@")
    ]
    return fingerprint({"names": found})
