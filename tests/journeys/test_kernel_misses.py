"""Kernels behind a miss, with the real compilers in the real child and no GPU: the driver is the fake one, so what is
launched is read back, and nothing runs. `tests/gpu/test_kernel_misses.py` runs the same on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

pytest.importorskip("triton", reason="real compilers")
pytest.importorskip("cuda.bindings", reason="real compilers")

import aotpack_runtime as apr
from aotpack.build import build
from aotpack.compilers.cubin import read_cubin
from aotpack.manifest import read_manifest
from aotpack_runtime import GuardMiss, Hit, Session
from aotpack_runtime.dispatch import Miss
from aotpack_runtime.format.tensor import Call, TensorMeta
from aotpack_runtime.format.tree import LEAF
from aotpack_runtime.jit import kernel_misses
from aotpack_runtime.kernel_entry import KernelEntry
from aotpack_runtime.store import Store
from tests.support import fake_cuda, missing
from tests.support.building import ROOT
from tests.support.fake_cuda import Array, FakeDriver
from tests.support.serving import imported

Json = Any
pytestmark = pytest.mark.slow

KERNELS = """
import miss_helpers
import triton
import triton.language as tl


@triton.jit
def rows(x, o, n, step, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + (row * n + i) * step, mask=i < n)
    tl.store(o + row * n + i, miss_helpers.twice(value), mask=i < n)
"""
HELPERS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(2)


@triton.jit
def twice(value):
    return value * FACTOR
"""
REFERENCE = """
def rows(x, **rest):
    return 2 * x
"""
SOURCE = """
#include "step.h"
template <class T, int K>
__global__ void first(const T* x, T* o, int n) {
    int row = blockIdx.x;
    for (int i = threadIdx.x; i < K && i < n; i += blockDim.x) o[row * K + i] = x[row * n + i] + (T)STEP;
}
"""
MANIFEST = """\
schema: aotpack.manifest/v1
bundle: {name: kernel-misses, version: 1.0.0}
targets:
  h100: {kind: cuda, arch: [sm_90], ptx: compute_80}
entries:
  rows:
    kind: triton
    source: "miss_kernels:rows"
    params: {x: "*{dtype}:16", o: "*{dtype}:16", n: i32, step: "1", BLOCK: constexpr}
    axes: {dtype: [fp16], BLOCK: [64, 128]}
    guards: ["n <= BLOCK", "n > 0"]
    writes: [o]
    grid: [count]
    shapes: {x: [count, n], o: [count, n]}
    points: [{n: 100, count: 3, step: 1}]
  served:
    kind: triton
    source: "miss_kernels:rows"
    params: {x: "*fp16", o: "*fp16", n: i32, step: "1", BLOCK: constexpr}
    axes: {BLOCK: [64]}
    guards: ["n <= BLOCK"]
    writes: [o]
    grid: [count]
    shapes: {x: [count, n], o: [count, n]}
    points: [{n: 50, count: 3, step: 1}]
    verify: {against: "miss_reference:rows"}
    on_miss: {reference: true}
  first:
    kind: nvrtc
    source: first.cu
    include_dirs: [include]
    name_expression: "first<{T}, {K}>"
    template: {T: {float32: float}, K: [8]}
    params: {x: "const {T}*:16", o: "{T}*", n: int}
    guards: ["k == K"]
    grid: [count]
    block: ["32"]
    shapes: {x: [count, n], o: [count, k]}
    points: [{n: 100, count: 3, k: 8}]
"""


@pytest.fixture(scope="session")
def bundle() -> Path:
    """The two entries, built once for all test processes."""
    folder = ROOT / "kernel_misses"
    (folder / "include").mkdir(parents=True, exist_ok=True)
    with FileLock(ROOT / "kernel_misses.lock"):
        for name, text in (
            ("miss_kernels.py", KERNELS), ("miss_helpers.py", HELPERS), ("first.cu", SOURCE), ("manifest.yaml", MANIFEST),
            ("include/step.h", "#define STEP 1\n"), ("miss_reference.py", REFERENCE),
        ):  # fmt: skip
            path = folder / name
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        store = Store(ROOT / "store")
        return build(read_manifest(folder / "manifest.yaml"), folder / "bundle", jobs=2, store=store).path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AOTPACK_JIT_NICE", "0")
    return tmp_path / "cache"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def opened(bundle: Path, cache: Path, driver: FakeDriver) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def load(**more: Any) -> Session:
        sessions.append(apr.load(bundle, device="cuda", machine=more.pop("machine", driver.machine()), **more))
        return sessions[-1]

    yield load
    for session in sessions:
        session.close()


