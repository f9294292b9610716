"""Kernel entries from manifest to bundle with the real compilers and no GPU: what is built, what is built again, what
is said of mistakes, and which variant each GPU would take.

The example manifests are built once for all test processes. A small project of two Triton kernels and a C++ template is
built once for this file; each test works on its own copy of the store, so what it compiles is compiled by it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

pytest.importorskip("triton", reason="real compilers")
pytest.importorskip("cuda.bindings", reason="real compilers")

from aotpack.build import build
from aotpack.cli import check
from aotpack.compilers.cubin import read_cubin, read_ptx
from aotpack.jobs import COMPILES, Result
from aotpack.kernel_plan import KernelPlan, candidates
from aotpack.manifest import read_manifest
from aotpack.manifest_kernels import TritonEntry
from aotpack.plan import EntryPlan, make_plan
from aotpack.steps import steps
from aotpack_runtime import load
from aotpack_runtime.bundle import Bundle, open_bundle
from aotpack_runtime.dispatch import Hit, KernelDispatcher, Miss
from aotpack_runtime.errors import AotpackError, CompileError, ManifestError, TargetMismatch
from aotpack_runtime.format import index as format_index
from aotpack_runtime.format import index_json
from aotpack_runtime.format.gpu import SHARED_EVERYWHERE
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.launch import CODE_BYTES, DESCRIPTOR_BYTES, Descriptor
from aotpack_runtime.format.tensor import Call, TensorMeta
from aotpack_runtime.format.tree import LEAF
from aotpack_runtime.machine import made_up
from aotpack_runtime.store import Store
from aotpack_runtime.verdict import judge, reject_variant
from tests.support.building import ROOT
from tests.support.bundles import index_record, members, sha256

Json = Any
MANIFESTS = Path(__file__).parents[2] / "manifests"
EXAMPLES = ("llm_kernels", "sampler")


# ----------------------------------------------------------------------------------------------- the examples


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> tuple[str, Path]:
    return request.param, example_bundle(request.param)


def example_bundle(name: str) -> Path:
    """The bundle of an example manifest, built once for all test processes."""
    ROOT.mkdir(exist_ok=True)
    with FileLock(ROOT / f"example-{name}.lock"):
        manifest = read_manifest(MANIFESTS / f"{name}.yaml")
        return build(manifest, ROOT / f"example-{name}", jobs=2, store=Store(ROOT / "store")).path


def opened(path: Path) -> Bundle:
    bundle = open_bundle(path)
    bundle.close()
    return bundle


def artifacts(path: Path) -> Iterator[tuple[Variant, bytes]]:
    """Every variant with the bytes of its only file."""
    for variant in opened(path).index.variants():
        ((name, _),) = variant.artifact.files.items()
        yield variant, (path / "artifacts" / variant.artifact.digest / name).read_bytes()


@pytest.mark.slow
def test_every_variant_of_the_plan_is_in_the_bundle(example: tuple[str, Path]) -> None:
    """For three architectures and PTX."""
    name, path = example
    plan = make_plan(read_manifest(MANIFESTS / f"{name}.yaml"))
    planned = [variant for entry in plan.entries if isinstance(entry, KernelPlan) for variant in entry.variants]
    built = list(opened(path).index.variants())
    assert sorted(variant.id for variant in built) == sorted(variant.id for variant in planned)
    assert {variant.arch for variant in planned} == {"sm_80", "sm_90", "sm_100", "compute_80"}
    assert {variant.id: dict(variant.axes) for variant in built} == {
        variant.id: dict(variant.axes) for variant in planned
    }


@pytest.mark.slow
def test_the_index_is_read_back_as_it_was_written(example: tuple[str, Path]) -> None:
    data = (example[1] / "index.json").read_bytes()
    read = index_json.parse(data)
    assert index_json.dump(read) == data
    assert index_json.parse(index_json.dump(read)) == read


@pytest.mark.slow
def test_the_bundle_holds_the_text_of_each_kernel(example: tuple[str, Path]) -> None:
    """Under the digest of its bytes, and no other text."""
    _, path = example
    there = {file.name: file.read_bytes() for file in (path / "sources").iterdir()}
    named = set()
    for entry in opened(path).index.entries.values():
        assert entry.kernel is not None
        member = f"{entry.kernel.text.digest}{entry.kernel.suffix}"
        assert sha256(there[member]) == entry.kernel.text.digest
        begins = "__global__" if entry.kernel.suffix == ".cu" else f"def {entry.source.text.rpartition(':')[2]}("
        assert begins in there[member].decode()
        named |= {member, *(path.partition("/")[2] for path in recipe_members(entry))}
    assert there.keys() == named


def recipe_members(entry: format_index.Entry) -> dict[str, format_index.File]:
    assert entry.kernel is not None and entry.kernel.recipe is not None
    return entry.kernel.recipe.members()


@pytest.mark.slow
def test_what_a_miss_compiles_from_is_the_files_beside_the_manifest(example: tuple[str, Path]) -> None:
    """Under the digest of their bytes, and the manifest's own words of the kernel."""
    name, path = example
    manifest = read_manifest(MANIFESTS / f"{name}.yaml")
    for entry in opened(path).index.entries.values():
        assert entry.kernel is not None and entry.kernel.recipe is not None
        recipe = entry.kernel.recipe
        for file_name, file in recipe.files.items():
            assert sha256((MANIFESTS / file_name).read_bytes()) == file.digest
        assert recipe.manifest == manifest.entries[entry.name].model_dump(mode="json")
        arguments = [name for name in recipe.manifest["params"] if name in entry.parameter_names]
        assert arguments == [name for name in entry.parameter_names if name in arguments]  # in their order
        assert set(recipe.archs) == {"sm_80", "sm_90", "sm_100", "compute_80"}


@pytest.mark.slow
def test_the_text_of_a_cpp_entry_is_its_file() -> None:
    path = example_bundle("sampler")
    (text,) = (path / "sources").iterdir()
    assert text.read_bytes() == (MANIFESTS / "kernels" / "topk.cu").read_bytes()


@pytest.mark.slow
def test_parameters_lie_where_the_compiled_code_has_them(example: tuple[str, Path]) -> None:
    """Offsets and sizes of the launch, of every variant, against the ELF of its cubin or the text of its PTX."""
    name, path = example
    compared = 0
    read: dict[bytes, Any] = {}
    for variant, data in artifacts(path):
        launch = variant.launch
        assert launch is not None
        file = read.get(data) or read.setdefault(data, read_any(variant, data))
        kernel = file.kernels[launch.symbol]
        wanted = [(parameter.offset, parameter.size_bytes) for parameter in kernel.params]
        found = [
            (parameter.offset, DESCRIPTOR_BYTES if isinstance(parameter, Descriptor) else CODE_BYTES[parameter.code])
            for parameter in launch.parameters
        ]
        assert found == wanted, variant.id
        assert launch.bytes == (wanted[-1][0] + wanted[-1][1])
        if variant.artifact.kind == "cubin":
            assert launch.bytes == kernel.param_bytes, variant.id
        compared += len(found)
    assert compared == {"llm_kernels": 2136, "sampler": 480}[name]


def read_any(variant: Variant, data: bytes) -> Any:
    return read_cubin(data) if variant.artifact.kind == "cubin" else read_ptx(data.decode())


@pytest.mark.slow
def test_the_target_is_what_the_code_is_for_and_not_what_was_asked(example: tuple[str, Path]) -> None:
    """Triton makes sm_90a of sm_90, and code for it runs nowhere else."""
    name, path = example
    recorded: dict[str, set[str]] = {}
    for variant, data in artifacts(path):
        asked = variant.id.rpartition("/")[2]
        needs = dict(variant.target.needs)
        assert variant.launch is not None
        shared = variant.launch.shared({})
        assert needs.pop("shared", None) == (str(shared) if shared > SHARED_EVERYWHERE else None)
        if variant.artifact.kind == "cubin":
            assert needs == {"cubin": read_cubin(data).architecture}
        else:
            ptx = read_ptx(data.decode())
            assert needs == {"ptx": f"{ptx.target.replace('sm_', 'compute_')} {ptx.version}"}
        recorded.setdefault(asked, set()).update(needs.values())
    suffix = "a" if name == "llm_kernels" else ""
    assert recorded == {
        "sm_80": {"sm_80"}, "sm_90": {f"sm_90{suffix}"}, "sm_100": {f"sm_100{suffix}"}, "compute_80": {"compute_80 8.8"},
    }  # fmt: skip


