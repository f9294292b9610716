"""The misses of one entry: counted by shape, compiled when that pays, and taken up when somebody has compiled them."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from aotpack_runtime.dispatch import Miss
from aotpack_runtime.errors import AotpackError, ArtifactError
from aotpack_runtime.fallbacks import Prepared
from aotpack_runtime.format.codec import dump_scalar
from aotpack_runtime.format.index import RecipeTarget, Variant
from aotpack_runtime.jit.compile import Limits
from aotpack_runtime.jit.decide import AGAIN, Estimate, When, best_share, due_s, estimate
from aotpack_runtime.jit.observed import Family, Shape, Shapes
from aotpack_runtime.jit.overlay import Compiled, Overlay
from aotpack_runtime.jit.request import (
    KEEPS_CHANGING,
    Request,
    covers,
    exact,
    open_sizes,
    ranged,
    shape_key,
    why_not,
    words,
)
from aotpack_runtime.jit.service import Ask, Jit, Sample, Served
from aotpack_runtime.loaders import SAMPLES, loader

log = logging.getLogger("aotpack.jit")

Json = Any
WEIGHTS_TIMES = 3
"""A child may take this many times the weights, beside what compilers need: zeros to compile with, and a copy."""
COMPILED = "aoti"
"""The kind of artifact that a child makes of a program."""
REPLACES = 8
"""How often a process may put another variant in the place of one, on average: a library that was loaded stays in its
memory, about 2 MB each (its C++ has symbols that are unique in a process, which dlclose leaves)."""
RETRY_SHARE = 2.0
"""What is not compiled now is asked for again when it has cost this many times as much."""


class Watch:
    """Watches one entry. `settings` are its `on_miss`."""

    def __init__(self, jit: Jit, entry: Served, settings: Mapping[str, Json]) -> None:
        self._jit, self._entry = jit, entry
        self._when: When = settings.get("when", "pays")
        self._background = bool(settings.get("background", True))
        self._most = int(settings.get("max_jit", 4))
        file = jit.bundle.index.weights_file
        memory = settings.get("max_memory") or (8 << 30) + WEIGHTS_TIMES * (file.size_bytes if file else 0)
        self._limits = Limits(float(settings.get("max_seconds", 600)), int(memory))
        self._shapes = Shapes()
        self._adopted: dict[str, tuple[Compiled, Overlay]] = {}
        self._last_used: dict[str, tuple[int, float]] = {}
        self._asked: dict[str, list[Shape]] = {}
        self._stamps: dict[str, int] = {}
        self._share = 1 / AGAIN
        self._replaced = 0
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------ a miss

    def look(self) -> bool:
        """Take up what other processes, or earlier ones, have compiled; True when there was something new."""
        found = False
        for overlay in self._jit.overlays():
            stamp = overlay.stamp()
            if self._stamps.get(str(overlay.root), 0) == stamp:
                continue
            with self._lock:
                self._stamps[str(overlay.root)] = stamp
                for key in overlay.names():
                    if key not in self._adopted and len(self._adopted) < self._most:
                        made = overlay.get(key, self._jit.bundle.index)
                        found |= made is not None and self._adopt(made, overlay)
        return found

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

    def refused(self, variant: Variant) -> None:
        """A variant of the overlay did not load: it is dropped, and compiled anew when it is asked for again."""
        with self._lock:
            for key, (made, overlay) in list(self._adopted.items()):
                if made.variant.id == variant.id:
                    overlay.drop(key, damaged=True)
                    del self._adopted[key], self._last_used[key]
                    self._entry.release(variant)
                    for shape in self._shapes.all():
                        if shape.state == "compiled" and covers(variant.guards, shape.call):
                            shape.state, shape.hits, shape.due = "", None, 0.0

    def _shape(self, miss: Miss, program: Variant | None) -> Shape:
        if program is None:  # the source serves it: only counted
            key: Any = words(miss.call)
            known = self._shapes.find(key)
            if known is None:
                family = Family(program)
                known = Shape(words(miss.call), miss.call, family, {}, state="no program of the bundle reaches it")
                self._shapes.add(key, known)
            return known
        key, loose = shape_key(program, miss.call)
        with self._lock:
            return self._shape_of(key, loose, program, miss)

    def _shape_of(self, key: Hashable, loose: Hashable, program: Variant, miss: Miss) -> Shape:
        shape = self._shapes.find(key)
        if shape is None:
            family = self._shapes.family(loose, program)
            sizes = open_sizes(program, miss.call)
            family.note(sizes)
            shape = Shape(words(miss.call), miss.call, family, sizes, state=self._why_not(program, miss))
            self._shapes.add(key, shape)
            self._jit.miss_log.write(self._entry.record.name, "miss", miss.call, reason=miss.last_reason())
            if not shape.state:
                shape.due = self._due()
                family.due = self._due() if self._changes(family) else math.inf
                if shape.due < math.inf and self._was_dropped(shape):
                    shape.due = 0.0
        elif shape.state == "compiled":  # it misses again: its variant is gone
            shape.state, shape.hits, shape.due = "", None, shape.seconds + self._due()
        return shape

    def _why_not(self, program: Variant, miss: Miss) -> str:
        reason = self._jit.unavailable or why_not(program, miss.call)
        return reason or ("" if self._target(program) else "this host meets none of the manifest's targets")

    def _was_dropped(self, shape: Shape) -> bool:
        """Was there a variant for it that was damaged? It has paid before."""
        damaged = set[str]().union(*(overlay.damaged for overlay in self._jit.overlays()))
        return bool(damaged) and self._key(self._request(shape, whole=False)) in damaged

    # ------------------------------------------------------------------------------------------------ asking

    def _due_call(self, shape: Shape, serve: Callable[..., object], leaves: Sequence[object]) -> object:
        """A call at which a compile is due: in the background it is served first, and what it began goes on behind it;
        its arguments are copied before, since it may write them."""
        capturing, family = _is_capturing(), shape.family
        whole = self._changes(family) and family.seconds >= family.due
        sample = None if capturing else self._sample(leaves)
        if self._background and not capturing:
            shape.due = family.due = math.inf
        elif not capturing:
            ask = self._asked_for(shape, sample, whole=whole)
            if ask is not None and ask.done.wait(self._limits.seconds):
                now = self._entry.serve_of(shape.call)
                if now is not None:
                    return now(*leaves)
        start = time.perf_counter()
        try:
            result = serve(*leaves)
        except BaseException:  # of the model's own: nothing is asked for by a call that it refuses
            if self._background and not capturing:
                if sample is not None:
                    sample.close()
                with self._lock:
                    self._later(shape)
            raise
        took = time.perf_counter() - start
        shape.calls += 1
        shape.seconds += took
        family.seconds += took
        if self._background and not capturing:
            self._jit.soon(lambda: self._asked_for(shape, sample, whole=whole))
        return result

    def _asked_for(self, shape: Shape, sample: Sample | None, *, whole: bool) -> Ask | None:
        """Ask for a compile that is due, or say when to consider it again."""
        with self._lock:
            ask = self._ask(shape, sample, whole=whole)
        if ask is None and sample is not None:
            sample.close()
        return ask

    def _ask(self, shape: Shape, sample: Sample | None, *, whole: bool) -> Ask | None:
        family = shape.family
        if shape.state not in ("", "asked") or (shape.state == "asked" and self._background):
            return None
        request = self._request(shape, whole=whole)
        if whole and request.dims and self._jit.refuses(self._key(request)):
            request = self._request(shape, whole=False)
        key = self._key(request)
        problem = self._jit.refuses(key) or self._over_budget(shape, key)
        if problem:
            shape.why = problem
            self._later(shape)
            return None
        # Of a blocking entry the others who come with this shape wait as well.
        shape.due = family.due = math.inf if self._background else shape.due
        shape.state = "asked"
        self._asked.setdefault(key, []).append(shape)
        self._jit.miss_log.write(self._entry.record.name, "asked", shape.call, label=request.label)
        return self._jit.ask(request, sample, self._limits, self._ended)

    def _request(self, shape: Shape, *, whole: bool) -> Request:
        program = shape.family.program
        assert program is not None
        target = self._target(program)
        assert target is not None
        name = self._entry.record.name
        wide = ranged(name, program, target, shape.call, shape.family.sizes) if whole else None
        return wide or exact(name, program, target, shape.call)

    def _key(self, request: Request) -> str:
        return request.key(self._jit.bundle.digest, self._jit.device)

    def _target(self, program: Variant) -> RecipeTarget | None:
        """The first target of the manifest that this host meets."""
        targets = program.recipe.targets if program.recipe is not None else ()
        return next((one for one in targets if one.target.reject(self._jit.machine, self._jit.allow) is None), None)

    def _sample(self, leaves: Sequence[Any]) -> Sample | None:
        try:
            saved = loader(SAMPLES).save(leaves)
        except Exception as error:  # made-up arguments are used instead
            log.debug("%s: arguments are not copied: %s", self._entry.record.name, error)
            return None
        if saved is None:
            return None
        numbers = [dump_scalar(leaf) if record is None else None for leaf, record in zip(leaves, saved[1], strict=True)]
        return Sample(saved[0], saved[1], numbers)

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
        with self._lock:
            if ask.made is None:
                log.info("%s: %s", self._entry.record.name, ask.problem)
            else:
                ask.made[1].damaged.discard(ask.key)
                self._adopt(*ask.made)
                self._revise()
            for shape in self._asked.pop(ask.key, ()):
                if shape.state == "asked":
                    shape.why = ask.problem
                    self._later(shape)

    def _adopt(self, made: Compiled, overlay: Overlay) -> bool:
        """Let the entry dispatch to a variant, loaded; False when it is none for it, or does not load."""
        variant, entry = made.variant, self._entry
        if made.entry != entry.record.name or made.key in self._adopted or variant.artifact.kind != COMPILED:
            return False
        reason = variant.target.reject(self._jit.machine, self._jit.allow)
        if reason:
            log.info("%s: %s", variant.id, reason)
            return False
        try:
            overlay.files(variant)
            entry.adopt([variant], overlay.files)
        except ArtifactError as error:
            self._jit.say(f"{variant.id}: {error}")
            overlay.drop(made.key, damaged=True)
            return False
        except AotpackError as error:  # the session was closed meanwhile: there is nothing wrong with the variant
            log.info("%s: %s", variant.id, error)
            return False
        overlay.used(made.key)
        self._adopted[made.key] = (made, overlay)
        self._jit.history.setdefault(entry.record.name, {})[made.key] = (
            made.seconds.compile, made.seconds.fallback, made.seconds.variant,
        )  # fmt: skip
        self._last_used[made.key] = (0, time.monotonic())
        for shape in self._shapes.all():
            if covers(variant.guards, shape.call):
                shape.state, shape.due = "compiled", math.inf
                shape.hits = entry.counter_of(variant.id)
                shape.family.seconds = 0.0
        return True

    def _over_budget(self, shape: Shape, wanted: str) -> str:
        """Why no further variant may be added, "" when it may: one that was not used since this shape began to miss
        makes place for it."""
        if wanted in self._asked or len(self._adopted) + len(self._asked) < self._most:
            return ""
        if self._asked:
            return "max_jit: what is being compiled takes the last places"
        for key, (count, _) in self._last_used.items():
            now = self._entry.counter_of(self._adopted[key][0].variant.id).value
            if now != count:
                self._last_used[key] = (now, time.monotonic())
        key = min(self._last_used, key=lambda one: self._last_used[one][1], default="")
        worn_out = self._replaced >= REPLACES * self._most
        if not key or worn_out or self._last_used[key][1] >= shape.first_seen:
            names = [name for name, sizes in shape.family.sizes.items() if len(sizes) >= KEEPS_CHANGING]
            what = f"{', '.join(names)} keep changing" if names else "its calls keep changing"
            self._jit.say(
                f"{self._entry.record.name}: has its {self._most} variants of misses (max_jit), all in use; {what}: "
                "give a range in the manifest, or a larger max_jit"
            )
            return f"max_jit: there are {self._most} variants already"
        made, overlay = self._adopted.pop(key)
        del self._last_used[key]
        self._replaced += 1
        overlay.drop(key)
        self._entry.release(made.variant)
        self._jit.totals.evictions += 1
        return ""

    # ------------------------------------------------------------------------------------------------ deciding

    def _estimate(self) -> Estimate:
        history = self._jit.history
        name = self._entry.record.name
        others = [past for other, pasts in list(history.items()) if other != name for past in list(pasts.values())]
        return estimate(list(history.get(name, {}).values()), others)

    def _due(self) -> float:
        return due_s(self._when, self._estimate(), self._share)

    def _revise(self) -> None:
        """Something was compiled, so more is known of what compiling costs and gives."""
        shapes = self._shapes.all()
        known = self._estimate()
        self._share = best_share((shape.demand_s for shape in shapes if shape.family.program is not None), known)
        due = self._due()
        for shape in shapes:
            if not shape.state:
                shape.due = due
                shape.family.due = due if self._changes(shape.family) else math.inf

    # -------------------------------------------------------------------------------------------------- status

    def close(self) -> None:
        """Write the counts of all shapes to the miss log."""
        for shape in self._shapes.all() if self._jit.miss_log else ():
            self._jit.miss_log.write(
                self._entry.record.name, "total", shape.call,
                calls=shape.calls, seconds=round(shape.seconds, 6), state=shape.state or shape.why,
            )  # fmt: skip

    def status(self) -> dict[str, Json]:
        """For `Session.status()`."""
        known = self._estimate()
        shapes = sorted(self._shapes.all(), key=lambda shape: -shape.calls)[:20]
        return {
            "when": self._when,
            "background": self._background,
            "variants": sorted(made.variant.id for made, _ in self._adopted.values()),
            "max_jit": self._most,
            "estimate": {
                "compile_seconds": round(known.compile_s, 3), "variant_over_fallback": round(known.ratio, 3),
                "from": known.source, "share": self._share if self._share < math.inf else None,
            },
            "shapes": [self._shape_record(shape, known) for shape in shapes],
        }  # fmt: skip

    def _shape_record(self, shape: Shape, known: Estimate) -> Json:
        lost = shape.seconds * max(known.gain, 0.0)
        share = None if known.gain <= 0 else round(lost / known.compile_s, 4)
        return {
            "shape": shape.text,
            "calls": shape.calls,
            "fallback_seconds": round(shape.seconds, 6),
            "break_even": share,
            "state": shape.state or shape.why or "watched",
        }


def _is_capturing() -> bool:
    """Is this thread's CUDA stream being captured into a graph? torch is asked only where it has begun with CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())
