"""Jobs that are to be fresh: each in a child of one process that has done nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest

from aotpack.workers import Workers
from aotpack_runtime.errors import CompileError
from aotpack_runtime.store import Store
from tests.support.bundles import Host

TELLS = """
import os, sys

def tell(job, store):
    if "word" in job:
        sys.modules["kept"] = job["word"]
    if job.get("ends") == "crash":
        os.abort()
    if job.get("ends") == "exit":
        sys.exit(7)
    if job.get("ends") == "sleep":
        print("sleeping", os.getpid(), file=sys.stderr, flush=True)
        import time; time.sleep(60)
    return {"pid": os.getpid(), "parent": os.getppid(), "kept": sys.modules.get("kept"), "read": os.read(0, 1).decode() if job.get("reads") else None}
"""
WORKER = "import aotpack.worker as w, sys; w.JOBS['tell'] = 'tells:tell'; w.main(sys.argv[1])"


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """One worker with one more kind of job."""
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    original = subprocess.Popen

    def started(command: list[str], **kwargs: Any) -> Any:
        return original([command[0], "-P", "-c", WORKER, command[-1]], **kwargs)

    monkeypatch.setattr("aotpack.workers.subprocess.Popen", started)
    with Workers(Store(tmp_path / "store"), 1) as found:
        yield found


def told(workers: Workers, *, fresh: bool = True, **job: Any) -> Any:
    return workers.submit({"kind": "tell", "entry": "e", **job}, fresh=fresh).result(60)


def test_what_a_fresh_job_imports_is_gone_with_it(workers: Workers) -> None:
    first, second = told(workers, word="first"), told(workers)
    assert first["kept"] == "first"
    assert second["kept"] is None
    assert first["parent"] == second["parent"]
    assert len({first["pid"], second["pid"], first["parent"]}) == 3


def test_other_jobs_are_done_by_the_process_itself_which_is_no_parent_any_more(workers: Workers) -> None:
    parent = told(workers)["parent"]
    assert told(workers, fresh=False, word="its own")["pid"] == parent
    after = told(workers)
    assert after["kept"] is None
    assert parent not in (after["pid"], after["parent"])
    assert told(workers, fresh=False)["kept"] == "its own"


@pytest.mark.parametrize(("ends", "death"), [("crash", "killed by SIGABRT"), ("exit", "exit status 7")])
def test_a_fresh_job_that_ends_its_process_fails_alone(workers: Workers, ends: str, death: str) -> None:
    parent = told(workers)["parent"]
    with pytest.raises(CompileError, match=f"its process died: {death}"):
        told(workers, ends=ends)
    assert told(workers)["parent"] == parent


def test_a_job_reads_nothing_of_what_is_meant_for_its_parent(workers: Workers) -> None:
    assert told(workers, reads=True)["read"] == ""


def test_a_fresh_job_ends_with_the_process_that_forked_it(workers: Workers) -> None:
    parent = told(workers)["parent"]
    running = workers.submit({"kind": "tell", "entry": "e", "ends": "sleep"}, fresh=True)
    children = Path(f"/proc/{parent}/task/{parent}/children")
    while not (child := children.read_text().split()):
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    with pytest.raises(CompileError, match="killed by SIGKILL"):
        running.result(60)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{child[0]}").exists()


def test_a_job_and_the_one_after_it_are_one_process_s(workers: Workers) -> None:
    after: list[Future[Any]] = []

    def then(result: Any, future: Future[Any]) -> Any:
        after.append(future)
        return {"kind": "tell", "entry": "e"}

    first = workers.submit_both({"kind": "tell", "entry": "e", "word": "kept"}, then).result(60)
    second = after[0].result(60)
    assert (second["pid"], second["kept"]) == (first["pid"], "kept")
    assert told(workers)["pid"] != first["pid"]


@pytest.mark.parametrize("ends", ["crash", "exit"])
def test_who_waits_for_either_of_two_jobs_is_told_that_their_process_died(workers: Workers, ends: str) -> None:
    after: list[Future[Any]] = []
    with pytest.raises(CompileError, match="its process died"):
        workers.submit_both({"kind": "tell", "entry": "e", "ends": ends}, lambda result, future: None).result(60)

    def then(result: Any, future: Future[Any]) -> Any:
        after.append(future)
        return {"kind": "tell", "entry": "e", "ends": ends}

    workers.submit_both({"kind": "tell", "entry": "e"}, then).result(60)
    with pytest.raises(CompileError, match="its process died"):
        after[0].result(60)


def test_who_waits_for_two_jobs_that_never_began_is_told_so(workers: Workers) -> None:
    """The pool is closed by whoever owns it: `prove` builds in threads that share one."""
    with workers:
        workers.submit({"kind": "tell", "entry": "e", "ends": "sleep"})
        waiting = workers.submit_both({"kind": "tell", "entry": "e"}, lambda result, future: None)
    with pytest.raises(CancelledError):
        waiting.result(10)


def test_where_there_is_a_gpu_a_fresh_job_has_a_process_that_was_never_forked(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = object()
    monkeypatch.setattr("aotpack.workers.this_machine", lambda: Host(gpu=gpu))
    first, second = told(workers), told(workers)
    assert first["parent"] == second["parent"] == os.getpid()
    assert first["pid"] != second["pid"]
    across = workers.submit({"kind": "tell", "entry": "e"}, fresh=True, apart=True).result(60)
    assert across["parent"] != os.getpid()
