"""The command line as people and pipelines meet it: streams, exit codes, what is built again and what is not.

One project, two variants, built once for all tests; each test works on its own copy of the builder's store, so what it
compiles is compiled by it.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.support.building import QUICK, ROOT
from tests.support.bundles import edited, set_need, sha256, with_member, write_bundle, write_zip, zip_bytes

Json = Any
MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return torch.relu(self.linear(x))


def build(seed=0):
    return Model(seed).eval()


def fail():
    raise RuntimeError("this source always fails")
"""


def manifest_text(batch: Json = (1, 2), **more: Any) -> str:
    """The project's manifest; JSON is YAML."""
    model = {
        "kind": "torch_export",
        "source": "model:build",
        "inputs": {"x": {"shape": ["batch", 8], "dtype": "float32"}},
        "points": [{"dims": {"batch": list(batch)}}],
        "inductor": QUICK,
    }
    return json.dumps(
        {
            "schema": "aotpack.manifest/v1",
            "bundle": {"name": "cli", "version": "1.0.0"},
            "targets": {"cpu": {"kind": "cpu"}},
            "entries": {"model": model},
            **more,
        },
        indent=1,
    )


class Project:
    """A folder with a manifest and a model, a store, and the command line run in it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.manifest, self.model, self.bundle = (
            folder / "manifest.yaml",
            folder / "model.py",
            folder / "dist" / "cli-1.0.0",
        )

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AOTPACK_", "PYTEST_"))}
        path = os.pathsep.join(path for path in sys.path if path)
        return {**kept, "PYTHONPATH": path, "AOTPACK_CACHE_DIR": str(self.cache), **variables}

    def __call__(
        self, *arguments: object, variables: dict[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """`aotpack ARGUMENTS`, run in the project's folder."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "aotpack", *map(str, arguments)],
            cwd=self.folder, env=self.environment(**(variables or {})), capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL, timeout=500, **more,
        )  # fmt: skip

    def json(self, *arguments: object, code: int = 0, **more: Any) -> Json:
        """The one document that `--json` prints, after making sure of the exit code."""
        done = self(*arguments, "--json", **more)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project, built. Its compiles outlive the test run; its export does not, since its folder is new each time."""
    pytest.importorskip("torch", reason="real builds")
    folder = tmp_path_factory.mktemp("cli")
    (folder / "manifest.yaml").write_text(manifest_text())
    (folder / "model.py").write_text(MODEL)
    with FileLock(ROOT / "cli.lock"):
        project = Project(folder, ROOT / "cli")
        done = project("build", "manifest.yaml")
        assert done.returncode == 0, done.stderr
        shutil.copytree(
            ROOT / "cli", folder / "cache", copy_function=os.link, ignore=shutil.ignore_patterns("tmp", ".tmp-*")
        )
    return Project(folder, folder / "cache")


@pytest.fixture
def project(origin: Project, tmp_path: Path) -> Iterator[Project]:
    """The built project with a store of this test's own, as it was when it ends."""
    shutil.copytree(origin.cache, tmp_path / "cache", copy_function=os.link)
    before = {path: path.read_text() for path in (origin.manifest, origin.model)}
    yield Project(origin.folder, tmp_path / "cache")
    for path, text in before.items():
        if path.read_text() != text:
            path.write_text(text)


@pytest.fixture
def bare(tmp_path: Path) -> Project:
    """The command line in an empty folder, with an empty store."""
    (tmp_path / "project").mkdir()
    return Project(tmp_path / "project", tmp_path / "empty-cache")


# ------------------------------------------------------------------------------------- build, and build again


def test_the_last_line_of_a_build_is_the_path_of_the_bundle(project: Project) -> None:
    done = project("build", "manifest.yaml", "-o", "somewhere/else")
    assert done.stdout == "somewhere/else\n"
    assert (project.folder / "somewhere" / "else" / "index.json").exists()
    assert "0 exported, 0 compiled, 0 verified in " in done.stderr
    assert sha256((project.folder / "somewhere/else/index.json").read_bytes()) in done.stderr


def test_an_unchanged_rebuild_runs_nothing_and_imports_neither_torch_nor_the_model(project: Project) -> None:
    inode = project.bundle.stat().st_ino
    done = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "aotpack", "build", "manifest.yaml", "--json"],
        cwd=project.folder, env=project.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    value = json.loads(done.stdout)
    assert (value["exported"], value["compiled"]) == (0, 0)
    assert len(value["verified"]) == 3
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "aotpack.build" in imported
    assert {name.partition(".")[0] for name in imported}.isdisjoint({"torch", "numpy", "sympy", "safetensors", "model"})
    assert project.bundle.stat().st_ino == inode


