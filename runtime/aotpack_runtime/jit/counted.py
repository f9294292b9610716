"""The misses of an entry that compiles nothing: counted by shape for AOTPACK_MISS_LOG, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from aotpack_runtime import forks
from aotpack_runtime.dispatch import Miss
from aotpack_runtime.fallbacks import Prepared
from aotpack_runtime.format.index import Variant
from aotpack_runtime.jit.misslog import MissLog
from aotpack_runtime.jit.observed import Family, Shape, Shapes, words

Json = Any


class Counted:
    """In the place of a `Watch`, for entries of other policies than jit."""

    background = True

    def __init__(self, entry: str) -> None:
        self._entry, self._log, self._shapes = entry, MissLog(), Shapes()
        self._lock = forks.lock(forks.MISSES)

    def look(self) -> bool:
        return False

    def watched(self, miss: Miss, prepared: Prepared) -> Callable[..., object]:
        """What serves calls like this one, with its calls and seconds counted."""
        shape, serve, clock = self._shape(miss), prepared.serve, time.perf_counter

        def watched(*leaves: object) -> object:
            start = clock()
            result = serve(*leaves)
            shape.seconds += clock() - start
            shape.calls += 1
            return result

        return watched

    def awaited(self, miss: Miss) -> str:
        """Nothing is waited for."""
        return ""

    def unserved(self, miss: Miss) -> None:
        """A call that nothing serves is a miss too."""
        self._shape(miss).calls += 1

    def refused(self, variant: Variant) -> None: ...

    def status(self) -> dict[str, Json]:
        shapes = sorted(self._shapes.all(), key=lambda shape: -shape.calls)[:20]
        return {"shapes": [{"shape": shape.text, "calls": shape.calls} for shape in shapes]}

    def close(self) -> None:
        """Write the counts of all shapes to the miss log."""
        self._log.totals(self._entry, self._shapes)

    def _shape(self, miss: Miss) -> Shape:
        text = words(miss.call)
        with self._lock:
            shape = self._shapes.find(text)
            if shape is None:
                shape = Shape(miss.call, Family(None), state="nothing is compiled in this mode")
                self._shapes.add(text, shape)
                self._log.write(self._entry, "miss", miss.call, reason=miss.last_reason())
        return shape
