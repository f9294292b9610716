"""When to stop trying: keys that failed wait longer each time, and a breaker opens when most compiles fail."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_PAUSE_S, LONGEST_PAUSE_S, GROWTH = 60.0, 6 * 3600.0, 4.0
LOOK_BACK, OPEN_AT = 6, 4
"""The breaker opens when this many of the last compiles failed."""
OPEN_S = 600.0
"""It lets one compile through after this long: when that is well, it closes."""


def pause_s(failures: int) -> float:
    """How long a key that failed `failures` times in a row is left alone: 1 minute, 4, 16, 64, at most 6 hours."""
    return min(FIRST_PAUSE_S * GROWTH ** (failures - 1), LONGEST_PAUSE_S) if failures else 0.0


@dataclass(slots=True)
class Breaker:
    """Open: nothing is compiled. A new session, so a new bundle, begins with a closed one."""

    clock: Callable[[], float] = time.monotonic
    opened: float | None = None
    _last: deque[bool] = field(default_factory=lambda: deque(maxlen=LOOK_BACK))
    _trying: bool = False

    def allows(self) -> bool:
        """May a compile begin? Of an open breaker one at a time may, when it has been open for a while."""
        if self.opened is None:
            return True
        if not self.ready():
            return False
        self._trying = True
        return True

    def ready(self) -> bool:
        """Would `allows` let one through?"""
        return self.opened is None or (not self._trying and self.clock() - self.opened >= OPEN_S)

    def forget_trial(self) -> None:
        """Nobody will say how the one that was let through ended."""
        self._trying = False

    def note(self, *, ok: bool) -> None:
        """A compile ended."""
        self._last.append(ok)
        if ok and self.opened is not None:
            self.opened = None
            self._last.clear()
        elif not ok and (self._trying or list(self._last).count(False) >= OPEN_AT):
            self.opened = self.clock()
        self._trying = False

    def record(self) -> dict[str, object]:
        """For the status."""
        failed = list(self._last).count(False)
        state = "closed" if self.opened is None else "open"
        return {"state": state, "recent_failures": failed, "recent": len(self._last)}
