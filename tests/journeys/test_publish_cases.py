"""Case A39 and its neighbours: a bundle takes its place in one step, holds only itself, and is the same bytes again.

Two tiny models, `relu(x)` and `sigmoid(relu(x))`, built in turn to one path.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real builds")

import torch

import aotpack_runtime as apr
from aotpack.build import build
from aotpack.jobs import Result
from aotpack.manifest import read_manifest
from aotpack.pack import publish, staging
from aotpack_runtime.errors import AotpackError, CompileError, OutputError
from aotpack_runtime.store import Store
from tests.support.building import ROOT, entry, write_zoo
from tests.support.bundles import sha256, write_bundle, write_zip
from tests.support.mounts import mounted

Json = Any

MODEL = """
import torch


class M(torch.nn.Module):
    def forward(self, x):
        return {result}


def build():
    return M().eval()
"""
RELU = MODEL.format(result="torch.relu(x)")
SIGMOID = MODEL.format(result="torch.sigmoid(torch.relu(x))")
FAILS = MODEL.format(result="x[(x > 0).nonzero()[0, 0].item():].tolist()")
ENTRIES = {"f": entry("build", {"x": {"shape": ["n"], "dtype": "float32"}}, [{"dims": {"n": [4]}}])}


def build_model(folder: Path, text: str, out: Path, **more: Any) -> Result:
    """Build one of the models, found in the store all tests share or compiled there once."""
    manifest = write_zoo(folder, text, ENTRIES)
    return build(read_manifest(manifest), out, jobs=1, store=more.pop("store", Store(ROOT / "store")), **more)


def answer(session: apr.Session) -> float:
    """What the bundle gives for 0: 0.0 of relu, 0.5 of sigmoid(relu)."""
    return float(session["f"](torch.zeros(4))[0])


def files(folder: Path) -> dict[str, str]:
    """Every file below `folder` with its digest."""
    return {str(path.relative_to(folder)): sha256(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("relu") / "bundle"
    return build_model(ROOT / "publish_relu", RELU, out).path


@pytest.fixture(scope="module")
def sigmoid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sigmoid") / "bundle"
    return build_model(ROOT / "publish_sigmoid", SIGMOID, out).path


# --------------------------------------------------------------------------------- A39: rebuilt to one path


LOOP = """
import sys, time
import torch
import aotpack_runtime as apr
print("ready", flush=True)
loads, seen, end = 0, [], None
while end is None or time.time() < end:
    with apr.load(sys.argv[1], mode="strict") as session:
        value = float(session["f"](torch.zeros(4))[0])
    loads += 1
    if seen[-1:] != [value]:
        seen.append(value)
        print(value, flush=True)
    if value == 0.5 and end is None:
        end = time.time() + 1
print("loads", loads, flush=True)
"""


@contextlib.contextmanager
def loop(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that loads and calls the bundle at `path` until it has given 0.5 for a second."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", LOOP, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "0.0\n"
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("suffix", ["", ".aotpack"], ids=["folder", "archive"])
def test_a39_a_rebuild_replaces_the_old_bundle_in_one_step(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session holds the first bundle without having called it, another process loads in a loop."""
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / f"same{suffix}"
    first = build_model(ROOT / "publish_relu", RELU, out)
    before = set(files(tmp_path / "same")) if not suffix else set()
    held = apr.load(out, mode="eager", source="never")
    with loop(out) as process:
        second = build_model(ROOT / "publish_sigmoid", SIGMOID, out)
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""
    assert rest.startswith("0.5\nloads "), "the loop saw the old bundle, then the new one, and nothing else"
    assert int(rest.split()[-1]) > 3

    assert first.digest != second.digest
    assert answer(held) == 0.0
    assert float(held["f"](torch.zeros(9))[0]) == 0.0
    assert held["f"].counts()["misses_by_tier"] == {"program": 1}
    with apr.load(out, mode="strict") as fresh:
        assert answer(fresh) == 0.5
        assert fresh.bundle.digest == second.digest
    assert hidden(tmp_path) == []
    if not suffix:
        left = set(files(out)) & before
        assert left <= {"index.json", *apr.load(out).bundle.index.members()}