@pytest.mark.slow
def test_no_path_of_this_machine_is_in_a_bundle(example: tuple[str, Path]) -> None:
    _, path = example
    own = {str(MANIFESTS), str(MANIFESTS.parent), str(ROOT), sys.prefix, str(Path.home()), tempfile.gettempdir() + "/"}
    for file in (file for file in path.rglob("*") if file.is_file()):
        data = file.read_bytes()
        assert [place for place in own if place.encode() in data] == [], file
        assert b"site-packages" not in data, file


HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "cuda", "numpy", "elftools", "sympy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
sys.argv = ["aotpack", *sys.argv[1:]]
from aotpack.cli import main
main()
"""
SOFTMAX = ["--shape", "x_ptr=4x300:float16", "--shape", "y_ptr=4x300:float16", "--value", "n_cols=300",
           "--value", "stride_x=300", "--value", "stride_y=300", "--value", "rows=4"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(["inspect"], "softmax/fp16-BLOCK1024/h100/sm_90  cubin", id="inspect"),
        pytest.param(["check", "--machine", "sm_90"], "\nfits", id="check"),
        pytest.param(
            ["explain", "softmax", *SOFTMAX, "--machine", "sm_90"], "hit: softmax/fp16-BLOCK1024/h100/sm_90", id="explain"
        ),
    ],
)  # fmt: skip
def test_neither_compilers_nor_torch_are_needed_to_look_at_a_bundle(
    command: list[str], words: str, tmp_path: Path
) -> None:
    path = example_bundle("llm_kernels")
    arguments = [command[0], str(path), *command[1:]]
    done = subprocess.run(
        [sys.executable, "-P", "-c", HIDING, *arguments],
        env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout


def environment(cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AOTPACK_", "PYTEST_"))}
    path = os.pathsep.join(path for path in sys.path if path)
    return {**kept, "PYTHONPATH": path, "AOTPACK_CACHE_DIR": str(cache)}


# ------------------------------------------------------------------------------------- which GPU takes which variant

FITS = "fits"
SM_80 = "sm_80 runs on 8.x from 0 on, this is {}"
SM_90A = "sm_90a runs on that capability alone, this is {}"
SM_100A = "sm_100a runs on that capability alone, this is {}"
VERDICTS = {
    "sm_80": (FITS, SM_90A, SM_100A, FITS),
    "sm_86": (FITS, SM_90A, SM_100A, FITS),
    "sm_89": (FITS, SM_90A, SM_100A, FITS),
    "sm_90": (SM_80, FITS, SM_100A, FITS),
    "sm_90,driver=12.4": (SM_80, FITS, SM_100A, "PTX 8.8 needs a driver of CUDA 12.9 or newer, this one is of CUDA 12.4"),
    "sm_100": (SM_80, SM_90A, FITS, FITS),
    "sm_103": (SM_80, SM_90A, SM_100A, FITS),
    "sm_120": (SM_80, SM_90A, SM_100A, FITS),
    "sm_75": (SM_80, SM_90A, SM_100A, "PTX for compute_80 needs that capability or a newer one, this is {}"),
}  # fmt: skip
"""GPU -> what is said of variants for sm_80, sm_90, sm_100 and PTX, as Triton builds them."""


@pytest.mark.slow
@pytest.mark.parametrize("machine", VERDICTS)
def test_each_variant_fits_a_gpu_or_says_why_not(machine: str) -> None:
    places = ("sm_80", "sm_90", "sm_100", "compute_80")
    wanted = dict(zip(places, VERDICTS[machine], strict=True))
    found: dict[str, set[str]] = {}
    for variant in opened(example_bundle("llm_kernels")).index.variants():
        reason = reject_variant(variant, "cuda", made_up(machine)) or FITS
        found.setdefault(variant.id.rpartition("/")[2], set()).add(reason)
    name = machine.partition(",")[0]
    assert found == {place: {reason.format(name)} for place, reason in wanted.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "verdict", "code"),
    [
        ("sm_80", "fits", 0),
        ("sm_86", "fits", 0),
        ("sm_90,driver=12.4", "fits", 0),
        ("sm_100", "fits", 0),
        ("sm_103", "fits through PTX, which the driver compiles", 0),
        ("sm_120", "fits through PTX, which the driver compiles", 0),
        ("sm_120,driver=12.8", None, 6),
        ("sm_75", None, 6),
    ],
)
def test_check_says_how_a_bundle_fits_a_gpu(
    machine: str, verdict: str | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every variant, also when none fits."""
    code_found, told = checked(capsys, example_bundle("llm_kernels"), machine, as_json=True)
    value = json.loads(told)
    assert (code_found, value["ok"]) == (code, code == 0)
    assert len(value["variants"]) == 4 * 57
    if verdict:
        assert value["verdict"] == verdict
        assert any(reason.startswith("fits") for reason in value["variants"].values())
    else:
        assert value["verdict"].startswith("entry 'add")
        assert "\n" not in value["verdict"]
        assert all(machine.partition(",")[0] in reason or "driver" in reason for reason in value["variants"].values())


def checked(
    capsys: pytest.CaptureFixture[str], path: Path, machine: str | None, *, as_json: bool = False
) -> tuple[int, str]:
    """`aotpack check` in this process: its exit code, and what it prints."""
    code = check.command(path, device=None, machine=machine, strict=False, as_json=as_json, debug=False)
    return code, capsys.readouterr().out


MATMUL = {"M": 100, "N": 4096, "K": 4096, "sam": 4096, "sak": 1, "sbk": 4096, "sbn": 1, "scm": 4096, "scn": 1}


def call_of(entry: format_index.Entry, dtype: str, **numbers: float) -> Call:
    """A call with aligned tensors of `dtype`, where an entry takes tensors."""
    leaves = [
        TensorMeta(dtype, "cuda", (1,), (1,), 0) if name not in numbers else numbers[name]
        for name in entry.parameter_names
    ]
    return Call((LEAF,) * len(leaves), tuple(leaves))


def chosen(path: Path, name: str, machine: str, dtype: str, **numbers: float) -> Hit | Miss:
    """What the server would take on a GPU."""
    entry = opened(path).index.entries[name]
    assert entry.kernel is not None
    host = made_up(machine)
    reasons = {variant.id: reject_variant(variant, "cuda", host) for variant in entry.variants}
    assert host.gpu is not None
    dispatcher = KernelDispatcher(
        entry.parameter_names,
        [variant for variant in entry.variants if not reasons[variant.id]],
        [(variant, reason) for variant, reason in reasons.items() if reason],
        choice=entry.kernel.choice,
        capability=host.gpu.capability,
    )
    return dispatcher.choose(call_of(entry, dtype, **numbers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "arch"),
    [
        ("sm_80", "a100/sm_80"),
        ("sm_86", "a100/sm_80"),
        ("sm_90", "h100/sm_90"),
        ("sm_90,driver=12.0", "h100/sm_90"),
        ("sm_100", "b200/sm_100"),
        ("sm_103", "a100/compute_80"),
        ("sm_120", "a100/compute_80"),
    ],
)
def test_machine_code_comes_before_ptx_on_every_gpu(machine: str, arch: str) -> None:
    hit = chosen(example_bundle("llm_kernels"), "matmul", machine, "float16", **MATMUL)
    assert isinstance(hit, Hit)
    assert hit.variant.id.endswith(arch)
    assert hit.variant.axes["dtype"] == "fp16"


@pytest.mark.slow
def test_a_call_that_misses_names_each_variant_with_its_own_reason() -> None:
    miss = chosen(example_bundle("llm_kernels"), "matmul", "sm_90", "float16", **{**MATMUL, "sak": 2})
    assert isinstance(miss, Miss)
    assert len(miss.reasons) == 36
    by_arch = {
        arch: {reason for name, reason in miss.reasons.items() if name.endswith(arch)}
        for arch in ("sm_80", "sm_90", "sm_100")
    }
    assert by_arch["sm_80"] == {SM_80.format("sm_90")}
    assert by_arch["sm_100"] == {SM_100A.format("sm_90")}
    assert "sak: expected 1, got 2" in by_arch["sm_90"]


