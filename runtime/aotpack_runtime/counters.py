"""Counts that threads may add to without a lock: `itertools.count` steps in one bytecode under the GIL."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counter:
    """`tick()` adds one; `value` reads without adding."""

    _count: itertools.count[int] = field(default_factory=itertools.count)
    tick: Callable[[], int] = field(init=False)

    def __post_init__(self) -> None:
        self.tick = self._count.__next__

    @property
    def value(self) -> int:
        # count(5) is how the counter itself says where it stands; nothing else reads it without a step.
        return int(repr(self._count)[len("count(") : -1])
