"""Kernels behind a miss on a GPU: compiled in the child, run there beside the reference, launched here.

`pytest -m gpu tests/gpu/test_kernel_misses.py` on a machine with a GPU and triton; of C++ where NVRTC is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aotpack_runtime as apr

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own modules


@pytest.fixture(scope="module")
def path(bundle: Callable[[str], str]) -> str:
    return bundle("misses")


@pytest.fixture
def session(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apr.Session]:
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AOTPACK_JIT_NICE", "0")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # of the reference, for the child too
    with apr.load(path, device="cuda") as opened:
        yield opened


def shape_of(session: apr.Session, name: str) -> Any:
    (shape,) = session.status()["entries"][name]["jit"]["shapes"]
    return shape


@pytest.mark.parametrize(
    ("dtype", "n", "step", "offset"),
    [
        pytest.param(torch.float16, 300, 1, 0, id="constexpr"),
        pytest.param(torch.float32, 100, 1, 0, id="dtype"),
        pytest.param(torch.float16, 100, 1, 1, id="alignment"),
        pytest.param(torch.float16, 100, 3, 0, id="literal"),
    ],
)
def test_a_miss_of_a_triton_kernel(session: Any, dtype: torch.dtype, n: int, step: int, offset: int) -> None:
    """The call waits for its variant, and gives what torch gives."""
    count = 5
    x = torch.randn(count * n * step + offset, device="cuda").to(dtype)[offset:]
    o = torch.full((count * n + offset,), torch.nan, device="cuda", dtype=dtype)[offset:]
    session["rows"](x, o, n=n, step=step, count=count)
    torch.testing.assert_close(o, 2 * x[::step][: count * n])
    shape = shape_of(session, "rows")
    assert shape["state"] == "compiled"
    assert "run beside kernels.cases:rows_reference at" in shape["checked"], shape
    assert session.status()["jit"]["compiles"] == 1
    assert json.dumps(session.status())


def test_a_reference_serves_while_the_compile_runs(session: Any) -> None:
    served = session["served"]
    x = torch.randn(5, 300, device="cuda").half()
    o = torch.full_like(x, torch.nan)
    served(x, o, n=300, step=1, count=5)
    torch.testing.assert_close(o, 2 * x)
    assert served.counts()["misses_by_tier"] == {"reference": 1}
    end = time.monotonic() + 120
    while shape_of(session, "served")["state"] != "compiled":
        assert time.monotonic() < end, session.status()
        time.sleep(0.05)
    o.fill_(torch.nan)
    served(x, o, n=300, step=1, count=5)
    torch.testing.assert_close(o, 2 * x)
    assert served.counts()["hits_by_tier"] == {"bundle": 0, "overlay": 1}


def test_a_compile_that_is_not_its_reference_is_never_launched(session: Any) -> None:
    wrong = session["wrong"]
    x = torch.randn(5, 300, device="cuda").half()
    o = torch.full_like(x, torch.nan)
    with pytest.raises(apr.GuardMiss, match=r"disagrees with kernels.cases:wrong_reference"):
        wrong(x, o, n=300, step=1, count=5)
    assert bool(o.isnan().all())


def test_a_miss_of_a_template(session: Any) -> None:
    """With NVRTC it is instantiated; without, it is said to be missing."""
    x = torch.arange(500, device="cuda", dtype=torch.float64).view(5, 100)
    o = torch.full((5, 8), torch.nan, device="cuda", dtype=torch.float64)
    try:
        session["first"](x, o, n=100, k=8, count=5)
    except apr.GuardMiss as error:
        assert "nvrtc" in str(error).lower()  # noqa: PT017 - either is right, by what is installed
        return
    torch.testing.assert_close(o, x[:, :8] + 1)


def test_a_gpu_without_machine_code_is_served_by_ptx_meanwhile(
    session: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle's cubins are for another GPU, as it were: PTX launches, its cubin is compiled behind it."""
    with apr.load(path, device="cuda") as opened:
        entry: Any = opened["rows"]
        real = entry._reject
        entry._reject = lambda variant, machine: (
            "for another GPU" if variant.id.endswith("/sm_90") else real(variant, machine)
        )
        x = torch.randn(5, 100, device="cuda").half()
        for tier in ("bundle", "overlay"):
            o = torch.full_like(x, torch.nan)
            entry(x, o, n=100, step=1, count=5)
            torch.testing.assert_close(o, 2 * x)
            assert entry.counts()["hits_by_tier"][tier] == 1
            end = time.monotonic() + 120
            while shape_of(opened, "rows")["state"] != "compiled":
                assert time.monotonic() < end, opened.status()
                time.sleep(0.05)
        assert entry.counts()["through_ptx"]


def test_a_miss_inside_of_a_capture_says_so(session: Any) -> None:
    x = torch.randn(5, 300, device="cuda").half()
    o = torch.full_like(x, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(apr.GuardMiss, match="its stream is being captured"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        session["rows"](x, o, n=300, step=1, count=5)
    session["rows"](x, o, n=300, step=1, count=5)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        session["rows"](x, o, n=300, step=1, count=5)
    o.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(o, 2 * x)
