"""Models on a GPU through the door for arrays: held against the door for torch's tensors, bit for bit.

torch is here as a source of memory and of the right answers; that it is not needed, the last test shows in a process of
its own. Run as test_torch.py is.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import aotpack_runtime as apr
from aotpack_runtime.dispatch import Miss
from aotpack_runtime.errors import GuardMiss
from aotpack_runtime.format.tree import flatten
from aotpack_runtime.loaders.crossing import array_over

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of torch's own modules
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def path(bundle: Callable[[str], str]) -> str:
    return bundle("torch")


@pytest.fixture
def arrays(path: str) -> Iterator[apr.Session]:
    with apr.load(path, device="cuda", mode="strict", tensors="array") as opened:
        yield opened


@pytest.fixture
def tensors(path: str) -> Iterator[apr.Session]:
    with apr.load(path, device="cuda", mode="strict", tensors="torch", source="never") as opened:
        yield opened


class Cupy:
    """What CuPy and Numba show of their arrays."""

    def __init__(self, tensor: torch.Tensor, stream: int | None = None) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, "stream": stream, "version": 3}


class Dlpack:
    """What a library with DLPack alone shows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> object:
        self.asked.append(how)
        return self.tensor.__dlpack__(stream=how.get("stream"))


def leaves(result: Any) -> list[Any]:
    found: list[Any] = []
    flatten(result, found)
    return found


def same(found: Any, wanted: Any) -> None:
    """Equal bit for bit, on the same devices, with the same layouts."""
    for array, tensor in zip(leaves(found), leaves(wanted), strict=True):
        if not isinstance(tensor, torch.Tensor):
            assert array == tensor
            continue
        assert (array.device, array.shape) == (str(tensor.device), tuple(tensor.shape))
        assert array.dtype == str(tensor.dtype).removeprefix("torch.")
        assert array.strides == tuple(step * tensor.itemsize for step in tensor.stride())
        assert array.tobytes() == tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda:0") -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


CALLS: Mapping[str, Callable[[], list[tuple[Any, ...]]]] = {
    "mlp": lambda: [(normal(batch, 64),) for batch in (1, 2, 8, 33, 64)],
    "attention": lambda: [(normal(*size, 256, dtype=torch.bfloat16),) for size in ((1, 2), (1, 77), (4, 256))],
    "convolution": lambda: [(normal(5, 3, 32, 32).to(memory_format=torch.channels_last),)],
    "literals": lambda: [(normal(7, 4),)],
    "taking": lambda: [(torch.randint(0, 100, (6, 16), device="cuda"), keep) for keep in (2, 7, 12)],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("how", [array_over, Cupy, Dlpack], ids=["own", "interface", "dlpack"])
def test_answers_are_those_of_the_door_for_tensors(arrays: Any, tensors: Any, name: str, how: Any) -> None:
    if name == "attention" and how is Cupy:
        pytest.skip("the interface has no bfloat16")
    for call in CALLS[name]():
        given = [how(value) if isinstance(value, torch.Tensor) else value for value in call]
        for _ in range(3):  # judged, remembered, and with the results laid out
            same(arrays[name](*given), tensors[name](*call))
    assert not arrays.status()["entries"][name]["through_torch"]


def test_state_lives_on_the_gpu(arrays: Any, tensors: Any) -> None:
    x = torch.ones(4, 8, device="cuda")
    for _ in range(5):
        same(arrays["counter"](array_over(x)), tensors["counter"](x))


def test_state_goes_on_where_torch_joins(path: str) -> None:
    x = torch.ones(4, 8, device="cuda")
    with apr.load(path, device="cuda", mode="strict", tensors="array", source="never") as session:
        same(session["counter"](array_over(x)), x + 4)
        torch.testing.assert_close(session["counter"](x), x + 8)
        same(session["counter"](array_over(x)), x + 12)
        torch.testing.assert_close(session["counter"](x), x + 16)


def test_an_argument_is_written_and_a_view_of_it_comes_back(arrays: Any, tensors: Any) -> None:
    mine, theirs = normal(3, 8), normal(3, 8)
    mine.copy_(theirs)
    found, wanted = arrays["writer"](array_over(mine)), tensors["writer"](theirs)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert leaves(found)[0].address == mine.data_ptr()
    same(found, wanted)


def test_an_array_of_the_host_after_one_of_the_gpu_is_a_miss(arrays: Any) -> None:
    x = normal(8, 64)
    for _ in range(2):
        arrays["mlp"](array_over(x))
    with pytest.raises(GuardMiss, match="expected cuda, got cpu"):
        arrays["mlp"](array_over(x.cpu()))
    arrays["mlp"](array_over(x))


def test_an_array_of_the_gpu_after_one_of_the_host_is_a_miss(path: str) -> None:
    x = torch.randn(8, 64)
    with apr.load(path, device="cpu", mode="strict", tensors="array") as session:
        for _ in range(2):
            session["mlp"](array_over(x))
        with pytest.raises(GuardMiss, match="expected cpu, got cuda"):
            session["mlp"](array_over(x.cuda()))


def test_the_work_goes_to_the_stream_that_is_said(arrays: Any, tensors: Any) -> None:
    stream, x = torch.cuda.Stream(), normal(64, 64)
    wanted = tensors["mlp"](x * 3)
    arrays["mlp"](array_over(x))
    late = torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), apr.use_stream(stream.cuda_stream):
        torch.cuda._sleep(50_000_000)  # work elsewhere would run ahead of it
        late.copy_(x * 3)
        found = arrays["mlp"](array_over(late))
    assert not stream.query()
    same(found, wanted)


