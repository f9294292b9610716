"""The C++ client on a GPU: held against Python's door for arrays, bit for bit and word for word."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aotpack_runtime as apr
from aotpack_runtime.errors import GuardMiss
from aotpack_runtime.format.tree import flatten
from aotpack_runtime.loaders.crossing import array_over
from tests.gpu.test_arrays import CALLS
from tests.support.cpp_client import CXX, built_client

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own modules
    pytest.mark.skipif(CXX is None, reason="there is no C++ compiler"),
]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LIBTORCH = Path(torch.__file__).parent / "lib"


@pytest.fixture(scope="module")
def path(bundle: Callable[[str], str]) -> str:
    return bundle("torch")


@pytest.fixture(scope="module")
def client() -> Path:
    return built_client()


@pytest.fixture
def arrays(path: str) -> Iterator[apr.Session]:
    with apr.load(path, device="cuda", mode="strict", tensors="array") as opened:
        yield opened


def bits(tensor: torch.Tensor) -> str:
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes().hex()


def tensor(value: torch.Tensor, where: str = "device", device: str = "cuda:0", **said: Any) -> Any:
    """A leaf for `calls`: its memory as it lies, and what it says of itself."""
    flat = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    leaf = {
        "hex": bits(flat), "where": where, "device": device, "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape), "strides": list(value.stride()),
    }  # fmt: skip
    return leaf | said


def call(entry: str, *values: Any, **how: Any) -> Any:
    leaves = [
        value if isinstance(value, dict) else tensor(value) if isinstance(value, torch.Tensor) else {"scalar": value}
        for value in values
    ]
    return {"entry": entry, "leaves": leaves, **how}


def run(*command: Any, lines: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    words, env = [str(word) for word in command], {**os.environ, **environment}
    return subprocess.run(words, input=lines, capture_output=True, text=True, check=False, env=env)


def ask(client: Path, bundle: str | Path, calls: list[Any], device: str = "cuda:0") -> list[Any]:
    lines = "".join(json.dumps(each) + "\n" for each in calls)
    done = run(client / "calls", bundle, LIBTORCH, device, lines=lines)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_python(session: apr.Session, entry: str, values: tuple[Any, ...]) -> list[Any]:
    """The results by Python's door, as `calls` writes them."""
    leaves: list[Any] = []
    flatten(session[entry](*[array_over(one) if isinstance(one, torch.Tensor) else one for one in values]), leaves)
    return [
        {"dtype": one.dtype, "device": one.device, "shape": list(one.shape), "hex": one.tobytes().hex()}
        if isinstance(one, apr.Array)
        else None
        for one in leaves
    ]


def test_answers_are_those_of_python_bit_for_bit(client: Path, path: str, arrays: apr.Session) -> None:
    made = [(name, values) for name, make in CALLS.items() for values in make()]
    wanted = [of_python(arrays, name, values) for name, values in made]
    found = ask(client, path, [call(name, *values, stream=True) for name, values in made])
    for (name, values), ours, theirs in zip(made, found, wanted, strict=True):
        assert ours.get("results") == theirs, (name, [getattr(one, "shape", one) for one in values], ours)


def test_a_bundle_for_the_cpu_too_is_opened_on_either(client: Path, path: str) -> None:
    x = torch.randn(8, 64)
    on_host = tensor(x, where="host", device="cpu")
    (found,) = ask(client, path, [call("mlp", on_host)], device="cpu")
    with apr.load(path, device="cpu", mode="strict", tensors="array") as session:
        assert found["results"] == of_python(session, "mlp", (x,))


def test_state_and_arguments_are_written_on_the_gpu(client: Path, path: str, arrays: apr.Session) -> None:
    x, y = torch.ones(4, 8, device="cuda"), torch.randn(3, 8, device="cuda")
    found = ask(client, path, [*[call("counter", x)] * 5, call("writer", y)])
    for answer in found[:5]:
        assert answer["results"] == of_python(arrays, "counter", (x,))
    assert found[5]["results"] == of_python(arrays, "writer", (y,))
    assert found[5]["leaves"] == [bits(y)]


def test_work_is_queued_on_the_stream_that_is_given(client: Path, path: str, arrays: apr.Session) -> None:
    x = torch.randn(64, 64, device="cuda")
    (found,) = ask(client, path, [call("mlp", x, late=True)])
    assert found.get("results") == of_python(arrays, "mlp", (x,)), found


def test_threads_with_streams_of_their_own(client: Path, path: str, arrays: apr.Session) -> None:
    given = [torch.randn(batch, 64, device="cuda") for batch in (1, 8, 20, 64)]
    found = ask(client, path, [call("mlp", x, threads=4, stream=True) for x in given])
    assert [answer.get("results", answer) for answer in found] == [of_python(arrays, "mlp", (x,)) for x in given]


