"""An overlay of one process alone, where the one that processes share cannot be used."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from aotpack_runtime import forks
from aotpack_runtime.jit.flight import let_go, take
from aotpack_runtime.jit.overlay import Overlay
from aotpack_runtime.jit.place import unwritable

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
