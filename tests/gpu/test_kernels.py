"""Kernels on a GPU: every variant against its reference, and every way in which a launch may go wrong.

Run on a machine with a GPU: `pytest -m gpu tests/gpu` (see conftest.py for where bundles come from).
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aotpack_runtime as apr
from aotpack_runtime.errors import GuardMiss

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own modules
ROOT = Path(__file__).resolve().parents[2]
Bundles = Callable[[str], str]


class Interface:
    """A tensor that shows nothing but the CUDA array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.__cuda_array_interface__ = tensor, tensor.__cuda_array_interface__


class Capsule:
    """A tensor that shows nothing but DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, ordinal = self.tensor.__dlpack_device__()
        return int(kind), int(ordinal)


@pytest.fixture(scope="module")
def cases(bundle: Bundles) -> Iterator[apr.Session]:
    with apr.load(bundle("cases"), device="cuda", mode="strict") as session:
        yield session


@pytest.fixture(scope="module")
def add(bundle: Bundles) -> Iterator[Any]:
    with apr.load(bundle("bench"), device="cuda", mode="strict") as session:
        yield session["add"]


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype, device="cuda")


def hit(entry: Any, *args: Any, **kwargs: Any) -> str:
    decision = entry.explain(*args, **kwargs)
    assert isinstance(decision, apr.Hit), str(decision)
    return decision.variant.id


# ----------------------------------------------------------------------------------------------- every variant


@pytest.mark.parametrize("name", ["llmk", "sampler"])
def test_every_variant_is_what_its_reference_is(bundle: Bundles, name: str) -> None:
    from aotpack.verify import Verified, verify_bundle

    seen, skipped = verify_bundle(bundle(name), ROOT / "manifests")
    wrong = {variant: found for variant, found in seen.items() if not isinstance(found, Verified)}
    assert not wrong
    assert seen
    assert all(reason.startswith(("sm_", "PTX")) for reason in skipped.values())


# ------------------------------------------------------------------------------------------- cases of the issue list


@pytest.mark.parametrize("shifted", ["none", "x", "y", "o", "all"])
def test_a08_an_address_that_is_not_aligned_takes_the_generic_variant(add: Any, shifted: str) -> None:
    x, y, o = (torch.randn(1025, device="cuda") for _ in range(3))
    x, y, o = (t[1:] if shifted in (name, "all") else t[:1024] for name, t in (("x", x), ("y", y), ("o", o)))
    o.fill_(torch.nan)
    assert ("align16" in hit(add, x, y, o, 1024)) == (shifted == "none")
    add(x, y, o, 1024)
    assert torch.equal(o, x + y)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 1000, 1024, 1025, 5000])
def test_sizes_around_blocks_and_nothing_is_written_past_the_end(add: Any, n: int) -> None:
    x, y = torch.randn(n + 64, device="cuda"), torch.randn(n + 64, device="cuda")
    o = poisoned(n + 64)
    add(x, y, o, n)
    assert torch.equal(o[:n], (x + y)[:n])
    assert bool(torch.isnan(o[n:]).all())


def test_a19_a_tensor_of_the_cpu_is_a_miss_and_never_dereferenced(add: Any) -> None:
    x, o = torch.randn(64, device="cuda"), poisoned(64)
    with pytest.raises(GuardMiss, match=r"y.device: expected cuda, got cpu"):
        add(x, torch.randn(64), o, 64)
    assert bool(torch.isnan(o).all())


def test_a19_the_second_gpu_has_its_own_module_and_the_current_device_stays(bundle: Bundles) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for device in ("cuda", "cuda:1"):
        with apr.load(bundle("bench"), device=device, mode="strict") as session:
            x, y = (torch.randn(5000, device="cuda:1") for _ in range(2))
            o = torch.full_like(x, torch.nan)
            session["add"](x, y, o, 5000)
            torch.cuda.synchronize(1)
            assert torch.equal(o, x + y)
            assert torch.cuda.current_device() == 0
            here = [t.to("cuda:0") for t in (x, y, o)]
            if device == "cuda":
                here[2].fill_(torch.nan)
                session["add"](*here, 5000)
                torch.cuda.synchronize(0)
                assert torch.equal(here[2], here[0] + here[1])
            else:
                with pytest.raises(GuardMiss, match="on cuda:0, the session is for cuda:1"):
                    session["add"](*here, 5000)
            with pytest.raises(GuardMiss, match="several devices"):
                session["add"](x, here[1], o, 5000)


@pytest.mark.parametrize("wrap", [Interface, Capsule], ids=["cuda-array-interface", "dlpack"])
@pytest.mark.parametrize("current", [0, 1])
def test_a19_arrays_of_others_are_launched_on_where_they_are(bundle: Bundles, wrap: Any, current: int) -> None:
    """The CUDA array interface does not say on which GPU; an address on another one is an illegal access there. torch
    hands out capsules of what is on the current GPU alone."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    places = [current] if wrap is Capsule else [1, 0, 1]
    with torch.cuda.device(current), apr.load(bundle("bench"), device="cuda", mode="strict") as session:
        for place in places:
            x, y = (torch.randn(5000, device=f"cuda:{place}") for _ in range(2))
            o = torch.full_like(x, torch.nan)
            for _ in range(2):  # judged, then remembered
                o.fill_(torch.nan)
                torch.cuda.synchronize(place)
                session["add"](wrap(x), wrap(y), wrap(o), 5000)
                torch.cuda.synchronize(place)
                assert torch.equal(o, x + y)
        assert torch.cuda.current_device() == current
    other = 1 - places[0]
    with torch.cuda.device(current), apr.load(bundle("bench"), device=f"cuda:{other}", mode="strict") as session:
        given = [wrap(torch.randn(5000, device=f"cuda:{places[0]}")) for _ in range(3)]
        with pytest.raises(GuardMiss, match=f"on cuda:{places[0]}, the session is for cuda:{other}"):
            session["add"](*given, 5000)


