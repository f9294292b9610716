"""Models behind a miss on a GPU: compiled beside the server on the same device, checked there, adopted over the weights
that are on it already. `pytest -m gpu tests/gpu/test_misses.py` on a machine with a GPU and a C++ compiler."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aotpack_runtime as apr
from aotpack_runtime.jit import model_misses

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own modules
HERE = Path(__file__).resolve().parent
AT_ONCE = {"when": "at_once"}


@pytest.fixture(scope="module")
def path(bundle: Callable[[str], str]) -> str:
    return bundle("torch")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AOTPACK_JIT_NICE", "0")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def eager() -> Iterator[Callable[..., torch.nn.Module]]:
    sys.path.insert(0, str(HERE))
    cases = importlib.import_module("gpu_models.cases")
    yield lambda name: getattr(cases, name)().to("cuda:0")
    sys.path.remove(str(HERE))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.device == wanted.device
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def until(holds: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def is_idle(session: apr.Session) -> bool:
    jit = session.status()["jit"]
    return bool(jit["waiting"] + jit["running"] == 0)


def test_a_miss_on_a_gpu_is_compiled_behind_it_over_the_same_weights(path: str, cache: Path, eager: Any) -> None:
    """Answered by the program, then hit; in another session found; replaced weights are seen; one copy of them."""
    model = eager("mlp")
    with apr.load(path, device="cuda", mode="jit", source="never", on_miss=AT_ONCE) as session:
        entry, x = session["mlp"], torch.randn(96, 64, device="cuda")
        close(entry(x), model(x))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        until(lambda: is_idle(session))
        status = session.status()
        assert (status["jit"]["compiles"], status["jit"]["failures"]) == (1, 0), status["jit"]
        close(entry(x), model(x))
        (shape,) = session.status()["entries"]["mlp"]["jit"]["shapes"]
        assert shape["state"] == "compiled"
        assert "the arguments that missed" in shape["checked"]
        assert entry.counts()["hits_by_tier"] == {"bundle": 0, "overlay": 1}
        weights = sum(tensor.nbytes for tensor in session._weight_set("mlp").tensors.values())
        assert torch.cuda.memory_allocated() - before < weights
        new = {name: 2 * tensor for name, tensor in model.state_dict().items()}
        session.update_weights(new)
        model.load_state_dict(new)
        close(entry(x), model(x))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            close(entry(x), model(x))
    with apr.load(path, device="cuda", mode="jit", source="never", on_miss={"when": "never"}) as session:
        session["mlp"](torch.randn(96, 64, device="cuda"))
        assert session["mlp"].counts()["hits_by_tier"]["overlay"] == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_miss_on_the_second_gpu_is_compiled_and_adopted_there(path: str, cache: Path, eager: Any) -> None:
    model = eager("mlp").to("cuda:1")
    with apr.load(path, device="cuda:1", mode="jit", source="never", on_miss=AT_ONCE) as session:
        entry, x = session["mlp"], torch.randn(93, 64, device="cuda:1")
        close(entry(x), model(x))
        until(lambda: is_idle(session))
        close(entry(x), model(x))
        assert entry.counts()["hits_by_tier"] == {"bundle": 0, "overlay": 1}, session.status()
        assert torch.cuda.current_device() == 0


def test_state_and_written_arguments_are_compiled_too(path: str, cache: Path, eager: Any) -> None:
    with apr.load(path, device="cuda", mode="jit", source="never", on_miss={**AT_ONCE, "background": False}) as session:
        mine, theirs = torch.ones(77, 8, device="cuda"), torch.ones(77, 8, device="cuda")
        found, wanted = session["writer"](mine), eager("writer")(theirs)
        close(mine, theirs)
        assert found[0].data_ptr() == mine.data_ptr()
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
        assert session["writer"].counts()["hits_by_tier"]["overlay"] == 1, session.status()


def test_what_lies_askew_is_not_compiled_for(path: str, cache: Path, eager: Any) -> None:
    with apr.load(path, device="cuda", mode="jit", source="never", on_miss=AT_ONCE) as session:
        x = torch.randn(96 * 64 + 1, device="cuda")[1:].view(96, 64)
        close(session["mlp"](x), eager("mlp")(x))
        (shape,) = session.status()["entries"]["mlp"]["jit"]["shapes"]
        assert "divisible by 16" in shape["state"]
    assert not (cache / "overlay").exists()


def test_without_room_on_the_device_the_program_serves_and_status_says_why(
    path: str, cache: Path, eager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_misses, "DEVICE_BYTES", 1 << 50)
    with apr.load(path, device="cuda", mode="jit", source="never", on_miss=AT_ONCE) as session:
        x = torch.randn(95, 64, device="cuda")
        close(session["mlp"](x), eager("mlp")(x))
        until(lambda: is_idle(session))
        (shape,) = session.status()["entries"]["mlp"]["jit"]["shapes"]
        assert "a compile beside it needs" in shape["state"]
        assert session.status()["jit"]["compiles"] == 0


def test_nothing_is_asked_for_while_a_stream_is_captured_and_a_capture_survives_what_arrives(
    path: str, cache: Path, eager: Any
) -> None:
    """A miss inside of a capture is the program's, captured; the variant of an earlier miss is loaded meanwhile."""
    model = eager("mlp")
    with apr.load(path, device="cuda", mode="jit", source="never", on_miss=AT_ONCE) as session:
        entry = session["mlp"]
        early, x = torch.randn(94, 64, device="cuda"), torch.randn(93, 64, device="cuda")
        hit = torch.randn(8, 64, device="cuda")
        close(entry(hit), model(hit))
        session._behind().refuses = lambda key: "not yet"
        entry(x)  # the program has served this shape
        until(lambda: is_idle(session))
        del session._behind().refuses
        entry(early)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, other = entry(x), entry(hit)
            until(lambda: is_idle(session))  # the variant for `early` is compiled and loaded by now
        graph.replay()
        close(found, model(x))
        close(other, model(hit))
        close(entry(early), model(early))
        assert session.status()["jit"]["compiles"] == 1
        assert entry.counts()["hits_by_tier"]["overlay"] == 1


def test_arguments_of_a_miss_are_saved_while_another_thread_captures(
    path: str, cache: Path, eager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are waited for by an event, which CUDA forbids to every thread beside a capture that does not say else."""
    model = eager("mlp")
    with apr.load(path, device="cuda", mode="jit", source="never", on_miss=AT_ONCE) as session:
        entry, jit = session["mlp"], session._behind()
        early, hit = torch.randn(92, 64, device="cuda"), torch.randn(8, 64, device="cuda")
        close(entry(hit), model(hit))
        held: list[Callable[[], object]] = []

        def later(work: Callable[[], object]) -> bool:
            held.append(work)
            return True

        monkeypatch.setattr(jit, "soon", later)
        close(entry(early), model(early))
        (work,) = held
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            behind = threading.Thread(target=work)
            behind.start()
            behind.join()
            found = entry(hit)
        graph.replay()
        close(found, model(hit))
        until(lambda: is_idle(session))
        (shape,) = session.status()["entries"]["mlp"]["jit"]["shapes"]
        assert shape["state"] == "compiled", session.status()
