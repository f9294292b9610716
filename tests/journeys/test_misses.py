"""The miss path on real models: what a child compiles is what eager computes, is kept, and is never believed blindly."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real builds")

import torch

import aotpack_runtime as apr
from aotpack_runtime.dispatch import Miss
from aotpack_runtime.fallbacks import Prepared
from aotpack_runtime.torch_entry import TorchEntry
from tests.support import missing
from tests.support.building import zoo_module
from tests.support.missing import AT_ONCE
from tests.support.serving import assert_same, imported, in_process, served

Json = Any
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def bundle() -> Path:
    return missing.bundle()


@pytest.fixture(scope="session")
def compiled(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return missing.compiled_cache(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AOTPACK_JIT_NICE", "0")
    monkeypatch.setenv("CXX", missing.CXX)
    return tmp_path / "cache"


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "aotpack.jit")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def mlp_entry(session: apr.Session) -> TorchEntry:
    entry = session["mlp"]
    assert isinstance(entry, TorchEntry)
    return entry


def x_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


@pytest.fixture(scope="session")
def eager(bundle: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    model = zoo_module(bundle).mlp()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(x)
        return found

    return call


def until(holds: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------ the miss path


def test_a_miss_is_answered_at_once_and_compiled_behind_it(
    bundle: Path, cache: Path, eager: Callable[..., torch.Tensor]
) -> None:
    """The first call is served by the program; later ones hit; another process finds what was compiled. One model that
    writes state and an argument, where a second run of anything would show."""
    with imported(bundle.parent) as zoo, apr.load(bundle, on_miss={**AT_ONCE, "background": True}) as session:
        model, entry = zoo.series(), session["series"]
        mine, theirs = torch.ones(4), torch.ones(4)
        tiers = []
        for number in range(200):
            x = torch.full((3, 4), float(number % 7))
            tier, found = served(entry, x, mine)
            with torch.no_grad():
                assert_same(model(x, theirs), found)
            assert_same(theirs, mine)
            tiers.append(tier)
            if number == 1:
                until(lambda: session.status()["jit"]["waiting"] + session.status()["jit"]["running"] == 0)
        assert tiers[:2] == ["program", "program"]
        assert set(tiers[2:]) == {"hit"}
        status = session.status()
        assert (status["jit"]["compiles"], status["jit"]["failures"]) == (1, 0)
        assert status["entries"]["series"]["hits_by_tier"] == {"bundle": 0, "overlay": 198}
        (shape,) = status["entries"]["series"]["jit"]["shapes"]
        assert (shape["calls"], shape["state"]) == (2, "compiled")
        assert json.dumps(status)
    with apr.load(bundle, on_miss=AT_ONCE) as session:
        assert served(session["series"], torch.ones(3, 4), torch.ones(4))[0] == "hit"
        assert session.status()["jit"]["compiles"] == 0


def test_a_dim_that_keeps_changing_is_compiled_as_a_range(
    bundle: Path, cache: Path, eager: Callable[..., torch.Tensor]
) -> None:
    with apr.load(bundle, on_miss={"background": False}) as session:
        entry = mlp_entry(session)
        for rows in (9, 20, 13):
            assert served(entry, x_of(rows))[0] == "program"  # too cheap to pay
        session._behind().history["elsewhere"] = {"k": (1e-9, 1.0, 0.5)}  # compiling takes no time, it turns out
        entry._watch._revise()
        tier, found = served(entry, x_of(13))
        assert tier == "hit"
        assert_same(eager(x_of(13)), found)
        (name,) = session.status()["entries"]["mlp"]["jit"]["variants"]
        assert name.startswith("mlp/jit-8_32x8-")
        for rows in (8, 10, 31, 32):
            tier, found = served(entry, x_of(rows))
            assert tier == "hit", rows
            assert_same(eager(x_of(rows)), found)
        explained = entry.explain(x_of(33))
        assert isinstance(explained, apr.Miss)
        assert explained.reasons[name] == "x.shape[0]: expected 8..32, got 33"
        assert entry.explain(x_of(4)) == apr.Hit(entry.variants[0])  # exact shapes of the bundle first


# -------------------------------------------------------------------------------------- damage: A25, A18, A38


def overlay_of(cache: Path) -> Path:
    (root,) = [path for path in (cache / "overlay").glob("*/*") if (path / "variants").is_dir()]
    return root


def library(root: Path) -> Path:
    (path,) = (root / "artifacts").glob("*/model.so")
    return path


def record(root: Path) -> Path:
    (path,) = (root / "variants").glob("*.json")
    return path


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _edited(root: Path, name: str, value: str) -> None:
    """Its needs changed, and its digest with them: what another host would have written."""
    from aotpack_runtime.format.fingerprint import canonical, digest

    made = json.loads(record(root).read_bytes())
    made["body"]["variant"]["target"]["needs"][name] = value
    record(root).write_bytes(canonical({**made, "sha256": digest(canonical(made["body"]))}))


@pytest.mark.parametrize(
    ("damage", "dropped"),
    [
        pytest.param(lambda root: _truncate(library(root), 0), True, id="library-empty"),
        pytest.param(lambda root: _truncate(library(root), 100_000), True, id="library-half"),
        pytest.param(lambda root: record(root).write_text("{"), True, id="record-broken"),
        pytest.param(lambda root: library(root).unlink(), True, id="library-gone"),
        pytest.param(lambda root: _flip(library(root), 50_000), True, id="library-flipped"),
        pytest.param(lambda root: _flip(record(root), 600), True, id="record-flipped"),
        pytest.param(lambda root: _edited(root, "torch", "9.9"), False, id="another-torch"),
        pytest.param(lambda root: _edited(root, "glibc", "2.99"), False, id="newer-glibc"),
        pytest.param(lambda root: _edited(root, "cpu", "x86-64-v3 AVX999"), False, id="another-cpu"),
    ],
)
def test_a25_a18_what_is_damaged_or_of_another_host_is_never_run(
    damage: Callable[[Path], object],
    *,
    dropped: bool,
    bundle: Path,
    compiled: Path,
    cache: Path,
    eager: Callable[..., torch.Tensor],
) -> None:
    shutil.copytree(compiled, cache)
    root = overlay_of(cache)
    damage(root)
    with apr.load(bundle, on_miss={"when": "never"}) as session:
        tier, found = served(session["mlp"], x_of(7))
        assert tier == "program"
        assert_same(eager(x_of(7)), found)
    assert (list((root / "variants").iterdir()) == []) is dropped


def test_a25_a_damaged_variant_is_compiled_once_more_and_then_hit(bundle: Path, compiled: Path, cache: Path) -> None:
    """Where compiles must pay, too: it has paid before."""
    shutil.copytree(compiled, cache)
    _flip(library(overlay_of(cache)), 50_000)
    for compiles in (1, 0):
        with apr.load(bundle, on_miss={"background": False}) as session:
            assert served(session["mlp"], x_of(7))[0] == "hit"
            assert session.status()["jit"]["compiles"] == compiles


def test_a38_a_cache_that_others_can_write_is_not_read(
    bundle: Path, compiled: Path, cache: Path, warned: Callable[[], list[str]]
) -> None:
    shutil.copytree(compiled, cache)
    with apr.load(bundle, on_miss={"when": "never"}) as session:
        assert served(session["mlp"], x_of(7))[0] == "hit"
    for folder in (cache, overlay_of(cache)):
        folder.chmod(0o777)
        with apr.load(bundle, on_miss={"when": "never"}) as session:
            for _ in range(3):
                assert served(session["mlp"], x_of(7))[0] == "program"
        folder.chmod(0o700)
    assert [text.partition(": ")[0] for text in warned()] == ["the overlay is not used"] * 2


def test_a38_the_current_folder_is_never_a_cache(
    bundle: Path, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cache", "aotpack", ".cache/aotpack", "."):
        shutil.copytree(compiled, tmp_path / "here" / name, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("AOTPACK_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", ".")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with apr.load(bundle, on_miss={"when": "never"}) as session:
        assert served(session["mlp"], x_of(7))[0] == "program"


# --------------------------------------------------------------------------------------------- A30 under JIT


def test_a30_variants_arrive_and_weights_change_under_calls(bundle: Path, compiled: Path, cache: Path) -> None:
    """Four threads call while the variant that another process compiled appears and weights are swapped: each result is
    that of one set of weights, by the program or by the variant."""
    names = ("b.weight", "b.bias")
    with apr.load(bundle, on_miss={"when": "never"}) as session:
        entry, x = session["mlp"], x_of(7)
        stored = session._weight_set("mlp").tensors
        sets = [{name: stored[name].clone() * factor for name in names} for factor in (1.0, -2.0)]
        wanted = []
        for weights in sets:
            session.update_weights(weights)
            wanted.append(entry(x).clone())
        stop, wrong = threading.Event(), []

        def call() -> None:
            while not stop.is_set():
                found = entry(x)
                if not any(torch.allclose(found, one, atol=1e-5) for one in wanted):
                    wrong.append(found)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for number in range(100):
                session.update_weights(sets[number % 2])
                if number == 50:
                    shutil.copytree(compiled, cache)
                    entry(x_of(5))  # a shape that is judged looks at the overlay
                time.sleep(0.005)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert not wrong
        assert entry.counts()["hits_by_tier"]["overlay"] > 0


def test_a_variant_that_is_refused_comes_back_when_it_is_compiled_again(
    bundle: Path, compiled: Path, cache: Path
) -> None:
    """What is compiled anew has the id of what was set aside."""
    shutil.copytree(compiled, cache)
    with apr.load(bundle, on_miss={"when": "never"}) as session:
        entry = mlp_entry(session)
        assert served(entry, x_of(7))[0] == "hit"
        (variant,) = entry._adopted.values()
        entry.set_aside(variant, apr.ArtifactError(variant.id, "did not run"))
        assert served(entry, x_of(7))[0] == "program"
        assert entry.counts()["skipped"][variant.id] == "does not load: " + f"{variant.id}: did not run"
        assert list(overlay_of(cache).glob("variants/*")) == []
        shutil.copytree(compiled, cache, dirs_exist_ok=True)
        entry(x_of(5))
        assert served(entry, x_of(7))[0] == "hit"
        assert variant.id not in entry.counts()["skipped"]


def test_closing_a_session_leaves_the_overlay_as_it_is(bundle: Path, compiled: Path, cache: Path) -> None:
    """A variant that arrives while the session is closed is not taken for a damaged one."""
    shutil.copytree(compiled, cache)
    session = apr.load(bundle, on_miss={"when": "never"})
    entry = mlp_entry(session)
    entry(x_of(4))
    assert entry._behind()
    watch = entry._watch
    session.close()
    assert not watch.look()
    assert len(list(overlay_of(cache).glob("variants/*"))) == 1


def test_a_call_that_the_model_refuses_asks_for_nothing_and_gives_its_copy_back(bundle: Path, cache: Path) -> None:
    def refuses(*leaves: object) -> object:
        raise IndexError("index out of range")

    with apr.load(bundle, mode="jit", on_miss={"when": "at_once"}) as session:
        entry, x = mlp_entry(session), x_of(9)
        miss = entry.explain(x)
        assert isinstance(miss, Miss)
        assert entry._behind()
        serve = entry._watch.watched(miss, Prepared(refuses, program=entry.programs[0]))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(IndexError):
                serve(x)
        assert len(os.listdir("/proc/self/fd")) == before
        assert session.status()["jit"]["waiting"] == 0
    assert not (cache / "overlay").exists()


@pytest.mark.parametrize("background", [True, False])
def test_where_no_thread_may_be_started_a_miss_is_served_and_asked_for_later(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]], *, background: bool
) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with apr.load(bundle, mode="jit", on_miss={"when": "at_once", "background": background}) as session:
        entry = mlp_entry(session)
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuses)
            start = time.monotonic()
            assert served(entry, x_of(24))[0] == "program"
            assert time.monotonic() - start < 10
        assert len(os.listdir("/proc/self/fd")) == before
        assert session.status()["jit"]["waiting"] == 0
        (shape,) = session.status()["entries"]["mlp"]["jit"]["shapes"]
        assert shape["state"] != "asked"
        if background:
            entry._watch._shapes.all()[0].due = 0.0  # it has cost twice as much by now
            entry(x_of(24))
            until(lambda: served(entry, x_of(24))[0] == "hit")


@pytest.mark.parametrize("arrays", [False, True], ids=["torch", "arrays"])
def test_calls_that_run_while_a_session_is_closed_are_right_or_say_so_and_do_not_open_it_again(
    bundle: Path, cache: Path, eager: Callable[..., torch.Tensor], *, arrays: bool
) -> None:
    """An entry loads, changes its ways and remembers what it judged while it is called: not once it is closed."""
    inputs = [x_of(rows) for rows in (4, 5, 6)]
    wanted = [eager(x) for x in inputs]
    given: list[Any] = [x.numpy() for x in inputs] if arrays else inputs
    wrong: list[object] = []
    for number in range(12):
        session = apr.load(bundle, mode="eager", tensors="array" if arrays else "torch")
        entry, stop = session["mlp"], threading.Event()

        def call(entry: Any = entry, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                for x, result in zip(given, wanted, strict=True):
                    try:
                        found = torch.as_tensor(entry(x))
                        if not torch.allclose(found, result, atol=1e-5):
                            wrong.append(found)
                    except apr.SessionClosed:
                        pass
                    except Exception as error:
                        wrong.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.005 * number)
        session.close()
        for x in given:
            with pytest.raises(apr.SessionClosed):
                entry(x)
        stop.set()
        for thread in threads:
            thread.join()
        for x in given:
            with pytest.raises(apr.SessionClosed):
                entry(x)
    assert wrong == []


def test_a_server_that_ends_while_a_thread_is_in_torch_ends_well(bundle: Path, cache: Path) -> None:
    """The thread that asks for a compile comes back from C++ when Python is gone, and C++ ends the process for it."""
    code = f"""
import torch
import aotpack_runtime as apr
from aotpack_runtime.loaders import samples

copy, small = samples.copy, torch.ones(4)

def slow(leaves):
    save = copy(leaves)

    def saved():
        for _ in range(1_000_000):
            small.to("cpu")  # asks for the GIL where C++ may not be unwound
        return save()

    return saved

samples.copy = slow
session = apr.load({str(bundle)!r}, mode="jit", on_miss={{"when": "at_once"}})
print(tuple(session["mlp"](torch.ones(9, 8)).shape))
"""
    assert in_process(code).strip().startswith("(9,")