@pytest.mark.parametrize(
    ("n", "s", "shift_x", "shift_o", "wanted"),
    [
        pytest.param(1024, 1, 0, 0, "align16-1", id="all"),
        pytest.param(1024, 2, 0, 0, "align16-i32", id="stride"),
        pytest.param(1000, 1, 0, 0, "align1-1", id="not-divisible"),
        pytest.param(1024, 1, 4, 0, "align1-1", id="address"),
        pytest.param(0, 1, 0, 0, "align16-1", id="zero-is-divisible"),
    ],
)
def test_a31_the_most_special_variant_that_holds_is_taken(
    cases: apr.Session, n: int, s: int, shift_x: int, shift_o: int, wanted: str
) -> None:
    x = torch.randn(4096, device="cuda")[shift_x // 4 :]
    o = poisoned(2048)[shift_o // 4 :]
    assert f"copy/{wanted}-" in hit(cases["copy"], x, o, n, s)
    cases["copy"](x, o, n, s)
    assert torch.equal(o[:n], x[: n * s : s])
    assert bool(torch.isnan(o[n:]).all())


@pytest.mark.parametrize("columns", [64, 512, 511, 520])
def test_a33_a_descriptor_only_where_steps_are_divisible_by_16_bytes(cases: apr.Session, columns: int) -> None:
    x = torch.randn(200, columns, device="cuda").to(torch.bfloat16)
    y = poisoned(200, columns, dtype=torch.bfloat16)
    arguments = (x, y, 200, columns, columns, 3.0)
    assert ("tensordesc" in hit(cases["scale"], *arguments)) == (columns % 8 == 0)
    for _ in range(2):
        y.fill_(torch.nan)
        cases["scale"](*arguments)
        assert torch.equal(y, (x.float() * 3).to(torch.bfloat16))
    other = torch.randn_like(x)  # another address, the same shape
    cases["scale"](other, *arguments[1:])
    assert torch.equal(y, (other.float() * 3).to(torch.bfloat16))


def test_a33_a_view_of_a_matrix_by_descriptor(cases: apr.Session) -> None:
    whole = torch.randn(300, 1024, device="cuda").to(torch.bfloat16)
    x = whole[10:210, 64:320]
    y = poisoned(200, 256, dtype=torch.bfloat16)
    assert "tensordesc" in hit(cases["scale"], x, y, 200, 256, 1024, 0.5)
    cases["scale"](x, y, 200, 256, 1024, 0.5)
    assert torch.equal(y, (x.float() * 0.5).to(torch.bfloat16))


class Added(torch.nn.Module):
    """A42: a kernel inside a model, whose grid follows the size of each call."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        o = torch.empty_like(x)
        torch.ops.aotpack_bench.add(x, y, o, x.shape[0])
        return o * 2


SIZES = [1024, 2, 1000, 1025, 5000]


def test_a42_the_grid_of_an_exported_program_follows_its_sizes(add: Any, tmp_path: Path) -> None:
    example = (torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda"))
    n = torch.export.Dim("n", min=2, max=8192)
    program = torch.export.export(Added(), example, dynamic_shapes=({0: n}, {0: n}))
    torch.export.save(program, tmp_path / "added.pt2")
    loaded = torch.export.load(tmp_path / "added.pt2").module()
    for size in SIZES:
        x, y = torch.randn(size, device="cuda"), torch.randn(size, device="cuda")
        assert torch.equal(loaded(x, y), (x + y) * 2)


def test_the_operator_is_one_node_of_a_compiled_graph(add: Any) -> None:
    compiled = torch.compile(Added(), fullgraph=True, dynamic=True)
    for size in SIZES:
        x, y = torch.randn(size, device="cuda"), torch.randn(size, device="cuda")
        assert torch.equal(compiled(x, y), (x + y) * 2)


def test_the_operator_passes_opcheck(add: Any) -> None:
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    torch.library.opcheck(torch.ops.aotpack_bench.add.default, (x, y, torch.empty_like(x), 1000))


# -------------------------------------------------------------------------------------------------- graphs, streams


def test_a_kernel_is_captured_into_a_graph_and_replayed(add: Any) -> None:
    x, y, o = (torch.randn(5000, device="cuda") for _ in range(3))
    add(x, y, o, 5000)  # warm-up: modules load outside of capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(x, y, o, 5000)
    for _ in range(3):
        x.normal_()
        o.fill_(torch.nan)
        graph.replay()
        assert torch.equal(o, x + y)


def test_warmup_is_enough_for_a_capture(bundle: Bundles) -> None:
    """In a process that has launched nothing: a module must not load while a graph is captured."""
    text = f"""
import torch, aotpack_runtime as apr
session = apr.load({bundle("bench")!r}, device="cuda", mode="strict")
session.warmup()
assert session.status()["ready"]
x, y, o = (torch.randn(5000, device="cuda") for _ in range(3))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    session["add"](x, y, o, 5000)
o.fill_(torch.nan)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(o, x + y)
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)


def test_a_launch_goes_to_the_stream_that_is_current(add: Any) -> None:
    x, y, o = torch.zeros(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda"), poisoned(1 << 20)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(5)
        add(x, y, o, 1 << 20)
        sums = o.sum()
    stream.synchronize()
    assert float(sums) == 6.0 * (1 << 20)


def test_a_foreign_array_goes_to_the_stream_that_was_said(add: Any) -> None:
    x, y, o = torch.zeros(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda"), poisoned(1 << 20)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(5)
    with apr.use_stream(stream.cuda_stream):
        add(Capsule(x), Capsule(y), Capsule(o), 1 << 20)
    stream.synchronize()
    assert bool((o == 6).all())


def test_threads_that_launch_at_once_do_not_mix_their_arguments(add: Any) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.full((4096,), float(number), device="cuda")
            outs = [poisoned(4096) for _ in range(20)]
            for _ in range(20):
                for place, o in enumerate(outs):
                    add(x, x, o, 4096 - place)
            stream.synchronize()
            if not all(bool((o[: 4096 - place] == 2.0 * number).all()) for place, o in enumerate(outs)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_never_used_cuda_may_launch(bundle: Bundles) -> None:
    """The driver's context is a thread's own; torch sets it at its first call, which may be after ours."""
    text = f"""
import threading, torch, aotpack_runtime as apr
add = apr.load({bundle("bench")!r}, device="cuda", mode="strict")["add"]
x, y, o = (torch.randn(5000, device="cuda") for _ in range(3))
add(x, y, o, 5000)
o.fill_(torch.nan)
torch.cuda.synchronize()
failed = []
def work():
    try:
        add(x, y, o, 5000)
    except BaseException as error:
        failed.append(error)
thread = threading.Thread(target=work); thread.start(); thread.join()
torch.cuda.synchronize()
assert not failed, failed
assert torch.equal(o, x + y)
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)


# ------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("wrap", [Interface, Capsule], ids=["cuda-array-interface", "dlpack"])
def test_arrays_of_others_are_taken_as_they_are(add: Any, wrap: Any) -> None:
    x, y = torch.randn(5000, device="cuda"), torch.randn(5000, device="cuda")
    o = poisoned(5000)
    for n in (5000, 4992, 17):
        o.fill_(torch.nan)
        torch.cuda.synchronize()
        add(wrap(x), wrap(y), wrap(o), n)
        torch.cuda.synchronize()
        assert torch.equal(o[:n], (x + y)[:n])
        assert bool(torch.isnan(o[n:]).all())
    half = wrap(torch.ones(8, dtype=torch.float16, device="cuda"))
    with pytest.raises(GuardMiss, match=r"x.dtype: expected float32, got float16"):
        add(half, wrap(y), wrap(o), 8)


def test_cupy_arrays_on_cupys_own_stream(add: Any) -> None:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x, y = cupy.random.rand(5000, dtype=cupy.float32), cupy.ones(5000, dtype=cupy.float32)
        o = cupy.full(5000, cupy.nan, dtype=cupy.float32)
        add(x, y, o, 5000)
        stream.synchronize()
        assert bool((o == x + y).all())


def test_numpy_scalars_are_numbers(cases: apr.Session) -> None:
    numpy = pytest.importorskip("numpy")
    o = poisoned(3000)
    for _ in range(3):  # the second is answered from the memo
        o.fill_(torch.nan)
        cases["fill"](o, numpy.int64(2000), numpy.float64(1.5), numpy.bool_(True))
        assert bool((o[:2000] == 1.5).all())
        assert bool(torch.isnan(o[2000:]).all())
    cases["fill"](o, numpy.int32(3000), numpy.float32(0.25), numpy.bool_(False))
    assert bool((o == -0.25).all())


def test_views_that_a_kernel_would_misread_are_misses_after_a_hit_too(add: Any) -> None:
    real = torch.randn(64, 2, device="cuda")
    plain, other = torch.view_as_complex(real).imag.contiguous(), torch.randn(64, device="cuda")
    add(plain, other, poisoned(64), 64)
    negated = torch.view_as_complex(real).conj().imag
    assert negated.is_neg()
    with pytest.raises(GuardMiss, match="conj or neg bit"):
        add(negated, other, poisoned(64), 64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(GuardMiss):
        add(mode.from_tensor(plain), other, other, 64)


def test_a_table_that_is_not_the_kernels_own_is_refused_before_a_launch(bundle: Bundles, tmp_path: Path) -> None:
    """The driver copies as many parameters as the kernel has: a shorter table would make it read past ours."""
    import json
    import shutil

    shutil.copytree(bundle("bench"), tmp_path / "b")
    path = tmp_path / "b" / "index.json"
    index = json.loads(path.read_text())
    for number in {variant["launch"] for variant in index["entries"]["add"]["variants"]}:
        index["shared"][number]["parameters"] = index["shared"][number]["parameters"][:-1]
    path.write_text(json.dumps(index))
    with apr.load(tmp_path / "b", device="cuda", mode="strict") as session:
        x = torch.randn(64, device="cuda")
        with pytest.raises(GuardMiss, match="takes parameters of"):
            session["add"](x, x, x, 64)


@pytest.mark.parametrize("value", [0.0, -1.25, 3, 1e30, 1e300, -1e300, float("inf")])
def test_floats_are_narrowed_as_c_does(cases: apr.Session, value: float) -> None:
    for _ in range(2):
        o = poisoned(100)
        cases["fill"](o, 100, value, True)
        assert torch.equal(o, torch.full((100,), value, dtype=torch.float64).to(torch.float32).to("cuda"))


def test_an_int_of_more_than_32_bits_takes_the_variant_of_64(cases: apr.Session) -> None:
    o = poisoned(16)
    assert "fill/i32" in hit(cases["fill"], o, 2**31 - 1, 1.0, True)
    assert "fill/i64" in hit(cases["fill"], o, 2**31, 1.0, True)
    with pytest.raises(GuardMiss, match=r"n: expected -2147483648..2147483647, got 2147483648"):
        cases["copy"](o, o, 2**31, 1)


def test_an_int_of_more_than_32_bits_reaches_the_kernel_whole(cases: apr.Session) -> None:
    n = 2**31 + 1024
    if torch.cuda.mem_get_info()[0] < 5 * n:
        pytest.skip("needs 9 GiB")
    o = poisoned(n + 8)
    cases["fill"](o, n, 2.0, True)
    assert bool((o[n - 4096 : n] == 2).all())
    assert bool((o[:4096] == 2).all())
    assert bool(torch.isnan(o[n:]).all())
    assert float((o[:n] == 2).sum()) == n


@pytest.mark.parametrize("wrong", [None, "5", 5.0, True, [5]])
def test_a_count_that_is_no_int_is_a_miss(add: Any, wrong: object) -> None:
    x = torch.randn(8, device="cuda")
    add(x, x, poisoned(8), 5)
    with pytest.raises(GuardMiss, match="n: expected"):
        add(x, x, poisoned(8), wrong)
    with pytest.raises(TypeError, match="missing"):
        add(x, x)


def test_clusters(cases: apr.Session) -> None:
    for n in (1, 1024, 5000, 100_000):
        x, o = torch.randn(n, device="cuda"), poisoned(n + 8)
        cases["cluster"](x, o, n)
        assert torch.equal(o[:n], 2 * x)
        assert bool(torch.isnan(o[n:]).all())


@pytest.mark.parametrize(
    ("grid", "block", "extra"),
    [
        ((1, 1, 1), (32, 1, 1), 0),
        ((3, 5, 7), (8, 4, 2), 0),
        ((2, 1, 1), (64, 1, 1), 200_000),
        ((1, 9, 3), (1, 1, 64), 8),
    ],
)
@pytest.mark.parametrize("negate", [False, True])
def test_grids_blocks_and_shared_memory_of_a_c_kernel(
    cases: apr.Session, grid: tuple[int, ...], block: tuple[int, ...], extra: int, *, negate: bool
) -> None:
    count = torch.Size(grid).numel() * torch.Size(block).numel()
    for shift, scale in ((0, 3), (5, 1), (40, 1)):
        out = poisoned(count + 4, dtype=torch.int64)
        sizes = dict(zip(("gx", "gy", "gz", "bx", "by", "bz"), (*grid, *block), strict=True))
        cases["place"](out, 7.75, shift, negate, **sizes, extra=extra)
        wanted = scale * torch.arange(count) + 7 + 2**shift
        assert torch.equal(out[:count].cpu(), -wanted if negate else wanted)
        assert bool((out[count:] == -1).all())


def test_shared_memory_beyond_the_device_is_a_miss_with_its_numbers(cases: apr.Session) -> None:
    out = poisoned(64, dtype=torch.int64)
    sizes = {"gx": 1, "gy": 1, "gz": 1, "bx": 32, "by": 1, "bz": 1}
    with pytest.raises(GuardMiss, match="232448"):
        cases["place"](out, 0.0, 1, False, **sizes, extra=10**6)
    with pytest.raises(GuardMiss, match="1024"):
        cases["place"](out, 0.0, 1, False, **{**sizes, "bx": 2048}, extra=0)


def test_rules_choose_and_the_result_says_which(cases: apr.Session) -> None:
    out = poisoned(32, dtype=torch.int64)
    sizes = {"gx": 1, "gy": 1, "gz": 1, "bx": 32, "by": 1, "bz": 1, "extra": 0}
    assert "SCALE3" in hit(cases["place"], out, 0.0, 0, False, **sizes)
    assert "SCALE1" in hit(cases["place"], out, 0.0, 1, False, **sizes)


# ---------------------------------------------------------------------------------------------------------- session


def test_status_counts_launches_and_a_closed_session_raises(bundle: Bundles) -> None:
    session = apr.load(bundle("bench"), device="cuda", mode="strict")
    x = torch.randn(64, device="cuda")
    for _ in range(3):
        session["add"](x, x, torch.empty_like(x), 64)
    with pytest.raises(GuardMiss):
        session["add"](x.half(), x, x, 64)
    status = session.status()
    assert (status["hits"], status["misses"], status["errors"]) == (3, 1, 1)
    assert list(status["entries"]["add"]["misses_by_reason"]) == ["x.dtype"]
    session.close()
    with pytest.raises(apr.SessionClosed):
        session["add"](x, x, x, 64)


def test_a_kernel_bundle_needs_neither_torch_nor_triton(bundle: Bundles) -> None:
    text = f"""
import sys
sys.modules["torch"] = sys.modules["triton"] = sys.modules["numpy"] = None
import array
import aotpack_runtime as apr
from aotpack.bench.child.device import Gpu
session, gpu, n = apr.load({bundle("bench")!r}, device="cuda", mode="strict"), Gpu(0), 5000
x, y, o = (gpu.put(apr.Array(array.array("f", values), "float32")) for values in (range(n), [2.0] * n, [-1.0] * n))
session["add"](x, y, o, n)
assert o.tolist() == [place + 2.0 for place in range(n)]
assert session.status()["hits"] == 1
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)