def test_a39_a_bundle_holds_its_members_and_nothing_else(relu: Path, sigmoid: Path) -> None:
    for path in (relu, sigmoid):
        with apr.load(path) as session:
            assert set(files(path)) == {"index.json", *session.bundle.index.members()}
            session.bundle.verify()


def test_a39_stray_files_in_the_old_bundle_are_not_in_the_new_one(tmp_path: Path) -> None:
    out = tmp_path / "b"
    build_model(ROOT / "publish_relu", RELU, out)
    (out / "artifacts" / "stray.so").write_bytes(b"of an earlier build")
    build_model(ROOT / "publish_sigmoid", SIGMOID, out)
    assert not (out / "artifacts" / "stray.so").exists()


@pytest.mark.parametrize("kind", ["export", "wrong-result"])
def test_a39_a_failed_build_leaves_the_old_bundle_as_it_was(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "dist" / "b"
    build_model(ROOT / "publish_relu", RELU, out)
    before, inode = files(out), out.stat().st_ino
    text = FAILS if kind == "export" else MODEL.format(result="torch.relu(x) + self.seed")
    if kind == "wrong-result":  # another model each time it is constructed: found when it is verified
        text = text.replace("def build():", "    seed = int.from_bytes(__import__('os').urandom(2))\n\n\ndef build():")
    with pytest.raises(CompileError):
        build_model(tmp_path / "model", text, out)
    assert files(out) == before
    assert out.stat().st_ino == inode
    assert hidden(tmp_path / "dist") == []


def test_a39_a_failed_first_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CompileError):
        build_model(tmp_path / "model", FAILS, tmp_path / "dist" / "b")
    assert not (tmp_path / "dist" / "b").exists()


def test_a_member_that_changed_since_is_put_right_by_the_next_build(tmp_path: Path) -> None:
    """A byte of the same file at the same size: what a loader refuses and asks to build again."""
    out = tmp_path / "b"
    result = build_model(ROOT / "publish_relu", RELU, out)
    good, inode = files(out), out.stat().st_ino
    assert build_model(ROOT / "publish_relu", RELU, out).digest == result.digest
    assert out.stat().st_ino == inode, "nothing changed, nothing is written"
    library = next(out.glob("artifacts/*/model.so"))
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(data)
    assert build_model(ROOT / "publish_relu", RELU, out).count("aoti") == 0
    assert files(out) == good


# --------------------------------------------------------------------------------- what may be replaced


def a_web_site(path: Path) -> None:
    path.mkdir()
    (path / "index.json").write_text('{"pages": ["home"]}')
    (path / "home.html").write_text("hello")