def test_an_unchanged_rebuild_starts_no_process(project: Project, tmp_path: Path) -> None:
    """Also no compiler, but for its version."""
    (tmp_path / "bin").mkdir()
    mark = tmp_path / "ran"
    (tmp_path / "bin" / "g++").write_text(f'#!/bin/sh\necho "$@" >> {mark}\nexec /usr/bin/g++ "$@"\n')
    (tmp_path / "bin" / "g++").chmod(0o755)
    project("build", "manifest.yaml", variables={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    assert mark.read_text() == "--version\n"


@pytest.mark.slow
def test_one_more_size_exports_again_and_compiles_one_variant(project: Project) -> None:
    project.manifest.write_text(manifest_text(batch=(1, 2, 3)))
    jobs = {job["name"]: job["status"] for job in project.json("plan", "manifest.yaml")["jobs"]}
    assert jobs["model/export/cpu"] == "changed: variants"
    value = project.json("build", "manifest.yaml", "-o", "three")
    assert (value["exported"], value["compiled"], value["failures"]) == (1, 1, {})
    assert [*value["verified"]].count("model/batch3/cpu") == 1
    again = project.json("build", "manifest.yaml", "-o", "three")
    assert (again["exported"], again["compiled"]) == (0, 0)
    assert again["digest"] == value["digest"]


def test_an_option_of_inductor_compiles_again_and_exports_nothing(project: Project) -> None:
    found = project.json(
        "plan", "manifest.yaml", "--set", "entries.model.inductor={aot_inductor.compile_wrapper_opt_level: O1}"
    )
    assert [(job["kind"], job["status"]) for job in found["jobs"]] == [
        ("export", "cached"),
        *[("aoti", "changed: options")] * 2,
    ]
    assert found["to_run"] == 2


def test_only_new_weights_export_again_and_compile_nothing(project: Project) -> None:
    before = project.json("inspect", project.bundle)
    value = project.json("build", "manifest.yaml", "-o", "reseeded", "--set", "entries.model.args.seed=7")
    assert (value["exported"], value["compiled"]) == (1, 0)
    after = project.json("inspect", "reseeded")
    assert after["weights"]["sha256"] != before["weights"]["sha256"]
    assert [v["sha256"] for v in after["entries"]["model"]["variants"]] == [
        v["sha256"] for v in before["entries"]["model"]["variants"]
    ]


def test_a_touched_source_is_the_same_and_an_edited_one_is_exported_again(project: Project) -> None:
    os.utime(project.model)
    assert [job["status"] for job in project.json("plan", "manifest.yaml")["jobs"]] == ["cached"] * 3
    project.model.write_text(MODEL.replace("relu", "sigmoid"))
    assert [job["status"] for job in project.json("plan", "manifest.yaml")["jobs"]] == [
        "changed: file model.py",
        *["after model/export/cpu"] * 2,
    ]
    project.model.write_text(MODEL)
    assert [job["status"] for job in project.json("plan", "manifest.yaml")["jobs"]] == ["cached"] * 3
    project.model.write_text(MODEL + "\n# a remark\n")
    value = project.json("build", "manifest.yaml", "-o", "remarked")
    assert (value["exported"], value["compiled"]) == (1, 0)


def test_a_touched_source_builds_nothing(project: Project) -> None:
    os.utime(project.model)
    value = project.json("build", "manifest.yaml")
    assert (value["exported"], value["compiled"]) == (0, 0)


@pytest.mark.parametrize(
    ("options", "variants"),
    [
        pytest.param(["--only", "*batch1*"], ["model/batch1/cpu"], id="only-a-variant"),
        pytest.param(["--only", "model"], ["model/batch1/cpu", "model/batch2/cpu"], id="only-an-entry"),
        pytest.param(["--target", "cpu"], ["model/batch1/cpu", "model/batch2/cpu"], id="target"),
        pytest.param(["--set", "entries.model.points[0].dims.batch=2"], ["model/batch2/cpu"], id="set-a-value"),
        pytest.param(
            ["--set", "entries.model.points[0].dims.batch=9", "--set", "entries.model.points.p0.dims.batch=[2, 5]"],
            ["model/batch2/cpu", "model/batch5/cpu"], id="set-twice",
        ),
    ],
)  # fmt: skip
def test_options_narrow_what_is_built(options: list[str], variants: list[str], project: Project) -> None:
    jobs = project.json("plan", "manifest.yaml", *options)["jobs"]
    assert [job["name"] for job in jobs if job["kind"] == "aoti"] == variants


def test_a_plan_says_what_it_would_do_and_does_nothing(project: Project, bare: Project) -> None:
    done = project("plan", "manifest.yaml")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["job", "name", "target", "status"]
    assert [line.split()[-1] for line in lines[1:]] == ["cached"] * 3
    assert done.stderr == "0 of 3 jobs to run, about 0 s and 0.0 MB\n"

    bare.manifest.write_text(manifest_text())
    bare.model.write_text("this is not Python")
    value = bare.json("plan", "manifest.yaml")
    assert [job["status"] for job in value["jobs"]] == ["new", *["after model/export/cpu"] * 2]
    assert value["to_run"] == 3
    assert value["estimated_seconds"] > 0
    assert value["estimated_bytes"] > 0
    assert not bare.cache.exists()
    assert sorted(path.name for path in bare.folder.iterdir()) == ["manifest.yaml", "model.py"]


def test_plan_and_rebuild_are_quick(project: Project) -> None:
    """The fastest of three: the promise is a second for 100 variants on a quiet machine."""
    for command in ("plan", "build"):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            assert project(command, "manifest.yaml").returncode == 0
            times.append(time.perf_counter() - start)
        assert min(times) < 4, command


# ------------------------------------------------------------------------------------- exit codes


def test_0_a_bundle_is_looked_into_checked_explained_and_verified(project: Project) -> None:
    for command in (["inspect"], ["check"], ["explain"], ["verify"]):
        rest = ["model", "--shape", "x=2x8:float32"] if command == ["explain"] else []
        assert project(*command, project.bundle, *rest).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="nothing"),
        pytest.param(["bogus"], id="unknown-command"),
        pytest.param(["build"], id="no-manifest"),
        pytest.param(["build", "m.yaml", "--jobs", "0"], id="no-jobs"),
        pytest.param(["build", "m.yaml", "--bogus"], id="unknown-option"),
        pytest.param(["explain", "{bundle}", "encoder", "--shape", "x=2"], id="shape-without-dtype"),
        pytest.param(["explain", "{bundle}", "encoder", "--shape", "x=2x4:float31"], id="unknown-dtype"),
        pytest.param(["explain", "{bundle}", "encoder", "--shape", "y=2x4:float32"], id="unknown-argument"),
        pytest.param(["explain", "{bundle}", "encoder"], id="missing-argument"),
        pytest.param(["explain", "{bundle}", "encoder", "--shape", "x=2x4:float32", "--device", "tpu"], id="device"),
        pytest.param(["check", "{bundle}", "--device", "gpu"], id="device-to-check"),
        pytest.param(["verify", "{bundle}", "--source", "nowhere"], id="no-such-folder"),
        pytest.param(["explain", "{bundle}", "encode", "--shape", "x=2x4:float32"], id="unknown-entry"),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_2_wrong_usage(arguments: list[str], form: str, bare: Project) -> None:
    write_bundle(bare.folder / "bundle")
    given = [argument.replace("{bundle}", "bundle") for argument in arguments]
    done = bare(*given, *(["--json"] if form == "json" else []))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if form == "json":
        value = json.loads(done.stdout)
        assert (value["ok"], value["exit_code"]) == (False, 2)
        assert value["error"]["message"]
    else:
        assert done.stdout == ""
        assert done.stderr


def test_2_an_output_that_holds_something_else(project: Project, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("")
    done = project("build", "manifest.yaml", "-o", tmp_path / "precious")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path / 'precious'}: exists and is not a bundle\nhint: ")


def test_2_an_output_that_is_called_like_another_kind_of_file(bare: Project) -> None:
    """It would have become a folder of that name."""
    bare.manifest.write_text(manifest_text())
    done = bare("build", "manifest.yaml", "-o", "bundle.tar.gz")
    assert (done.returncode, done.stdout) == (2, "")
    said = "error: .*bundle.tar.gz: .gz is no form of a bundle\nhint: an archive is FILE.aotpack or FILE.zip\n"
    assert re.fullmatch(said, done.stderr)


def test_a_cache_that_cannot_be_made_is_named_with_what_to_set(bare: Project) -> None:
    bare.cache.parent.mkdir(exist_ok=True)
    bare.cache.write_text("a file")
    bare.manifest.write_text(manifest_text())
    bare.model.write_text(MODEL)
    value = bare.json("build", "manifest.yaml", code=1)
    assert value["error"]["type"] in {"FileExistsError", "NotADirectoryError"}
    assert value["error"]["hint"] == "results are kept there; AOTPACK_CACHE_DIR names another folder"
    assert bare("build", "manifest.yaml").stderr.endswith(f"\nhint: {value['error']['hint']}\n")


TEN = """\
schema: aotpack.manifest/v2
bundle: {name: 3d, version: one}
targets:
  cpu: {kind: cpu, marsh: x86-64-v3}
entries:
  first:
    kind: torch_export
    source: model
    inputs:
      x: {shape: [batch, 0.5], dtype: float31}
    points:
      - {tier: boiling, dims: {batch: {min: 4, max: 2}}}
    on_miss: {policy: maybe}
    training: yes
"""
PLACES = [(1, "schema"), (2, "bundle.name"), (2, "bundle.version"), (4, "targets.cpu"), (8, "entries.first.source"),
          (10, "entries.first.inputs.x.shape"), (10, "entries.first.inputs.x.dtype"), (12, "entries.first.points[0].tier"),
          (12, "entries.first.points[0].dims.batch"), (13, "entries.first.on_miss.policy"), (14, "entries.first.training")]  # fmt: skip


@pytest.mark.parametrize("command", ["build", "plan"])
def test_3_a_manifest_with_many_mistakes_shows_them_all_and_writes_nothing(command: str, bare: Project) -> None:
    bare.manifest.write_text(TEN)
    done = bare(command, "manifest.yaml")
    assert (done.returncode, done.stdout) == (3, "")
    lines = done.stderr.splitlines()
    assert len(lines) == len(PLACES) == 11
    for line, (number, path) in zip(lines, PLACES, strict=True):
        place, message = line.split(": error: ")
        file, at, column = place.split(":")
        assert (file, int(at)) == ("manifest.yaml", number)
        assert int(column) >= 1
        assert message.startswith(path)
    assert sorted(path.name for path in bare.folder.iterdir()) == ["manifest.yaml"]
    assert not bare.cache.exists()

    value = bare.json(command, "manifest.yaml", code=3)
    assert (value["ok"], value["exit_code"], value["error"]["type"]) == (False, 3, "ManifestError")
    assert [
        f"{p['file']}:{p['line']}:{p['col']}: error: {p['path']}: {p['message']}" for p in value["error"]["problems"]
    ] == lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["nope.yaml"], "nope.yaml:1:1: error: cannot be read: No such file or directory", id="missing"),
        pytest.param(["."], ".:1:1: error: cannot be read: Is a directory", id="directory"),
        pytest.param(["manifest.yaml", "--target", "gpu"], "no target 'gpu'; the manifest has: cpu", id="target"),
        pytest.param(["manifest.yaml", "--only", "decoder*"], "'decoder*' matches no variant", id="only"),
        pytest.param(["manifest.yaml", "--set", "entries.model.tear=hot"], "unknown key 'tear'", id="set-unknown"),
        pytest.param(["manifest.yaml", "--set", "bundle"], "--set:1:1: error: ", id="set-nothing"),
    ],
)
@pytest.mark.parametrize("command", ["build", "plan"])
def test_3_what_a_manifest_cannot_mean(command: str, arguments: list[str], words: str, bare: Project) -> None:
    bare.manifest.write_text(manifest_text())
    bare.model.write_text(MODEL)
    done = bare(command, *arguments)
    assert (done.returncode, done.stdout) == (3, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (bare.folder / "dist").exists()


def test_1_a_source_that_fails_names_its_line(project: Project) -> None:
    done = project("build", "manifest.yaml", "-o", "never", "--set", "entries.model.source=model:fail")
    assert (done.returncode, done.stdout) == (1, "")
    assert "RuntimeError: this source always fails at model.py:20" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project.folder / "never").exists()
    assert (
        "Traceback" in project("build", "manifest.yaml", "--set", "entries.model.source=model:fail", "--debug").stderr
    )