def arrays(typestr: str = "<f2", offset: int = 0) -> tuple[Array, Array]:
    return Array(4096 + offset, typestr, (3, 100)), Array(8192, typestr, (3, 100))


def entry_of(session: Session, name: str) -> KernelEntry:
    entry = session[name]
    assert isinstance(entry, KernelEntry)
    return entry


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def only(session: Session, name: str) -> str:
    """The one variant that misses added to an entry."""
    (variant,) = session.status()["entries"][name]["jit"]["variants"]
    return str(variant)


@pytest.mark.parametrize(
    ("given", "numbers", "label", "cubin"),
    [
        pytest.param(arrays(), {"n": 300, "step": 1}, "fp16_BLOCK512", True, id="constexpr"),
        pytest.param(arrays("<f4"), {"n": 100, "step": 1}, "fp32_BLOCK128", True, id="dtype"),
        pytest.param(arrays(offset=2), {"n": 100, "step": 1}, "fp16_BLOCK128", True, id="alignment"),
        pytest.param(arrays(), {"n": 100, "step": 3}, "fp16_BLOCK128", True, id="literal"),
        pytest.param(arrays(), {"n": 100, "step": 2**40}, "fp16_BLOCK128", True, id="wider-int"),
    ],
)
def test_a_miss_of_a_triton_kernel_is_compiled_and_launched(
    given: tuple[Array, Array], numbers: Json, label: str, opened: Callable[..., Session], driver: FakeDriver, *, cubin: bool
) -> None:  # fmt: skip
    session = opened()
    rows = entry_of(session, "rows")
    rows(*given, **numbers, count=3)
    name = only(session, "rows")
    assert name.startswith(f"rows/jit-{label}-")
    decision = rows.explain(*given, **numbers, count=3)
    assert isinstance(decision, Hit)
    assert decision.variant.id == name
    (launched,) = driver.seen
    assert (launched.symbol, launched.grid) == ("rows", (3, 1, 1))
    (data,) = driver.loads
    assert read_cubin(data).architecture == "sm_90a"
    status = session.status()
    assert status["entries"]["rows"]["hits_by_tier"] == {"bundle": 0, "overlay": 1}
    (shape,) = status["entries"]["rows"]["jit"]["shapes"]
    assert (shape["calls"], shape["state"]) == (1, "compiled")
    assert "its parameters are where its cubin has them" in shape["checked"]
    assert "not run: the manifest names no reference" in shape["checked"]
    assert status["jit"]["compiles"] == 1
    assert json.dumps(status)
    rows(*given, **numbers, count=3)  # from the memo
    assert len(driver.seen) == 2
    again = opened()  # another process, as it were
    entry_of(again, "rows")(*given, **numbers, count=3)
    assert again.status()["jit"]["compiles"] == 0
    assert len(driver.seen) == 3


@pytest.mark.parametrize(
    ("given", "numbers", "label"),
    [
        pytest.param(arrays("<f4"), {"n": 100, "k": 5}, "float32_K5", id="template-number"),
        pytest.param(arrays("<f8"), {"n": 100, "k": 8}, "float64_K8", id="template-type"),
    ],
)
def test_a_miss_of_a_template_is_instantiated_with_nvrtc(
    given: tuple[Array, Array], numbers: Json, label: str, opened: Callable[..., Session], driver: FakeDriver
) -> None:
    session = opened()
    entry_of(session, "first")(*given, **numbers, count=3)
    assert only(session, "first").startswith(f"first/jit-{label}-")
    (launched,) = driver.seen
    assert (launched.grid, launched.block) == ((3, 1, 1), (32, 1, 1))
    (data,) = driver.loads
    assert [param.size_bytes for param in read_cubin(data).kernels[launched.symbol].params] == [8, 8, 4]


