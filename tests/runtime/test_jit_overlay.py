"""The overlay, its locks and its place, without torch: records are whole or absent, and belong to one key."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotpack_runtime.bundle import file_of
from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.index import ArtifactRef, Index, Variant
from aotpack_runtime.format.index_json import parse
from aotpack_runtime.jit.budget import Breaker, pause_s
from aotpack_runtime.jit.flight import held
from aotpack_runtime.jit.overlay import Compiled, Overlay, Seconds, clear, everything, evict
from aotpack_runtime.jit.place import distrusted, facts, overlay_root, unwritable
from aotpack_runtime.jit.service import Jit
from tests.support.bundles import Host, index_record
from tests.support.mounts import mounted

Json = Any


@pytest.fixture
def index() -> Index:
    return parse(json.dumps(index_record()).encode())


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    return Overlay(overlay_root("b" * 64, Host(), tmp_path / "cache"))


def put(overlay: Overlay, index: Index, key: str, data: bytes = b"\x7fELF", **changes: Any) -> Compiled:
    """A variant of the entry in `index`, put as a child puts it."""
    template = index.entries["encoder"].variants[0]
    with held(overlay.lock(key)), overlay.building(key) as folder:
        path = folder / "model.so"
        path.write_bytes(data + key.encode())
        files = {"model.so": file_of(path)}
        artifact = ArtifactRef("aoti", fingerprint({"model.so": files["model.so"].digest}), files)
        variant: Variant = replace(template, **{"id": f"encoder/jit-{key}", "artifact": artifact, **changes})
        made = Compiled(key=key, entry="encoder", variant=variant, seconds=Seconds(9.0, 0.5, 0.25), parts={"a": 1})
        overlay.put(made, {"model.so": path})
    return made


# ------------------------------------------------------------------------------------------------------- records


def test_a_variant_is_read_back_as_it_was_put(overlay: Overlay, index: Index) -> None:
    before = overlay.stamp()
    made = put(overlay, index, "k1")
    assert overlay.names() == ["k1"]
    assert overlay.get("k1", index) == made
    assert overlay.stamp() != before == 0
    (path,) = overlay.files(made.variant).values()
    assert Path(path).read_bytes() == b"\x7fELFk1"
    assert list((overlay.root / "build").iterdir()) == []
    for folder in (overlay.root, overlay.root / "variants", overlay.root / "artifacts"):
        assert folder.stat().st_mode & 0o777 == 0o700


def _edit(change: Callable[[Json], object]) -> Callable[[Overlay], None]:
    def damage(overlay: Overlay) -> None:
        record = json.loads(overlay.record("k1").read_bytes())
        change(record)
        overlay.record("k1").write_text(json.dumps(record))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda overlay: overlay.record("k1").write_bytes(b""), id="empty"),
        pytest.param(lambda overlay: overlay.record("k1").write_bytes(b"{"), id="half"),
        pytest.param(lambda overlay: overlay.record("k1").write_bytes(b"\x80\x04]\x94."), id="pickle"),
        pytest.param(_edit(lambda record: record.update(key="k2")), id="another-key"),
        pytest.param(_edit(lambda record: record.update(format=2)), id="another-format"),
        pytest.param(_edit(lambda record: record["body"].update(entry="other")), id="another-entry"),
        pytest.param(
            _edit(lambda record: record["body"]["variant"]["guards"].update(where=["x.shape[0] > 1"])), id="guards"
        ),
        pytest.param(
            _edit(lambda record: record["body"]["variant"]["artifact"].update(digest="../../etc")), id="escapes"
        ),
    ],
)
def test_a_record_that_is_not_what_was_written_is_removed(
    damage: Callable[[Overlay], object], overlay: Overlay, index: Index
) -> None:
    put(overlay, index, "k1")
    kept = put(overlay, index, "k3")
    damage(overlay)
    assert overlay.get("k1", index) is None
    assert overlay.names() == ["k3"]
    assert overlay.damaged == {"k1"}
    assert overlay.get("k3", index) == kept


def test_a_variant_whose_weights_the_bundle_lacks_is_removed(overlay: Overlay, index: Index) -> None:
    put(overlay, index, "k1", constants=(("c0", "scale"), ("c1", "gone")))
    assert overlay.get("k1", index) is None


def test_files_are_hashed_before_they_are_handed_out(overlay: Overlay, index: Index) -> None:
    made = put(overlay, index, "k1")
    (path,) = (overlay.root / "artifacts").glob("*/model.so")
    path.write_bytes(b"\x7fELFk2")  # of the same size
    assert overlay.get("k1", index) is not None
    with pytest.raises(ArtifactError, match="is not what was compiled"):
        overlay.files(made.variant)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_record_that_may_not_be_read_is_a_miss_and_stays(overlay: Overlay, index: Index) -> None:
    put(overlay, index, "k1")
    overlay.record("k1").chmod(0)
    assert overlay.get("k1", index) is None
    assert overlay.names() == ["k1"]


def test_a_failure_is_remembered_until_it_is_forgiven(overlay: Overlay) -> None:
    assert overlay.failure("k1") == (0, 0.0, "")
    overlay.put_failure("k1", 2, 123.0, "g++ is missing")
    assert overlay.failure("k1") == (2, 123.0, "g++ is missing")
    overlay.forgive("k1")
    assert overlay.failure("k1") == (0, 0.0, "")


# -------------------------------------------------------------------------------------------------------- eviction


def test_a23_the_least_recently_used_go_first_until_the_cap_holds(
    overlay: Overlay, index: Index, tmp_path: Path
) -> None:
    """Two hundred variants and a cap of ten."""
    cache, sizes = tmp_path / "cache", set()
    for number in range(200):
        put(overlay, index, f"{number:03}")
        os.utime(overlay.record(f"{number:03}"), (number, number))
        sizes.add(everything(cache)[-1].size_bytes)
    overlay.used("000")
    (size,) = sizes
    gone = evict(cache, 10 * size, keep="001")
    assert sorted(overlay.names()) == ["000", "001", *[f"{number:03}" for number in range(192, 200)]]
    assert len(gone) == 190
    assert len(list((overlay.root / "artifacts").iterdir())) == 10
    assert sum(kept.size_bytes for kept in everything(cache)) <= 10 * size
    assert len(clear(cache)) == 10
    assert everything(cache) == []


def test_what_killed_processes_left_is_removed_by_the_next(
    overlay: Overlay, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(overlay, index, "k1")
    left = overlay.root / "build" / "k9"
    left.mkdir()
    (left / "half.o").write_bytes(bytes(1000))
    orphan = overlay.root / "artifacts" / ("c" * 64)
    orphan.mkdir()
    monkeypatch.setattr("aotpack_runtime.jit.overlay.ORPHAN_S", -1.0)
    with held(overlay.lock("k8")):  # one that runs
        (overlay.root / "build" / "k8").mkdir()
        put(overlay, index, "k2")
        assert [path.name for path in (overlay.root / "build").iterdir()] == ["k8"]
    assert not orphan.exists()
    assert overlay.names() == ["k1", "k2"]
    assert len(list((overlay.root / "artifacts").iterdir())) == 2


# ----------------------------------------------------------------------------------------------------------- locks

HOLD = """
import sys, time
from pathlib import Path
from aotpack_runtime.jit.budget import Breaker, pause_s
from aotpack_runtime.jit.flight import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a27_a_lock_ends_with_its_owner(tmp_path: Path, repo: Path) -> None:
    path = tmp_path / "locks" / "k"
    environment = {**os.environ, "PYTHONPATH": str(repo / "runtime")}
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    with held(path, wait=False) as got:
        assert not got
    killed = threading.Timer(0.3, lambda: owner.send_signal(signal.SIGKILL))
    killed.start()
    start = time.monotonic()
    with held(path) as got:
        assert got
        assert 0.2 < time.monotonic() - start < 5
    owner.communicate()