# ----------------------------------------------------------------------------------------------- a small project

KERNELS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(2)


@triton.jit
def _twice(value):
    return value * FACTOR


@triton.jit
def add(x, y, o, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(o + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def scale(x, o, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(o + i, _twice(tl.load(x + i, mask=mask)), mask=mask)


def unused():
    return 1
"""
SOURCE = """
#include "step.h"
#include "memory.h"
template <class T, int B>
__global__ void top(const T* x, T* o, int n) {
    int i = blockIdx.x * B + threadIdx.x;
    if (i < n) o[i] = x[i] + STEP + MEMORY;
}

__global__ void spilling(float* x, int n) {
    float values[96];
    for (int i = 0; i < 96; ++i) values[i] = x[i * n + threadIdx.x];
    for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int i = 0; i < 96; ++i) values[i] = values[i] * values[(i + 7) % 96] + 1.0f;
    }
    for (int i = 0; i < 96; ++i) x[i * n] = values[i];
}
"""
MANIFEST = """\
schema: aotpack.manifest/v1
bundle: {name: small, version: 1.0.0}
targets:
  h100: {kind: cuda, arch: [sm_90]}
  old: {kind: cuda, arch: [sm_80]}
entries:
  add:
    kind: triton
    source: "small_kernels:add"
    params: {x: "*fp32", y: "*fp32", o: "*fp32", n: i32, BLOCK: constexpr}
    configs: [{BLOCK: 128, num_warps: 4}, {BLOCK: 256, num_warps: 4}, {BLOCK: 1024, num_warps: 8}]
    key: [n]
    choose: tuned
    tuning: tuning/add.json
    rules: [{when: "n <= 4096", config: 1}]
    grid: ["ceil_div(n, BLOCK)"]
    targets: [h100]
  scale:
    kind: triton
    source: "small_kernels:scale"
    params: {x: "*fp32", o: "*fp32", n: i32, BLOCK: constexpr}
    configs: [{BLOCK: 128}]
    writes: [o]
    grid: ["ceil_div(n, BLOCK)"]
    targets: [h100]
  top:
    kind: nvrtc
    source: top.cu
    include_dirs: [include]
    headers: {memory.h: "#define MEMORY 1"}
    name_expression: "top<{T}, {B}>"
    template: {T: {float32: float}, B: [64, 128]}
    params: {x: "const {T}*", o: "{T}*", n: int}
    options: ["--std=c++17"]
    grid: ["ceil_div(n, B)"]
    block: ["B"]
    limits: {spill_bytes: 0}
    targets: [h100, old]
"""
BUNDLE = "dist/small-1.0.0"
ADD = [f"add/num_warps{warps}-BLOCK{block}/h100/sm_90" for block, warps in ((128, 4), (256, 4), (1024, 8))]
SCALE = ["scale/only/h100/sm_90"]
TOP = ["top/h100/sm_90", "top/old/sm_80"]


def aotpack(cache: Path, *arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`aotpack ARGUMENTS`."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "aotpack", *map(str, arguments)],
        cwd=folder, env=environment(cache), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        timeout=300,
    )  # fmt: skip


class Project:
    """The small project, its store, and what builds of it did."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.manifest, self.bundle = folder / "manifest.yaml", folder / BUNDLE

    @property
    def store(self) -> Store:
        return Store(self.cache / "build")

    def build(self, *overrides: str, out: str = "out", **more: Any) -> Result:
        return build(
            read_manifest(self.manifest, overrides), self.folder / out, store=self.store, **{"jobs": 1, **more}
        )

    def plan(self, *overrides: str) -> dict[str, str]:
        """Job -> what a build would do."""
        found = steps(make_plan(read_manifest(self.manifest, overrides)), self.store)
        return {step.name: step.status for step in found if step.status != "cached"}

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folder / name
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return aotpack(self.cache, *arguments, folder=self.folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_project(folder: Path) -> None:
    (folder / "include").mkdir()
    (folder / "small_kernels.py").write_text(KERNELS)
    (folder / "top.cu").write_text(SOURCE)
    (folder / "include" / "step.h").write_text("#define STEP 1\n")
    (folder / "include" / "unused.h").write_text("#define UNUSED 1\n")
    (folder / "manifest.yaml").write_text(MANIFEST)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project, built."""
    folder = tmp_path_factory.mktemp("kernels")
    write_project(folder)
    project = Project(folder, folder / "cache")
    assert project.build(out=BUNDLE).count(*COMPILES) == 6
    return project


@pytest.fixture
def project(origin: Project, tmp_path: Path) -> Iterator[Project]:
    """The built project with a store of this test's own; its files are put back when the test ends."""
    shutil.copytree(origin.cache, tmp_path / "cache", copy_function=os.link)
    before = {path: path.read_bytes() for path in source_files(origin)}
    yield Project(origin.folder, tmp_path / "cache")
    for path in source_files(origin):
        if path not in before:
            path.unlink()
    for path, data in before.items():
        if path.read_bytes() != data:
            path.write_bytes(data)


def source_files(project: Project) -> list[Path]:
    return [
        path
        for path in project.folder.rglob("*")
        if path.is_file() and path.relative_to(project.folder).parts[0] not in {"cache", "dist", "out", "__pycache__"}
    ]


def compiled(result: Result) -> list[str]:
    """Names of the jobs that were run to compile something."""
    return sorted(name for kind, name, _ in result.steps if kind in COMPILES)


# -------------------------------------------------------------------------------------------- same bytes, and again


@pytest.mark.slow
def test_the_same_manifest_gives_the_same_bytes_from_nothing(origin: Project, tmp_path: Path) -> None:
    """In another folder, with another store, in other processes."""
    (tmp_path / "elsewhere").mkdir()
    write_project(tmp_path / "elsewhere")
    again = Project(tmp_path / "elsewhere", tmp_path / "cache").build()
    assert again.count(*COMPILES) == 6
    assert files_of(again.path) == files_of(origin.bundle)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("llm_kernels", "softmax/fp16*"), ("sampler", "sample")])
def test_a_part_of_an_example_is_the_same_code_as_in_the_whole(name: str, part: str, tmp_path: Path) -> None:
    """Compiled again from nothing, in the order of the part."""
    manifest = read_manifest(MANIFESTS / f"{name}.yaml")
    result = build(manifest, tmp_path / "part", jobs=1, only=part, store=Store(tmp_path / "store"))
    whole = {variant.id: variant for variant in opened(example_bundle(name)).index.variants()}
    found = {variant.id: variant for variant in opened(result.path).index.variants()}
    assert result.count(*COMPILES) > 0
    assert found == {one: whole[one] for one in found}


def test_an_unchanged_rebuild_runs_no_job(project: Project) -> None:
    inode = project.bundle.stat().st_ino
    os.utime(project.folder / "small_kernels.py")
    assert project.plan() == {}
    result = project.build(out=BUNDLE)
    assert (result.steps, project.bundle.stat().st_ino) == ([], inode)