@pytest.mark.slow
def test_5_what_fails_is_left_out_under_keep_going(project: Project) -> None:
    index = json.loads(project.manifest.read_text())
    index["entries"]["broken"] = {**index["entries"]["model"], "source": "model:fail"}
    project.manifest.write_text(json.dumps(index))
    value = project.json("build", "manifest.yaml", "-o", "some", "--keep-going", code=5)
    assert (value["ok"], value["path"]) == (False, "some")
    assert value["failures"].keys() == {"broken/batch1/cpu", "broken/batch2/cpu"}
    assert all("this source always fails" in reason for reason in value["failures"].values())
    assert value["compiled"] == 0
    assert list(project.json("inspect", "some")["entries"]) == ["model"]

    done = project("build", "manifest.yaml", "-o", "some", "--keep-going")
    assert (done.returncode, done.stdout) == (5, "some\n")
    assert "left out: broken/batch1/cpu: " in done.stderr
    assert project("build", "manifest.yaml", "-o", "none", "--keep-going", "--only", "broken").returncode == 1
    assert not (project.folder / "none").exists()


def test_4_without_a_compiler_or_torch_the_tool_is_named(project: Project, bare: Project) -> None:
    bare.manifest.write_text(manifest_text())
    bare.model.write_text(MODEL)
    for command in ("build", "plan"):
        done = bare(command, "manifest.yaml", variables={"CXX": "no-such-g++"})
        assert (done.returncode, done.stdout) == (4, "")
        assert "no-such-g++" in done.stderr
    value = bare.json("build", "manifest.yaml", "--set", 'requires={torch: ">=99"}', code=4)
    assert "torch>=99" in value["error"]["message"]
    assert not (bare.folder / "dist").exists()