@pytest.mark.parametrize(
    ("name", "given", "numbers", "reason"),
    [
        pytest.param("rows", arrays(), {"n": 0, "step": 1}, "the manifest's guard does not hold: n > 0", id="own-guard"),
        pytest.param("rows", arrays(), {"n": 1 << 21, "step": 1}, "the manifest's guard does not hold: n <= BLOCK", id="beyond"),
        pytest.param("first", arrays("<f4", 4), {"n": 9, "k": 8},
                     "x: expected an address divisible by 16, on which C++ may rely, got one 4 bytes past it", id="promise"),
        pytest.param("first", arrays("<f4"), {"n": 1 << 40, "k": 8}, "n: expected -2147483648 to 2147483647", id="c-int"),
        pytest.param("rows", arrays("<c8"), {"n": 9, "step": 1}, "x.dtype: Triton has no complex64", id="dtype"),
        pytest.param("rows", arrays("<f2", 1), {"n": 9.5, "step": 1}, "n: expected an int, got 9.5", id="float"),
    ],
)  # fmt: skip
def test_what_the_manifest_cannot_launch_stays_a_miss(
    name: str, given: tuple[Array, Array], numbers: Json, reason: str, opened: Callable[..., Session], cache: Path
) -> None:
    session = opened()
    with pytest.raises(GuardMiss) as caught:
        entry_of(session, name)(*given, **numbers, count=3)
    assert f"and none is compiled for it here ({reason}" in str(caught.value)
    assert not (cache / "overlay").exists()
    (shape,) = session.status()["entries"][name]["jit"]["shapes"]
    assert shape["state"].startswith(reason)


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((12, 0), "sm_120a")])
def test_a_gpu_that_the_bundle_has_no_machine_code_for_gets_its_own(
    capability: tuple[int, int], arch: str, bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PTX serves `first` meanwhile; of `rows` a value is asked for that no PTX has."""
    driver = fake_cuda.install(monkeypatch, [capability])
    with apr.load(bundle, device="cuda", machine=driver.machine()) as session:
        assert session.verdict == "fits through PTX, which the driver compiles"
        first = entry_of(session, "first")
        first(*arrays("<f4"), n=100, k=8, count=3)
        assert driver.loads[-1].startswith(b"//")  # the text of PTX
        assert [name.rpartition("/")[2] for name in first.counts()["through_ptx"]] == ["compute_80"]
        entry_of(session, "rows")(*arrays(), n=300, step=1, count=3)
        until(lambda: session.status()["jit"]["waiting"] + session.status()["jit"]["running"] == 0)
        first(*arrays("<f4"), n=100, k=8, count=3)
        made = [read_cubin(data).architecture for data in driver.loads if not data.startswith(b"//")]
        assert sorted(made) == sorted([arch, arch.removesuffix("a")])
        assert len(driver.seen) == 3
        assert first.counts()["hits_by_tier"] == {"bundle": 1, "overlay": 1}


def test_a_bundle_without_code_for_a_gpu_fits_once_its_kernels_are_compiled(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver too old for the PTX, and a GPU of another major version."""
    import dataclasses

    driver = fake_cuda.install(monkeypatch, [(8, 6)])
    machine = driver.machine()
    machine.__dict__["gpus"] = (dataclasses.replace(driver.gpus[0], driver=(12, 0)),)
    with pytest.raises(apr.TargetMismatch):
        apr.load(bundle, device="cuda", machine=machine, mode="strict")
    with apr.load(bundle, device="cuda", machine=machine) as session:
        assert session.verdict == "fits once its kernels are compiled here"
        entry_of(session, "rows")(*arrays(), n=100, step=1, count=3)
        entry_of(session, "first")(*arrays("<f4"), n=100, k=8, count=3)
        assert {read_cubin(data).architecture for data in driver.loads} == {"sm_86"}
        assert session.status()["ready"]


def test_threads_that_miss_at_once_compile_once_and_all_launch(
    opened: Callable[..., Session], driver: FakeDriver
) -> None:
    session = opened()
    rows = entry_of(session, "rows")
    threads = [threading.Thread(target=lambda: rows(*arrays(), n=300, step=1, count=3)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(driver.seen) == 6
    assert session.status()["jit"]["compiles"] == 1


def test_without_the_compiler_a_miss_says_so(
    opened: Callable[..., Session], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_misses, "TOOLS", {"triton": "not_there_at_all", "nvrtc": "not_there.at_all"})
    session = opened()
    for name, given, numbers, tool in (
        ("rows", arrays(), {"n": 300, "step": 1}, "Triton"), ("first", arrays("<f4"), {"n": 9, "k": 5}, "NVRTC"),
    ):  # fmt: skip
        with pytest.raises(GuardMiss, match=rf"none is compiled for it here \({tool} is not installed: pip install"):
            entry_of(session, name)(*given, **numbers, count=3)


def test_a_compile_that_takes_too_long_is_ended_and_left_alone_for_a_while(
    opened: Callable[..., Session], driver: FakeDriver
) -> None:
    """A block of a million elements keeps Triton busy for minutes (3.9): the call waits no longer than it may."""
    session = opened(on_miss={"max_seconds": 2})
    rows = entry_of(session, "rows")
    with pytest.raises(GuardMiss, match=r"it may take 2 seconds|still being compiled after 2 s"):
        rows(*arrays(), n=1 << 20, step=1, count=3)
    until(lambda: session.status()["jit"]["failures"] == 1)
    start = time.monotonic()
    with pytest.raises(GuardMiss, match="failed 1 times, the next try is in"):
        rows(*arrays(), n=1 << 20, step=1, count=3)
    assert time.monotonic() - start < 1
    assert driver.seen == []


def test_a_reference_serves_what_it_was_compared_for_and_nothing_else(opened: Callable[..., Session]) -> None:
    """Contiguous tensors of the manifest's shapes, by the very file that the bundle was built with."""
    torch = pytest.importorskip("torch")
    session = opened(mode="eager")
    served = entry_of(session, "served")
    (way,) = served._fallbacks
    numbers = {"n": 300, "step": 1, "count": 3}

    def prepared(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        meta = TensorMeta("float16", "cuda:0", shape, strides, 0)
        call = Call((LEAF,) * 5, (meta, meta, *numbers.values()))
        return way.prepare(Miss(call, served.record.parameter_names, ()), ())

    assert "manifest's shapes: x of [3, 300]" in prepared((300, 3), (3, 1))
    assert "manifest's shapes: x of [3, 300]" in prepared((3, 300), (1, 3))
    assert "there is no such" in prepared((3, 300), (300, 1)) or "is not there" in prepared((3, 300), (300, 1))
    way._problem = ""
    with imported(ROOT / "kernel_misses", "miss_reference"):
        found = prepared((3, 300), (300, 1))
        assert not isinstance(found, str), found
        x, o = torch.randn(3, 300, dtype=torch.float16), torch.full((3, 300), torch.nan, dtype=torch.float16)
        found.serve(x, o, *numbers.values())
    torch.testing.assert_close(o, 2 * x)
    assert served.counts()["misses_by_tier"] == {"reference": 1}


def test_what_misses_of_kernels_compiled_is_promoted(
    opened: Callable[..., Session],
    bundle: Path,
    driver: FakeDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry_of(opened(), "rows")(*arrays(), n=300, step=1, count=3)
    # The facts of a fake machine name the overlay, so the command's own would look elsewhere.
    from aotpack import promote

    machine = driver.machine()
    monkeypatch.setattr(promote, "this_machine", lambda: machine)
    made = promote.promote(bundle, tmp_path / "out", version="1.1.0")
    assert [name.rpartition("-")[0] for name in made.variants] == ["rows/jit-fp16_BLOCK512"]
    with apr.load(tmp_path / "out", device="cuda", machine=machine, mode="strict") as session:
        entry_of(session, "rows")(*arrays(), n=300, step=1, count=3)
        session.bundle.verify()
    assert driver.seen[-1].symbol == "rows"


def test_a_source_that_was_changed_in_the_bundle_is_not_compiled(
    bundle: Path, cache: Path, driver: FakeDriver, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(bundle, tmp_path / "copy")
    for path in (tmp_path / "copy" / "sources").iterdir():
        text = path.read_text()
        path.write_text(text.replace("FACTOR = tl.constexpr(2)", "FACTOR = tl.constexpr(3)"))
    with apr.load(tmp_path / "copy", device="cuda", machine=driver.machine()) as session:
        with pytest.raises(GuardMiss, match="sha256 is"):
            entry_of(session, "rows")(*arrays(), n=300, step=1, count=3)
        assert driver.seen == []


def test_a_session_that_only_serves_hits_imports_none_of_it(bundle: Path) -> None:
    code = f"""
import sys
import aotpack_runtime as apr
from tests.support import fake_cuda
import pytest
driver = fake_cuda.install(pytest.MonkeyPatch())
session = apr.load({str(bundle)!r}, device="cuda", machine=driver.machine())
given = fake_cuda.Array(4096, "<f2", (3, 100)), fake_cuda.Array(8192, "<f2", (3, 100))
session["rows"](*given, n=100, step=1, count=3)
assert len(driver.seen) == 1
print([name for name in sys.modules if name.startswith(("aotpack_runtime.jit", "torch", "triton"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=missing.environment(None), cwd=missing.REPO, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
