"""Cases A17, A18, A20 and A28: what a host lacks, where archives unpack, and that a server compiles nothing.

One zoo, three variants: `affine` for AVX-512 and for AVX2 (in this order), `double` for AVX2.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real builds")

import torch

import aotpack_runtime as apr
from aotpack_runtime.archive import pack_archive
from aotpack_runtime.format.target import cpu_flags
from aotpack_runtime.machine import this_machine
from tests.support.building import build_zoo, entry, zoo_module
from tests.support.bundles import Host, edited, set_need, sha256, with_member, zip_bytes
from tests.support.mounts import mounted

Json = Any

MODELS = """
import torch


class Affine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Double(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def affine():
    return Affine().eval()


def double():
    return Double().eval()
"""

WIDE, NARROW, PROGRAM = "affine/batch1_16/wide", "affine/batch1_16/narrow", "affine/program0/wide"


@pytest.fixture(scope="session")
def bundle() -> Path:
    batch = [{"dims": {"batch": {"min": 1, "max": 16, "opt": 4}}}]
    entries = {
        "affine": entry("affine", {"x": {"shape": ["batch", 8], "dtype": "float32"}}, batch),
        "double": entry("double", {"x": {"shape": ["rows", 4], "dtype": "float32"}}, [{"dims": {"rows": [3]}}], targets=["narrow"]),
    }  # fmt: skip
    targets = {"wide": {"kind": "cpu", "march": "x86-64-v4"}, "narrow": {"kind": "cpu"}}
    return build_zoo("host_cases", MODELS, entries, targets=targets)


@pytest.fixture(scope="session")
def host() -> Host:
    """This machine as a made-up one: what tests take away is known to have been there."""
    real = this_machine()
    facts = {name: getattr(real, name) for name in ("arch", "torch", "glibc", "libstdcxx", "python")}
    return Host(**facts, cpu_flags=real.cpu_flags)


@pytest.fixture(scope="session")
def x() -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def wanted(bundle: Path, x: torch.Tensor) -> torch.Tensor:
    """Eager's result, with the seed that sources are constructed with."""
    torch.manual_seed(0)
    with torch.no_grad():
        return zoo_module(bundle).affine()(x)


Serves = Callable[[apr.Session], str]


@pytest.fixture(scope="session")
def serves(x: torch.Tensor, wanted: torch.Tensor) -> Serves:
    """Tells which variant or tier answers `affine(x)`, after making sure that the answer is eager's."""

    def ask(session: apr.Session) -> str:
        affine = session["affine"]
        before = affine.counts()
        out = affine(x)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
        after = affine.counts()
        new = [n for n, count in after["hits_by_variant"].items() if count > before["hits_by_variant"].get(n, 0)]
        new += [n for n, count in after["misses_by_tier"].items() if count > before["misses_by_tier"].get(n, 0)]
        (only,) = new
        return only

    return ask


def needing(name: str, value: str, *ids: str) -> Callable[[Json], None]:
    """An index in which the variants called `ids` (all compiled ones by default) need something else."""

    def change(index: Json) -> None:
        for record in index["entries"].values():
            for variant in record["variants"]:
                if not ids or variant["id"] in ids:
                    set_need(index, variant, name, value)

    return change


def runner(code: str, *arguments: object, **variables: str) -> dict[str, Any]:
    """What `code` prints as JSON in a fresh process."""
    done = start(code, *arguments, **variables)
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    return {**json.loads(out), "stderr": err}


def start(code: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


# ----------------------------------------------------------------------------------- A17: instruction sets


@pytest.mark.parametrize(
    ("lost", "tier"),
    [
        pytest.param("", WIDE, id="avx512-host"),
        pytest.param("avx512f avx512bw avx512cd avx512dq avx512vl", NARROW, id="avx2-host"),
        pytest.param("avx512vl", NARROW, id="avx512-without-vl"),
        pytest.param("avx512f avx512bw avx512cd avx512dq avx512vl avx2", "program", id="host-without-avx2"),
        pytest.param("*", "program", id="host-without-any"),
    ],
)
def test_a17_a_variant_beyond_the_host_is_passed_over_for_one_that_fits(
    lost: str, tier: str, bundle: Path, host: Host, serves: Serves
) -> None:
    """On a CPU that has all of AVX-512 by fiat; where it has not, only what is safe to run is run."""
    v4 = cpu_flags("x86-64-v4")
    flags = frozenset({"fpu"}) if lost == "*" else (host.cpu_flags | v4) - set(lost.split())
    if tier == WIDE and not v4 <= host.cpu_flags:
        pytest.skip("this CPU lacks AVX-512")
    with apr.load(bundle, mode="eager", source="never", machine=replace(host, cpu_flags=flags)) as session:
        assert serves(session) == tier
        assert session.verdict == ("fits with fallback" if tier == "program" else "fits")
        skipped = {name: reason for name, reason in session.skipped.items() if name.startswith("affine/batch")}
        assert skipped.keys() == {WIDE: set(), NARROW: {WIDE}, "program": {WIDE, NARROW}}[tier]
        for name, reason in skipped.items():
            level = "x86-64-v4" if name == WIDE else "x86-64-v3"
            assert reason.startswith(f"built for CPU {level}, this host lacks ")
            assert set(lost.replace("*", "avx2").split()) & set(reason.split())


def test_a17_a_made_up_instruction_set_is_refused_before_its_library_is_opened(
    bundle: Path, tmp_path: Path, serves: Serves
) -> None:
    """Seen from the outside: the library is garbage that any attempt to open would trip over."""
    library = next(bundle.glob("artifacts/*/model.so"))
    forged = with_member(bundle, tmp_path / "garbage", str(library.relative_to(bundle)), b"not a library")
    index = json.loads((forged / "index.json").read_text())
    (name,) = [
        variant["id"]
        for variant in (*index["entries"]["affine"]["variants"], *index["entries"]["double"]["variants"])
        if variant["artifact"]["files"]["model.so"]["bytes"] == len(b"not a library")
    ]
    bad = edited(forged, tmp_path / "bad", needing("cpu", "x86-64-v3 AVX999", name))
    with apr.load(bad, mode="eager", source="never") as session:
        assert session.skipped[name] == "built for CPU x86-64-v3 AVX999, this host lacks avx999"
        served = serves(session)
        twin = {WIDE: NARROW, NARROW: WIDE}.get(name)
        has_twin = twin is not None and twin not in session.skipped
        assert session.verdict == ("fits" if has_twin else "fits with fallback")
        assert served != name
        assert session["double"](torch.ones(3, 4)).tolist() == [[3.0] * 4] * 3
        assert name not in json.dumps(session["affine"].counts()["loaded"])


def test_a17_narrow_code_on_a_wide_host_is_a_silent_hit(
    bundle: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    serves: Serves,
) -> None:
    """Code of 256 bits where there are 512: nothing to say about it."""

    def keep_narrow(index: Json) -> None:
        variants = index["entries"]["affine"]["variants"]
        variants[:] = [variant for variant in variants if variant["id"] == NARROW]

    caplog.set_level(logging.WARNING)
    with apr.load(edited(bundle, tmp_path / "narrow", keep_narrow), mode="strict") as session:
        assert session.verdict == "fits"
        assert serves(session) == NARROW
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("mode", ["eager", "strict"])
def test_a17_on_another_architecture_only_programs_are_left(mode: Any, bundle: Path, host: Host) -> None:
    arm = replace(host, arch="aarch64", cpu_flags=frozenset())
    if mode == "strict":
        with pytest.raises(apr.TargetMismatch, match="built for machine x86_64, this host has aarch64"):
            apr.load(bundle, mode=mode, machine=arm)
        return
    with apr.load(bundle, mode=mode, machine=arm, source="never") as session:
        assert session["double"](torch.ones(3, 4)).tolist() == [[3.0] * 4] * 3
        assert session["double"].counts()["misses_by_tier"] == {"program": 1}


# ----------------------------------------------------------------------------------- A18: torch, glibc, Python


A18 = {
    "torch-newer": ("torch", "9.9.9", "built with torch 9.9.9, running "),
    "torch-older": ("torch", "1.0", "built with torch 1.0, running "),
    "glibc": ("glibc", "2.99", "needs glibc 2.99 or newer, this host has "),
    "libstdcxx": ("libstdcxx", "3.4.999", "needs libstdc++ GLIBCXX 3.4.999 or newer, this host has "),
    "python": ("python", "cp399", "built for Python cp399, this host has "),
    "invented": ("phase_of_moon", "full", "needs phase_of_moon 'full', which this aotpack-runtime cannot judge"),
}


@pytest.mark.parametrize("what", A18)
def test_a18_a_variant_built_for_other_software_is_skipped_with_one_line(
    what: str, bundle: Path, tmp_path: Path, x: torch.Tensor, serves: Serves
) -> None:
    need, value, words = A18[what]
    changed = edited(bundle, tmp_path / "b", needing(need, value))
    with apr.load(changed, mode="eager", source="never") as session:
        assert session.verdict == "fits with fallback"
        assert session.skipped[WIDE].startswith(words)
        assert "\n" not in session.skipped[WIDE]
        assert serves(session) == "program"
        assert session["affine"].counts()["loaded"] == [PROGRAM]
        miss = session["affine"].explain(x)
        assert isinstance(miss, apr.Miss)
        assert miss.reasons[NARROW].startswith(words)
    with pytest.raises(apr.TargetMismatch, match=words.replace("+", r"\+").split(",")[0]) as caught:
        apr.load(changed, mode="strict")
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("way", ["argument", "variable"])
@pytest.mark.parametrize("need", ["torch", "glibc", "libstdcxx", "python"])
def test_a18_the_documented_override_makes_it_a_hit(
    need: str, way: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: Serves
) -> None:
    changed = edited(bundle, tmp_path / "b", needing(need, "99.9"))
    if way == "variable":
        monkeypatch.setenv("AOTPACK_ALLOW", f"cuda, {need}")
    with apr.load(changed, mode="strict", allow=[need] if way == "argument" else []) as session:
        assert session.verdict == "fits"
        assert serves(session).startswith("affine/batch1_16/")


@pytest.mark.parametrize(
    ("need", "value"),
    [
        pytest.param("glibc", "2.4", id="older-glibc"),
        pytest.param("libstdcxx", "3.4", id="older-libstdcxx"),
        pytest.param("torch_min", "2.1", id="older-torch-of-a-program"),
    ],
)
def test_a18_what_was_built_on_an_older_system_is_a_silent_hit(
    need: str, value: str, bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, serves: Serves
) -> None:
    caplog.set_level(logging.WARNING)
    with apr.load(edited(bundle, tmp_path / "b", needing(need, value)), mode="strict") as session:
        assert session.verdict == "fits"
        assert serves(session).startswith("affine/batch1_16/")
    assert caplog.text == ""


def test_a18_an_older_torch_is_told_so_before_anything_is_opened(bundle: Path, host: Host) -> None:
    """The program needs no newer torch than it was exported with: without one nothing is left, and each reason is given."""
    with pytest.raises(apr.TargetMismatch) as caught:
        apr.load(bundle, machine=replace(host, torch="2.0.1"))
    assert (
        caught.value.reasons[PROGRAM]
        == f"needs torch {'.'.join(torch.__version__.split('.')[:2])} or newer, this host has 2.0.1"
    )
    with pytest.raises(apr.TargetMismatch, match="torch is not installed"):
        apr.load(bundle, machine=replace(host, torch=None))


def test_a18_a_library_that_does_not_open_is_skipped_and_said_once(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, serves: Serves
) -> None:
    """What no recorded fact foresaw ("undefined symbol"): the next variant, then the program, and never a crash."""
    changed = bundle
    for number, library in enumerate(sorted(bundle.glob("artifacts/*/model.so"))):
        data = library.read_bytes().replace(b"aoti_torch_", b"aoti_torsh_")
        changed = with_member(changed, tmp_path / str(number), str(library.relative_to(bundle)), data)
    with apr.load(changed, mode="eager", source="never") as session:
        assert serves(session) == "program"
        assert serves(session) == "program"
        assert {WIDE, NARROW} <= session["affine"].counts()["skipped"].keys()
        session.warmup()
        assert session.status()["ready"]
    assert caplog.text.count(f"{WIDE} does not load and is skipped") == 1
    assert "undefined symbol" in caplog.text
    assert "Traceback" not in caplog.text


# ----------------------------------------------------------------------------------- A20: unpacking


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(place))
    return place


@pytest.fixture
def archive(bundle: Path, tmp_path: Path) -> Path:
    return pack_archive(bundle, tmp_path / "host.aotpack")


def places(cache: Path) -> list[Path]:
    return [path for path in (cache / "unpacked").iterdir() if path.name != ".lock"]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a20_twenty_loads_share_one_unpacked_copy_and_leave_nothing_behind(
    archive: Path, cache: Path, serves: Serves
) -> None:
    temporary = Path(tempfile.gettempdir())
    with apr.load(archive, mode="eager", source="never") as session:  # what torch keeps open once, it opens here
        assert serves(session).startswith("affine/batch1_16/")
    gc.collect()
    entries, descriptors = sorted(os.listdir(temporary)), len(os.listdir("/proc/self/fd"))
    held = []
    for _ in range(20):
        held.append(session := apr.load(archive, mode="eager", source="never"))
        assert serves(session).startswith("affine/batch1_16/")
    assert len({session.bundle.root for session in held}) == 1
    assert len(places(cache)) == 1
    del session
    held.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [name for name in os.listdir(temporary) if name not in entries and not name.startswith("pytest-")] == []
    assert len(places(cache)) == 1


LOAD = """
import json, sys, time
import aotpack_runtime as apr
session = apr.load(sys.argv[1], mode="eager", source="never")
import torch
out = session["affine"](torch.ones(2, 8))
print(json.dumps({"root": str(session.bundle.root), "sum": out.sum().item(), "served": session["affine"].counts()["hits"]}))
"""


def test_a20_eight_processes_unpack_once(archive: Path, cache: Path) -> None:
    """Without torch: what they race for is the folder. Disk use never is more than about one copy."""
    code = "import sys, json; from aotpack_runtime.bundle import open_bundle; b = open_bundle(sys.argv[1]); b.verify(); print(json.dumps(str(b.root)))"
    running = [start(code, archive) for _ in range(8)]
    most = 0
    while any(process.poll() is None for process in running):
        with contextlib.suppress(OSError):
            most = max(most, size_of(cache))
        time.sleep(0.002)
    answers = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 8, answers
    assert len({out for out, _ in answers}) == 1
    assert len(places(cache)) == 1
    assert most <= 1.5 * size_of(places(cache)[0])


SLOW = """
import os, shutil, sys, time
from aotpack_runtime import archive

def slow(source, target, length=0):
    target.write(source.read(100))
    target.flush()
    print("writing", flush=True)
    time.sleep(600)

shutil.copyfileobj = slow
archive.unpack(__import__("pathlib").Path(sys.argv[1]))
"""


def test_a20_what_a_killed_process_left_half_unpacked_is_removed_by_the_next(
    archive: Path, cache: Path, serves: Serves
) -> None:
    """Also where the next has the id of the killed one, as the first process of a container does."""
    process = start(SLOW, archive)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    (orphan,) = places(cache)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert orphan.exists()
    with apr.load(archive, mode="eager", source="never") as session:
        assert serves(session).startswith("affine/batch1_16/")
    (place,) = places(cache)
    assert place != orphan


def test_a20_a_process_waits_for_the_one_that_unpacks_and_takes_over_when_it_dies(archive: Path, cache: Path) -> None:
    first = start(SLOW, archive)
    assert first.stdout is not None
    first.stdout.readline()
    second = start(LOAD, archive)
    time.sleep(3)
    assert second.poll() is None
    assert len(places(cache)) == 1
    first.kill()
    out, err = second.communicate(timeout=120)
    first.communicate()
    assert second.returncode == 0, err
    assert Path(json.loads(out)["root"]) in places(cache)


def test_a20_a_loaded_session_outlives_its_archive_and_its_unpacked_folder(
    archive: Path, cache: Path, x: torch.Tensor, wanted: torch.Tensor, serves: Serves
) -> None:
    """Also for what it had not yet opened: the first hit and the first miss come afterwards."""
    with apr.load(archive, mode="eager", source="never") as session:
        archive.unlink()
        shutil.rmtree(cache)
        assert serves(session).startswith("affine/batch1_16/")
        big = session["affine"](x.repeat(5, 1))
        torch.testing.assert_close(big, wanted.repeat(5, 1), rtol=1e-5, atol=1e-6)
        assert session["affine"].counts()["misses_by_tier"] == {"program": 1}


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system mounted noexec."""
    with mounted(tmp_path / "noexec", "noexec,size=64m") as place:
        yield place


def test_a20_on_a_noexec_file_system_the_fallback_serves_and_the_way_out_is_named(
    archive: Path, noexec: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, serves: Serves
) -> None:
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(noexec / "cache"))
    with apr.load(archive, mode="eager", source="never") as session:
        assert serves(session) == "program"
        reason = session["affine"].counts()["skipped"][NARROW]
    assert "failed to map segment" in reason
    assert "noexec" in reason
    assert "AOTPACK_CACHE_DIR" in reason
    assert "noexec" in caplog.text


def test_a20_with_a_noexec_temp_folder_nothing_is_lost(
    archive: Path, noexec: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, serves: Serves
) -> None:
    monkeypatch.setenv("TMPDIR", str(noexec))
    monkeypatch.setattr("tempfile.tempdir", None)
    with apr.load(archive, mode="strict") as session:
        assert serves(session).startswith("affine/batch1_16/")
    assert list(noexec.iterdir()) == []


# ----------------------------------------------------------------------------------- A28: no compiler needed


@pytest.fixture
def fake_compilers(tmp_path: Path) -> tuple[Path, Path]:
    """(a folder with compilers that only leave a mark, the mark)."""
    folder, mark = tmp_path / "bin", tmp_path / "compiled"
    folder.mkdir()
    for name in ("g++", "gcc", "c++", "cc", "clang", "clang++", "ld", "as", "nvcc", "icpx"):
        (folder / name).write_text(f'#!/bin/sh\necho "$0 $@" >> {mark}\nexit 1\n')
        (folder / name).chmod(0o755)
    return folder, mark


SERVE = """
import json, logging, sys, time, warnings
import torch
logging.basicConfig(level=logging.WARNING)
import aotpack_runtime as apr
start = time.perf_counter()
session = apr.load(sys.argv[1], mode="jit", source="never")
hit = session["affine"](torch.ones(2, 8))
seconds = time.perf_counter() - start
miss = session["affine"](torch.ones(40, 8))
counts = session["affine"].counts()
inductor = "torch._inductor.codecache" in sys.modules
print(json.dumps({"seconds": seconds, "hits": counts["hits"], "by": counts["misses_by_tier"],
                  "same": torch.equal(hit[0], miss[0]) or torch.allclose(hit[0], miss[0]), "inductor": inductor}))
"""


def test_a28_a_hit_takes_no_compiler_and_no_inductor(
    bundle: Path, tmp_path: Path, fake_compilers: tuple[Path, Path]
) -> None:
    """(a) with an empty Inductor cache: measured through torch's own loader, 5.3 s the first time."""
    folder, mark = fake_compilers
    empty = tmp_path / "inductor"
    seen = runner(
        SERVE,
        bundle,
        PATH=f"{folder}:{os.environ['PATH']}",
        CXX=str(folder / "g++"),
        TORCHINDUCTOR_CACHE_DIR=str(empty),
    )
    assert (seen["hits"], seen["by"], seen["same"]) == (1, {"program": 1}, True)
    assert not mark.exists()
    assert list(empty.rglob("*")) == []
    assert not seen["inductor"]
    assert seen["seconds"] < 2


def test_a28_without_a_compiler_a_miss_is_served_and_nothing_misleading_is_said(bundle: Path, tmp_path: Path) -> None:
    """(b) nothing on the path at all. Nothing compiles in this version, so there is no tool to miss either."""
    (tmp_path / "empty").mkdir()
    seen = runner(SERVE, bundle, PATH=str(tmp_path / "empty"), CXX="")
    assert (seen["hits"], seen["by"], seen["same"]) == (1, {"program": 1}, True)
    assert seen["stderr"] == ""


# ----------------------------------------------------------------------------------- A38: nothing is unpickled


class Mark:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def test_a38_pickles_inside_a_program_are_never_read(
    bundle: Path, tmp_path: Path, x: torch.Tensor, wanted: torch.Tensor
) -> None:
    """A program file may hold weights and example inputs that torch would unpickle: here each is a trap."""
    import zipfile

    mark = tmp_path / "unpickled"
    trap = pickle.dumps(Mark(mark))
    program = next(path for path in bundle.glob("programs/*.pt2") if b"linear" in path.read_bytes())
    with zipfile.ZipFile(program) as zipped:
        files = {name: zipped.read(name) for name in zipped.namelist()}
    root = next(iter(files)).partition("/")[0]
    inside = zip_bytes({"archive/data.pkl": trap, "archive/version": b"3"})
    for name in ("data/sample_inputs/model.pt", "data/weights/model.pt", "data/constants/model.pt"):
        files[f"{root}/{name}"] = inside if "sample" in name else trap
    forged = with_member(bundle, tmp_path / "b", str(program.relative_to(bundle)), zip_bytes(files))
    with apr.load(forged, mode="eager", source="never") as session:
        big = session["affine"](x.repeat(5, 1))
        torch.testing.assert_close(big, wanted.repeat(5, 1), rtol=1e-5, atol=1e-6)
        assert session["affine"].counts()["misses_by_tier"] == {"program": 1}
    assert not mark.exists()


@pytest.mark.parametrize("what", ["pickle", "torch.save"])
def test_a38_weights_that_are_a_pickle_are_refused(what: str, bundle: Path, tmp_path: Path, x: torch.Tensor) -> None:
    import io

    mark = tmp_path / "unpickled"
    buffer = io.BytesIO()
    if what == "pickle":
        buffer.write(pickle.dumps(Mark(mark)))
    else:
        torch.save({"linear.weight": Mark(mark)}, buffer)
    weights = next(bundle.glob("weights/*"))
    forged = with_member(bundle, tmp_path / "b", str(weights.relative_to(bundle)), buffer.getvalue())
    with (
        apr.load(forged, mode="eager", source="never") as session,
        pytest.raises(apr.MalformedBundle, match="weights/"),
    ):
        session["affine"](x)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["artifacts", "programs", "weights"])
def test_a_changed_byte_stops_the_call_that_would_run_it(
    kind: str, bundle: Path, tmp_path: Path, x: torch.Tensor
) -> None:
    """Every byte that will run is checked first: the call raises, each time, and the process lives."""
    changed = tmp_path / "b"
    shutil.copytree(bundle, changed)
    for path in changed.glob(f"{kind}/**/*.*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert sha256(bytes(data)) not in (changed / "index.json").read_text()
    with apr.load(changed, mode="eager", source="never") as session:
        for _ in range(2):
            with pytest.raises(apr.DigestMismatch, match=kind):
                session["affine"](x.repeat(5, 1) if kind == "programs" else x)
        with pytest.raises(apr.DigestMismatch, match=kind):
            session.bundle.verify()