NO_TORCH = """
import importlib.metadata, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "sympy", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
find = importlib.metadata.Distribution.from_name.__func__

def from_name(cls, name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return find(cls, name)

importlib.metadata.Distribution.from_name = classmethod(from_name)
sys.argv = ["aotpack", *sys.argv[1:]]
from aotpack.cli import main
main()
"""


def without_torch(project: Project, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`aotpack ARGUMENTS` where torch is not installed."""
    return subprocess.run(
        [sys.executable, "-P", "-c", NO_TORCH, *map(str, arguments)],
        cwd=project.folder, env=project.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(["inspect", "bundle"], 0, id="inspect"),
        pytest.param(["explain", "bundle", "encoder", "--shape", "x=2x4:float32"], 0, id="explain"),
        pytest.param(["check", "bundle"], 0, id="check"),
        pytest.param(["schema"], 0, id="schema"),
        pytest.param(["env"], 0, id="env"),
        pytest.param(["init", "new.yaml"], 0, id="init"),
        pytest.param(["--version"], 0, id="version"),
        pytest.param(["--help"], 0, id="help"),
        pytest.param(["verify", "bundle"], 4, id="verify"),
        pytest.param(["build", "manifest.yaml"], 4, id="build"),
        pytest.param(["plan", "manifest.yaml"], 4, id="plan"),
    ],
)
def test_without_torch_a_command_works_or_says_that_it_needs_it(arguments: list[str], code: int, bare: Project) -> None:
    write_bundle(bare.folder / "bundle")
    bare.manifest.write_text(manifest_text())
    done = without_torch(bare, *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert "the package 'torch' is needed for" in done.stderr
        assert "pip install" in done.stderr


def changed_needs(need: str, value: str, *kinds: str) -> Callable[[Json], None]:
    def change(index: Json) -> None:
        for entry in index["entries"].values():
            for kind in kinds:
                for variant in entry[kind]:
                    set_need(index, variant, need, value)

    return change


def test_6_a_bundle_that_does_not_fit_this_host(project: Project, tmp_path: Path) -> None:
    with_fallback = edited(project.bundle, tmp_path / "fallback", changed_needs("torch", "9.9.9", "variants"))
    done = project("check", with_fallback)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "fits with fallback"
    assert "built with torch 9.9.9, running" in done.stdout
    assert project("check", with_fallback, "--strict").returncode == 6
    value = project.json("check", with_fallback)
    assert value["variants"]["model/batch1/cpu"].startswith("built with torch 9.9.9")
    assert value["variants"]["model/program0"] == "fits"

    nothing = edited(project.bundle, tmp_path / "nothing", changed_needs("arch", "vax", "variants", "programs"))
    for command in ("check", "verify"):
        value = project.json(command, nothing, code=6)
        assert value["error"]["type"] == "TargetMismatch"
        assert "built for machine vax" in value["error"]["message"]
    assert project("check", project.bundle, "--device", "cuda").returncode == 6
    newer = edited(project.bundle, tmp_path / "newer", lambda index: index.update(format=99))
    for command in ("check", "inspect", "verify"):
        done = project(command, newer)
        assert (done.returncode, done.stdout) == (6, "")
        assert "format version is 99, this aotpack-runtime reads 1" in done.stderr


def test_6_verify_of_a_variant_that_does_not_fit(project: Project, tmp_path: Path) -> None:
    """A18: not a pass, since it was not run; and said apart from what failed."""
    bundle = edited(project.bundle, tmp_path / "b", changed_needs("glibc", "2.99", "variants"))
    value = project.json("verify", bundle, "--source", project.folder, code=6)
    verdicts = {name: seen["verdict"] for name, seen in value["variants"].items()}
    assert verdicts == {"model/batch1/cpu": "skipped", "model/batch2/cpu": "skipped", "model/program0": "ok"}
    assert "needs glibc 2.99" in value["variants"]["model/batch1/cpu"]["detail"]


def test_1_verify_of_a_bundle_that_is_not_what_its_source_gives(project: Project, tmp_path: Path) -> None:
    weights = next(project.bundle.glob("weights/*"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x40
    other = with_member(project.bundle, tmp_path / "other", str(weights.relative_to(project.bundle)), bytes(data))
    done = project("verify", other, "--source", project.folder)
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "Traceback" not in done.stderr
    far = project("verify", other, "--source", tmp_path)
    assert far.returncode == 0, "without the source it agrees with itself"
    assert "against the bundle's exported program" in far.stdout
    assert re.search(r"model/program0 +ok +\d+ cases against itself", far.stdout)
    assert (
        "model: compared with the bundle's own program, not with eager: model:build: cannot be imported" in far.stderr
    )


def test_1_verify_of_a_bundle_whose_source_has_changed_since(project: Project) -> None:
    project.model.write_text(MODEL.replace("seed=0", "seed=7"))
    done = project("verify", project.bundle)
    assert done.returncode == 1
    assert "its source gives another 'linear.weight' than the bundle has" in done.stdout
    assert "build again when the source has changed" in done.stdout


@pytest.mark.parametrize("kind", ["artifacts", "programs", "weights"])
def test_7_verify_of_a_bundle_with_a_changed_byte(kind: str, project: Project, tmp_path: Path) -> None:
    bundle = tmp_path / "b"
    shutil.copytree(project.bundle, bundle)
    member = next(path for path in (bundle / kind).rglob("*") if path.is_file())
    data = bytearray(member.read_bytes())
    data[len(data) // 2] ^= 1
    member.write_bytes(data)
    value = project.json("verify", bundle, code=7)
    assert value["error"]["type"] == "DigestMismatch"
    assert str(member.relative_to(bundle)) in value["error"]["message"]


A21 = {
    "truncated": (lambda at, good: at.write_bytes(good[: len(good) // 2]), "is truncated"),
    "empty": (lambda at, good: at.write_bytes(b""), "is empty"),
    "html": (lambda at, good: at.write_text("<!doctype html><title>404"), "is not a bundle"),
    "directory": (lambda at, good: at.mkdir(), "is a directory without index.json"),
    "missing": (lambda at, good: None, "no such file"),
    "no-index": (lambda at, good: write_zip(at, {"a": b"b"}), "is a zip without index.json"),
}


@pytest.mark.parametrize("command", ["inspect", "check", "verify", "explain"])
@pytest.mark.parametrize("what", A21)
def test_7_a21_what_is_no_bundle_is_called_what_it_is(what: str, command: str, bare: Project) -> None:
    good = zip_bytes({"index.json": b"{}", "weights": bytes(1000)})
    place = bare.folder / "model.aotpack"
    make, words = A21[what]
    make(place, good)
    rest = ["encoder"] if command == "explain" else []
    done = bare(command, "model.aotpack", *rest)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith(f"error: model.aotpack: {words}")
    assert "Traceback" not in done.stderr
    assert not list(bare.cache.rglob("*"))


def test_0_a21_a_good_archive_is_looked_into_whatever_it_is_called(project: Project, tmp_path: Path) -> None:
    assert project("build", "manifest.yaml", "-o", tmp_path / "good.aotpack").returncode == 0
    shutil.copy(tmp_path / "good.aotpack", tmp_path / "good.bin")
    for command in ("inspect", "check", "verify"):
        assert project(command, tmp_path / "good.bin").returncode == 0


# ------------------------------------------------------------------------------------- what each command shows


def test_inspect_shows_entries_guards_and_digests(project: Project) -> None:
    value = project.json("inspect", project.bundle)
    assert value["digest"] == sha256((project.bundle / "index.json").read_bytes())
    assert (value["name"], value["version"]) == ("cli", "1.0.0")
    first = value["entries"]["model"]["variants"][0]
    assert first["id"] == "model/batch1/cpu"
    assert first["guards"] == ["x: float32[1, 8] on cpu"]
    assert first["needs"]["cpu"] == "x86-64-v3"
    assert (
        value["bytes"]
        == sum(path.stat().st_size for path in project.bundle.rglob("*") if path.is_file())
        - (project.bundle / "index.json").stat().st_size
    )
    text = project("inspect", project.bundle).stdout
    for part in (value["digest"], "model(x)  from model:build, on a miss: jit", "x: float32[2, 8] on cpu", "torch 2."):
        assert part in text


def test_explain_tells_a_hit_from_a_miss_and_who_serves_it(project: Project) -> None:
    def explain(*options: str) -> str:
        return project("explain", project.bundle, "model", *options).stdout

    assert explain("--shape", "x=2x8:float32") == "hit: model/batch2/cpu\n"
    miss = explain("--shape", "x=3x8:float32").splitlines()
    assert miss[0] == "miss"
    assert "  model/batch1/cpu: x.shape[0]: expected 1, got 3" in miss
    assert miss[-1] == "served by: model/program0"
    assert explain("--shape", "x=2x8:float64").splitlines()[-1] == "served by: the source, where it can be imported"
    assert "x: expected a float32 tensor, got 3" in explain("--value", "x=3")
    assert explain("--shape", "x=2x8:float32", "--device", "cuda").splitlines()[1:] == [
        "  model/batch1/cpu: is for cpu, this session is for cuda",
        "  model/batch2/cpu: is for cpu, this session is for cuda",
        "served by: the source, where it can be imported",
    ]
    misspelt = project("explain", project.bundle, "model", "--shape", "y=2x8:float32")
    assert "model has no argument 'y'; it has: x" in misspelt.stderr
    value = project.json("explain", project.bundle, "model", "--shape", "x=scalar:float32")
    assert value["miss"]["model/batch1/cpu"] == "x: expected 2 dims, got 0 []"
    assert value["fallback"] is None


def test_explain_puts_containers_together_in_their_own_order(bare: Project) -> None:
    from tests.support.bundles import index_record

    index = index_record()
    entry = index["entries"]["encoder"]
    for variant in (*entry["variants"], *entry["programs"]):
        guards = variant["guards"]
        (leaf,) = guards["leaves"]
        guards["trees"] = [["dict", ["a", "b"], "*", ["list", "*"]]]
        guards["leaves"] = [{**leaf, "path": "x['a']"}, {**leaf, "path": "x['b'][0]", "dtype": "int64"}]
        variant["outputs"]["leaves"][0]["shape"] = ["4"]
        variant["examples"] = [[[2, 4], [2, 4]]]
    write_bundle(bare.folder / "bundle", index)
    both = ["--shape", "x['b'][0]=2x4:int64", "--shape", "x['a']=2x4:float32"]
    assert bare("explain", "bundle", "encoder", *both).stdout == "hit: encoder/batch2/cpu\n"
    done = bare("explain", "bundle", "encoder", "--shape", "x['c']=2x4:int64")
    assert done.returncode == 2
    assert "has the leaves x['a'], x['b'][0]" in done.stderr.replace("\n", " ")
    assert "expected dict with keys" in bare("explain", "bundle", "encoder", "--value", "x=[1, 2]").stdout


def test_env_names_versions_settings_and_the_host(bare: Project) -> None:
    value = bare.json("env", variables={"AOTPACK_MODE": "strict", "AOTPACK_CACHEDIR": "/misspelt"})
    assert value["unknown_variables"] == {"AOTPACK_CACHEDIR": "/misspelt"}
    assert value["packages"]["aotpack"] == value["packages"]["aotpack-runtime"]
    assert value["variables"]["AOTPACK_MODE"] == "strict"
    assert value["cache_dir"] == str(bare.cache)
    assert value["machine"]["arch"] == os.uname().machine
    assert "variables.AOTPACK_MODE: strict\n" in bare("env", variables={"AOTPACK_MODE": "strict"}).stdout


def test_init_writes_a_manifest_that_plans(bare: Project) -> None:
    for name in ("3D models (new)", "...", "plain"):
        folder = bare.folder / name
        folder.mkdir()
        done = bare("init", folder / "manifest.yaml")
        assert (done.returncode, done.stdout) == (0, f"{folder / 'manifest.yaml'}\n")
        assert bare("plan", folder / "manifest.yaml").returncode == 0, name
    again = bare("init", bare.folder / "plain" / "manifest.yaml")
    assert (again.returncode, again.stdout) == (2, "")
    assert "exists" in again.stderr
    assert bare.json("init", bare.folder / "plain" / "manifest.yaml", "--force")["ok"]
    assert bare("init", "no/such/folder/m.yaml").returncode == 1


def test_the_schema_in_the_repository_is_that_of_the_manifest(bare: Project, repo: Path) -> None:
    """`aotpack schema > manifests/schema.json` makes it anew."""
    assert bare("schema").stdout == (repo / "manifests" / "schema.json").read_text()


# ------------------------------------------------------------------------------------- streams


def commands(bundle: str = "bundle") -> list[list[str]]:
    return [
        ["plan", "manifest.yaml"], ["build", "manifest.yaml", "-o", "out"], ["inspect", bundle],
        ["explain", bundle, "model", "--shape", "x=2x8:float32"], ["check", bundle], ["verify", bundle], ["schema"],
        ["env"], ["init", "new.yaml", "--force"],
    ]  # fmt: skip


def test_with_json_every_command_prints_one_document_and_nothing_else(project: Project) -> None:
    for command in commands(str(project.bundle)):
        value = project.json(*command)
        assert value.get("ok", True) is True, command


def test_with_json_a_failure_is_one_document_too(bare: Project) -> None:
    bare.manifest.write_text("nonsense: true")
    for command in commands():
        if command[0] in {"schema", "env", "init"}:
            continue
        done = bare(*command, "--json")
        value = json.loads(done.stdout)
        assert (value["ok"], value["exit_code"]) == (False, done.returncode)
        assert done.returncode in {3, 7}
        assert {"type", "message"} <= value["error"].keys()
        assert done.stderr == ""


def test_a_reader_that_goes_away_is_no_error(project: Project) -> None:
    for command in commands(str(project.bundle)):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "aotpack", *command], cwd=project.folder, env=project.environment(),
            stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        os.close(writing)
        assert done.returncode == 0, command
        assert "rror" not in done.stderr, command


@pytest.mark.slow
def test_a_build_goes_on_when_nobody_reads_its_progress(project: Project) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "aotpack", "build", "manifest.yaml", "-o", "unseen", "--set", "entries.model.args.seed=3"],
        cwd=project.folder, env=project.environment(), stdout=subprocess.PIPE, stderr=writing, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, "unseen\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_error(closed: str, project: Project) -> None:
    for command in (["inspect", str(project.bundle)], ["build", "manifest.yaml"]):
        line = " ".join([sys.executable, "-P", "-m", "aotpack", *command, closed])
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            cwd=project.folder,
            env=project.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if closed == "2>&-":
            assert done.stdout.count("\n") == (1 if command[0] == "build" else done.stdout.count("\n"))


def test_a_full_disk_behind_stdout_is_an_error_in_one_line(project: Project) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "aotpack", "inspect", str(project.bundle)],
            cwd=project.folder, env=project.environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: output: No space left on device\n"


def on_a_terminal(project: Project, *arguments: str, **variables: str) -> str:
    """What a terminal gets to see of a command."""
    main, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "aotpack", *arguments], cwd=project.folder, env=project.environment(**variables),
        stdin=end, stdout=end, stderr=end,
    )  # fmt: skip
    os.close(end)
    seen = b""
    while True:
        try:
            data = os.read(main, 4096)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(main)
    process.wait()
    return seen.decode()


COLOUR = "\x1b["


def test_colour_is_for_terminals_that_want_it(project: Project) -> None:
    for arguments in (["--help"], ["bogus"], ["inspect", "nope"], ["plan", "manifest.yaml"]):
        done = project(*arguments)
        assert COLOUR not in done.stdout + done.stderr
        seen = on_a_terminal(project, *arguments, NO_COLOR="1", TERM="xterm-256color")
        assert seen
        numbers = [int(number) for style in re.findall(r"\x1b\[([\d;]+)m", seen) for number in style.split(";")]
        colours = [number for number in numbers if 30 <= number < 50 or number >= 90]
        assert colours == []


@pytest.mark.slow
def test_on_a_dumb_terminal_progress_is_plain_lines(project: Project) -> None:
    seen = on_a_terminal(
        project, "build", "manifest.yaml", "-o", "dumb", "--set", "entries.model.args.seed=4", TERM="dumb", NO_COLOR="1"
    )
    assert "\x1b" not in seen
    assert seen.count("exported model/export/cpu") == 1
    assert seen.splitlines()[-1] == "dumb"


def test_quiet_says_nothing_but_the_path(project: Project) -> None:
    done = project("build", "manifest.yaml", "--quiet")
    assert (done.stdout, done.stderr) == ("dist/cli-1.0.0\n", "")


def test_help_of_every_command_names_its_arguments_and_takes_no_time(bare: Project) -> None:
    text = bare("--help").stdout
    for command, *_ in commands():
        assert command in text
        done = bare(command, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert "--json" in done.stdout
        assert "--debug" in done.stdout


def test_jobs_come_from_the_option_or_the_variable(project: Project) -> None:
    for value in ("1", "auto"):
        assert project("build", "manifest.yaml", variables={"AOTPACK_JOBS": value}).returncode == 0
    done = project("build", "manifest.yaml", variables={"AOTPACK_JOBS": "many"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: AOTPACK_JOBS is 'many'; expected a number of processes, or auto\n"
