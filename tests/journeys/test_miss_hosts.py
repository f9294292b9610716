"""Hosts that make a miss hard: many processes at once, owners that die, caches that cannot be used, no compiler."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real builds")

from tests.support import missing
from tests.support.missing import Server
from tests.support.mounts import mounted

Json = Any
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def bundle() -> Path:
    return missing.bundle()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.kill()


def until(holds: Callable[[], object], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def builds(cache: Path) -> list[Path]:
    return list(cache.glob("overlay/*/*/build/*"))


def children_of(cache: Path) -> list[int]:
    """Processes of compiles into this cache, compilers included: they name it, or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if f"TMPDIR={cache}".encode() in line:
                    found.append(int(entry.name))
    return found


# ------------------------------------------------------------------------------------------------ A24, A27, A20


def test_a24_sixteen_processes_of_four_threads_compile_a_shape_once(
    bundle: Path, tmp_path: Path, servers: list[Server]
) -> None:
    """Sixty-four calls of one missing shape at the same moment: one compile, and every result is right."""
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    servers += [Server(bundle, 11, cache, f"gate={gate}", OMP_NUM_THREADS="1") for _ in range(16)]
    for server in servers:
        server.wait_ready()
    gate.touch()
    found = [server.result() for server in servers]
    assert all(one["ok"] for one in found)
    assert sum(one["jit"]["compiles"] for one in found) == 1
    assert sum(one["jit"]["found"] for one in found) == 15
    assert all(one["mlp"]["hits_by_tier"]["overlay"] == 4 for one in found)
    assert len(list(cache.glob("overlay/*/*/variants/*"))) == 1
    assert builds(cache) == []


def test_a27_when_the_owner_is_killed_another_takes_over_and_nothing_is_left_running(
    bundle: Path, tmp_path: Path, servers: list[Server]
) -> None:
    cache = tmp_path / "cache"
    owner = Server(bundle, 12, cache)
    servers.append(owner)
    until(lambda: children_of(cache))
    waiter = Server(bundle, 12, cache, f"gate={tmp_path / 'gate'}")
    servers.append(waiter)
    waiter.wait_ready()
    until(lambda: builds(cache))
    (tmp_path / "gate").touch()
    time.sleep(1)  # it waits by now, if the owner was not quicker
    owned = children_of(cache)
    assert owned
    os.kill(owner.pid, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: not any(_is_running(pid) for pid in owned), 10)
    until(lambda: children_of(cache), 10)
    assert time.monotonic() - killed < 10
    found = waiter.result()
    assert found["ok"]
    assert found["jit"]["compiles"] == 1
    assert builds(cache) == []
    assert children_of(cache) == []


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a24_a_cache_that_is_wiped_in_a_loop_breaks_nothing(
    bundle: Path, tmp_path: Path, servers: list[Server]
) -> None:
    """Processes that find a variant, and others that compile it, while another removes the cache all the time."""
    cache = missing.compiled_cache(tmp_path / "cache")
    servers += [Server(bundle, 7, cache, "calls=150") for _ in range(3)]
    while any(server.is_running() for server in servers):
        shutil.rmtree(cache / "overlay", ignore_errors=True)
        time.sleep(0.3)
    assert all(server.result()["ok"] for server in servers)


# --------------------------------------------------------------------------------------------- A22, A23, noexec


