"""A bundle with all that a server of it needs besides Python: the runtime, and of torch the shared libraries alone.

    OUT/bundle/                       the bundle
    OUT/python/aotpack_runtime/       the runtime; put OUT/python on the import path
    OUT/python/aotpack_libtorch/lib/  torch's libraries that the bundle's own name, and what those name in turn
    OUT/python/nvidia/...             libraries of CUDA's wheels, where those of torch look for them

What a bundle cannot do without torch's Python (misses, packages with operators of their own) it cannot do there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aotpack_runtime
from aotpack_runtime.bundle import Bundle, open_bundle
from aotpack_runtime.errors import MissingDependency, OutputError
from aotpack_runtime.format import layout
from aotpack_runtime.machine import this_machine

PACKAGE = "aotpack_libtorch"
WHOLE = ("cudnn",)
"""Wheels of CUDA whose libraries open others of their own folder by name when they are first used."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that was written: a library by its path below OUT, the runtime, the bundle."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Slim:
    """What was written to `path`; `host` names the libraries that the host has to bring itself. `unused_cuda` when
    libraries of CUDA are there for torch's own alone, and nothing in the bundle is for a GPU."""

    path: Path
    parts: tuple[Part, ...]
    host: tuple[str, ...]
    torch: str
    unused_cuda: bool


def export_slim(bundle: Path, out: Path) -> Slim:
    """Write `bundle` and what a server of it needs to the folder `out`, in one step.

    MissingDependency where torch's libraries are not installed, OutputError where `out` holds something else.
    """
    opened = open_bundle(bundle)
    opened.close()
    machine = this_machine()
    if machine.libtorch is None or machine.torch is None:
        raise MissingDependency("torch", needed_for="exporting its libraries", install="'aotpack[torch]'")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out}: exists and is not an empty folder", hint="name another place, or remove it")
    site = Path(machine.libtorch).parents[1]
    needed = (name for library in _libraries_of(opened) for name in _dynamic(library)[0])
    libraries, host = _closure(needed, Path(machine.libtorch))
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
    try:
        parts = [
            *[_library(path, site, folder) for path in libraries],
            _runtime(folder, Path(machine.libtorch).parent),
            _bundle(opened, folder),
        ]
        folder.chmod(0o755)
        os.rename(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for_gpu = any(variant.target.device == "cuda" for variant in opened.index.variants())
    return Slim(
        out, tuple(sorted(parts, key=lambda part: -part.size_bytes)), tuple(sorted(host)), machine.torch,
        unused_cuda=machine.torch_cuda is not None and not for_gpu,
    )  # fmt: skip


def _libraries_of(bundle: Bundle) -> Iterator[Path]:
    """The bundle's own shared libraries."""
    for member in bundle.index.members():
        if member.endswith(".so"):
            yield bundle.root / member


def _closure(needed: Iterable[str], lib: Path) -> tuple[list[Path], set[str]]:
    """(files of torch's wheel and of CUDA's wheels beside it, names that only the host has) that `needed` leads to."""
    site = lib.parents[1]
    found: dict[Path, None] = {}
    host: set[str] = set()
    waiting = [(name, [lib]) for name in needed]
    while waiting:
        name, folders = waiting.pop()
        path = next((folder / name for folder in folders if (folder / name).exists()), None)
        if path is None or not path.is_relative_to(site):
            host.add(name)
            continue
        if path in found:
            continue
        found[path] = None
        names, paths = _dynamic(path)
        waiting += [(each, [*paths, lib]) for each in names]
        if path.parent.parent.name in WHOLE:
            waiting += [(each.name, [path.parent]) for each in path.parent.glob("*.so*")]
    return list(found), host - {path.name for path in found}


def _dynamic(path: Path) -> tuple[list[str], list[Path]]:
    """(what a library names as needed, the folders that it looks in)."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        section: Any = ELFFile(file).get_section_by_name(".dynamic")
        tags = [] if section is None else list(section.iter_tags())
        needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
        paths = [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]
        paths += [tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"]
    folders = [folder.replace("$ORIGIN", str(path.parent)) for text in paths for folder in text.split(":")]
    return needed, [Path(os.path.normpath(folder)) for folder in folders if folder]


def _library(path: Path, site: Path, folder: Path) -> Part:
    """A library where its neighbours look for it: at its place in the wheels, those of torch in our own package."""
    inside = path.relative_to(site)
    target = folder / "python" / (Path(PACKAGE) / inside.relative_to("torch") if inside.parts[0] == "torch" else inside)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    target.chmod(0o755)
    return Part(str(target.relative_to(folder)), target.stat().st_size)


def _runtime(folder: Path, torch: Path) -> Part:
    """The runtime, and beside torch's libraries the version that they are of, as torch itself says it."""
    source, target = Path(aotpack_runtime.__file__).parent, folder / "python" / "aotpack_runtime"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    beside = folder / "python" / PACKAGE
    beside.mkdir(exist_ok=True)
    shutil.copyfile(torch / "version.py", beside / "version.py")
    return Part("python/aotpack_runtime", _size(target))


def _bundle(bundle: Bundle, folder: Path) -> Part:
    target = folder / "bundle"
    for member in (layout.INDEX, *bundle.index.members()):
        (target / member).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.root / member, target / member)
    open_bundle(target).verify()
    return Part("bundle", _size(target))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
