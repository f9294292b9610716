"""Servers that load a bundle, and perhaps call it, before they fork their workers: misses in the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="real builds")

from tests.support import missing
from tests.support.serving import in_process

pytestmark = pytest.mark.slow

BEGIN = """
import os, signal, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads (Python 3.12)
os.environ |= {variables!r}
import torch
import aotpack_runtime as apr
torch.set_num_threads(1)
bundle = {bundle!r}
reference = apr.load(bundle, mode="eager", source="never")["mlp"]

def in_fork(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

def ended(*workers):
    return [os.waitpid(pid, 0)[1] for pid in workers]

def right(session, rows):
    x = torch.randn(rows, 8)
    return torch.allclose(session["mlp"](x), reference(x), atol=1e-5)

def hits(session):
    return session.status()["entries"]["mlp"]["hits_by_tier"]["overlay"]
"""


def run(code: str, cache: Path) -> str:
    variables = {"AOTPACK_CACHE_DIR": str(cache), "AOTPACK_JIT_NICE": "0", "CXX": missing.CXX}
    return in_process(BEGIN.format(variables=variables, bundle=str(missing.bundle())) + code, timeout_s=200).strip()


def test_workers_forked_in_the_middle_of_a_compile_serve_and_take_it_up(tmp_path: Path) -> None:
    """The parent's threads, its turn to compile among them, are not in the worker: it asks for itself, and finds what the
    parent compiles."""
    code = """
session = apr.load(bundle, mode="jit", on_miss={"when": "at_once"}, source="never")
assert right(session, 4) and right(session, 31)
while not session.status()["jit"]["running"]:
    time.sleep(0.01)

def work():
    status = session.status()["jit"]
    assert (status["running"], status["waiting"]) == (0, 0), status
    end = time.monotonic() + 90
    while not hits(session):
        assert right(session, 31) and time.monotonic() < end, session.status()
        time.sleep(0.05)
    status = session.status()["jit"]
    assert (status["compiles"], status["found"]) == (0, 1), status
    session.close()

print(ended(in_fork(work), in_fork(work)))
"""
    assert run(code, tmp_path / "cache") == "[0, 0]"


def test_a_worker_forked_while_a_variant_is_taken_up_or_weights_are_replaced_is_no_hang(tmp_path: Path) -> None:
    cache = missing.compiled_cache(tmp_path / "cache")
    code = """
session = apr.load(bundle, mode="jit", on_miss={"when": "never"}, source="never")
assert right(session, 5)
stored = {name: value.clone() for name, value in session._weight_set("mlp").tensors.items()}
locks = [session["mlp"]._watch._lock, session["mlp"]._lock, session._lock, session._weight_set("mlp").lock]
stop = []

def busy():  # as one that takes up a variant is, for longer
    while not stop:
        for lock in locks:
            with lock:
                time.sleep(0.003)
        session.update_weights(stored)

thread = threading.Thread(target=busy)
thread.start()

def work():
    assert right(session, 9) and right(session, 7)
    session.update_weights(stored)
    assert right(session, 9) and right(session, 10)
    session.close()

found = [ended(in_fork(work)) for _ in range(8)]
stop.append(True)
thread.join()
print(set(map(tuple, found)))
"""
    assert run(code, cache) == "{(0,)}"


def test_a_worker_keeps_its_hands_off_the_folder_of_its_parent(tmp_path: Path) -> None:
    """Where no cache can be written each process compiles for itself; a worker that ends leaves the parent's alone."""
    (tmp_path / "file").write_text("no folder")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = f"""
import pathlib, tempfile
tempfile.tempdir = {str(temporary)!r}
session = apr.load(bundle, mode="jit", on_miss={{"when": "never"}}, source="never")
assert right(session, 32)
place = lambda: session._jit._place().root.parents[2]
folders = lambda: sorted(pathlib.Path(tempfile.tempdir).glob("aotpack-jit-*"))
mine = [place()]
assert folders() == mine

def work():
    assert right(session, 32) and session._jit._private.made is None
    assert place() not in mine and len(folders()) == 2
    session.close()
    assert folders() == mine

print(ended(in_fork(work)), folders() == mine, len(mine))
"""
    assert run(code, tmp_path / "file") == "[0] True 1"
    assert list(temporary.glob("aotpack-jit-*")) == []  # the session was not closed, but the process ended
