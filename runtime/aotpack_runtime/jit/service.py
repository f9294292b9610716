"""What the misses of a session share: the overlay, children and their number, failures, and what became of it all."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from aotpack_runtime import forks
from aotpack_runtime.bundle import Bundle
from aotpack_runtime.counters import Counter
from aotpack_runtime.errors import AotpackError, CompileError
from aotpack_runtime.format.index import Entry, Variant
from aotpack_runtime.format.target import Machine
from aotpack_runtime.jit import threads
from aotpack_runtime.jit.ask import Ask, Requested, Sample
from aotpack_runtime.jit.budget import Breaker, pause_s
from aotpack_runtime.jit.compile import Child, Limits, unavailable
from aotpack_runtime.jit.flight import held
from aotpack_runtime.jit.gpu import visible
from aotpack_runtime.jit.memory import shortage
from aotpack_runtime.jit.misslog import MissLog
from aotpack_runtime.jit.overlay import Compiled, Overlay, evict
from aotpack_runtime.jit.place import distrusted, overlay_root, unwritable
from aotpack_runtime.jit.private import Private

log = logging.getLogger("aotpack.jit")

Json = Any
PENDING = 16
"""Compiles that wait at a time; what comes while as many do asks again later."""
CACHE_BYTES = 2 << 30
MOST_WARNINGS = 200


class Served(Protocol):
    """An entry, as the room behind its misses sees it."""

    record: Entry
    device: str
    programs: tuple[Variant, ...]

    def adopt(self, variants: Sequence[Variant], files: Callable[[Variant], Mapping[str, str]]) -> None: ...
    def release(self, variant: Variant) -> None: ...
    def serve_of(self, call: Any) -> Callable[..., object] | None: ...
    def counter_of(self, name: str) -> Any: ...


@dataclass(slots=True)
class Totals:
    """What became of all asks of a session."""

    compiles: int = 0
    failures: int = 0
    found: int = 0
    evictions: int = 0
    cpu_s: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=256))


class Jit:
    """The compiles behind a session. Thread-safe; nothing is made or started before the first miss asks for it."""

    def __init__(self, bundle: Bundle, device: str, machine: Machine, allow: frozenset[str], cache: Path) -> None:
        self.bundle, self.device, self.machine, self.allow = bundle, device, machine, allow
        root = overlay_root(bundle.digest, machine, cache)
        self.distrusted = distrusted(root)
        self.overlay = None if self.distrusted else Overlay(root)
        self.breaker, self.totals = Breaker(), Totals()
        self.history: dict[str, dict[str, tuple[float, float, float]]] = {}
        """Entry -> key -> (compile, fallback, variant) seconds of its variants."""
        self.unavailable = unavailable()
        self.miss_log = MissLog()
        self._private = Private()
        self._lock = forks.lock(forks.LAST)
        self._asks: dict[str, Ask] = {}
        self._children: set[Child] = set()
        self._begun, self._ended = Counter(), Counter()
        self._turns = threading.Semaphore(jobs())
        self._queue: SimpleQueue[Callable[[], object] | None] | None = None
        forks.in_child(self._begin_anew)
        self._said: set[str] = set()
        self._closed = False
        self._started = time.monotonic()
        if self.distrusted:
            self.say(f"the overlay is not used: {self.distrusted}")

    def overlays(self) -> list[Overlay]:
        """Where variants may be, the shared one first."""
        private = self._private.made
        return [overlay for overlay in (self.overlay, private) if overlay is not None]

    def say(self, text: str) -> None:
        """One warning for each thing that is the matter, however often it is."""
        if text not in self._said and len(self._said) < MOST_WARNINGS:
            self._said.add(text)
            log.warning("%s", text)

    def soon(self, work: Callable[[], object]) -> bool:
        """Do `work` on a thread of this session, after what came before: a call does not wait for it. False when there
        may be no such thread."""
        queue = self._queue
        if queue is None:
            with self._lock:
                queue = self._queue
                if queue is None:
                    queue = SimpleQueue()
                    try:
                        threads.start(partial(self._do, queue), "aotpack-jit", self._stop)
                    except RuntimeError as error:
                        self.say(f"misses are served without compiling behind them for now: {error}")
                        return False
                    self._queue = queue
        self._begun.tick()
        queue.put(work)
        return True

    def _do(self, queue: SimpleQueue[Callable[[], object] | None]) -> None:
        while (work := queue.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("while asking for a compile behind a miss")
            self._ended.tick()

    def _begin_anew(self) -> None:
        """In a forked child: threads do not come along, nor do the compiles they wait for."""
        for ask in self._asks.values():
            if ask.sample is not None:
                ask.sample.close()
        self._asks, self._children, self._queue = {}, set(), None
        self._begun, self._ended = Counter(), Counter()
        self._turns = threading.Semaphore(jobs())
        self.breaker.forget_trial()

    # ------------------------------------------------------------------------------------------------- compiling

    def refuses(self, key: str) -> str:
        """Why `key` is not compiled now, "" when it may be asked for."""
        if self.unavailable:
            return self.unavailable
        if self._closed:
            return "the session is closed"
        if self.breaker.opened is not None and not self.breaker.ready():
            return "the breaker is open: most compiles failed"
        for overlay in self.overlays():
            count, until, why = overlay.failure(key)
            left = until - time.time()
            if 0 < left <= pause_s(count):  # more is left when the clock was set back
                return f"failed {count} times, the next try is in {left:.0f} s: {why}"
        with self._lock:
            if len(self._asks) >= PENDING and key not in self._asks:
                return f"{PENDING} compiles wait already"
        return ""

    def is_crowded(self) -> bool:
        """Would a further compile be refused, as many wait already?"""
        return len(self._asks) >= PENDING

    def ask(self, request: Requested, sample: Sample | None, limits: Limits, ended: Callable[[Ask], None]) -> Ask:
        """Compile `request` behind the traffic, once however many ask; `ended` is called when there is a result, for
        whoever asked first. The sample is closed then."""
        key = request.key(self.bundle.digest, self.device)
        with self._lock:
            known = self._asks.get(key)
            if known is not None:
                if sample is not None:
                    sample.close()
                return known
            ask = self._asks[key] = Ask(request, key, sample, limits)
        try:
            threads.start(partial(self._fly, ask, ended), f"aotpack-jit-{key[:8]}", self._stop)
        except RuntimeError as error:
            ask.problem = str(error)
            self._finish(ask, ended)
        return ask

    def _fly(self, ask: Ask, ended: Callable[[Ask], None]) -> None:
        try:
            with self._turns:  # of those that wait, only as many look after locks as may compile
                ask.made = self._found_or_made(ask)
        except AotpackError as error:
            ask.problem = str(error)
        except OSError as error:
            ask.problem = f"the overlay cannot be written: {error}"
            self.say(ask.problem)
        except Exception as error:
            log.exception("%s: while compiling behind a miss", ask.request.entry)
            ask.problem = f"{type(error).__name__}: {error}"
        finally:
            self._finish(ask, ended)

    def _finish(self, ask: Ask, ended: Callable[[Ask], None]) -> None:
        if ask.sample is not None:
            ask.sample.close()
        try:
            ended(ask)
        except Exception:
            log.exception("%s: while taking up what was compiled behind a miss", ask.request.entry)
        with self._lock:
            self._asks.pop(ask.key, None)
        ask.done.set()

    def _found_or_made(self, ask: Ask) -> tuple[Compiled, Overlay]:
        """What is under the key by now, else what a child makes of it; others who want it wait meanwhile."""
        overlay = self._place()
        with held(overlay.lock(ask.key), stopped=lambda: self._closed) as got:
            if not got:
                raise CompileError(ask.request.label, "stopped: the session was closed")
            made = overlay.get(ask.key, self.bundle.index)
            if made is not None:
                self.totals.found += 1
                return made, overlay
            if problem := self.refuses(ask.key):  # another process may have failed at it meanwhile
                raise CompileError(ask.request.label, problem)
            slots = [overlay.root.parents[1] / "slots" / str(number) for number in range(jobs())]
            with held(*slots, stopped=lambda: self._closed) as free, overlay.building(ask.key) as folder:
                if problem := shortage():
                    raise CompileError(ask.request.label, problem)
                if not free or not self.breaker.allows():  # last: the one that it lets through has to end
                    raise CompileError(ask.request.label, "stopped: the session was closed, or the breaker opened")
                self._compile(ask, overlay, folder)
            made = overlay.get(ask.key, self.bundle.index)
            if made is None:
                raise CompileError(ask.request.label, "what was compiled is gone: the overlay was emptied meanwhile")
            return made, overlay

    def _compile(self, ask: Ask, overlay: Overlay, folder: Path) -> None:
        request, start = ask.request, time.monotonic()
        child = Child(folder, ask.limits, visible(self.device))
        with self._lock:
            self._children.add(child)
        if self._closed:  # who closed it may not have seen this child
            child.stop()
        log.info("%s: compiling %s behind the traffic", request.entry, request.label)
        try:
            _, cpu_s = child.run(self._job(ask, overlay), ask.sample.descriptor if ask.sample else None)
        except CompileError as error:
            if self._closed:
                raise
            self._failed(ask, overlay, error)
            raise
        finally:
            with self._lock:
                self._children.discard(child)
        self.breaker.note(ok=True)
        overlay.forgive(ask.key)
        self.totals.compiles += 1
        self.totals.cpu_s += cpu_s
        self.totals.seconds.append(time.monotonic() - start)
        log.info("%s: compiled %s in %.1f s", request.entry, request.label, time.monotonic() - start)
        cache = overlay.root.parents[2]
        limit = self.bundle.index.settings.get("cache_max_bytes", CACHE_BYTES)
        self.totals.evictions += len(evict(cache, limit, keep=ask.key))

    def _failed(self, ask: Ask, overlay: Overlay, error: CompileError) -> None:
        self.breaker.note(ok=False)
        self.totals.failures += 1
        self.note_failure(ask.key, overlay, str(error))
        self.say(f"{ask.request.entry}: a miss is not compiled, and served as before: {error}")
        if error.log:
            log.debug("%s", error.log)

    def note_failure(self, key: str, overlay: Overlay, why: str) -> None:
        """`key` is left alone for a while, longer each time, by all processes of the host."""
        count = overlay.failure(key)[0] + 1
        overlay.put_failure(key, count, time.time() + pause_s(count), why)

    def _job(self, ask: Ask, overlay: Overlay) -> Json:
        request = ask.request
        return {
            **request.job(),
            "variant": f"{request.entry}/jit-{request.label}-{ask.key[:8]}",
            "key": ask.key,
            "parts": request.parts(self.bundle.digest, self.device),
            "bundle": os.path.abspath(self.bundle.root),
            "digest": self.bundle.digest,
            "device": "cpu" if self.device == "cpu" else "cuda:0",  # the only one that the child sees
            "allow": sorted(self.allow),
            "entry": request.entry,
            "overlay": os.path.abspath(overlay.root),
            "sample": ask.sample and ask.sample.record(),
        }

    def _place(self) -> Overlay:
        """The overlay to compile into: the shared one, or where it cannot be written one of this process alone."""
        problem = unwritable(self.overlay.root) if self.overlay is not None else self.distrusted
        if not problem:
            assert self.overlay is not None
            return self.overlay
        with self._lock:
            private = self._private.get()
        if isinstance(private, str):
            self.say(
                f"misses are served without compiling behind them: {problem}, and folders for temporary files cannot "
                "be used either; AOTPACK_CACHE_DIR names another place"
            )
            raise CompileError("overlay", f"{problem}; {private}", hint="set AOTPACK_CACHE_DIR")
        self.say(f"{problem}; what is compiled is kept by this process alone, until AOTPACK_CACHE_DIR names another")
        return private

    # ---------------------------------------------------------------------------------------------------- status

    def status(self) -> dict[str, Json]:
        """For `Session.status()`: all of it is JSON."""
        seconds = sorted(self.totals.seconds)
        overlays = self.overlays()
        with self._lock:
            running, waiting = len(self._children), len(self._asks) + self._begun.value - self._ended.value
        return {
            "available": not self.unavailable,
            **({"why": self.unavailable} if self.unavailable else {}),
            "compiles": self.totals.compiles,
            "failures": self.totals.failures,
            "found": self.totals.found,
            "running": running,
            "waiting": max(waiting - running, 0),
            "compile_seconds": {"p50": _quantile(seconds, 0.5), "p95": _quantile(seconds, 0.95), "n": len(seconds)},
            "compile_cpu_share": round(self.totals.cpu_s / max(time.monotonic() - self._started, 1e-9), 4),
            "breaker": self.breaker.record(),
            "overlay": {
                "path": str(overlays[-1].root) if overlays else None,
                "variants": sum(len(overlay.names()) for overlay in overlays),
                "bytes": sum(overlay.size_bytes() for overlay in overlays),
                "evictions": self.totals.evictions,
            },
        }

    def close(self) -> None:
        """Stop running children; what waits gives up."""
        self._stop()
        with self._lock:
            asks = list(self._asks.values())
        for ask in asks:
            ask.done.wait(5)
        self._private.close()

    def _stop(self) -> None:
        """Nothing is begun any more, and what runs is told to end."""
        self._closed = True
        if self._queue is not None:
            self._queue.put(None)
        with self._lock:
            children = list(self._children)
        for child in children:
            child.stop()


def jobs() -> int:
    """Compiles at a time on this host: AOTPACK_JIT_JOBS, else one for every four CPUs that this process may use."""
    return int(os.environ.get("AOTPACK_JIT_JOBS") or max(1, len(os.sched_getaffinity(0)) // 4))


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 3) if ordered else None