def test_what_another_stream_makes_is_waited_for(arrays: Any, tensors: Any) -> None:
    stream, x = torch.cuda.Stream(), normal(64, 64)
    wanted = tensors["mlp"](x * 3)
    arrays["mlp"](array_over(x))
    late = torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x * 3)
    same(arrays["mlp"](Cupy(late, stream.cuda_stream)), wanted)


def test_dlpack_is_told_the_stream(arrays: Any) -> None:
    stream, given = torch.cuda.Stream(), Dlpack(normal(8, 64))
    arrays["mlp"](given)
    with apr.use_stream(stream.cuda_stream):
        arrays["mlp"](given)
    assert [how["stream"] for how in given.asked] == [1, stream.cuda_stream]


def test_threads_with_streams_of_their_own(arrays: Any, tensors: Any) -> None:
    given = [normal(batch, 64) for batch in range(1, 9)]
    wanted = [tensors["mlp"](x).cpu().numpy().tobytes() for x in given]
    own = [array_over(x) for x in given]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work() -> None:
        with apr.use_stream(torch.cuda.Stream().cuda_stream):
            for _ in range(50):
                wrong.extend(
                    x.shape[0] for x, right in zip(own, wanted, strict=True) if arrays["mlp"](x).tobytes() != right
                )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_weights_are_on_the_gpu_once_also_where_torch_joins(path: str, tensors: Any) -> None:
    given = [normal(size, 64) for size in (1, 8, 20)]
    for tensor in given:
        tensors["mlp"](tensor)  # what cuBLAS keeps for itself is there
    own = [array_over(x) for x in given]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with apr.load(path, device="cuda", mode="eager", tensors="array", source="never") as session:
        for x in own:
            session["mlp"](x)
        for tensor in given:
            session["mlp"](tensor)
        torch.cuda.synchronize()
        weights = session._weight_set("mlp")
        ours = {name: array.address for name, array in weights._current.items()}
        assert ours == {name: tensor.data_ptr() for name, tensor in weights.as_torch().stored().items()}
        # Ours come from the driver, which torch's allocator does not count; it would count a copy.
        assert torch.cuda.memory_allocated() - before < sum(array.nbytes for array in weights._current.values())


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "with-torch"])
def test_an_update_never_shows_a_mixture(path: str, tensors: Any, *, joined: bool) -> None:
    x = normal(64, 64)
    with apr.load(path, device="cuda", mode="strict", tensors="array", source="never") as session:
        entry, own = session["mlp"], array_over(x)
        if joined:
            entry(x)
        names = tensors._weight_set("mlp").tensors
        states, wanted = [], []
        for factor in (1.0, 2.0):
            state = {name: tensor * factor for name, tensor in names.items()}
            states.append({name: array_over(tensor.cpu() if factor == 2 else tensor) for name, tensor in state.items()})
            session.update_weights(states[-1])
            wanted.append(entry(own).tobytes())
        assert wanted[0] != wanted[1]
        session.update_weights(states[0])
        stop, found = threading.Event(), []

        def call() -> None:
            with apr.use_stream(torch.cuda.Stream().cuda_stream):
                while not stop.is_set():
                    found.append(entry(own).tobytes())

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(30):
            session.update_weights(states[number % 2])
        stop.set()
        for thread in threads:
            thread.join()
        assert found
        assert set(found) <= set(wanted)


