"""The misses of one entry: counted by shape, compiled when that pays, and taken up when somebody has compiled them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aotpack_runtime import forks
from aotpack_runtime.dispatch import Miss
from aotpack_runtime.drivers.captures import beside_captures
from aotpack_runtime.fallbacks import Prepared
from aotpack_runtime.format.index import Variant
from aotpack_runtime.jit.adopted import Adopted
from aotpack_runtime.jit.ask import Ask, Requested, Sample
from aotpack_runtime.jit.compile import Limits
from aotpack_runtime.jit.decide import AGAIN, Estimate, When, best_share, due_s, estimate
from aotpack_runtime.jit.gpu import is_capturing
from aotpack_runtime.jit.observed import Family, Seen, Shape, Shapes
from aotpack_runtime.jit.request import KEEPS_CHANGING, covers
from aotpack_runtime.jit.service import Jit, Served

log = logging.getLogger("aotpack.jit")

Json = Any
RETRY_SHARE = 2.0
"""What is not compiled now is asked for again when it has cost this many times as much."""


class Misses(Protocol):
    """What a miss asks for, of one kind of entry: `model_misses`, `kernel_misses`."""

    when: When
    seconds: float
    memory_bytes: int

    def seen(self, miss: Miss, program: Variant | None) -> Seen: ...
    def why_not(self, miss: Miss, program: Variant | None) -> str: ...
    def request(self, shape: Shape, *, whole: bool) -> Requested: ...
    def room(self) -> str: ...
    def copied(self, leaves: Sequence[Any]) -> Callable[[], Sample | None]: ...


class Watch:
    """Watches one entry. `settings` are its `on_miss`."""

    def __init__(self, jit: Jit, entry: Served, misses: Misses, settings: Mapping[str, Json]) -> None:
        self._jit, self._entry, self._misses = jit, entry, misses
        self._when: When = settings.get("when", misses.when)
        self.background = bool(settings.get("background", True))
        seconds = settings.get("max_seconds", misses.seconds)
        self._limits = Limits(float(seconds), int(settings.get("max_memory") or misses.memory_bytes))
        self._shapes = Shapes()
        self._adopted = Adopted(jit, entry, int(settings.get("max_jit", 4)))
        self._asked: dict[str, list[Shape]] = {}
        self._share = 1 / AGAIN
        self._lock = forks.lock(forks.MISSES)
        forks.in_child(self._begin_anew)

    # ------------------------------------------------------------------------------------------------ a miss

    def look(self) -> bool:
        """Take up what other processes, or earlier ones, have compiled; True when there was something new."""
        if not self._adopted.moved():
            return False
        with beside_captures(self._entry.device), self._lock:
            found = self._adopted.look()
            for variant in found:
                self._cover(variant)
        return bool(found)

    def watched(self, miss: Miss, prepared: Prepared) -> Callable[..., object]:
        """What serves calls like this one: as `prepared` does, with its calls and seconds counted, and a compile asked
        for when it is due."""
        shape = self._shape(miss, prepared.program)
        serve, clock, family = prepared.serve, time.perf_counter, shape.family

        def watched(*leaves: object) -> object:
            if shape.seconds >= shape.due or family.seconds >= family.due:
                return self._due_call(shape, serve, leaves)
            start = clock()
            result = serve(*leaves)
            took = clock() - start
            shape.calls += 1
            shape.seconds += took
            family.seconds += took
            return result

        return watched

    def awaited(self, miss: Miss) -> str:
        """Have what takes this call compiled, and wait for it, as nothing serves it meanwhile: "" when it is there,
        else why it is not."""
        shape = self._shape(miss, None)
        shape.calls += 1
        if shape.state not in ("", "asked"):
            return shape.state
        if is_capturing():
            return "its stream is being captured: nothing is compiled or loaded meanwhile"
        if shape.due == math.inf and not shape.state:
            return "on_miss says that nothing is compiled (when: never)"
        ask = self._asked_for(shape, lambda: None, whole=False, waits=True)
        if ask is not None and not ask.done.wait(self._limits.seconds):
            return f"it is still being compiled after {self._limits.seconds:g} s (max_seconds)"
        return "" if shape.state == "compiled" else shape.state or shape.why

    def unserved(self, miss: Miss) -> None:
        """A call that nothing serves is a miss too; one of a kernel was counted when it began to wait."""
        shape = self._shape(miss, None)
        if self._entry.record.kernel is None:
            shape.calls += 1

    def refused(self, variant: Variant) -> None:
        """A variant of the overlay did not load: it is dropped, and compiled anew when it is asked for again."""
        with self._lock:
            for shape in self._shapes.all() if self._adopted.refused(variant) else ():
                if shape.state == "compiled" and covers(variant.guards, shape.call):
                    shape.state, shape.hits, shape.due = "", None, 0.0

    def _shape(self, miss: Miss, program: Variant | None) -> Shape:
        seen = self._misses.seen(miss, program)
        with self._lock:
            shape = self._shapes.find(seen.key)
            if shape is None:
                shape = self._new_shape(miss, seen)
            elif shape.state == "compiled":  # it misses again: its variant is gone
                shape.state, shape.hits, shape.due = "", None, shape.seconds + self._due()
        return shape

    def _new_shape(self, miss: Miss, seen: Seen) -> Shape:
        if seen.why:
            family = Family(None, seen.why)
        else:
            family = self._shapes.family(
                seen.family, lambda: Family(seen.program, self._misses.why_not(miss, seen.program))
            )
        family.note(seen.sizes)
        shape = Shape(miss.call, family, seen.request, state=family.why or self._jit.unavailable)
        self._shapes.add(seen.key, shape)
        if self._jit.miss_log:
            self._jit.miss_log.write(self._entry.record.name, "miss", miss.call, reason=miss.last_reason())
        if not shape.state:
            shape.due = due = self._due()
            family.due = due if self._changes(family) else math.inf
            if due < math.inf and self._was_dropped(shape):
                shape.due = 0.0
        return shape

    def _was_dropped(self, shape: Shape) -> bool:
        """Was there a variant for it that was damaged? It has paid before."""
        damaged = [overlay.damaged for overlay in self._jit.overlays() if overlay.damaged]
        return bool(damaged) and self._key(self._misses.request(shape, whole=False)) in set[str]().union(*damaged)

    # ------------------------------------------------------------------------------------------------ asking

    def _due_call(self, shape: Shape, serve: Callable[..., object], leaves: Sequence[object]) -> object:
        """A call at which a compile is due: in the background it is served first, and what it began goes on behind it;
        its arguments are copied before, since it may write them."""
        capturing, family = self._entry.device != "cpu" and is_capturing(), shape.family
        whole = self._changes(family) and family.seconds >= family.due
        # Nothing is copied for a compile that would be refused: a copy costs the call more than all else that is done.
        copied = (lambda: None) if capturing or self._jit.is_crowded() else self._misses.copied(leaves)
        if self.background and not capturing:
            shape.due = family.due = math.inf
        elif not capturing:
            ask = self._asked_for(shape, copied, whole=whole, waits=True)
            if ask is not None and ask.done.wait(self._limits.seconds):
                now = self._entry.serve_of(shape.call)
                if now is not None:
                    return now(*leaves)
        start = time.perf_counter()
        try:
            result = serve(*leaves)
        except BaseException:  # of the model's own: nothing is asked for by a call that it refuses
            if self.background and not capturing:
                with self._lock:
                    self._later(shape)
            raise
        took = time.perf_counter() - start
        shape.calls += 1
        shape.seconds += took
        family.seconds += took
        if self.background and not capturing:
            begun = self._jit.soon(lambda: self._asked_for(shape, copied, whole=whole))
            if not begun:
                with self._lock:
                    self._later(shape)
        return result

    def _asked_for(
        self, shape: Shape, copied: Callable[[], Sample | None], *, whole: bool, waits: bool = False
    ) -> Ask | None:
        """Ask for a compile that is due, or say when to consider it again. Who `waits` gets what others asked for too:
        they wait with them."""
        with beside_captures(self._entry.device), self._lock:  # copied arguments are waited for, variants let go of
            return self._ask(shape, copied, whole=whole, waits=waits)

    def _ask(self, shape: Shape, copied: Callable[[], Sample | None], *, whole: bool, waits: bool) -> Ask | None:
        family = shape.family
        if shape.state not in ("", "asked") or (shape.state == "asked" and not waits):
            return None
        request = self._misses.request(shape, whole=whole)
        if whole and request.dims and self._jit.refuses(self._key(request)):
            request = self._misses.request(shape, whole=False)
        key = self._key(request)
        problem = self._jit.refuses(key) or self._over_budget(shape, key) or self._misses.room()
        if problem:
            shape.why = problem
            self._later(shape)
            return None
        shape.due = family.due = shape.due if waits else math.inf
        shape.state = "asked"
        self._asked.setdefault(key, []).append(shape)
        self._jit.miss_log.write(self._entry.record.name, "asked", shape.call, label=request.label)
        return self._jit.ask(request, copied(), self._limits, self._ended)

    def _key(self, request: Requested) -> str:
        return request.key(self._jit.bundle.digest, self._jit.device)

    def _later(self, shape: Shape) -> None:
        """Consider it again when it has cost twice as much."""
        family = shape.family
        shape.due = max(shape.seconds, 1e-3) * RETRY_SHARE
        if self._changes(family):
            family.due = max(family.seconds, 1e-3) * RETRY_SHARE
        shape.state = ""

    @staticmethod
    def _changes(family: Family) -> bool:
        return any(len(sizes) >= KEEPS_CHANGING for sizes in family.sizes.values())

    # ------------------------------------------------------------------------------------------------ taking up

    def _ended(self, ask: Ask) -> None:
        """What was asked for is there, or is not: calls that missed go to it, or on as before."""
        with beside_captures(self._entry.device), self._lock:
            problem, guards = ask.problem, None
            if ask.made is None:
                log.info("%s: %s", self._entry.record.name, problem)
            else:
                made, overlay = ask.made
                guards = made.variant.guards
                overlay.damaged.discard(ask.key)
                problem = self._adopted.take(made, overlay)
                if ask.key in overlay.damaged:  # compiled again it would be the same
                    self._jit.note_failure(ask.key, overlay, problem)
                self._cover(made.variant)
                self._revise()
            for shape in self._asked.pop(ask.key, ()):
                if shape.state == "asked":
                    shape.why = problem
                    self._later(shape)
                    if guards is not None and not problem:  # asking again would give the same
                        reason = guards.reject(shape.call, self._entry.record.parameter_names)
                        shape.state = f"what was compiled for it does not take it: {reason}"

    def _cover(self, variant: Variant) -> None:
        """A variant came: the shapes that it takes are those of its calls now."""
        if variant.id not in {made.variant.id for made in self._adopted}:
            return
        for shape in self._shapes.all():
            if covers(variant.guards, shape.call):
                shape.state, shape.due = "compiled", math.inf
                shape.hits = self._entry.counter_of(variant.id)
                shape.family.seconds = 0.0

    def _over_budget(self, shape: Shape, wanted: str) -> str:
        """Why no further variant may be added, "" when it may."""
        if wanted in self._asked:
            return ""
        problem = self._adopted.make_room(shape.first_seen, len(self._asked))
        if problem and not self._asked:
            names = [name for name, sizes in shape.family.sizes.items() if len(sizes) >= KEEPS_CHANGING]
            what = f"{', '.join(names)} keep changing" if names else "its calls keep changing"
            self._jit.say(
                f"{self._entry.record.name}: has its {self._adopted.most} variants of misses (max_jit), all in use; "
                f"{what}: give a range in the manifest, or a larger max_jit"
            )
        return problem

    # ------------------------------------------------------------------------------------------------ deciding

    def _estimate(self) -> Estimate:
        history = self._jit.history
        name = self._entry.record.name
        others = [past for other, pasts in list(history.items()) if other != name for past in list(pasts.values())]
        return estimate(list(history.get(name, {}).values()), others)

    def _due(self) -> float:
        return due_s(self._when, self._estimate() if self._when == "pays" else Estimate(), self._share)

    def _revise(self) -> None:
        """Something was compiled, so more is known of what compiling costs and gives."""
        shapes = self._shapes.all()
        known = self._estimate()
        self._share = best_share(
            (shape.demand_s for shape in shapes if shape.state in ("", "asked", "compiled")), known
        )
        self._weigh_anew(shapes)

    def _weigh_anew(self, shapes: Sequence[Shape]) -> None:
        due = self._due()
        for shape in shapes:
            if not shape.state:
                shape.due = due
                shape.family.due = due if self._changes(shape.family) else math.inf

    def _begin_anew(self) -> None:
        """In a forked child: nobody here will say what became of what was asked for."""
        self._asked.clear()
        shapes = self._shapes.all()
        for shape in shapes:
            if shape.state == "asked":
                shape.state = ""
        self._weigh_anew(shapes)

    # -------------------------------------------------------------------------------------------------- status

    def close(self) -> None:
        """Write the counts of all shapes to the miss log."""
        self._jit.miss_log.totals(self._entry.record.name, self._shapes)

    def status(self) -> dict[str, Json]:
        """For `Session.status()`."""
        known = self._estimate()
        shapes = sorted(self._shapes.all(), key=lambda shape: -shape.calls)[:20]
        return {
            "when": self._when,
            "background": self.background,
            "variants": sorted(made.variant.id for made in self._adopted),
            "max_jit": self._adopted.most,
            "estimate": {
                "compile_seconds": round(known.compile_s, 3), "variant_over_fallback": round(known.ratio, 3),
                "from": known.source, "share": self._share if self._share < math.inf else None,
            },
            "shapes": [self._shape_record(shape, known) for shape in shapes],
        }  # fmt: skip

    def _shape_record(self, shape: Shape, known: Estimate) -> Json:
        lost = shape.seconds * max(known.gain, 0.0)
        share = None if known.gain <= 0 else round(lost / known.compile_s, 4)
        checked = next((made.checked for made in self._adopted if covers(made.variant.guards, shape.call)), "")
        return {
            "shape": shape.text,
            "calls": shape.calls,
            "fallback_seconds": round(shape.seconds, 6),
            "break_even": share,
            "state": shape.state or shape.why or "watched",
            **({"checked": checked} if checked else {}),
        }
