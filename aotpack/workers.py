"""A pool of builder processes: each takes one job at a time, and a job that kills its process fails alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from aotpack_runtime import errors
from aotpack_runtime.errors import AotpackError, CompileError
from aotpack_runtime.machine import this_machine
from aotpack_runtime.store import Store

Json = Any
LOG_TAIL_CHARACTERS = 4000

Then = Callable[[Json, Future[Json]], Mapping[str, Json] | None]
"""Of a job's result, and of the future of what comes next: the job that its process does next, or None."""


class Workers:
    """`count` processes, started when they are first needed and reused for jobs of any kind.

    A job that is to be `fresh` is run in a child of one that has done nothing else; where there is a GPU, whose driver
    bears no fork, and after other jobs, in a new process.

    `submit` gives a future of the job's result; it raises what the job raised, or CompileError when its process died.
    """

    def __init__(self, store: Store, count: int) -> None:
        self._store, self._pool, self._count = store, ThreadPoolExecutor(count), count
        self._local = threading.local()
        self._all: list[_Process] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Of a build that went well only a warm-up may still be running, and nobody waits for it.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._stop()
        self._pool.shutdown()
        self._stop()

    def submit(
        self, job: Mapping[str, Json], *, fresh: bool = False, apart: bool = False, among: int = 1
    ) -> Future[Json]:
        """Run `job`: `fresh` in a process of its own, `apart` in one that sees no GPU and runs only such jobs. What is
        started for it takes its share of the machine's threads as one `among` so many jobs."""
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, min(self._count, among)))
        return self._pool.submit(self._run, job, fresh=fresh, apart=apart, threads=threads)

    def submit_both(
        self,
        job: Mapping[str, Json],
        then: Then,
        *,
        among: int = 1,
    ) -> Future[Json]:
        """Run `job` in a process of its own that sees no GPU, and after it, in the same one, what `then` says. The
        future of the first."""
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, min(self._count, among)))
        first: Future[Json] = Future()

        def ended(task: Future[None]) -> None:
            if task.cancelled():  # the pool was closed before it began, and somebody may wait
                first.cancel()

        self._pool.submit(self._run_both, job, then, first, threads).add_done_callback(ended)
        return first

    def _run_both(
        self,
        job: Mapping[str, Json],
        then: Then,
        first: Future[Json],
        threads: int,
    ) -> None:
        second: Future[Json] = Future()
        try:
            with self._process(fresh=True, apart=True, threads=threads) as process:
                result = process.run(job)
                after = then(result, second)
                first.set_result(result)
                if after is not None:
                    second.set_result(process.run(after))
        except BaseException as error:
            for future in (first, second):
                if not future.done():
                    future.set_exception(error)

    def warm_up(self, job: Mapping[str, Json], *, busy: int, most: int, apart: bool) -> None:
        """Let workers that the next `busy` jobs leave idle, `most` of them, do `job`, which gets them ready for others.
        What fails in it is left for those to say."""
        for _ in range(min(self._count - busy, most)):
            self._pool.submit(self._warm, job, apart=apart)

    def _warm(self, job: Mapping[str, Json], *, apart: bool) -> None:
        with contextlib.suppress(AotpackError):
            self._run(job, fresh=False, apart=apart)

    def _run(self, job: Mapping[str, Json], *, fresh: bool, apart: bool, threads: int = 1) -> Json:
        forked = fresh and self._may_fork(apart=apart)
        with self._process(fresh=fresh and not forked, apart=apart, threads=threads) as process:
            process.clean &= forked
            return process.run({**job, "forked": forked})

    def _may_fork(self, *, apart: bool) -> bool:
        """May a fresh job of this thread be done in a child of its process? Not where jobs may have asked the driver of
        a GPU, which does not bear it, or have left anything else."""
        process: _Process | None = getattr(self._local, "process", None)
        return (apart or this_machine().gpu is None) and (process is None or process.clean)

    @contextlib.contextmanager
    def _process(self, *, fresh: bool, apart: bool, threads: int) -> Iterator[_Process]:
        """This thread's process, or a `fresh` one, which ends with the block."""
        process = None if fresh else getattr(self._local, "process", None)
        if process is not None and process.apart != apart:
            process.stop()
        if process is None or not process.alive:
            process = _Process(self._store, apart=apart, threads=threads)
            with self._lock:
                self._all.append(process)
        try:
            yield process
        finally:
            if fresh:
                process.stop()
            else:
                self._local.process = process

    def _stop(self) -> None:
        with self._lock:
            for process in self._all:
                process.stop()
            self._all.clear()


_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

_YIELDING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait for each other sleep. They would spin, and models that are exported side by side mostly spend their
time so: five on two cores took 114 s, 49 with this, 43 with one thread each (torch 2.11)."""


class _Process:
    """One worker with its pipes and its log."""

    def __init__(self, store: Store, *, apart: bool, threads: int) -> None:
        self.apart, self.clean = apart, True
        scratch = store.root / "build" / "tmp"  # one place for all jobs: torch keeps precompiled headers in TMPDIR
        scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop()
        own = {"TMPDIR": str(scratch), "PYTHONHASHSEED": "0", **(_NO_GPU if apart else {})}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "aotpack.worker", str(store.root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**_YIELDING, "OMP_NUM_THREADS": str(threads), **os.environ, **own},
            start_new_session=True,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: Mapping[str, Json]) -> Json:
        start = self._log_position()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        name = str(job.get("variant") or job.get("entry"))
        if not line:
            raise CompileError(name, f"its process died: {_death(self._process.wait())}", log=self._log_since(start))
        answer = json.loads(line)
        if "died" in answer:
            raise CompileError(name, f"its process died: {_death(answer['died'])}", log=self._log_since(start))
        if answer.get("last"):
            self._process.wait()
        if "error" in answer:
            raise _rebuilt(answer["error"], name, self._log_since(start))
        return answer["result"]

    def stop(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _log_position(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _log_since(self, start: int) -> str:
        size = os.fstat(self._log.fileno()).st_size
        start = max(start, size - LOG_TAIL_CHARACTERS)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace")


def _death(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _rebuilt(record: Mapping[str, str], name: str, log: str) -> AotpackError:
    """An error of the worker, raised here with its own type's exit code."""
    kind = getattr(errors, record["type"], CompileError)
    error = CompileError(name, record["message"], hint=record["hint"], log=log)
    error.message = record["message"]
    error.exit_code = kind.exit_code
    return error


Report = Callable[[str, str, float], None]
"""Called with (what happened, to which job, seconds)."""
