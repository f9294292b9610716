"""Where this host's overlay of a bundle is, and whether it can be used."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from aotpack_runtime import forks
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.target import Machine
from aotpack_runtime.jit.flight import let_go, take
from aotpack_runtime.jit.overlay import Overlay
from aotpack_runtime.machine import cache_dir, untrusted

FREE_BYTES = 256 << 20
"""A compile is not begun with less room than this: its files and those that compilers write beside them."""


def facts(machine: Machine) -> dict[str, str]:
    """What a variant compiled on a host may depend on without saying so among its needs."""
    found = {
        "arch": machine.arch,
        "cpu": " ".join(sorted(machine.cpu_flags)),
        "torch": machine.torch or "",
        "python": machine.python,
        "glibc": machine.glibc or "",
        "libstdcxx": machine.libstdcxx or "",
    }
    if machine.gpu is not None:
        found["gpu"] = ".".join(map(str, machine.gpu.capability))
    return found


def overlay_root(bundle: str, machine: Machine, cache: Path | None = None) -> Path:
    """The overlay of the bundle with this digest, for hosts like `machine`."""
    return (cache or cache_dir()) / "overlay" / bundle / fingerprint(facts(machine))[:32]


def distrusted(root: Path) -> str:
    """Why nothing may be read from the overlay at `root`, "" when it may: another user could have put it there."""
    for folder in (*reversed(root.parents[:3]), root):  # the cache, its overlays, those of the bundle
        if folder.is_dir() and (problem := untrusted(folder)):
            return problem
    return ""


def unwritable(root: Path) -> str:
    """Why nothing can be compiled into the overlay at `root`, "" when it can; it is made if it is not there."""
    for folder in (*reversed(root.parents[:3]), root):
        if problem := untrusted(folder):
            return problem
    if not os.access(root, os.W_OK):
        return f"{root}: cannot be written"
    try:
        status = os.statvfs(root)
    except OSError as error:
        return f"{root}: {error.strerror}"
    if status.f_flag & os.ST_RDONLY:
        return f"{root}: is on a file system mounted read-only"
    if status.f_flag & os.ST_NOEXEC:
        return f"{root}: is on a file system mounted noexec, from which no library is loaded"
    free = status.f_bavail * status.f_frsize
    if free < FREE_BYTES:
        return f"{root}: its file system is full ({free >> 20} MiB left, a compile needs {FREE_BYTES >> 20})"
    return ""


PREFIX, OWNER = "aotpack-jit-", "owner"
"""Of folders of one process alone, and of the file in each that it holds locked while it lives."""


class Private:
    """An overlay of this process alone, for hosts whose cache cannot be written: made when it is first needed, gone
    when it is closed or the process ends. Of a process that was killed the next that needs one removes it."""

    def __init__(self) -> None:
        self.made: Overlay | None = None
        self._lock: int | None = None
        forks.in_child(self._forget)

    def get(self) -> Overlay | str:
        """The overlay, or why there is none."""
        if self.made is None:
            try:
                _remove_left()
                folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            except OSError as error:
                return f"there is no folder for temporary files: {error}"
            if problem := unwritable(folder / "overlay" / "private" / "host"):
                shutil.rmtree(folder, ignore_errors=True)
                return problem
            with contextlib.suppress(OSError):  # where there are no locks, nobody removes what is left
                self._lock = take(folder / OWNER)
            self.made = Overlay(folder / "overlay" / "private" / "host")
            atexit.register(self.close)
        return self.made

    def close(self) -> None:
        if self.made is None:
            return
        folder = self.made.root.parents[2]
        shutil.rmtree(folder, ignore_errors=True)
        if self._lock is not None:
            let_go(self._lock, folder / OWNER)
        self._forget()

    def _forget(self) -> None:
        """In a forked child the folder is its parent's."""
        atexit.unregister(self.close)
        self.made = self._lock = None


def _remove_left() -> None:
    """Folders of processes that are gone: nobody holds their lock any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status, owner = folder.lstat(), folder / OWNER
            own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            lock = take(owner) if own and owner.exists() else None
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                let_go(lock, owner)
