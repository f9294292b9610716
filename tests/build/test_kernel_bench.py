"""The bench of kernels as far as it goes without a GPU: which calls are timed, what a sample records and compares, and
what it refuses. The driver is a fake that adds two arrays in host memory; the rest is the bench's own code.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aotpack.bench.child import answers, device, given, kernel_sample, kernel_start
from aotpack.bench.child.__main__ import JOBS
from aotpack.bench.child.clock import Clock
from aotpack.bench.child.flat import bytes_of
from aotpack.bench.gate import parse_gate
from aotpack.bench.harness import Harness, Runs
from aotpack.bench.kernel_cases import make_kernel_cases
from aotpack.bench.modes import KERNEL_MODES, modes_of, unmeasurable
from aotpack.bench.nvrtc_jobs import nvrtc_jobs
from aotpack.bench.report import make_report, table
from aotpack.bench.run import run_bench
from aotpack.compilers.nvrtc import compile_program
from aotpack_runtime import session as sessions
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.errors import MissingDevice, TargetMismatch, UsageError
from aotpack_runtime.format.index import Entry
from aotpack_runtime.machine import this_machine
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeDriver, Launched
from tests.support.kernels import integer, kernel_entry, kernel_variant, pointer, write_kernels

ROOT = Path(__file__).resolve().parents[2]
LEAVES = [pointer("x"), pointer("y"), pointer("o"), integer("n")]
PARAMETERS = [("Q", 0), ("Q", 1), ("Q", 2), ("i", 3)]


def add(launched: Launched) -> str:
    """The kernel, in host memory; what is seen of a launch is its symbol."""
    x, y, o = (launched.read(place, ctypes.c_uint64) for place in range(3))
    n = launched.read(3, ctypes.c_int32)
    arrays = [(ctypes.c_float * n).from_address(address) for address in (x, y, o)]
    for place in range(n):
        arrays[2][place] = arrays[0][place] + arrays[1][place]
    return launched.symbol


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A GPU whose memory is the host's."""
    fake = fake_cuda.install(monkeypatch)
    fake.look = add
    memory: list[Any] = []

    def allocate(size: int) -> tuple[int, int]:
        memory.append(ctypes.create_string_buffer(size + 256))
        return 0, -(-ctypes.addressof(memory[-1]) // 256) * 256

    def copy(to: int, source: int, size: int) -> tuple[int]:
        ctypes.memmove(to, source, size)
        return (0,)

    functions = {"cuMemAlloc": allocate, "cuMemcpyHtoD": copy, "cuMemcpyDtoH": copy,
                 "cuCtxSynchronize": lambda: (0,), "cuCtxSetCurrent": lambda context: (0,)}  # fmt: skip
    monkeypatch.setattr(device, "cu", SimpleNamespace(**functions))
    monkeypatch.setattr(sessions, "this_machine", fake.machine)
    given._index.cache_clear()
    return fake


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    aligned = [pointer(name, aligned=True) for name in "xyo"] + [integer("n")]
    variants = [
        kernel_variant("add16", aligned, PARAMETERS, where=["n % 16 == 0"]),
        kernel_variant("add1", LEAVES, PARAMETERS),
        kernel_variant("ptx", LEAVES, PARAMETERS, kind="ptx", needs={"ptx": "compute_80 8.0"}),
    ]
    record = kernel_entry(variants, "Tensor Tensor Tensor int", writes=["o"])
    record["verify"] = {
        "against": "ref:add", "cases": [{"n": 64}, {"n": 33}], "shapes": {name: ["n"] for name in "xyo"}, "rtol": None,
        "samples": 1,
    }  # fmt: skip
    return write_kernels(tmp_path / "bundle", add=record)


def entry(bundle: Path) -> Entry:
    opened = open_bundle(bundle)
    opened.close()
    return opened.index.entries["add"]


def job(bundle: Path, driver: FakeDriver, mode: str, folder: Path) -> dict[str, Any]:
    """A job of `mode` whose inputs lie in `folder`, beside what must come of them."""
    cases = make_kernel_cases(entry(bundle), driver.machine(), "cuda")
    inputs, wanted = {}, {}
    for case in cases:
        x, y = torch.randn(case.numbers["n"]), torch.randn(case.numbers["n"])
        inputs[case.name] = {"x": bytes_of(x), "y": bytes_of(y), "o": bytes_of(torch.full_like(x, torch.nan))}
        inputs[case.name] |= case.numbers
        wanted[case.name] = {"o": x.double() + y.double()}
    (folder / "inputs").write_bytes(pickle.dumps(inputs))
    torch.save(wanted, folder / "reference")
    return {
        "bundle": str(bundle), "entry": "add", "folder": str(folder), "device": "cuda", "mode": mode, "steady": True,
        "cases": [case.record() for case in cases], "inputs": str(folder / "inputs"),
        "results": str(folder / f"{mode}.results"), "reference": str(folder / "reference"),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("aotpack.bench.child.calls.STEADY_SECONDS", 0.0)
    yield
    given._index.cache_clear()


def test_cases_are_points_with_the_variant_that_each_hits(bundle: Path, driver: FakeDriver) -> None:
    cases = make_kernel_cases(entry(bundle), driver.machine(), "cuda")
    assert [(case.name, case.kind, case.like) for case in cases] == [("n=64", "hot", "add16"), ("n=33", "hot", "add1")]
    (named,) = make_kernel_cases(entry(bundle), driver.machine(), "cuda", [{"n": (33,)}])
    assert (named.numbers, named.like) == ({"n": 33}, "add1")
    with pytest.raises(UsageError, match="no point of 'add' has n=7; there are: n=64; n=33"):
        make_kernel_cases(entry(bundle), driver.machine(), "cuda", [{"n": (7,)}])
    with pytest.raises(TargetMismatch):
        make_kernel_cases(entry(bundle), this_machine(), "cuda")


@pytest.mark.parametrize(("mode", "symbols"), [("bundle", ["add16", "add1"]), ("ptx", ["ptx"])], ids=["bundle", "ptx"])
def test_a_sample_times_launches_and_keeps_what_they_wrote(
    bundle: Path, driver: FakeDriver, mode: str, symbols: list[str], tmp_path: Path
) -> None:
    work = job(bundle, driver, mode, tmp_path)
    found = kernel_sample.sample(work, Clock(time.monotonic()))
    assert list(dict.fromkeys(driver.seen)) == symbols
    assert list(found["phases_s"]) == ["verdict", "load", "inputs", "first_call"]
    assert found["hits"] == len(driver.seen)
    assert [call["case"] for call in found["calls"]] == ["n=64", "n=33"]
    assert all(call["launch_s"] > 0 and call["steady_s"] > 0 for call in found["calls"])
    checked = {"reference": work["reference"], "results": {mode: work["results"]}, **work_entry(work)}
    assert answers.check_kernel(checked, Clock(0.0)) == {mode: None}
    results = pickle.loads(Path(work["results"]).read_bytes())
    results["n=33"]["o"].data = bytes(len(results["n=33"]["o"].data))
    Path(work["results"]).write_bytes(pickle.dumps(results))
    assert answers.check_kernel(checked, Clock(0.0))[mode].startswith("n=33: o: ||out - ref|| / ||ref|| is 1.00e+00")


def work_entry(work: dict[str, Any]) -> dict[str, Any]:
    return {"bundle": work["bundle"], "entry": work["entry"]}


def test_what_nvrtc_compiles_is_what_is_launched(
    bundle: Path, driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotpack.compilers.nvrtc.compile_program", lambda job: SimpleNamespace(data=job["code"]))
    work = job(bundle, driver, "nvrtc-cold", tmp_path)
    work["nvrtc"] = {name: {"code": b"compiled for " + name.encode()} for name in ("add16", "add1")}
    found = kernel_sample.sample(work, Clock(time.monotonic()))
    assert driver.loads == [b"compiled for add16", b"compiled for add1"]
    assert list(dict.fromkeys(driver.seen)) == ["add16", "add1"]
    assert found["hits"] == len(driver.seen)


def test_launches_are_reported_compared_and_gated(bundle: Path, driver: FakeDriver, tmp_path: Path) -> None:
    ours = kernel_sample.sample(job(bundle, driver, "bundle", tmp_path), Clock(time.monotonic()))
    for place, call in enumerate(ours["calls"]):
        call["launch_s"] = 5e-6 * (place + 1)
    theirs = {**ours, "calls": [{**call, "launch_s": 2 * call["launch_s"]} for call in ours["calls"]]}
    runs = Runs(samples={"bundle": [ours] * 3, "triton-warm": [theirs] * 3})
    cases = make_kernel_cases(entry(bundle), driver.machine(), "cuda")
    about = {"name": "b", "version": "1", "digest": "d"}
    report = make_report(runs, cases, modes=KERNEL_MODES, bundle=about, entry="add", size_bytes=1, version="2")
    assert report["steady"]["against"] == "triton-warm"
    assert [one["ratios"]["bundle"]["median"] for one in report["steady"]["cases"]] == [0.5, 0.5]
    lines = table(report).splitlines()
    assert "launch, until it is queued, x triton-warm:" in lines
    assert any(line.split()[:3] == ["bundle", "n=64", "5.0"] and "(0.50, 0.50 .. 0.50)" in line for line in lines)
    assert parse_gate("launch>0.000006").broken(report, None) is None
    assert parse_gate("steady_ratio>0.4").broken(report, None) is not None


def test_what_cannot_be_measured_says_why(bundle: Path, driver: FakeDriver) -> None:
    record = entry(bundle)
    assert list(modes_of(record)) == ["bundle", "bundle-torch", "nvrtc-cold", "ptx", "import-torch"]
    assert "--manifest" in str(unmeasurable(KERNEL_MODES["nvrtc-cold"], record, {}))
    assert unmeasurable(KERNEL_MODES["ptx"], record, {}) is None
    with pytest.raises(UsageError, match="mode 'eager' is not for 'add'"):
        run_bench(bundle, modes=["eager"])
    with pytest.raises(UsageError, match="'add' is a kernel, which does not run on cpu"):
        run_bench(bundle, device="cpu")
    if not this_machine().gpus:
        with pytest.raises(MissingDevice, match="measuring it needs a CUDA device, and this host has none"):
            run_bench(bundle)


def test_nvrtc_is_told_what_the_manifest_says_and_compiles_one_instantiation() -> None:
    name, wanted = "sample/float32-BLOCK256-VPT4/gpu/sm_90", "_Z6sampleIfLi256ELi4EEvPKT_PKfPifi"
    jobs = nvrtc_jobs(ROOT / "manifests" / "sampler.yaml", SimpleNamespace(name="sample"), [name])  # type: ignore[arg-type]
    made = compile_program(jobs[name])
    assert list(made.symbols.values()) == [wanted]
    assert wanted.encode() in made.data
    with pytest.raises(UsageError, match=r"sampler.yaml does not build sample/other"):
        nvrtc_jobs(ROOT / "manifests" / "sampler.yaml", SimpleNamespace(name="sample"), ["sample/other"])  # type: ignore[arg-type]


def test_a_whole_run_compares_all_modes_on_the_same_inputs(
    bundle: Path, driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Here(Harness):
        """Jobs are done in this process, which has torch: what a hit of the bundle must not import."""

        def _child(self, do: str, caches: Path, **more: Any) -> Any:
            room, _, function = JOBS[do].partition(":")
            work = {**self._job, "do": do, **more}
            return getattr(import_module(f"aotpack.bench.child.{room}"), function)(work, Clock(time.monotonic()))

    def arguments(record: Entry, variant: Any, case: dict[str, int], *, seed: int) -> dict[str, Any]:
        x, y = torch.randn(2, case["n"], generator=torch.Generator().manual_seed(seed))
        return {"x": x, "y": y, "o": torch.full_like(x, torch.nan), **case}

    (tmp_path / "ref.py").write_text("def add(*, x, y, o, n):\n    return x + y\n")
    monkeypatch.setattr("aotpack.kernel_verify.make_arguments", arguments)
    monkeypatch.setattr(sys, "path", list(sys.path))
    record = entry(bundle)
    cases = make_kernel_cases(record, driver.machine(), "cuda")
    harness = Here(
        bundle, record, cases, device="cuda", folder=tmp_path, dtype="", steady=True, report=lambda line: None
    )
    runs = harness.run(["bundle", "ptx", "nvrtc-cold"], 2)
    assert runs.reference == "ref:add"
    assert runs.unmeasured == {
        "nvrtc-cold": "a bundle does not say how its text is compiled; name the manifest with --manifest"
    }
    assert {name: len(samples) for name, samples in runs.samples.items()} == {"bundle": 2, "ptx": 2}
    assert list(runs.wrong) == ["bundle"]
    assert runs.wrong["bundle"].startswith("a hit imported torch")


def test_triton_is_launched_as_the_variant_was_built(
    tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
class Kernel:
    arg_names = ["x", "y", "o", "n", "BLOCK"]
    def __getitem__(self, grid):
        return lambda *args, **options: (grid, args, options)
kernel = Kernel()
"""
    (tmp_path / "standing_in.py").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    axes = {"BLOCK": 32, "align": 16, "num_warps": 4, "num_stages": 3, "num_ctas": 1}
    variant = kernel_variant("v", LEAVES, PARAMETERS, axes=axes, grid=["ceil_div(n, 32)"])
    record = kernel_entry([variant], "Tensor Tensor Tensor int", writes=["o"])
    record["source"]["text"] = "standing_in:kernel"
    work = {
        "bundle": str(write_kernels(tmp_path / "b", add=record)),
        "entry": "add",
        "device": "cpu",
        "folder": str(tmp_path),
    }
    started = kernel_start.start({**work, "mode": "triton-cold"}, Clock(time.monotonic()))
    x = started.put(bytes_of(torch.ones(65)))
    assert torch.equal(x, torch.ones(65))
    launch = started.bind({"like": "v"}, {"x": 1, "y": 2, "o": 3, "n": 65})
    assert launch() == ((3, 1, 1), (1, 2, 3, 65, 32), {"num_warps": 4, "num_stages": 3, "num_ctas": 1})
