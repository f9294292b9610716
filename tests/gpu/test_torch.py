"""Models on a GPU: built there, then held against eager in every way in which a GPU may answer otherwise than a CPU.

Run on a machine with a GPU, a CUDA build of torch and a C++ compiler: `pytest -m gpu tests/gpu/test_torch.py`.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aotpack_runtime as apr
from aotpack_runtime.dispatch import Hit, Miss
from aotpack_runtime.errors import GuardMiss

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own modules
HERE = Path(__file__).resolve().parent
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def path(bundle: Callable[[str], str]) -> str:
    return bundle("torch")


@pytest.fixture(scope="module")
def session(path: str) -> Iterator[apr.Session]:
    with apr.load(path, device="cuda", mode="strict", source="never") as opened:
        yield opened


@pytest.fixture(scope="module")
def eager() -> Iterator[Callable[..., torch.nn.Module]]:
    sys.path.insert(0, str(HERE))
    cases = importlib.import_module("gpu_models.cases")
    yield lambda name, device="cuda:0", dtype=None: getattr(cases, name)().to(device=device, dtype=dtype)
    sys.path.remove(str(HERE))


def close(found: torch.Tensor, wanted: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert found.device == wanted.device
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("batch", [1, 2, 8, 33, 64])
def test_a_model_answers_what_eager_does_on_the_caller_s_device(session: Any, eager: Any, batch: int) -> None:
    x = torch.randn(batch, 64, device="cuda")
    close(session["mlp"](x), eager("mlp")(x))


@pytest.mark.parametrize("sizes", [(1, 2), (1, 77), (4, 128), (4, 256)])
def test_grouped_causal_attention_in_bfloat16(session: Any, eager: Any, sizes: tuple[int, int]) -> None:
    x = torch.randn(*sizes, 256, device="cuda", dtype=torch.bfloat16)
    close(session["attention"](x), eager("attention", dtype=torch.bfloat16)(x), 2e-2, 2e-2)


def test_convolutions_over_channels_last(session: Any, eager: Any) -> None:
    x = torch.randn(5, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    close(session["convolution"](x), eager("convolution")(x), 1e-2, 1e-3)


def test_literals_stay_where_eager_has_them(session: Any, eager: Any) -> None:
    x = torch.randn(7, 4, device="cuda")
    for found, wanted in zip(session["literals"](x), eager("literals")(x), strict=True):
        close(found, wanted)


def test_state_lives_on_the_gpu_and_is_each_session_s_own(path: str, eager: Any) -> None:
    x = torch.ones(4, 8, device="cuda")
    for _ in range(2):
        model = eager("counter")
        with apr.load(path, device="cuda", mode="strict", source="never") as session:
            for _ in range(5):
                close(session["counter"](x), model(x))


def test_an_argument_is_written_and_a_view_of_it_comes_back(session: Any, eager: Any) -> None:
    mine, theirs = torch.ones(3, 8, device="cuda"), torch.ones(3, 8, device="cuda")
    found, wanted = session["writer"](mine), eager("writer")(theirs)
    close(mine, theirs)
    assert found[0].data_ptr() == mine.data_ptr()
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


def test_an_int_stays_open_and_a_dict_comes_back(session: Any, eager: Any) -> None:
    model = eager("taking")
    ids = torch.randint(0, 100, (6, 16), device="cuda")
    for keep in (2, 7, 12):
        found, wanted = session["taking"](ids, keep), model(ids, keep)
        assert list(found) == list(wanted)
        for name in wanted:
            close(found[name], wanted[name])


def test_the_work_goes_to_the_caller_s_stream(session: Any, eager: Any) -> None:
    model, entry, stream = eager("mlp"), session["mlp"], torch.cuda.Stream()
    x = torch.randn(64, 64, device="cuda")
    wanted = model(x * 3)
    entry(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what is queued before must be waited for: another stream would run ahead
        late = x * 3
        found = entry(late)
    assert not stream.query()
    stream.synchronize()
    close(found, wanted)


def test_threads_with_streams_of_their_own(session: Any, eager: Any) -> None:
    model, entry = eager("mlp"), session["mlp"]
    given = [torch.randn(batch, 64, device="cuda") for batch in range(1, 9)]
    wanted = [model(x) for x in given]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                for x, right in zip(given, wanted, strict=True):
                    found = entry(x)
                    torch.cuda.current_stream().synchronize()
                    if not torch.allclose(found, right, rtol=1e-4, atol=1e-5):
                        wrong.append(f"{list(x.shape)}: {(found - right).abs().max()}")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_weights_are_on_the_gpu_once_for_all_variants(path: str) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with apr.load(path, device="cuda", mode="eager", source="never") as session:
        entry = session["mlp"]
        sizes = [1, 8, 20]
        entry(torch.randn(1, 64, device="cuda"))
        torch.cuda.synchronize()
        once = torch.cuda.memory_allocated() - before
        for size in sizes[1:]:
            entry(torch.randn(size, 64, device="cuda"))
        assert len(session.status()["entries"]["mlp"]["loaded"]) == 3
        assert torch.cuda.memory_allocated() - before == once
        weights = sum(tensor.nbytes for tensor in session._weight_set("mlp").tensors.values())
        assert once >= weights and once < 1.5 * weights + 65536


def test_weights_are_replaced_in_every_variant_and_in_the_program(path: str, eager: Any) -> None:
    with apr.load(path, device="cuda", mode="eager", source="never") as session:
        model, entry = eager("mlp"), session["mlp"]
        given = [torch.randn(size, 64, device="cuda") for size in (1, 8, 20, 100)]  # 100: a miss, served by the program
        for x in given:
            close(entry(x), model(x))
        for factor in (2.0, 0.5, 3.0):
            new = {name: tensor * factor for name, tensor in model.state_dict().items()}
            session.update_weights({name: tensor.cpu() if factor == 0.5 else tensor for name, tensor in new.items()})
            model.load_state_dict(new)
            for x in given:
                close(entry(x), model(x), 1e-3, 1e-3)
        assert session.status()["entries"]["mlp"]["misses"] == 4


def test_an_update_never_shows_a_mixture_while_calls_are_queued(path: str, eager: Any) -> None:
    with apr.load(path, device="cuda", mode="strict", source="never") as session:
        entry, x = session["mlp"], torch.randn(64, 64, device="cuda")
        model = eager("mlp")
        states, wanted = [], []
        for factor in (1.0, 2.0):
            states.append({name: tensor * factor for name, tensor in eager("mlp").state_dict().items()})
            model.load_state_dict(states[-1])
            wanted.append(model(x))
        session.update_weights(states[0])
        stop, found = threading.Event(), []

        def call() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    found.append(entry(x))
                    torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(30):
            session.update_weights(states[number % 2])
        stop.set()
        for thread in threads:
            thread.join()
        assert found
        mixed = [y for y in found if not any(torch.allclose(y, right, rtol=1e-3, atol=1e-3) for right in wanted)]
        assert not mixed


def test_what_is_elsewhere_is_a_miss_and_says_where(session: Any) -> None:
    decision = session["mlp"].explain(torch.randn(1, 64))
    assert isinstance(decision, Miss)
    assert "expected cuda, got cpu" in str(decision)
    with pytest.raises(GuardMiss, match="expected cuda, got cpu"):
        session["mlp"](torch.randn(1, 64))


def test_a_view_that_lies_askew_is_served_by_the_program(path: str, eager: Any) -> None:
    with apr.load(path, device="cuda", mode="eager", source="never") as session:
        x = torch.randn(8 * 64 + 1, device="cuda")[1:].view(8, 64)
        assert "divisible by 16" in str(session["mlp"].explain(x))
        close(session["mlp"](x), eager("mlp")(x))
        assert session.status()["misses"] == 1


def test_a_miss_beyond_every_variant_is_the_program_s(path: str, eager: Any) -> None:
    with apr.load(path, device="cuda", mode="eager", source="never") as session:
        x = torch.randn(300, 64, device="cuda")
        close(session["mlp"](x), eager("mlp")(x))
        x = torch.randn(9, 4, device="cuda", dtype=torch.float32)[:, :4]
        for found, wanted in zip(session["literals"](x), eager("literals")(x), strict=True):
            close(found, wanted)


def test_the_same_bundle_serves_the_cpu(path: str, eager: Any) -> None:
    with apr.load(path, device="cpu", mode="strict", source="never") as session:
        x = torch.randn(8, 64)
        close(session["mlp"](x), eager("mlp", "cpu")(x))
        for found, wanted in zip(
            session["literals"](x[:, :4].contiguous()), eager("literals", "cpu")(x[:, :4]), strict=True
        ):
            close(found, wanted)


def test_warm_up_loads_every_hot_variant(path: str) -> None:
    with apr.load(path, device="cuda", mode="strict", source="never") as session:
        assert not session.status()["ready"]
        seconds = session.warmup("all")
        assert {"mlp/n1/gpu", "counter/n4/gpu"} <= seconds.keys()
        assert session.status()["ready"]
        x = torch.ones(4, 8, device="cuda")
        close(session["counter"](x), x + 4)  # warm-up left the state as it was


def test_a_call_inside_a_captured_graph_replays(session: Any, eager: Any) -> None:
    model, entry = eager("mlp"), session["mlp"]
    x = torch.randn(8, 64, device="cuda")
    entry(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = entry(x)
    x.copy_(torch.randn(8, 64, device="cuda"))
    graph.replay()
    close(found, model(x))


@several
def test_a_session_for_the_second_gpu(path: str, eager: Any) -> None:
    with apr.load(path, device="cuda:1", mode="eager", source="never") as session:
        for name, given in {
            "mlp": torch.randn(8, 64, device="cuda:1"), "literals": torch.randn(7, 4, device="cuda:1"),
        }.items():  # fmt: skip
            model = eager(name, "cuda:1")
            found, wanted = session[name](given), model(given)
            for one, other in zip(*[x if isinstance(x, tuple) else (x,) for x in (found, wanted)], strict=True):
                close(one, other)
        assert torch.cuda.current_device() == 0
        assert isinstance(session["mlp"].explain(torch.randn(8, 64, device="cuda:1")), Hit)
        assert "is on cuda:0, the session is for cuda:1" in str(
            session["mlp"].explain(torch.randn(8, 64, device="cuda:0"))
        )
        x = torch.randn(300, 64, device="cuda:1")
        close(session["mlp"](x), eager("mlp", "cuda:1")(x))
        with pytest.raises(RuntimeError, match="same device"):
            session["mlp"](torch.randn(300, 64, device="cuda:0"))


@several
def test_cuda_without_a_number_is_the_current_device(path: str) -> None:
    with torch.cuda.device(1), apr.load(path, device="cuda", mode="strict", source="never") as session:
        assert session["mlp"](torch.randn(8, 64, device="cuda:1")).device == torch.device("cuda:1")
