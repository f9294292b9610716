"""What a job depended on, recorded while it runs, so that an unchanged rebuild need not run it.

Python files the user's source imported, files it read, and the distributions its other modules came from. Reads by
Python's own `open` are seen by an audit hook; readers in native code are wrapped by name (`_NATIVE_READERS`), and a
native reader that is not listed there is not seen: its files belong under a distribution, or in the manifest's `args`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = Any

_NATIVE_READERS = {
    "safetensors": "safe_open",
    "safetensors.torch": "safe_open",
    "torch.jit": "load",
    "torch.jit._serialization": "load",
}
"""Functions whose first argument is a path that native code opens."""


_AT_START = ("sitecustomize", "usercustomize")
"""What Python imports by itself as it starts (module `site`): the host's, of no source. Debian keeps one under /etc."""


@dataclass(slots=True)
class Recorder:
    """Paths that were read while recording."""

    opened: set[str] = field(default_factory=set)
    active: bool = True


@contextmanager
def recording(*, native: bool = True) -> Iterator[Recorder]:
    """Note every file that is opened for reading inside; by native code too, which takes importing torch, or not."""
    recorder = Recorder()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and recorder.active:
            path, mode = arguments[0], arguments[1]
            if isinstance(path, str) and (mode is None or "r" in str(mode)):
                recorder.opened.add(path)

    sys.addaudithook(audit)  # a hook cannot be taken off again; `active` ends it
    undo = list(_wrap_native_readers(recorder)) if native else []
    try:
        yield recorder
    finally:
        recorder.active = False
        for module, name, original in undo:
            setattr(module, name, original)


def _wrap_native_readers(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    for module_name, name in _NATIVE_READERS.items():
        try:
            module = importlib.import_module(module_name)
            original = getattr(module, name)
        except (ImportError, AttributeError):
            continue

        def wrapper(path: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike):
                recorder.opened.add(os.fspath(path))
            return _original(path, *args, **kwargs)

        setattr(module, name, functools.wraps(original)(wrapper) if callable(original) else wrapper)
        yield module, name, original


def dependencies(recorder: Recorder, folder: Path) -> dict[str, Json]:
    """`files` (path -> stamp) and `distributions` (name -> version) of what is imported and was read by now.

    Files under an installed distribution are covered by its version; files beside the manifest are named relative to
    its `folder`.
    """
    installed, standard = _installed(), _standard()
    files: dict[str, Json] = {}
    tops: set[str] = set()
    imported = {
        name: getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name not in _AT_START
    }
    paths = {path for path in imported.values() if path} | recorder.opened
    for path in sorted(paths):
        real = Path(path).resolve()
        if not real.is_file() or str(real).startswith(("/proc/", "/sys/", "/dev/")):
            continue
        if any(real.is_relative_to(root) for root in installed):
            root = next(root for root in installed if real.is_relative_to(root))
            tops.add(real.relative_to(root).parts[0].removesuffix(".py"))
        elif _ours(real) or any(real.is_relative_to(root) for root in standard) or real.suffix == ".pyc":
            continue
        else:
            files[named(real, folder)] = stamp(real)
    return {"files": files, "distributions": _distributions(tops)}


def source_modules(folder: Path) -> dict[str, str]:
    """Imported module -> sha256 of its file, for modules that lie beside the manifest and in no environment there.

    torch.ops says that its file is "_ops.py", wherever this process is: only whole paths are of files.
    """
    found: dict[str, str] = {}
    elsewhere = [*_installed(), *_standard()]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or not os.path.isabs(file):
            continue
        real = Path(file).resolve()
        if real.is_relative_to(folder.resolve()) and not _ours(real) and not any(map(real.is_relative_to, elsewhere)):
            found[name] = hashlib.sha256(real.read_bytes()).hexdigest()
    return found


def stamp(path: Path) -> dict[str, Json]:
    """Content digest of a file, with the facts that let a later look skip hashing it.

    The change time is set by the kernel at every write and cannot be put back by `touch`.
    """
    status = path.stat()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digest, "facts": [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]}


def changed_dependency(recorded: Mapping[str, Json], folder: Path) -> str | None:
    """The first dependency that is no longer what was recorded, None when all are. Imports nothing of theirs."""
    for name, old in recorded["files"].items():
        path = Path(folder, name)
        try:
            status = path.stat()
        except OSError:
            return f"file {name} is gone"
        facts = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if facts != old["facts"] and stamp(path)["sha256"] != old["sha256"]:
            return f"file {name}"
    for name, version in recorded["distributions"].items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != version:
            return f"{name} {version} -> {found}"
    return None


def _installed() -> list[Path]:
    return [Path(path).resolve() for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]


def _standard() -> list[Path]:
    """Python's own folders. Not its whole prefix: that is /usr on many systems, and /usr/src/app is a user's."""
    prefix = Path(sys.base_prefix).resolve()
    return [Path(sysconfig.get_path("stdlib")).resolve(), prefix / "lib", prefix / "share"]


def named(path: Path, folder: Path) -> str:
    """Relative to `folder` where it is in there, so that a project may be moved; else its real path."""
    path, folder = path.resolve(), folder.resolve()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _ours(path: Path) -> bool:
    """The builder's own files: a change of theirs is a change of its revision, not of the source."""
    here = Path(__file__).resolve().parent.parent
    runtime = Path(importlib.import_module("aotpack_runtime").__file__ or "").resolve().parent
    return path.is_relative_to(here) or path.is_relative_to(runtime)


def _distributions(tops: set[str]) -> dict[str, str]:
    owners = importlib.metadata.packages_distributions()
    names = {name for top in tops for name in owners.get(top, ())}
    return {name: importlib.metadata.version(name) for name in sorted(names)}