@pytest.mark.parametrize("text", ["", "4194303", "otherhost 17", "\x00" * 64])
def test_a27_a_lock_file_that_lies_there_is_no_lock(text: str, tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.write_text(text)
    with held(path, wait=False) as got:
        assert got


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "k"
    with held(path) as first:
        path.unlink()
        with held(path, wait=False) as second:
            assert first
            assert second


def test_waiting_for_a_lock_ends_when_told_to(tmp_path: Path) -> None:
    with held(tmp_path / "k"), held(tmp_path / "k", stopped=lambda: True) as got:
        assert not got


def test_one_of_several_locks_is_enough(tmp_path: Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1"]
    with held(*paths) as first, held(*paths) as second, held(*paths, wait=False) as third:
        assert (first, second, third) == (True, True, False)


def test_a27_where_there_are_no_locks_everybody_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with held(tmp_path / "k") as first, held(tmp_path / "k") as second:
        assert first
        assert second


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "k"
    ready, done = os.pipe(), os.pipe()
    with held(path):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"1")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    try:
        with held(path, wait=False) as got:
            assert got
    finally:
        os.write(done[1], b"1")
        os.waitpid(child, 0)


# ----------------------------------------------------------------------------------------------------------- places


def test_a26_every_fact_of_a_host_makes_another_overlay(tmp_path: Path) -> None:
    roots = {overlay_root("b" * 64, Host(), tmp_path)}
    for name, value in (
        ("arch", "aarch64"), ("torch", "2.13.1"), ("glibc", "2.37"), ("libstdcxx", "3.4.31"), ("python", "cp312"),
        ("cpu_flags", frozenset({"avx2"})),
    ):  # fmt: skip
        other: Any = {name: value}
        roots.add(overlay_root("b" * 64, replace(Host(), **other), tmp_path))
    roots.add(overlay_root("c" * 64, Host(), tmp_path))
    assert len(roots) == 8
    assert facts(Host()) == facts(replace(Host()))


@pytest.mark.parametrize("level", range(4))
def test_a38_a_folder_that_others_can_write_is_not_trusted(level: int, overlay: Overlay) -> None:
    assert unwritable(overlay.root) == ""
    folder = [overlay.root, *overlay.root.parents][level]
    folder.chmod(0o777)
    assert distrusted(overlay.root) == f"{folder}: others can write it" == unwritable(overlay.root)
    folder.chmod(0o700)
    assert distrusted(overlay.root) == ""


@pytest.mark.parametrize(
    ("options", "word"), [("ro,size=1m", "read-only"), ("noexec,size=600m", "noexec"), ("size=64k", "full")]
)
def test_a23_a_place_that_cannot_be_used_says_why(options: str, word: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "place", options) as place:
        problem = unwritable(overlay_root("b" * 64, Host(), place / "cache"))
    assert word in problem.lower()
    (tmp_path / "file").write_text("")
    assert "cannot be created" in unwritable(overlay_root("b" * 64, Host(), tmp_path / "file" / "cache"))


@pytest.mark.slow
def test_readers_see_whole_variants_while_writers_are_killed(tmp_path: Path, repo: Path, index: Index) -> None:
    """Writers killed at all kinds of moments; whatever can be read is whole, and the last writer cleans up."""
    code = """
import json, os, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from aotpack_runtime.format.index_json import parse
from aotpack_runtime.jit.overlay import Overlay
from tests.runtime.test_jit_overlay import put
from tests.support.bundles import index_record
index = parse(json.dumps(index_record()).encode())
overlay = Overlay(Path(sys.argv[1]))
print("begin", flush=True)
while True:
    put(overlay, index, "k1", os.urandom(8) * 50_000)
    overlay.drop("k1")
"""
    overlay = Overlay(tmp_path / "cache" / "overlay" / "b" / "h")
    for number in range(int(os.environ.get("AOTPACK_KILLS", "40"))):
        command = [sys.executable, "-c", code, str(overlay.root), str(repo / "runtime"), str(repo)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.002 * (number % 50))
        made = overlay.get("k1", index)
        writer.kill()
        writer.communicate()
        with contextlib.suppress(ArtifactError):  # it may be dropped while it is read
            if made is not None:
                overlay.files(made.variant)
        made = overlay.get("k1", index)
        if made is not None:
            assert overlay.files(made.variant)
    put(overlay, index, "k2")
    assert list((overlay.root / "build").iterdir()) == []


# ------------------------------------------------------------------------------------------ what must not add up


def test_locks_of_what_is_done_are_gone_and_those_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "k1"
    with held(path) as got, held(path, wait=False) as second:
        assert (got, second) == (True, False)
        path.unlink()  # the cache is wiped, and another process begins
        with held(path, wait=False) as other:
            assert other
    assert not path.exists()
    with held(path):
        path.unlink()
        path.write_text("of another")
    assert path.read_text() == "of another"


def test_what_two_variants_share_stays_until_both_are_gone(overlay: Overlay, index: Index) -> None:
    """Two keys that were compiled to the same bytes."""
    first = put(overlay, index, "k1")
    with held(overlay.lock("k2")), overlay.building("k2") as folder:
        path = folder / "model.so"
        path.write_bytes(b"\x7fELFk1")
        overlay.put(replace(first, key="k2"), {"model.so": path})
    overlay.drop("k1")
    assert overlay.get("k2", index) is not None
    assert overlay.files(first.variant)
    overlay.drop("k2")
    assert list((overlay.root / "artifacts").iterdir()) == []


PRIVATE = """
import os, sys, time
from aotpack_runtime.jit.private import Private
made = Private().get()
print(made.root.parents[2], flush=True)
{then}
"""


def test_folders_of_processes_that_were_killed_are_removed_by_the_next_and_no_others(tmp_path: Path) -> None:
    def start(then: str) -> tuple[subprocess.Popen[str], Path]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", PRIVATE.format(then=then)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    killed, left = start("time.sleep(60)")
    lives, kept = start("time.sleep(60)")
    (tmp_path / "aotpack-jit-strange").mkdir()  # not one of these: it has no lock
    try:
        killed.kill()
        killed.wait()
        assert (left / "owner").exists()
        ended, own = start("")
        assert ended.wait(20) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([kept.name, "aotpack-jit-strange"])
        assert own not in (left, kept)
    finally:
        for process in (killed, lives):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert ended.stdout is not None
    ended.stdout.close()


@pytest.mark.parametrize(
    ("noted_s", "refused"),
    [
        pytest.param(0, True, id="just-now"),
        pytest.param(-59, True, id="nearly-over"),
        pytest.param(-61, False, id="over"),
        pytest.param(90 * 86400, False, id="before-the-clock-was-set-back"),
    ],
)
def test_a_failure_is_remembered_for_its_pause_whatever_the_clock_does(
    noted_s: float, *, refused: bool, overlay: Overlay
) -> None:
    jit: Any = SimpleNamespace(
        unavailable="", _closed=False, breaker=Breaker(), overlays=lambda: [overlay], _lock=threading.Lock(), _asks={}
    )
    overlay.put_failure("k1", 1, time.time() + noted_s + pause_s(1), "no compiler")
    assert bool(Jit.refuses(jit, "k1")) is refused
