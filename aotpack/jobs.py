"""Jobs: found in the store when nothing they depend on has moved, else run in worker processes.

A job's key is made of named parts, so that a plan can say which of them changed since the last build.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aotpack.compilers.dependencies import changed_dependency
from aotpack.workers import Workers
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.format.fingerprint import changed, fingerprint
from aotpack_runtime.store import Store

Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One thing to do in a worker: `kind` is its row in `worker.JOBS`, `variants` what is lost when it fails.

    A `fresh` one has a process for itself; those that are `apart` share processes that see no GPU and do nothing else.
    """

    kind: str
    name: str
    target: str
    parts: Mapping[str, Json]
    payload: Mapping[str, Json]
    variants: tuple[str, ...]
    fresh: bool = False
    apart: bool = False

    @property
    def key(self) -> str:
        return fingerprint(self.parts)

    def in_a_worker(self) -> Mapping[str, Json]:
        """What `worker.run` takes."""
        return {**self.payload, "kind": self.kind}


Then = Callable[[Job, Json], Job | None]
"""Of a job that was done and its record, the one that its process does next."""


@dataclass(slots=True)
class Result:
    """What a build did. `failures` maps a variant to the reason why it was left out, `unverified` to why it is in the
    bundle without having been run."""

    path: Path
    digest: str
    steps: list[tuple[str, str, float]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    verified: dict[str, Mapping[str, Json]] = field(default_factory=dict)
    unverified: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count(self, *kinds: str) -> int:
        """How many jobs of these kinds were run rather than found."""
        return sum(1 for step, _, _ in self.steps if step in kinds)


DONE = {
    "export": "exported", "move": "moved", "aoti": "compiled", "cross": "compiled", "triton": "compiled",
    "nvrtc": "compiled", "triton_source": "read", "nvrtc_source": "read", "verify": "verified",
}  # fmt: skip
"""Kind of job -> what a person says of one that is done."""

COMPILES = tuple(kind for kind, word in DONE.items() if word == "compiled")


class Reporter:
    """Told how many jobs begin, of one more that did beside them, and of each that ends; the command line shows it,
    others may ignore it."""

    def begin(self, kind: str, total: int) -> None: ...
    def add(self) -> None: ...
    def done(self, kind: str, name: str, seconds: float, problem: str | None) -> None: ...


class Runner:
    """Looks jobs up and runs them; notes in `result` what was run and what failed."""

    def __init__(self, manifest: Path, store: Store, reporter: Reporter, result: Result, *, keep_going: bool) -> None:
        self.store, self.reporter, self.result = store, reporter, result
        self._manifest, self._keep_going = manifest.absolute(), keep_going
        self._running: dict[str, Future[Json]] = {}
        """Jobs that began right after another, by their key."""

    def find(self, job: Job) -> tuple[Json | None, str]:
        """(record, "cached"), or (None, why it is to be done: "new", "changed: source, options")."""
        record = self.store.get_record(job.kind, job.key)
        if record is None:
            last = self.store.get_record("last", self._last_key(job))
            return None, "new" if last is None else "changed: " + ", ".join(changed(last, job.parts))
        moved = changed_dependency(record["depends"], self._manifest.parent) if "depends" in record else None
        return (None, f"changed: {moved}") if moved else (record, "cached")

    def run(self, jobs: Sequence[Job], workers: Workers, label: str, then: Then | None = None) -> dict[str, Json]:
        """Record by job name, of all that were found or done. What `then` makes of a job that was done and of its
        record, a job for its process or None, begins at once; it is asked for by running it."""
        records: dict[str, Json] = {}
        pending: list[Job] = []
        for job in jobs:
            record, _ = self.find(job)
            if record is None:
                pending.append(job)
            else:
                records[job.name] = record
                self._remember(job)
        begun = sum(job.key not in self._running for job in pending)
        running = [(job, self._started(job) or self._start(job, workers, len(pending), then)) for job in pending]
        if begun:
            self.reporter.begin(label, begun)
        for job, future in running:
            record = self.outcome(future, job.variants)
            if record is not None:
                self.store.put_record(job.kind, job.key, record)
                self._remember(job)
                records[job.name] = record
        return records

    def _started(self, job: Job) -> Future[Json] | None:
        return self._running.pop(job.key, None)

    def _start(self, job: Job, workers: Workers, among: int, then: Then | None) -> Future[Json]:
        work = {**job.in_a_worker(), "among": self.store.count_records(job.kind) + among}
        if then is not None and job.fresh and job.apart:
            future = workers.submit_both(work, partial(self._after, job, then), among=among)
        else:
            future = workers.submit(work, fresh=job.fresh, apart=job.apart, among=among)
        return self._watched(future, job.kind, job.name)

    def _after(self, job: Job, then: Then, record: Json, future: Future[Json]) -> Mapping[str, Json] | None:
        """What is sent after `job` to its process, whose result `future` will have; in a thread of the workers."""
        after = then(job, record)
        if after is None or self.find(after)[0] is not None:
            return None
        self.reporter.add()
        self._running[after.key] = self._watched(future, after.kind, after.name)
        return after.in_a_worker()

    def submit(self, workers: Workers, kind: str, payload: Mapping[str, Json], name: str) -> Future[Json]:
        """Run what is no job of its own in a process of any kind."""
        return self._watched(workers.submit({**payload, "kind": kind}), kind, name)

    def _watched(self, future: Future[Json], kind: str, name: str) -> Future[Json]:
        start = time.perf_counter()

        def ended(done: Future[Json]) -> None:
            if not done.cancelled():
                seconds = time.perf_counter() - start
                problem = done.exception()
                self.result.steps.append((kind, name, seconds))
                self.reporter.done(kind, name, seconds, str(problem) if problem else None)

        future.add_done_callback(ended)
        return future

    def outcome(self, future: Future[Json], variants: Sequence[str]) -> Json | None:
        """The job's result; None for one that failed and that `keep_going` leaves out."""
        try:
            return future.result()
        except AotpackError as error:
            if not self._keep_going:
                raise
            self.result.failures.update({variant: str(error) for variant in variants})
            return None

    def _remember(self, job: Job) -> None:
        """Keep the parts of a job of this manifest, whether it was run now or found, for the next plan to compare."""
        key = self._last_key(job)
        if self.store.get_record("last", key) != job.parts:
            self.store.put_record("last", key, job.parts)

    def _last_key(self, job: Job) -> str:
        return fingerprint({"manifest": str(self._manifest), "job": job.name})
