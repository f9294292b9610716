"""Variants of the overlay that an entry dispatches to: taken up, counted against `max_jit`, let go of."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from aotpack_runtime.errors import AotpackError, ArtifactError
from aotpack_runtime.format import layout
from aotpack_runtime.format.index import Variant
from aotpack_runtime.jit.overlay import Compiled, Overlay
from aotpack_runtime.jit.service import Jit, Served

log = logging.getLogger("aotpack.jit")

COMPILED = ("aoti",)
"""Kinds of artifact that a child makes of a program."""
REPLACES = 8
"""How often a process may put another variant in the place of one, on average: a library that was loaded stays in its
memory, about 2 MB each (its C++ has symbols that are unique in a process, which dlclose leaves)."""


class Adopted:
    """At most `most` of them. The caller's lock is held around every call."""

    def __init__(self, jit: Jit, entry: Served, most: int) -> None:
        self._jit, self._entry, self.most = jit, entry, most
        self._kinds = COMPILED if entry.record.kernel is None else layout.KERNELS
        self._made: dict[str, tuple[Compiled, Overlay]] = {}
        self._last_used: dict[str, tuple[int, float]] = {}
        self._stamps: dict[Overlay, int] = {}
        self._replaced = 0

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Compiled]:
        return iter([made for made, _ in self._made.values()])

    def moved(self) -> list[Overlay]:
        """Overlays to which something was added, or taken from, since they were last looked at."""
        return [one for one in self._jit.overlays() if self._stamps.get(one, 0) != one.stamp()]

    def look(self) -> list[Variant]:
        """Take up what other processes, or earlier ones, have compiled; what is new."""
        found = []
        for overlay in self.moved():
            self._stamps[overlay] = overlay.stamp()
            for key in overlay.names():
                if key not in self._made and len(self._made) < self.most:
                    made = overlay.get(key, self._jit.bundle.index)
                    if made is not None and not self.take(made, overlay):
                        found.append(made.variant)
        return found

    def take(self, made: Compiled, overlay: Overlay) -> str:
        """Let the entry dispatch to a variant, loaded; "" when it does, else why not: it is none for it, or does not
        load."""
        variant, entry = made.variant, self._entry
        if made.entry != entry.record.name or variant.artifact.kind not in self._kinds:
            return "it is none of this entry"
        if made.key in self._made:
            return "it is there already"
        reason = variant.target.reject(self._jit.machine, self._jit.allow)
        if reason:
            log.info("%s: %s", variant.id, reason)
            return reason
        try:
            overlay.files(variant)
            entry.adopt([variant], overlay.files)
        except ArtifactError as error:
            self._jit.say(f"{variant.id}: {error}")
            overlay.drop(made.key, damaged=True)
            return str(error)
        except AotpackError as error:  # the session was closed meanwhile: there is nothing wrong with the variant
            log.info("%s: %s", variant.id, error)
            return str(error)
        overlay.used(made.key)
        self._made[made.key] = (made, overlay)
        if made.seconds.fallback:  # of a kernel nothing is timed
            self._jit.history.setdefault(entry.record.name, {})[made.key] = (
                made.seconds.compile, made.seconds.fallback, made.seconds.variant,
            )  # fmt: skip
        self._last_used[made.key] = (0, time.monotonic())
        return ""

    def refused(self, variant: Variant) -> bool:
        """A variant did not load when it was used: it is dropped. False when it is none of these."""
        keys = [key for key, (made, _) in self._made.items() if made.variant.id == variant.id]
        for key in keys:
            self._made.pop(key)[1].drop(key, damaged=True)
            del self._last_used[key]
            self._entry.release(variant)
        return bool(keys)

    def make_room(self, since: float, coming: int) -> str:
        """Why no further variant may be added beside `coming` others, "" when it may: one that was not used `since`
        makes place for it."""
        if len(self._made) + coming < self.most:
            return ""
        if coming:
            return "max_jit: what is being compiled takes the last places"
        for key, (count, _) in self._last_used.items():
            now = self._entry.counter_of(self._made[key][0].variant.id).value
            if now != count:
                self._last_used[key] = (now, time.monotonic())
        key = min(self._last_used, key=lambda one: self._last_used[one][1], default="")
        if not key or self._replaced >= REPLACES * self.most or self._last_used[key][1] >= since:
            return f"max_jit: there are {self.most} variants already"
        made, overlay = self._made.pop(key)
        del self._last_used[key]
        self._replaced += 1
        overlay.drop(key)
        self._entry.release(made.variant)
        self._jit.totals.evictions += 1
        return ""
