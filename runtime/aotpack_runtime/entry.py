"""An entry as a callable: judge the call, run the variant it hits, or serve the miss.

What models and kernels share stands here; `torch_entry` and `kernel_entry` know how each is called and loaded.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from aotpack_runtime import forks, logs
from aotpack_runtime.assemble import Serve
from aotpack_runtime.counters import Counter
from aotpack_runtime.dispatch import Hit, Miss
from aotpack_runtime.errors import AotpackError, GuardMiss, SessionClosed
from aotpack_runtime.fallbacks import Prepared
from aotpack_runtime.format import index
from aotpack_runtime.format.index import Variant
from aotpack_runtime.weights import Gone

MEMO_LIMIT = 4096
"""Judged calls remembered for an entry (or four for each variant, if that is more); then the memo starts again."""


class Entry:
    """A callable of a bundle. Calls bind like the model's own forward(), and return what eager returns.

    Raises TypeError as Python does for arguments that do not bind, GuardMiss when nothing may serve the call,
    ArtifactError when an artifact does not load, and whatever the model itself raises.
    """

    last_words: ClassVar[str] = "and a miss is an error (mode strict, or on_miss: error)"
    """What GuardMiss says of an entry that has no way to serve a miss."""

    __call__: ClassVar[Callable[..., Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Entry:  # noqa: PYI034 - of a class of its own
        # Calling looks `__call__` up on the class: each entry has a class of its own, whose `__call__` is the
        # function compiled for its signature. A dispatch in between would cost every call.
        return super().__new__(type("Entry", (cls,), {"__doc__": cls.__doc__}))

    def __init__(
        self,
        record: index.Entry,
        *,
        device: str,
        policy: str,
        source_policy: str,
        variants: Sequence[Variant],
        programs: Sequence[Variant],
        skipped: Sequence[tuple[str, str]],
        watch: Callable[[Any], Any] | None = None,
    ) -> None:
        self.record, self.device, self.policy, self.source_policy = record, device, policy, source_policy
        self.variants, self.programs = tuple(variants), tuple(programs)
        self._skipped = list(skipped)
        self._lock = forks.lock(forks.ENTRY)
        self._memo: dict[object, Serve] = {}
        self._memo_limit = max(MEMO_LIMIT, 4 * len(variants))
        self._executables: dict[str, Any] = {}
        self._adopted: dict[str, Variant] = {}
        self._released_hits = 0
        self._counters: dict[str, Counter] = {}
        self._reasons: Tally[str] = Tally()
        self.closed = False
        self._fallbacks: list[Any] = []
        self._make_watch = watch
        self._watch: Any = None
        self._files: dict[str, Callable[[Variant], Mapping[str, str]]] = {}
        """How the files are found of a variant that was adopted."""

    def __repr__(self) -> str:
        return f"<aotpack entry {self.record.name!r}: {len(self.variants)} variants on {self.device}>"

    def explain(self, /, *args: Any, **kwargs: Any) -> Hit | Miss:
        """Which variant this call would hit, or why each was turned down. Runs and loads nothing."""
        raise NotImplementedError

    def counts(self) -> dict[str, Any]:
        """Calls served so far: hits by variant, misses by what served them and by their reason."""
        bundled = {variant.id: self._value(variant.id) for variant in self.record.variants}
        overlay = {name: self._value(name) for name in list(self._adopted)}
        hits = bundled | overlay
        programs = sum(self._value(program.id) for program in self.programs)
        fallbacks = {"program": programs} | {
            way.tier: self._value(way.tier) for way in self._fallbacks if way.tier != "program"
        }
        return {
            "hits": sum(hits.values()) + self._released_hits,
            "hits_by_tier": {"bundle": sum(bundled.values()), "overlay": sum(overlay.values()) + self._released_hits},
            "hits_by_variant": {name: count for name, count in hits.items() if count},
            "misses": sum(fallbacks.values()) + self._value("error"),
            "misses_by_tier": {tier: count for tier, count in fallbacks.items() if count},
            "misses_by_reason": dict(self._reasons.most_common(20)),
            "errors": self._value("error"),
            "loaded": sorted(self._executables),
            "skipped": dict(self._skipped),
            **({} if self._watch is None else {"jit": self._watch.status()}),
        }

    # ------------------------------------------------------------------------------------------- for the session

    def load(self, variant: Variant) -> None:
        """Load a variant now rather than at its first call."""
        raise NotImplementedError

    def run_example(self, variant: Variant) -> None:
        """Run a variant of a model once with made-up inputs."""
        raise NotImplementedError

    def set_aside(self, variant: Variant, error: AotpackError) -> None:
        """A variant that does not load is skipped from now on, with its reason: a bundle is an advisory artifact."""
        with self._lock:
            if self.closed or variant.id in dict(self._skipped):
                return
            logs.logger("dispatch").warning("%s does not load and is skipped: %s", variant.id, error)
            self._skipped.append((variant.id, f"does not load: {error}"))
            self._forget(variant)
        if self._watch is not None:
            self._watch.refused(variant)

    def counter(self, name: str) -> Callable[[], object]:
        """The tick of the counter called `name`."""
        return self.counter_of(name).tick

    def counter_of(self, name: str) -> Counter:
        """The counter called `name`, of calls that a variant or a way served."""
        return self._counters.setdefault(name, Counter())

    def close(self) -> None:
        """Let go of every executable; calls raise SessionClosed from now on."""

        def closed(*args: Any, **kwargs: Any) -> object:
            raise self._is_closed()

        with self._lock:
            self._install(closed)
            self.closed = True
        if self._watch is not None:
            self._watch.close()
        with self._lock:
            self._memo.clear()
            self._executables = Gone()
            self._fallbacks.clear()

    def _is_closed(self) -> SessionClosed:
        return SessionClosed(f"{self.record.name}: the session is closed", hint="load the bundle again")

    def _behind(self) -> bool:
        """Is there something behind the misses of this entry? It is made at the first."""
        if self._make_watch is not None:
            with self._lock:
                if self._make_watch is not None:
                    self._watch, self._make_watch = self._make_watch(self), None
        return self._watch is not None

    def _let_go(self, variant: Variant) -> None:
        """Of a variant that was adopted; its calls stay counted."""
        if self._adopted.pop(variant.id, None) is not None:
            counter = self._counters.pop(variant.id, None)
            self._released_hits += counter.value if counter is not None else 0
        self._files.pop(variant.id, None)

    # ------------------------------------------------------------------------------------------------ a call

    def _remember(self, key: object, serve: Serve) -> None:
        self._remember_in(self._memo, key, serve)

    def _remember_in(self, memo: dict[object, Serve], key: object, serve: Serve) -> None:
        if self.closed:
            return
        if len(memo) >= self._memo_limit:
            memo.clear()
        memo[key] = serve

    def _forget(self, variant: Variant) -> None:
        """Dispatch without `variant` from now on."""
        raise NotImplementedError

    def _serve_miss(self, miss: Miss, values: tuple[object, ...], *, why: str = "") -> tuple[Serve, bool]:
        """What serves a miss, and whether the same serves all calls judged alike; GuardMiss when nothing does. `why` is
        said in place of the entry's last words."""
        category = _category(miss)
        self._reasons[category] += 1
        if logs.logger("guards").isEnabledFor(logs.INFO):
            reason = miss.call.state[0] if miss.call.state else miss.last_reason() or "no variants"
            logs.guard_failed(self.record.name, reason, self._reasons[category])
        logs.logger("dispatch").debug("%s: %s", self.record.name, miss)
        way = self._way(miss, values)
        if not isinstance(way, str):
            return way.serve if self._watch is None else self._watch.watched(miss, way), way.remember
        if self.closed:  # meanwhile: its fallbacks are gone
            raise self._is_closed()
        if self._watch is not None:
            self._watch.unserved(miss)
        self.counter("error")()
        raise GuardMiss(
            self.record.name, miss.reasons, why="; ".join(filter(None, (way, why))) or self.last_words,
            hint=self._next_step(values),
        )  # fmt: skip

    def _next_step(self, values: tuple[object, ...]) -> str:
        """What would make such a call one that is served, "" where that is not known."""
        return ""

    def _way(self, miss: Miss, values: tuple[object, ...]) -> Prepared | str:
        """The first fallback that serves a miss, or why none does."""
        problems: list[str] = []
        for fallback in self._fallbacks:
            prepared: Prepared | str = fallback.prepare(miss, values)
            if not isinstance(prepared, str):
                return prepared
            problems.append(prepared)
        return "; ".join(problems)

    def _install(self, function: Callable[..., object]) -> None:
        """Calls go to `function` from now on; of a closed entry they go on to say so."""
        if self.closed:
            return
        type(self).__call__ = staticmethod(function)

    def _value(self, name: str) -> int:
        counter = self._counters.get(name)
        return counter.value if counter else 0


def _category(miss: Miss) -> str:
    """What turned the call down, without its values: "x.shape[0]", "x.dtype". Of the widest variant, tried last."""
    if miss.call.state:
        return miss.call.state[0].partition(";")[0].partition(" with ")[0]
    reason = miss.last_reason()
    return reason.partition(":")[0].partition(" is ")[0] if reason else "no variants"