EDITS: dict[str, tuple[str, str, str, dict[str, str], list[str]]] = {
    # file, old text, new text -> what the plan says is to be done, and what is compiled
    "body": ("small_kernels.py", "tl.load(y + i, mask=mask), mask", "2 * tl.load(y + i, mask=mask), mask", {"add/source": "changed: file small_kernels.py"}, ADD),
    "comment": ("small_kernels.py", "FACTOR = tl", "# a remark\nFACTOR = tl", {"add/source": "changed: file small_kernels.py"}, []),
    "function-that-no-kernel-calls": ("small_kernels.py", "return 1", "return 2", {"add/source": "changed: file small_kernels.py"}, []),
    "function-that-one-kernel-calls": ("small_kernels.py", "value * FACTOR", "value * FACTOR * 3", {"scale/source": "changed: file small_kernels.py"}, SCALE),
    "constant-that-one-kernel-reads": ("small_kernels.py", "tl.constexpr(2)", "tl.constexpr(3)", {"scale/source": "changed: file small_kernels.py"}, SCALE),
    "body-of-a-template": ("top.cu", "+ MEMORY", "- MEMORY", {"top/source": "changed: file top.cu"}, TOP),
    "header": ("include/step.h", "STEP 1", "STEP 2", {"top/source": "changed: file include/step.h"}, TOP),
    "option-of-nvrtc": ("manifest.yaml", '["--std=c++17"]', '["--std=c++20"]', dict.fromkeys(TOP, "changed: options"), TOP),
    "header-in-memory": ("manifest.yaml", "MEMORY 1", "MEMORY 2", {"top/source": "changed: headers"}, TOP),
    "template-value": ("manifest.yaml", "B: [64, 128]", "B: [64, 32]", dict.fromkeys(TOP, "changed: expressions"), TOP),
    "option-of-triton": ("manifest.yaml", "configs: [{BLOCK: 128}]", "configs: [{BLOCK: 128, num_warps: 2}]", {SCALE[0]: "changed: options"}, SCALE),
    "constexpr": ("manifest.yaml", "configs: [{BLOCK: 128}]", "configs: [{BLOCK: 256}]", {SCALE[0]: "changed: constants"}, SCALE),
    "hint": ("manifest.yaml", '{x: "*fp32", o: "*fp32", n: i32, BLOCK', '{x: "*fp32", o: "*fp32", n: "i32:16", BLOCK', {SCALE[0]: "changed: divisible"}, SCALE),
    "type": ("manifest.yaml", '{x: "*fp32", o: "*fp32", n: i32, BLOCK', '{x: "*fp32", o: "*fp32", n: i64, BLOCK', {SCALE[0]: "changed: signature"}, SCALE),
    "grid": ("manifest.yaml", 'grid: ["ceil_div(n, B)"]', 'grid: ["ceil_div(n, B)", 1]', {}, []),
    "rules": ("manifest.yaml", "n <= 4096", "n <= 8192", {}, []),
    "guards": ("manifest.yaml", "    writes: [o]\n", "    writes: [o]\n    guards: [n <= 1000]\n", {}, []),
}  # fmt: skip


SAME_CODE = {"option-of-nvrtc", "hint"}
"""Edits that are compiled again and come to the same code."""


@pytest.mark.slow
@pytest.mark.parametrize("what", EDITS)
def test_what_is_edited_and_nothing_else_is_compiled_again(what: str, project: Project) -> None:
    name, old, new, planned, jobs = EDITS[what]
    before = json.loads((project.bundle / "index.json").read_text())
    project.edit(name, old, new)
    plan = project.plan()
    assert planned.items() <= plan.items()
    told = {name for name in plan if not name.endswith("/source") and not plan[name].startswith("after ")}
    assert told == planned.keys() - {name for name in planned if name.endswith("/source")}
    result = project.build()
    assert compiled(result) == sorted(jobs)
    index = json.loads((result.path / "index.json").read_text())
    same = {name for name in before["entries"] if kernels_of(before, name) == kernels_of(index, name)}
    changed = {job.partition("/")[0] for job in jobs}
    assert before["entries"].keys() - same == (set() if what in SAME_CODE else changed)
    assert project.build().steps == []


def kernels_of(index: Json, entry: str) -> list[str]:
    return sorted(variant["artifact"]["digest"] for variant in index["entries"][entry]["variants"])


def test_a_changed_grid_or_rule_is_another_bundle(project: Project) -> None:
    before = project.build(out=BUNDLE).digest
    assert project.build("entries.top.grid=[n]").digest != before
    assert project.build("entries.add.rules[0].when=n <= 8").digest != before
    assert project.build().digest == before


@pytest.mark.slow
def test_a_header_that_is_new_is_seen(project: Project) -> None:
    """It may be found before the one that was."""
    (project.folder / "include" / "memory.h").write_text("#define MEMORY 5\n")
    assert project.plan()["top/source"] == "changed: headers_there"
    assert compiled(project.build()) == TOP


# --------------------------------------------------------------------------------------------------- what is wrong