def a_folder_of_files(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("do not lose")


def a_file(path: Path) -> None:
    path.write_text("do not lose")


def a_zip(path: Path) -> None:
    write_zip(path, {"thesis.txt": b"do not lose"})


def a_bundle(path: Path) -> None:
    write_bundle(path)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(a_folder_of_files, "out", id="folder"),
        pytest.param(a_web_site, "out", id="folder-with-another-index"),
        pytest.param(a_file, "out", id="file"),
        pytest.param(a_file, "out.aotpack", id="file-called-archive"),
        pytest.param(a_zip, "out.zip", id="another-zip"),
        pytest.param(a_bundle, "out.aotpack", id="folder-called-archive"),
    ],
)
def test_what_is_no_bundle_is_not_replaced(make: Any, name: str, tmp_path: Path) -> None:
    """Refused before anything is exported, and once more before it would happen."""
    out = tmp_path / name
    make(out)
    before = files(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(OutputError) as caught:
        build_model(tmp_path / "model", "this is not Python", out)
    assert str(caught.value).startswith(f"{out}: ")
    assert caught.value.exit_code == 2
    with staging(out) as staged:
        write_bundle(staged)
        with pytest.raises(OutputError):
            publish(staged, out)
    assert {name: digest for name, digest in files(tmp_path).items() if not name.startswith("model/")} == before


@pytest.mark.parametrize("make", [a_bundle, Path.mkdir], ids=["bundle", "empty-folder"])
def test_a_bundle_or_an_empty_folder_is_replaced(make: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out)
    build_model(ROOT / "publish_relu", RELU, out)
    with apr.load(out) as session:
        assert answer(session) == 0.0


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    """`dist/current` names the folder that is replaced."""
    (tmp_path / "releases").mkdir()
    (tmp_path / "current").symlink_to(tmp_path / "releases" / "one")
    for model, text, wanted in (("relu", RELU, 0.0), ("sigmoid", SIGMOID, 0.5)):
        build_model(ROOT / f"publish_{model}", text, tmp_path / "current")
        assert (tmp_path / "current").is_symlink()
        with apr.load(tmp_path / "releases" / "one") as session:
            assert answer(session) == wanted
    assert hidden(tmp_path) == hidden(tmp_path / "releases") == []


def test_where_nothing_can_be_written_it_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AotpackError, match=r"file/out: cannot be written: File exists \(.*/file\)"):
        build_model(ROOT / "publish_relu", RELU, tmp_path / "file" / "out")


def test_a_mount_point_cannot_be_replaced_and_the_way_out_is_named(tmp_path: Path) -> None:
    """`docker run -v $PWD/dist:/out ... -o /out`."""
    with mounted(tmp_path / "out") as out:
        with pytest.raises(AotpackError, match="it is a mount point, which cannot be replaced: name a folder inside"):
            build_model(ROOT / "publish_relu", RELU, out)
        build_model(ROOT / "publish_relu", RELU, out / "bundle")
        with apr.load(out / "bundle") as session:
            assert answer(session) == 0.0


# --------------------------------------------------------------------------------- killed builds


COMMAND = [sys.executable, "-P", "-m", "aotpack", "build", "-j", "1"]


def start_build(manifest: Path, out: Path, cache: Path) -> subprocess.Popen[str]:
    """`aotpack build` with an empty store, returned once its export is done and it compiles."""
    environment = {
        **os.environ,
        "AOTPACK_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    process = subprocess.Popen(
        [*COMMAND, str(manifest), "-o", str(out)], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A shell starts what runs in its background deaf to SIGINT, and so would be all that the tests start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no thread of ours is alive
    )  # fmt: skip
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "exported f/export" in line, line + process.stderr.read()
    return process


def workers_of(cache: Path) -> list[int]:
    """Processes that build in `cache`, compilers included."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if (str(cache).encode() in command and b"aotpack.worker" in command) or str(
                cache / "build"
            ).encode() in command:
                found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_killed_build_leaves_the_old_bundle_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    out, cache = tmp_path / "dist" / "b", tmp_path / "cache"
    write_bundle(out)
    before = files(tmp_path / "dist")
    manifest = write_zoo(tmp_path / "model", RELU, ENTRIES)
    process = start_build(manifest, out, cache)
    time.sleep(1)
    assert workers_of(cache)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    deadline = time.monotonic() + 20
    while workers_of(cache) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of(cache) == []
    assert files(tmp_path / "dist") == before
    assert hidden(tmp_path / "dist") == []
    assert stdout == ""
    if number != signal.SIGKILL:
        assert stderr.strip().splitlines()[-1] == "interrupted; nothing was written"
        assert "Traceback" not in stderr


STAGED = """
import sys, time
from pathlib import Path
from aotpack.pack import staging
out = Path(sys.argv[1])
with staging(out) as folder:
    folder.mkdir()
    (folder / "half").write_text("half a bundle")
    print("staged", flush=True)
    time.sleep(600)
