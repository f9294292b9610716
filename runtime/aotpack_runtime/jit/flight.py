"""One compile of a thing at a time, across the threads and processes of a host.

A lock is the kernel's (`flock` on a file): it ends with the process that holds it, however that ends, so there is no
owner to look up and no age to guess. Where a file system has no locks, everybody compiles: slower, and right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aotpack_runtime import forks
from aotpack_runtime.machine import make_private

POLL_S = 0.05
"""Waiters look this often: a closed session must not be held by a lock, and whoever takes over does within it."""


Stopped = Callable[[], bool]
_held: set[int] = set()


def let_go(descriptor: int, path: Path) -> None:
    """Give the lock back that `take` gave; its file goes with it, so that locks of what is done do not add up."""
    if descriptor not in _held:  # a forked child gave its parent's back already
        return
    _held.discard(descriptor)
    with contextlib.suppress(OSError):
        if _is_at(path, descriptor):
            os.unlink(path)
    os.close(descriptor)


def _forget_all() -> None:
    """A forked child has its parent's descriptors, and would hold its parent's locks for as long as it lives."""
    while _held:
        os.close(_held.pop())


forks.in_child(_forget_all)


@contextlib.contextmanager
def held(*paths: Path, stopped: Stopped = lambda: False, wait: bool = True) -> Iterator[bool]:
    """Hold the lock at one of `paths`, whichever is free first, while the block runs.

    False when `stopped` says so before, or without `wait` when all are taken.
    """
    mine: tuple[int, Path] | None = None
    locks = True
    try:
        while mine is None and locks and not stopped():
            for path in paths:
                try:
                    descriptor = take(path)
                except OSError:  # no locks here, or no place for one
                    locks = False
                else:
                    mine = None if descriptor is None else (descriptor, path)
                if mine is not None or not locks:
                    break
            else:
                if not wait:
                    break
                time.sleep(POLL_S)
        yield mine is not None or not locks
    finally:
        if mine is not None:
            let_go(*mine)


def take(path: Path) -> int | None:
    """The descriptor that holds the lock; None while another has it. OSError where there are no locks."""
    make_private(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):
            _held.add(descriptor)
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # another has it, or the folder was wiped meanwhile
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(path: Path, descriptor: int) -> bool:
    """Is this file the one at `path`, and not one that was there before?"""
    now, mine = os.stat(path), os.fstat(descriptor)
    return (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)