MISTAKES: dict[str, tuple[str, str, str, int, str]] = {
    # file, old text, new text, exit code, the line
    "bad-signature": ("manifest.yaml", '"*fp32", y:', '"*fp99", y:', 3,
        "manifest.yaml:10:17: error: entries.add.params.x: unknown type 'fp99'; known: i1, i8, "),
    "argument-that-the-kernel-has-not": ("manifest.yaml", '{x: "*fp32", y:', '{w: "*fp32", y:', 1,
        "add/num_warps4-BLOCK128/h100/sm_90: add: signature: unknown argument 'w'; the kernel has: x, y, o, n, BLOCK"),
    "64-warps": ("manifest.yaml", "num_warps: 8}", "num_warps: 64}", 3,
        "manifest.yaml:11:96: error: entries.add.configs[2].num_warps: expected a power of two from 1 to 32, found 64"),
    "block-of-1000": ("manifest.yaml", "{BLOCK: 1024,", "{BLOCK: 1000,", 1,
        "add/num_warps8-BLOCK1000/h100/sm_90: add: constants: BLOCK is 1000; the size of a block is a power of two from 1 to 1048576"),
    "missing-header": ("top.cu", "step.h", "nope.h", 1,
        "top/h100/sm_90: top.cu(2): there is no header 'nope.h'; searched include"),
    "missing-folder": ("manifest.yaml", "[include]", "[includes]", 1,
        "top.cu: its include folder 'includes' is not there; searched "),
    "template-that-does-not-compile": ("top.cu", "+ STEP", "+ STOP", 1, 'top/h100/sm_90: top.cu(7): error: identifier "STOP" is undefined'),
    "instance-that-is-not-there": ("manifest.yaml", '"top<{T}, {B}>"', '"topp<{T}, {B}>"', 1,
        "top/h100/sm_90: top.cu: the name expression 'topp<float, 128>': identifier \"topp\" is undefined"),
    "kernel-that-does-not-compile": ("small_kernels.py", "_twice(tl.load", "tl.nothing(tl.load", 1,
        "scale/only/h100/sm_90: scale: small_kernels.py:24: "),
    "unknown-arch-of-nvrtc": ("manifest.yaml", "arch: [sm_80]", "arch: [sm_999]", 1,
        "top/old/sm_999: top.cu: unknown architecture 'sm_999', known: sm_50, "),
    "unknown-arch-of-triton": ("manifest.yaml", "arch: [sm_90]", "arch: [sm_999]", 1,
        "add/num_warps4-BLOCK128/h100/sm_999: add: unknown architecture 'sm_999', known: sm_75, sm_80, "),
    "type-of-another-size": ("manifest.yaml", "n: int}", "n: short}", 1,
        "top/float32-B64/h100/sm_90: parameter 'n': short (2 bytes) in the manifest, it takes 4 bytes"),
    "parameter-too-few": ("manifest.yaml", 'o: "{T}*", n: int}', 'o: "{T}*"}', 1,
        "top/float32-B64/h100/sm_90: the kernel takes 3 parameters, the manifest gives 2: x, o"),
    "option-for-the-target": ("manifest.yaml", "--std=c++17", "-arch=sm_52", 1,
        "top/h100/sm_90: top.cu: the option '-arch=sm_52' is not for the manifest: the architecture is the target's"),
    "too-many-threads": ("manifest.yaml", "B: [64, 128]", "B: [64, 2048]", 3,
        "manifest.yaml:36:13: error: entries.top.block[0]: B is 2048, expected 1 to 1024"),
    "too-many-threads-together": ("manifest.yaml", 'block: ["B"]', "block: [B, 16]", 1,
        "top/float32-B128/h100/sm_90: block has 2048 threads; this kernel is launched with 1 to 1024"),
    "clusters-on-sm_80": ("manifest.yaml", 'block: ["B"]', 'block: ["B"]\n    cluster: [2]', 1,
        "top/float32-B64/old/sm_80: clusters need sm_90 or newer, this is sm_80"),
    "no-such-source": ("manifest.yaml", "source: top.cu", "source: tip.cu", 1, "tip.cu: there is no such file; searched "),
    "no-such-kernel": ("manifest.yaml", "small_kernels:scale", "small_kernels:scole", 1, "small_kernels:scole: "),
    "no-kernel": ("manifest.yaml", "small_kernels:scale", "small_kernels:unused", 1, "small_kernels:unused: "),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_the_bundle_as_it_was(what: str, project: Project) -> None:
    name, old, new, code, line = MISTAKES[what]
    before = files_of(project.bundle)
    project.edit(name, old, new)
    with pytest.raises(AotpackError) as caught:
        project.build(out=BUNDLE)
    error = caught.value
    told = [error.message]
    if isinstance(error, ManifestError):
        told = [str(problem).removeprefix(f"{project.folder}/") for problem in error.problems]
    assert error.exit_code == code
    assert [line] == [each[: len(line)] for each in told]
    assert all("\n" not in each and len(each) < 400 for each in (*told, error.hint))
    assert files_of(project.bundle) == before
    assert [path.name for path in project.bundle.parent.iterdir() if not path.name.startswith(".")] == ["small-1.0.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "form"),
    [
        ("bad-signature", r"manifest\.yaml:10:17: error: .*\n"),
        ("missing-header", r"error: top/h100/sm_90: .*\nhint: name the folder that holds it in include_dirs; .*\n"),
    ],
)
def test_the_command_tells_a_mistake_and_what_to_do(what: str, form: str, project: Project) -> None:
    name, old, new, code, _ = MISTAKES[what]
    project.edit(name, old, new)
    done = project("build", "manifest.yaml", "--quiet", "-j", "1")
    assert (done.returncode, done.stdout) == (code, "")
    assert re.fullmatch(form, done.stderr), done.stderr


@pytest.mark.slow
def test_a_cubin_that_spills_over_the_limit_is_refused(project: Project) -> None:
    """Spills are read from the cubin; without the limit it is built."""
    before = files_of(project.bundle)
    project.edit("manifest.yaml", '"top<{T}, {B}>"', '"spilling"')
    project.edit("manifest.yaml", '{x: "const {T}*", o: "{T}*", n: int}', '{x: "float*", n: int}')
    project.edit("manifest.yaml", "B: [64, 128]", "B: [128]")
    project.edit("manifest.yaml", '"--std=c++17"', '"--std=c++17", "--maxrregcount=32"')
    done = project("build", "manifest.yaml", "--quiet", "-j", "1")
    assert (done.returncode, done.stdout) == (1, "")
    text, hint = done.stderr.splitlines()
    assert text.startswith("error: top/float32-B128/h100/sm_90: spilling takes ")
    assert text.endswith(" spill bytes, limits say at most 0")
    assert hint == "hint: use smaller template values, or __launch_bounds__"
    assert files_of(project.bundle) == before
    assert project.build("entries.top.limits={}").path.exists()


@pytest.mark.slow
def test_a_host_with_no_driver_is_told_so(project: Project) -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(TargetMismatch) as caught:
            load(project.bundle, device=device)
        assert str(caught.value).startswith(f"device '{device}' does not fit this host: no CUDA device on this host")
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 6
    done = project("verify", project.bundle)
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr.startswith("error: device 'cuda' does not fit this host: no CUDA device on this host\nhint: ")


def test_check_wants_a_capability_and_not_a_target(project: Project) -> None:
    done = project("check", project.bundle, "--machine", "sm_90a")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--machine" in done.stderr


@pytest.mark.parametrize(
    ("machine", "reasons"),
    [
        (None, ("no CUDA device", "no CUDA device", "no CUDA device")),
        ("sm_75", (
            "sm_90a runs on that capability alone, this is sm_75", "sm_90 runs on 9.x from 0 on, this is sm_75",
            "sm_80 runs on 8.x from 0 on, this is sm_75",
        )),
    ],
)  # fmt: skip
def test_check_lists_the_variants_also_when_none_fits(
    machine: str | None, reasons: tuple[str, str, str], project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = checked(capsys, project.bundle, machine)
    head, *rows, verdict = told.splitlines()
    triton, newer, older = reasons
    expected = dict.fromkeys((*ADD, *SCALE), triton)
    expected |= {f"top/float32-B{size}/h100/sm_90": newer for size in (64, 128)}
    expected |= {f"top/float32-B{size}/old/sm_80": older for size in (64, 128)}
    assert code == 6
    assert head.split() == ["variant", "kind", "verdict"]
    assert [tuple(row.split(maxsplit=2)) for row in rows] == [
        (name, "cubin", reason) for name, reason in expected.items()
    ]
    assert verdict.startswith("entry 'add")


@pytest.mark.slow
def test_what_is_built_without_a_gpu_is_said_to_be_unverified(project: Project) -> None:
    done = project("build", "manifest.yaml")
    assert (done.returncode, done.stdout) == (0, f"{BUNDLE}\n")
    assert "0 exported, 0 compiled, 0 verified in " in done.stderr
    assert "8 variants were compiled and not run here: no CUDA device" in done.stderr
    value = json.loads(project("build", "manifest.yaml", "--json").stdout)
    assert set(value["unverified"].values()) == {"no CUDA device"}
    assert len(value["unverified"]) == 8


# ---------------------------------------------------------------------------------------------------------- tuning


def write_table(project: Project, *, picks: Mapping[int, int] | None = None, **changes: Json) -> Path:
    """A table for the manifest as it is now: at n = 1000 its third config is fastest, unless `picks` says else."""
    entry = read_manifest(project.manifest).entries["add"]
    assert isinstance(entry, TritonEntry)
    known = candidates(entry)
    rows = [
        {"sizes": {"n": size}, "given": {}, "pick": known[place], "times_us": [[known[place], 1.0]]}
        for size, place in (picks or {1000: 2}).items()
    ]
    table = {
        "schema": "aotpack.tuning/v1", "entry": "add", "candidates": known,
        "archs": {"sm_90": {"gpu": "made up", "cuda_driver": "13.0", "tools": {}, "rows": rows}},
    }  # fmt: skip
    path = project.folder / "tuning" / "add.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**table, **changes}))
    return path


NOTE = "add: there is no tuning/add.json yet, so rules decide, and where none holds the first variant that fits; run `aotpack tune` on a GPU"


def test_a_table_that_is_missing_is_a_loud_note_and_rules_decide(project: Project) -> None:
    result = project.build()
    assert result.notes == [NOTE]
    done = project("build", "manifest.yaml")
    assert NOTE in done.stderr.splitlines()
    found = {n: str(chosen(result.path, "add", "sm_90", "float32", n=n)) for n in (1, 4096, 4097)}
    assert found == {1: f"hit: {ADD[1]}", 4096: f"hit: {ADD[1]}", 4097: f"hit: {ADD[0]}"}


def test_a_table_is_another_bundle_and_nothing_is_compiled(project: Project) -> None:
    before = project.build().digest
    write_table(project)
    result = project.build()
    assert (result.steps, result.notes) == ([], [])
    assert result.digest != before
    kernel = opened(result.path).index.entries["add"].kernel
    assert kernel is not None
    assert kernel.choice.tables is not None
    assert [(dict(row.sizes), row.pick["BLOCK"]) for row in kernel.choice.tables["sm_90"]] == [({"n": 1000}, 1024)]


def test_the_row_that_is_nearest_picks_on_its_architecture(project: Project) -> None:
    write_table(project, picks={1000: 2, 1_000_000: 0})
    path = project.build().path
    found = {n: str(chosen(path, "add", "sm_90", "float32", n=n)) for n in (1, 1000, 30_000, 40_000, 2**31 - 1)}
    assert found == {
        1: f"hit: {ADD[2]}", 1000: f"hit: {ADD[2]}", 30_000: f"hit: {ADD[2]}", 40_000: f"hit: {ADD[0]}",
        2**31 - 1: f"hit: {ADD[0]}",
    }  # fmt: skip
    tensors = [word for name in "xyo" for word in ("--shape", f"{name}=1000:float32")]
    done = project("explain", path, "add", *tensors, "--value", "n=1000", "--machine", "sm_90")
    assert (done.returncode, done.stdout) == (0, f"hit: {ADD[2]}\n")


def test_another_architecture_has_the_rules(project: Project) -> None:
    project.edit("manifest.yaml", "choose: tuned", "choose: tuned\n    guards: [n > 0]")
    write_table(project)
    path = project.build("entries.add.targets=[h100, old]", only="add").path
    assert str(chosen(path, "add", "sm_90", "float32", n=1000)) == f"hit: {ADD[2]}"
    assert str(chosen(path, "add", "sm_86", "float32", n=1000)) == "hit: add/num_warps4-BLOCK256/old/sm_80"


def test_configs_in_another_order_have_the_same_table(project: Project) -> None:
    """A42."""
    write_table(project)
    project.edit(
        "manifest.yaml",
        "[{BLOCK: 128, num_warps: 4}, {BLOCK: 256, num_warps: 4}, {BLOCK: 1024, num_warps: 8}]",
        "[{BLOCK: 1024, num_warps: 8}, {BLOCK: 256, num_warps: 4}, {num_warps: 4, BLOCK: 128}]",
    )
    result = project.build()
    assert (compiled(result), result.notes) == ([], [])
    assert str(chosen(result.path, "add", "sm_90", "float32", n=1000)) == f"hit: {ADD[2]}"


STALE = "add: add.json was measured for other candidates than the manifest has now"


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param("[{BLOCK: 128, num_warps: 4}, {BLOCK: 256, num_warps: 4}]", id="one-removed"),
        pytest.param(
            "[{BLOCK: 128, num_warps: 4}, {BLOCK: 256, num_warps: 4}, {BLOCK: 1024, num_warps: 4}]", id="warps"
        ),
        pytest.param(
            "[{BLOCK: 128, num_warps: 4}, {BLOCK: 256, num_warps: 4}, {BLOCK: 1024, num_warps: 8}, {BLOCK: 512}]",
            id="one-more",
        ),
        pytest.param(
            "[{BLOCK: 128, num_stages: 2}, {BLOCK: 256, num_stages: 2}, {BLOCK: 1024, num_warps: 8, num_stages: 2}]",
            id="stages",
        ),
    ],
)
@pytest.mark.slow
def test_a_table_of_other_configs_is_an_error_that_says_what_to_run(configs: str, project: Project) -> None:
    """A42: never a silent default. It is found before a compiler runs."""
    write_table(project)
    left = project.plan(f"entries.add.configs={configs}")
    with pytest.raises(CompileError) as caught:
        project.build(f"entries.add.configs={configs}", only="add")
    assert caught.value.message == STALE
    assert "`aotpack tune`" in caught.value.hint
    assert project.plan(f"entries.add.configs={configs}") == left


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"entry": "other"}, "it is of aotpack.tuning/v1 and entry other", id="another-entry"),
        pytest.param({"schema": "aotpack.tuning/v9"}, "it is of aotpack.tuning/v9 and entry add", id="another-schema"),
        pytest.param({"archs": []}, "AttributeError", id="archs-a-list"),
        pytest.param({"archs": {"sm_90": {"rows": [{}]}}}, "KeyError 'sizes'", id="empty-row"),
        pytest.param({"archs": {"sm_90": {}}}, "KeyError 'rows'", id="no-rows"),
    ],
)
def test_a_table_that_is_not_one_is_named(change: Json, words: str, project: Project) -> None:
    write_table(project, **change)
    refused(project, words)


