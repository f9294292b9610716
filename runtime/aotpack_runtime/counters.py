"""Counts that threads may add to without a lock: `itertools.count` steps in one bytecode under the GIL."""

from __future__ import annotations

import itertools
from collections.abc import Callable


class Counter:
    """`tick()` adds one; `value` reads without adding."""

    __slots__ = ("_count", "tick")

    def __init__(self) -> None:
        self._count = itertools.count()
        self.tick: Callable[[], int] = self._count.__next__

    @property
    def value(self) -> int:
        # count(5) is how the counter itself says where it stands; nothing else reads it without a step.
        return int(repr(self._count)[len("count(") : -1])