def test_a22_without_home_or_user_a_miss_is_compiled(bundle: Path, tmp_path: Path) -> None:
    """A uid that is in no password file: torch asks for the user's name, and the cache is a private temporary folder."""
    other = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
    if subprocess.run([*other, "true"], capture_output=True, check=False).returncode:
        pytest.skip("another uid needs user namespaces")
    path = f"{missing.REPO / 'runtime'}:{missing.REPO}"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": path,
        "TMPDIR": str(tmp_path),
        "AOTPACK_JIT_NICE": "0",
        "CXX": missing.CXX,
    }
    command = [*other, sys.executable, "-m", "tests.support.missing", str(bundle), "13"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"], done.stderr
    assert found["jit"]["compiles"] == 1, done.stderr
    assert found["jit"]["overlay"]["path"].startswith(str(tmp_path / "aotpack-12345"))
    assert done.stderr == ""


@pytest.fixture(params=["file", "full"])
def unusable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A place for a cache that cannot be written."""
    if request.param == "file":
        (tmp_path / "file").write_text("no folder")
        yield tmp_path / "file"
        return
    with mounted(tmp_path / "place", "size=64k") as place:
        yield place / "cache"


def test_a23_a_cache_that_cannot_be_written_costs_one_warning(bundle: Path, tmp_path: Path, unusable: Path) -> None:
    """The miss is compiled all the same, for this process alone, and nothing stays behind."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    found = Server(bundle, 14, unusable, TMPDIR=str(temporary)).result()
    assert found["ok"]
    assert (found["jit"]["compiles"], found["mlp"]["hits_by_tier"]["overlay"]) == (1, 4)
    assert found["stderr"].count("is kept by this process alone") == 1
    assert list(temporary.glob("aotpack*")) == []


def test_on_file_systems_mounted_noexec_the_program_serves_with_one_warning(bundle: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "noexec", "noexec,size=600m") as place:
        found = Server(bundle, 15, place / "cache", "threads=2", TMPDIR=str(place)).result()
    assert found["ok"]
    assert found["jit"]["compiles"] == 0
    assert found["mlp"]["misses_by_tier"] == {"program": 2}
    assert found["stderr"].count("are served without compiling") == found["stderr"].count("\n") == 1


def test_a28_without_a_compiler_the_program_serves_with_one_warning(bundle: Path, tmp_path: Path) -> None:
    """The builder is there and g++ is not: the compile fails, is not tried again, and every result is right."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    found = Server(bundle, 16, tmp_path / "cache", PATH=str(tools), CXX="").result()
    assert found["ok"]
    assert (found["jit"]["compiles"], found["jit"]["failures"]) == (0, 1)
    assert found["mlp"]["misses_by_tier"] == {"program": 4}
    assert found["stderr"].count("a miss is not compiled, and served as before") == 1, found["stderr"]
    again = Server(bundle, 16, tmp_path / "cache", PATH=str(tools), CXX="").result()
    assert again["ok"]
    assert again["jit"]["failures"] == 0  # remembered: not tried again for a minute


def test_any_folder_will_do_and_a_relative_one_is_that_of_the_moment_of_load(bundle: Path, tmp_path: Path) -> None:
    """torch writes paths into command lines as they are. The server goes to another folder once it has loaded, as one
    that becomes a daemon does, and makes files that all may write."""
    place = tmp_path / "ein Ordner" / "größe $x 'q' \"w\" \\ ;"
    shutil.copytree(bundle, place / "bundle")
    (place / "elsewhere").mkdir()
    code = f"""
import os
os.chdir({str(place)!r})
os.umask(0)
import torch
import aotpack_runtime as apr
session = apr.load("bundle", mode="jit", on_miss={{"when": "at_once", "background": False}}, source="never")
os.chdir("elsewhere")
session["mlp"](torch.ones(18, 8))
status = session.status()
print(status["jit"]["compiles"], status["entries"]["mlp"]["hits_by_tier"]["overlay"])
"""
    environment = missing.environment(None, AOTPACK_CACHE_DIR="cache", CXX=missing.CXX)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.stdout.split() == ["1", "1"], done.stderr
    assert list((place / "elsewhere").iterdir()) == builds(place / "cache") == []
    folders = [path for path in (place / "cache").rglob("*") if path.is_dir()]
    assert len(folders) >= 6
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


# ----------------------------------------------------------------------------------------- ends in the middle of it


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """A compiler that does not come to an end."""
    return compiler(tmp_path, "exec sleep 61")


def compiler(folder: Path, compiles: str) -> str:
    """One that does `compiles`; named like g++, by which torch knows what flags it takes."""
    place = folder / "tools"
    place.mkdir()
    path = place / "g++"
    path.write_text(f'#!/bin/sh\ncase " $* " in *" -o "*) {compiles};; esac\nexec {shutil.which("g++")} "$@"\n')
    path.chmod(0o755)
    return str(path)


def _named(cache: Path, name: str) -> list[int]:
    return [pid for pid in children_of(cache) if _command(pid).startswith(name)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_that_dies_by_itself_takes_its_compilers_along(
    bundle: Path, tmp_path: Path, servers: list[Server], endless: str
) -> None:
    """As for want of memory: the guard is there yet, and who waits for it must not leave the compiler running."""
    cache = tmp_path / "cache"
    servers.append(Server(bundle, 19, cache, "threads=1", CXX=endless))
    until(lambda: _named(cache, "sleep"))
    (compiling,) = _named(cache, "sleep")
    worker = _parent(compiling)
    while _parent(worker) != _parent(_parent(worker)) and _command(_parent(worker)).startswith("sh"):
        worker = _parent(worker)  # of a shell between them
    os.kill(worker, signal.SIGKILL)
    until(lambda: children_of(cache) == [], 10)
    found = servers[0].result()
    assert found["ok"]
    assert found["jit"]["failures"] == 1
    assert builds(cache) == []


@pytest.mark.parametrize("handled", [False, True], ids=["plain", "handled"])
def test_a_server_that_is_told_to_end_takes_its_compiles_along(
    bundle: Path, tmp_path: Path, endless: str, *, handled: bool
) -> None:
    """SIGTERM with nobody to handle it, and with a handler that ends the server as web servers do."""
    cache = tmp_path / "cache"
    code = f"""
import signal, sys, time
if {handled}:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
import torch
import aotpack_runtime as apr
session = apr.load({str(bundle)!r}, mode="jit", on_miss={{"when": "at_once"}}, source="never")
session["mlp"](torch.ones(20, 8))
time.sleep(120)
"""
    server = subprocess.Popen([sys.executable, "-c", code], env=missing.environment(cache, CXX=endless))
    try:
        until(lambda: _named(cache, "sleep"), 60)
        server.terminate()
        assert server.wait(20) == (3 if handled else -signal.SIGTERM)
        until(lambda: children_of(cache) == [], 10)
    finally:
        server.kill()
        server.wait()
    assert bool(builds(cache)) is not handled
    if not handled:  # the next compile sweeps up what was left
        assert Server(bundle, 21, cache, "threads=1").result()["ok"]
        assert builds(cache) == []


def test_a_disk_that_becomes_full_in_the_middle_costs_one_warning_and_leaves_nothing(
    bundle: Path, tmp_path: Path
) -> None:
    with mounted(tmp_path / "place", "size=300m") as place:
        fills = compiler(tmp_path, f"head -c 400m /dev/zero > {place}/full 2> /dev/null")
        found = Server(bundle, 22, place / "cache", "threads=1", CXX=fills).result()
        assert found["ok"]
        assert (found["jit"]["compiles"], found["jit"]["failures"]) == (0, 1)
        assert found["stderr"].count("a miss is not compiled, and served as before") == 1, found["stderr"]
        assert (place / "full").stat().st_size > 100 << 20
        assert list(place.glob("cache/overlay/*/*/[va]*/*")) == builds(place / "cache") == []
