"""Seconds of a process, phase by phase."""

from __future__ import annotations

import time


class Clock:
    """Seconds of each phase, one after another, from `began` on the monotonic clock."""

    def __init__(self, began: float) -> None:
        self._last = self._began = began
        self.phases: dict[str, float] = {}

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._began