def refused(project: Project, words: str) -> str:
    """What is said of the table, which holds `words`."""
    before = files_of(project.bundle)
    with pytest.raises(CompileError) as caught:
        project.build(out=BUNDLE)
    assert caught.value.message.startswith("add: ")
    assert "add.json: is no tuning table: " in caught.value.message
    assert words in caught.value.message
    assert "\n" not in str(caught.value)
    assert "`aotpack tune`" in caught.value.hint
    assert files_of(project.bundle) == before
    return caught.value.message


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema": "aotpack.tuning/v1"}'], ids=repr)
def test_a_table_that_is_no_json_of_ours_is_named(data: bytes, project: Project) -> None:
    write_table(project).write_bytes(data)
    refused(project, "Error")


PICK = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "BLOCK": 128}
BAD_ROWS = {
    "size-a-text": ({"sizes": {"n": "many"}, "given": {}, "pick": PICK}, "ValueError sizes are ints of 64 bits, found {'n': 'many'}"),
    "size-true": ({"sizes": {"n": True}, "given": {}, "pick": PICK}, "ValueError sizes are ints of 64 bits, found {'n': True}"),
    "size-of-no-argument": ({"sizes": {"m": 1}, "given": {}, "pick": PICK}, "row 0 of sm_90 is of ['m'], the key is ['n']"),
    "given-of-no-key": ({"sizes": {}, "given": {"y": 1}, "pick": PICK}, "row 0 of sm_90 is of ['y'], the key is ['n']"),
    "pick-of-a-part": ({"sizes": {"n": 1}, "given": {}, "pick": {"BLOCK": 128}}, "row 0 of sm_90 picks {'BLOCK': 128}, which is no candidate"),
    "pick-that-is-no-candidate": ({"sizes": {"n": 1}, "given": {}, "pick": {**PICK, "BLOCK": 4096}},
        "row 0 of sm_90 picks {'num_warps': 4, 'num_stages': 3, 'num_ctas': 1, 'BLOCK': 4096}, which is no candidate"),
    "pick-nothing": ({"sizes": {"n": 1}, "given": {}, "pick": {"BLOCK": None}}, "ValueError axes are numbers and words, found {'BLOCK': None}"),
    "sizes-a-number": ({"sizes": 3, "given": {}, "pick": PICK}, "AttributeError 'int' object has no attribute 'values'"),
    "pick-a-number": ({"sizes": {"n": 1}, "given": {}, "pick": 3}, "AttributeError 'int' object has no attribute 'values'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_row_that_says_nothing_of_this_entry_is_named(what: str, project: Project) -> None:
    row, words = BAD_ROWS[what]
    path = write_table(project, archs={"sm_90": {"rows": [row]}})
    assert refused(project, words) == f"add: {path}: is no tuning table: {words}"


@pytest.mark.slow
def test_a_part_of_a_tuned_entry_has_the_table_of_the_whole(project: Project) -> None:
    write_table(project)
    for part, chosen_first in (("*-BLOCK1024/*", ADD[2]), ("*-BLOCK128/*", ADD[0])):
        result = project.build(only=part)
        assert (result.steps, result.notes) == ([], [])
        assert [variant.id for variant in opened(result.path).index.variants()] == [chosen_first]
        assert str(chosen(result.path, "add", "sm_90", "float32", n=1000)) == f"hit: {chosen_first}"


@pytest.mark.parametrize(
    "archs",
    [
        pytest.param({"sm_90": {"rows": [{"sizes": {}, "given": {"n": 3}, "pick": PICK}]}}, id="size-among-axes"),
        pytest.param({"sm_9": {"rows": [{"sizes": {"n": 3}, "given": {}, "pick": PICK}]}}, id="no-architecture"),
    ],
)
def test_a_row_that_no_call_can_be_of_is_named(archs: Json, project: Project) -> None:
    write_table(project, archs=archs)
    refused(project, "")


def test_a_size_that_no_argument_can_have_is_the_table_s_mistake(project: Project) -> None:
    write_table(project, archs={"sm_90": {"rows": [{"sizes": {"n": 2**70}, "given": {}, "pick": PICK}]}})
    refused(project, "")


# --------------------------------------------------------------------------- A35: cubin of one capability, and PTX


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a cubin for sm_90a and PTX 8.8 for compute_90."""
    folder = tmp_path_factory.mktemp("hopper")
    write_project(folder)
    project = Project(folder, folder / "cache")
    project.edit("manifest.yaml", "arch: [sm_90]", "arch: [sm_90a], ptx: compute_90")
    return project.build("entries.top.targets=[h100]", only="top").path


@pytest.mark.parametrize(
    ("machine", "cubin", "ptx", "verdict"),
    [
        ("sm_90,driver=12.4", None, "PTX 8.8 needs a driver of CUDA 12.9 or newer, this one is of CUDA 12.4", "fits"),
        ("sm_90,driver=12.9", None, None, "fits"),
        ("sm_100,driver=12.9", "sm_90a runs on that capability alone, this is sm_100", None, "fits through PTX, which the driver compiles"),
        ("sm_100,driver=12.8", "sm_90a runs on that capability alone, this is sm_100", "PTX 8.8 needs a driver of CUDA 12.9 or newer, this one is of CUDA 12.8", ""),
        ("sm_80,driver=12.9", "sm_90a runs on that capability alone, this is sm_80", "PTX for compute_90 needs that capability or a newer one, this is sm_80", ""),
        ("sm_121,driver=13.0", "sm_90a runs on that capability alone, this is sm_121", None, "fits through PTX, which the driver compiles"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a35_the_cubin_where_it_runs_and_ptx_where_the_driver_reads_it(
    machine: str, cubin: str | None, ptx: str | None, verdict: str, hopper: Path
) -> None:
    index = opened(hopper).index
    host = made_up(machine)
    found = {variant.artifact.kind: reject_variant(variant, "cuda", host) for variant in index.variants()}
    assert found == {"cubin": cubin, "ptx": ptx}
    decision = chosen(hopper, "top", machine, "float32", n=1000)
    if verdict:
        assert judge(index, "cuda", host)[0] == verdict
        assert isinstance(decision, Hit)
        assert decision.variant.artifact.kind == ("ptx" if cubin else "cubin")
    else:
        assert isinstance(decision, Miss)
        with pytest.raises(TargetMismatch) as caught:
            judge(index, "cuda", host)
        assert {cubin, ptx} == set(caught.value.reasons.values())


# --------------------------------------------------------------------------- A19: a host without a GPU serves the rest

WITHOUT_A_GPU = """
import json, sys
import aotpack_runtime
session = aotpack_runtime.load(sys.argv[1], device="cpu")
try:
    session["scale"]
except aotpack_runtime.TargetMismatch as error:
    said = str(error)
print(json.dumps({
    "entries": list(session), "said": said, "skipped": dict(session.skipped), "verdict": session.verdict,
    "status": session.status()["entries"],
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "drivers": [name for name in sys.modules if name.startswith("aotpack_runtime.") and "cu" in name],
}))
"""


def test_a19_a_bundle_for_both_serves_its_cpu_half_without_a_gpu(project: Project, tmp_path: Path) -> None:
    by_hand = index_json.parse(json.dumps(index_record()).encode())
    kernels = opened(project.bundle).index.entries
    both = replace(by_hand, entries={**by_hand.entries, "scale": kernels["scale"]})
    place = tmp_path / "both"
    shutil.copytree(project.bundle, place)
    for name, data in {**members(), "index.json": index_json.dump(both)}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_A_GPU, str(place)],
        env=environment(tmp_path / "cache"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["entries"] == ["encoder"]
    assert seen["skipped"] == {SCALE[0]: "no CUDA device"}
    assert seen["said"].startswith("entry 'scale' does not fit this host: no CUDA device")
    assert "\n" not in seen["said"]
    assert {"cuda", "triton", "torch", "numpy"}.isdisjoint(seen["modules"])
    assert "aotpack_runtime.drivers.cuda" not in seen["drivers"]
    assert "aotpack_runtime.loaders.cubin" not in seen["drivers"]


# --------------------------------------------------------------------------------------------- parts of a manifest


@pytest.mark.parametrize(
    ("options", "variants"),
    [
        pytest.param({"only": "scale"}, SCALE, id="entry"),
        pytest.param({"only": "*BLOCK1024/*"}, [ADD[2]], id="variant"),
        pytest.param({"only": "*-B64/*"}, ["top/float32-B64/h100/sm_90", "top/float32-B64/old/sm_80"], id="axis"),
        pytest.param({"target": "old"}, ["top/float32-B128/old/sm_80", "top/float32-B64/old/sm_80"], id="target"),
        pytest.param({"only": "top", "target": "h100"}, ["top/float32-B128/h100/sm_90", "top/float32-B64/h100/sm_90"], id="both"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_part_of_a_manifest_is_built_alone(options: dict[str, str], variants: list[str], project: Project) -> None:
    result = project.build(**options)
    assert sorted(variant.id for variant in opened(result.path).index.variants()) == variants


@pytest.mark.slow
def test_what_does_not_compile_is_left_out_under_keep_going(project: Project) -> None:
    """Exit code 5, and the rest is built: one process will do."""
    project.edit("small_kernels.py", "_twice(tl.load", "tl.nothing(tl.load")
    project.edit("top.cu", "+ STEP", "+ STOP")
    done = project("build", "manifest.yaml", "-o", "rest", "--keep-going", "-j", "1", "--json")
    value = json.loads(done.stdout)
    assert (done.returncode, value["ok"], value["path"]) == (5, False, "rest")
    top = {f"top/float32-B{size}/{target}" for size in (64, 128) for target in ("h100/sm_90", "old/sm_80")}
    assert value["failures"].keys() == {*SCALE, *top}
    assert all("\n" not in reason for reason in value["failures"].values())
    assert "small_kernels.py:24" in value["failures"][SCALE[0]]
    rest = project.folder / "rest"
    try:
        assert [variant.id for variant in opened(rest).index.variants()] == ADD
        suffixes = [file.suffix for file in (rest / "sources").iterdir()]
        assert suffixes == [".py", ".py"]  # the kernel's text, and the file that a miss compiles it from
    finally:
        shutil.rmtree(rest)
    assert project("build", "manifest.yaml", "-o", "none", "--keep-going", "--only", "scale").returncode == 1
    assert not (project.folder / "none").exists()


@pytest.mark.slow
def test_without_keep_going_the_first_failure_ends_the_build(project: Project) -> None:
    project.edit("small_kernels.py", "_twice(tl.load", "tl.nothing(tl.load")
    before = files_of(project.bundle)
    with pytest.raises(AotpackError, match=r"^scale/only/h100/sm_90: "):
        project.build(out=BUNDLE)
    assert files_of(project.bundle) == before


def top(*sizes: int, targets: Sequence[str] = ("h100/sm_90", "old/sm_80")) -> set[str]:
    """Ids of variants of `top`."""
    return {f"top/float32-B{size}/{target}" for size in sizes for target in targets}


def ids_of(entry: EntryPlan | KernelPlan) -> set[str]:
    return {variant.id for variant in entry.variants}


LEFT_OUT: dict[str, tuple[str, str, set[str], str]] = {
    "too-many-threads": ('block: ["B"]', "block: [B, 16]", top(128), "block has 2048 threads; this kernel is launched with 1 to 1024"),
    "over-the-limit": ("limits: {spill_bytes: 0}", "limits: {registers: 1}", top(64, 128), " registers, limits say at most 1"),
    "type-of-another-size": ("n: int}", "n: short}", top(64, 128), "parameter 'n': short (2 bytes) in the manifest, it takes 4 bytes"),
    "clusters-on-sm_80": ('block: ["B"]', 'block: ["B"]\n    cluster: [2]', top(64, 128, targets=["old/sm_80"]), "clusters need sm_90 or newer, this is sm_80"),
    "table-of-other-candidates": ("num_warps: 8}", "num_warps: 4}", {f"add/BLOCK{size}/h100/sm_90" for size in (128, 256, 1024)}, "was measured for other candidates than the manifest has now"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_does_not_fit_its_manifest_is_left_out_under_keep_going(what: str, project: Project) -> None:
    """Also what is found after the compiler ran."""
    old, new, left_out, words = LEFT_OUT[what]
    write_table(project)
    project.edit("manifest.yaml", old, new)
    everything = {name for entry in make_plan(read_manifest(project.manifest)).entries for name in ids_of(entry)}
    result = project.build(keep_going=True)
    assert result.failures.keys() == left_out
    assert all(words in reason and "\n" not in reason for reason in result.failures.values())
    assert {variant.id for variant in opened(result.path).index.variants()} == everything - left_out


# ------------------------------------------------------------------------------------------- tools that are not there

WITHOUT = """
import importlib.metadata, sys

find, hidden = importlib.metadata.Distribution.from_name.__func__, sys.argv[1]

def from_name(cls, name):
    if name == hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(cls, name)

importlib.metadata.Distribution.from_name = classmethod(from_name)
sys.argv = ["aotpack", *sys.argv[2:]]
from aotpack.cli import main
main()
"""


@pytest.mark.parametrize("command", ["build", "plan"])
@pytest.mark.parametrize(
    ("hidden", "line"),
    [
        ("triton", "error: the package 'triton' is needed for triton entries and is not installed\nhint: pip install 'aotpack[triton]'\n"),
        ("cuda-bindings", "error: the package 'cuda-bindings' is needed for nvrtc entries and is not installed\nhint: pip install 'aotpack[nvrtc]'\n"),
    ],
)  # fmt: skip
def test_a_compiler_that_is_not_installed_is_named(command: str, hidden: str, line: str, project: Project) -> None:
    before = files_of(project.bundle)
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT, hidden, command, "manifest.yaml"],
        cwd=project.folder, env=environment(project.cache), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (4, "", line)
    assert files_of(project.bundle) == before


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        ('{nvrtc: ">=99"}', "error: the package 'nvrtc>=99' is needed for this manifest (requires; 12."),
        ('{triton: "<3"}', "error: the package 'triton<3' is needed for this manifest (requires; 3."),
    ],
)
def test_a_requirement_is_of_what_the_compiler_says_it_is(requires: str, words: str, project: Project) -> None:
    done = project("build", "manifest.yaml", "--set", f"requires={requires}")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(words)


@pytest.mark.parametrize(
    "requires",
    [
        '{nvrtc: ">=12.9,<13"}',
        '{nvrtc: "<13", triton: ">=3.6"}',
    ],
)
def test_a_requirement_that_is_met_says_nothing(requires: str, project: Project) -> None:
    assert project.build(f"requires={requires}").steps == []


def test_tuning_without_a_gpu_says_so(project: Project) -> None:
    done = project("tune", "manifest.yaml")
    line, hint = "tuning needs a CUDA device, and this host has none", "run it on a GPU of the target's kind"
    assert (done.returncode, done.stdout, done.stderr) == (4, "", f"error: {line}\nhint: {hint}\n")


# ------------------------------------------------------------------------------------------- headers and debugging


@pytest.mark.slow
def test_what_a_build_writes_beside_the_headers_is_no_header(project: Project) -> None:
    """`include_dirs: [.]`: bundles and hidden folders are none; a file that is new is one."""
    project.edit("manifest.yaml", "[include]", "[include, .]")
    project.build(out="dist/beside")
    try:
        (project.folder / ".hidden").mkdir()
        (project.folder / ".hidden" / "step.h").touch()
        assert project.build(out="dist/beside").steps == []
        (project.folder / "new.h").touch()
        assert project.plan()["top/source"] == "changed: headers_there"
    finally:
        shutil.rmtree(project.folder / "dist" / "beside")
        shutil.rmtree(project.folder / ".hidden")


@pytest.mark.slow
def test_only_a_build_that_asks_for_debugging_holds_the_folder_of_its_sources(project: Project) -> None:
    """A debugger wants to find them: `-lineinfo` of NVRTC, `debug: true` of Triton."""
    assert with_folder(project.bundle, project) == set()
    project.edit("manifest.yaml", '"--std=c++17"', '"--std=c++17", "-lineinfo"')
    project.edit("manifest.yaml", "writes: [o]", "options: {debug: true}")
    assert with_folder(project.build().path, project) == {*SCALE, *top(64, 128)}


def with_folder(path: Path, project: Project) -> set[str]:
    """Variants whose files hold the project's folder; of no other file it may be in."""
    folder = str(project.folder).encode()
    found = {name for name, data in files_of(path).items() if folder in data}
    assert all(name.startswith("artifacts/") for name in found)
    return {variant.id for variant, data in artifacts(path) if folder in data}


# ------------------------------------------------------------------------------------- launches that no GPU can do


@pytest.mark.parametrize(
    ("block", "calls"),
    [
        pytest.param("[B, n]", {8: True, 16: True, 17: False, 1024: False}, id="product"),
        pytest.param("[n, n]", {32: True, 33: False}, id="square"),
        pytest.param("[n]", {0: False, 1: True, 1024: True, 1025: False}, id="extent"),
    ],
)
def test_a_block_of_more_threads_than_there_are_is_a_miss(block: str, calls: dict[int, bool], project: Project) -> None:
    """B is 64 or 128; the driver would refuse the launch."""
    path = project.build(f"entries.top.block={block}", only="top").path
    assert {n: isinstance(chosen(path, "top", "sm_90", "float32", n=n), Hit) for n in calls} == calls


@pytest.mark.parametrize(
    ("field", "value", "calls"),
    [
        pytest.param("grid", "[n - 8]", {7: False, 8: True}, id="grid"),
        pytest.param("grid", "[1, n]", {65535: True, 65536: False}, id="grid-y"),
        pytest.param("smem", "n * 4", {-1: False, 0: True, 58112: True, 58113: False}, id="shared-memory"),
        pytest.param("guards", "[64 // (n - 5) > 0]", {5: False, 6: True}, id="divided-by-zero"),
    ],
)
def test_a_call_whose_launch_cannot_be_is_a_miss(
    field: str, value: str, calls: dict[int, bool], project: Project
) -> None:
    path = project.build(f"entries.top.{field}={value}", only="top").path
    assert {n: isinstance(chosen(path, "top", "sm_90", "float32", n=n), Hit) for n in calls} == calls


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("sm_80", None),
        ("sm_86", "needs 120000 bytes of shared memory a block, sm_86 has 101376"),
        ("sm_89", "needs 120000 bytes of shared memory a block, sm_89 has 101376"),
    ],
)
def test_a_block_fits_a_gpu_that_has_its_shared_memory(machine: str, reason: str | None, project: Project) -> None:
    path = project.build("entries.top.smem=120000", only="top", target="old").path
    found = {reject_variant(variant, "cuda", made_up(machine)) for variant in opened(path).index.variants()}
    assert found == {reason}