def test_misses_have_pythons_words(client: Path, path: str, arrays: apr.Session) -> None:
    made: list[tuple[str, tuple[Any, ...]]] = [
        ("mlp", (torch.randn(300, 64, device="cuda"),)),
        ("mlp", (torch.randn(8, 64),)),
        ("mlp", (torch.randn(64, 8, device="cuda").T,)),
        ("mlp", (torch.randn(8, 64, device="cuda", dtype=torch.float64),)),
        ("mlp", (torch.randn(64, device="cuda"),)),
        ("mlp", (torch.randn(513, device="cuda")[1:].view(8, 64),)),
        ("convolution", (torch.randn(5, 3, 32, 32, device="cuda"),)),
        ("taking", (torch.zeros(6, 16, device="cuda", dtype=torch.int64), 13)),
        ("taking", (torch.zeros(6, 16, device="cuda", dtype=torch.int64), True)),
    ]
    calls = []
    for name, values in made:
        skip = {"skip": 4} if isinstance(values[0], torch.Tensor) and values[0].storage_offset() else {}
        leaves = [
            tensor(one, "device" if one.is_cuda else "host", str(one.device), **skip)
            if isinstance(one, torch.Tensor)
            else {"scalar": one}
            for one in values
        ]
        if skip:
            leaves[0]["hex"] = bits(values[0])
        calls.append({"entry": name, "leaves": leaves})
    for (name, values), answer in zip(made, ask(client, path, calls), strict=True):
        with pytest.raises(GuardMiss) as caught:
            of_python(arrays, name, values)
        assert answer["miss"], answer
        for variant, reason in caught.value.reasons.items():
            assert f"{variant}: {reason}" in answer["error"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"where": "host"}, "says that it is on cuda:0, where its memory is not: it is none of a GPU"),
        ({"where": "null"}, "has elements at address 0"),
        ({"device": "cuda:1"}, "is on cuda:1, the session is for cuda:0"),
        ({"device": "cpu"}, "expected cuda, got cpu"),
        ({"strides": [1 << 62, 1]}, "reaches beyond the memory of any process"),
        ({"skip": 2}, "lies 2 bytes past an address divisible by 16"),
        ({"conj": True}, "has its conj bit set"),
    ],
)
def test_memory_that_is_not_of_the_device_is_never_seen(client: Path, path: str, said: Any, words: str) -> None:
    x = torch.randn(8, 64)
    bad, good = ask(client, path, [call("mlp", tensor(x) | said), call("mlp", tensor(x))])
    assert bad["miss"]
    assert words in bad["error"]
    assert good["results"][0]["device"] == "cuda:0"


@several
def test_another_gpu(client: Path, path: str, arrays: apr.Session) -> None:
    x = torch.randn(8, 64, device="cuda")
    (found,) = ask(client, path, [call("mlp", tensor(x, device="cuda:1"))], device="cuda:1")
    (wanted,) = of_python(arrays, "mlp", (x,))
    assert found["results"] == [{**wanted, "device": "cuda:1"}]


def test_a_libtorch_without_cuda_is_one_clear_error(client: Path, path: str, tmp_path: Path) -> None:
    for library in LIBTORCH.iterdir():
        if "cuda" not in library.name:
            (tmp_path / library.name).symlink_to(library)
    done = run(client / "aotpack-serve", path, "mlp", tmp_path, "--device", "cuda:0")
    assert done.returncode == 1
    assert "cannot be opened" in done.stderr
    assert "cuda" in done.stderr


def test_a_gpu_that_is_not_there_is_one_clear_error(client: Path, path: str) -> None:
    command = (client / "aotpack-serve", path, "mlp", LIBTORCH, "--device")
    done = run(*command, f"cuda:{torch.cuda.device_count()}")
    assert (done.returncode, "has no GPU of that number" in done.stderr) == (1, True)
    done = run(*command, "cuda:0", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, "no CUDA-capable device" in done.stderr) == (1, True), done.stderr


def test_the_sample_server_brings_inputs_over_and_results_back(client: Path, path: str, arrays: apr.Session) -> None:
    x = torch.randn(8, 64)
    lines = json.dumps({"input": x.tolist()}) + "\n"
    done = run(client / "aotpack-serve", path, "mlp", LIBTORCH, "--device", "cuda:0", lines=lines)
    (found,) = json.loads(done.stdout.splitlines()[1])["results"]
    (wanted,) = of_python(arrays, "mlp", (x.cuda(),))
    assert torch.tensor(found["data"], dtype=torch.float32).numpy().tobytes().hex() == wanted["hex"]
