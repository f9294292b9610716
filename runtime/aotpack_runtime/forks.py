"""Forks of a server, as one that loads before it forks its workers makes them: a child has all of its parent's memory,
and of its threads the one that forked.

So a lock that is made here is held by nobody while the process is forked: what it guards is whole in the child, and the
lock is free. What counts on threads of the parent is put right in the child by `in_child`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

WAIT_SECONDS = 10.0
"""A fork waits no longer than this, for whoever holds a lock for good; the child gets its locks free all the same."""


MISSES, ENTRY, SESSION, STATE, WEIGHTS, LAST = range(6)
"""Levels of locks: who holds one takes those of its level or of later ones only, and a fork takes all in this order."""

_locks: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_before: list[Callable[[], object]] = []
_in_child: list[Callable[[], Callable[[], object] | None]] = []
_forking = threading.RLock()
_taken: list[Any] = []


def lock(level: int) -> Any:
    """A `threading.RLock` of a level that nobody holds while the process is forked."""
    made = threading.RLock()
    _locks[made] = (level, next(_numbers))
    return made


def before(work: Callable[[], object]) -> None:
    """Do `work` before each fork, while the locks are free."""
    _before.append(work)


def in_child(work: Callable[[], object]) -> None:
    """Do `work` in each child; a method for as long as its object lives."""
    with _forking:
        _in_child[:] = [known for known in _in_child if known() is not None]
        _in_child.append(_method(work) if isinstance(work, MethodType) else lambda: work)


def _method(work: MethodType) -> Callable[[], Callable[[], object] | None]:
    """A weak reference to a method. That of `weakref` has a callback, which fails when Python ends (3.11)."""
    owner, function = weakref.ref(work.__self__), work.__func__

    def found() -> Callable[[], object] | None:
        lives = owner()
        return None if lives is None else MethodType(function, lives)

    return found


def _take() -> None:
    _forking.acquire()
    for work in _before:
        work()
    deadline = time.monotonic() + WAIT_SECONDS
    for known, _ in sorted(_locks.items(), key=lambda item: item[1]):
        if known.acquire(timeout=max(deadline - time.monotonic(), 0)):
            _taken.append(known)


def _give_back() -> None:
    while _taken:
        _taken.pop().release()
    _forking.release()


def _begin() -> None:
    for known in set(_locks) - set(_taken):
        known._at_fork_reinit()
    _give_back()
    for found in _in_child:
        work = found()
        if work is not None:
            work()


os.register_at_fork(before=_take, after_in_parent=_give_back, after_in_child=_begin)