REFUSED: dict[str, str] = {
    # a field of a kernel, as `--set` gives it -> the line without its place
    "scale.guards=[o > 1]": "guards[0]: 'o' is not an int argument or a number",
    "scale.grid=[x]": "grid[0]: 'x' is not an int argument or a number",
    "scale.writes=[n]": "writes[0]: 'n' is no pointer",
    "scale.axes={u: [a b, ab]}": "axes: two values give the id 'scale/ab/h100/sm_90'; rename one",
    "scale.axes={num_warps: [4, 8]}": "axes.num_warps: 'num_warps' is a field of triton.Config; give it in configs",
    "scale.op=small::same": "op: small::same is the operator of 'add' too; rename one",
    "add.rules=[{when: BLOCK > 1, config: 0}]": "rules[0].when: 'BLOCK' is not an int argument",
    "top.smem=T": "smem: 'T' is not an int argument or a number",
    "top.smem=300000": "smem: expected 0 to 232448, found 300000",
    "top.smem=-4": "smem: expected 0 to 232448, found -4",
    "top.smem=B // 0": "smem: B // 0 divides by 0",
    "top.grid=[-1]": "grid[0]: expected 0 to 2147483647, found -1",
    "top.cluster=[3, 3, 3]": "cluster: 27 blocks a cluster, at most 16",
}  # fmt: skip


@pytest.mark.parametrize("override", REFUSED)
def test_a_bundle_that_no_reader_opens_or_no_gpu_launches_is_never_published(override: str, project: Project) -> None:
    """It is refused before anything is compiled, and the good bundle stays."""
    before = files_of(project.bundle)
    first = ["entries.add.op=small::same"] if ".op=" in override else []
    with pytest.raises(ManifestError) as caught:
        project.build(*first, f"entries.{override}", out=BUNDLE)
    (problem,) = caught.value.problems
    assert f"{problem.path}: {problem.message}" == f"entries.{override.partition('.')[0]}.{REFUSED[override]}"
    assert files_of(project.bundle) == before


def test_the_plan_of_a_template_is_a_job_for_each_architecture(tmp_path: Path) -> None:
    """Also before its source was read: 8 programs, not 96."""
    found = steps(make_plan(read_manifest(MANIFESTS / "sampler.yaml")), Store(tmp_path))
    archs = ("sm_100", "sm_90", "sm_80", "compute_80")
    assert [(step.name, step.status) for step in found if step.kind == "nvrtc"] == [
        (f"{entry}/gpu/{arch}", f"after {entry}/source") for entry in ("topk_softmax", "sample") for arch in archs
    ]