def test_a_miss_is_served_through_torch_and_counted(path: str, tensors: Any) -> None:
    x = normal(300, 64)
    with apr.load(path, device="cuda", mode="eager", tensors="array", source="never") as session:
        found = session["mlp"](array_over(x))
        with apr.load(path, device="cuda", mode="eager", tensors="torch", source="never") as other:
            same(found, other["mlp"](x))
        assert session.status()["misses"] == 1


def test_a_miss_goes_to_the_stream_that_is_said_and_waits_for_the_one_that_is_named(path: str) -> None:
    stream, x = torch.cuda.Stream(), normal(300, 64)
    with apr.load(path, device="cuda", mode="eager", tensors="array", source="never") as session:
        wanted = session["mlp"](array_over(x * 3)).tobytes()
        late = torch.empty_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(x * 3)
        with apr.use_stream(stream.cuda_stream):
            assert session["mlp"](array_over(late)).tobytes() == wanted
        late.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(x * 3)
        assert session["mlp"](Cupy(late, stream.cuda_stream)).tobytes() == wanted
        assert session.status()["misses"] == 3


def test_warm_up_leaves_the_state_as_it_was(arrays: Any) -> None:
    assert {"mlp/n1/gpu", "counter/n4/gpu"} <= arrays.warmup("all").keys()
    x = torch.ones(4, 8, device="cuda")
    same(arrays["counter"](array_over(x)), x + 4)


def test_results_outlive_the_session_and_memory_does_not_grow(path: str) -> None:
    x = array_over(normal(64, 64))
    with apr.load(path, device="cuda", mode="strict", tensors="array") as session:
        kept = session["mlp"](x)
        right = kept.tobytes()
        for _ in range(100):
            session["mlp"](x)
        before = torch.cuda.memory_allocated()
        for _ in range(2000):
            session["mlp"](x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    assert kept.tobytes() == right


@several
def test_another_gpu_is_a_session_of_its_own(path: str, tensors: Any) -> None:
    with apr.load(path, device="cuda:1", mode="strict", tensors="array") as session:
        x = normal(8, 64)
        same(session["mlp"](array_over(x.to("cuda:1"))), tensors["mlp"](x).to("cuda:1"))
        assert torch.cuda.current_device() == 0
        for elsewhere in (array_over(x), Cupy(x)):
            decision = session["mlp"].explain(elsewhere)
            assert isinstance(decision, Miss)
            assert "is on cuda:0, the session is for cuda:1" in str(decision)
            with pytest.raises(GuardMiss, match="is on cuda:0"):
                session["mlp"](elsewhere)
        assert session.put(array_over(x)).device == "cuda:1"
        assert session.put(array_over(x)).tobytes() == array_over(x).tobytes()


def test_torch_is_not_needed(path: str, tensors: Any, tmp_path: Path) -> None:
    x = torch.randn(8, 64)
    (tmp_path / "x").write_bytes(x.numpy().tobytes())
    program = f"""
        import sys
        import aotpack_runtime as apr
        session = apr.load({path!r}, device="cuda", mode="strict")
        x = session.put(apr.Array(open({str(tmp_path / "x")!r}, "rb").read(), "float32", (8, 64)))
        open({str(tmp_path / "y")!r}, "wb").write(session["mlp"](x).tobytes())
        sys.exit("torch was imported" if "torch" in sys.modules else 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "y").read_bytes() == tensors["mlp"](x.cuda()).cpu().numpy().tobytes()


@several
@pytest.mark.parametrize("imports", ["", "import torch"])
def test_a_process_on_the_second_gpu_takes_no_memory_of_the_first(path: str, imports: str) -> None:
    program = f"""
        import ctypes, sys
        {imports}
        import aotpack_runtime as apr
        session = apr.load({path!r}, device="cuda:1", mode="strict")
        if "torch" in sys.modules:
            result = session["mlp"](torch.randn(8, 64, device="cuda:1")).cpu()
        else:
            result = session["mlp"](session.put(apr.Array(bytes(8 * 64 * 4), "float32", (8, 64)))).tobytes()
        driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
        for ordinal in range(2):
            assert driver.cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(active)) == 0
            print(active.value)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"]