"""


def test_what_a_build_left_that_was_killed_while_staging_is_removed_by_the_next(tmp_path: Path) -> None:
    """And what a build that still runs has staged is let alone."""
    out = tmp_path / "b"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", STAGED, out], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "staged\n"
    (staged,) = hidden(tmp_path)
    build_model(ROOT / "publish_relu", RELU, out)
    assert hidden(tmp_path) == [staged]
    process.kill()
    process.communicate()
    assert hidden(tmp_path) == [staged]
    build_model(ROOT / "publish_sigmoid", SIGMOID, out)
    assert hidden(tmp_path) == []


# --------------------------------------------------------------------------------- archives, reproducibility


def test_an_archive_is_the_folder_in_one_file_and_the_same_bytes_each_time(relu: Path, tmp_path: Path) -> None:
    archives = []
    for name in ("one.aotpack", "two.aotpack", "three.zip"):
        result = build_model(ROOT / "publish_relu", RELU, tmp_path / name)
        assert result.path == tmp_path / name
        archives.append((tmp_path / name).read_bytes())
        time.sleep(1.1)  # a date in it would be another one
    assert len(set(archives)) == 1
    with zipfile.ZipFile(tmp_path / "one.aotpack") as archive:
        assert {name: sha256(archive.read(name)) for name in archive.namelist()} == files(relu)
        assert archive.namelist() == sorted(archive.namelist())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.aotpack", "three.zip", "two.aotpack"]


REPRODUCED = """
import torch


class Tail(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("rows", torch.linspace(0, 1, 192).view(3, 64, 1))
        self.register_buffer("columns", torch.linspace(1, 2, 192).view(3, 1, 64))

    def forward(self, x, scale=2.0):
        self.steps += 1
        loops = torch.sin(x.sum() + self.rows * self.columns)  # split as threads are counted
        return {"z": torch.softmax(self.linear(x), -1) * scale, "a": x.mean(0) + torch.tensor([1.5]), "l": loops}


def build():
    return Tail().eval()
"""


@pytest.mark.slow
def test_two_builds_in_other_folders_with_other_stores_are_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder for the manifest, another store, another temp folder, another user name, another hash seed, another
    number of threads."""
    entries = {
        "tail": entry(
            "build", {"x": {"shape": ["n", 6], "dtype": "float32"}}, [{"dims": {"n": {"min": 1, "max": 9, "opt": 4}}}]
        )
    }
    built = []
    for place, seed, threads in (("one", "1", "1"), ("a-much-longer-name-for-two", "22", "2")):
        root = tmp_path / place
        (root / "tmp").mkdir(parents=True)
        for name, value in (
            ("TMPDIR", str(root / "tmp")),
            ("USER", place),
            ("LOGNAME", place),
            ("PYTHONHASHSEED", seed),
            ("OMP_NUM_THREADS", threads),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
        manifest = write_zoo(root / "model", REPRODUCED, entries, bundle={"name": "same", "version": "1.0.0"})
        result = build(read_manifest(manifest), root / "out" / place, jobs=1, store=Store(root / "store"))
        assert result.count("aoti") == 1
        built.append((result.path, result.digest))
    (one, first), (two, second) = built
    assert files(one) == files(two)
    assert first == second
    for path in one.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if path.suffix == ".pt2":
                with zipfile.ZipFile(path) as archive:
                    content += b"".join(archive.read(name) for name in archive.namelist())
            for trace in (str(tmp_path), "a-much-longer-name-for-two", str(Path.home()), sys.prefix):
                assert trace.encode() not in content, f"{path.name} holds {trace}"


def test_the_digest_of_a_bundle_is_that_of_its_index(relu: Path) -> None:
    with apr.load(relu) as session:
        assert session.bundle.digest == sha256((relu / "index.json").read_bytes())
    index = json.loads((relu / "index.json").read_text())
    assert "created" not in json.dumps(index), "a date would make each build another one"
