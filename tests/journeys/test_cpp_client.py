"""The C++ client: its guards decide as Python's do, and it answers as the Python runtime does, with neither Python nor
torch's packages in its process."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="bundles are built with torch")

import numpy as np
import torch

import aotpack_runtime as apr
from aotpack_runtime.arguments import describe, flatten_all
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.dispatch import Dispatcher, Hit, Miss
from aotpack_runtime.fallbacks.source import split_arguments
from aotpack_runtime.format.codec import dump_scalar
from aotpack_runtime.format.tensor import Call, Other, TensorMeta
from aotpack_runtime.loaders.inputs import make_leaves, unflatten
from tests.property.calls import Plan, Planner, make, surrounded
from tests.property.zoo import ENTRIES, property_models
from tests.support.cpp_client import CXX, built_client

CALLS = 600
"""Of each model: 10,200 in all."""
LIBTORCH = Path(torch.__file__).parent / "lib"

pytestmark = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def client() -> Path:
    """The folder of the built programs."""
    return built_client()


def test_ten_thousand_recorded_calls_are_judged_as_python_judges_them_and_in_its_words(client: Path) -> None:
    bundle = property_models()
    index = open_bundle(bundle).index
    manifest = json.loads((bundle.parent / "manifest.yaml").read_text())
    sys.path.insert(0, str(bundle.parent))
    lines: list[str] = []
    wanted: list[Any] = []
    try:
        zoo = __import__("zoo")
        for name in ENTRIES:
            record = index.entries[name]
            variants = [variant for variant in record.variants if set(variant.artifact.files) == {"model.so"}]
            dispatcher = Dispatcher(record.parameter_names, variants)
            model = getattr(zoo, manifest["entries"][name]["source"].partition(":")[2])()
            for trees, leaves, state in recorded(record, manifest["entries"][name], model):
                call = Call(trees, leaves, state)
                decision = dispatcher.choose(call)
                wanted.append(said(decision))
                lines.append(json.dumps(written(name, call)))
    finally:
        sys.path.remove(str(bundle.parent))
        sys.modules.pop("zoo", None)
    assert len(lines) >= 10_000
    assert 0.2 * len(lines) < sum(isinstance(decision, str) for decision in wanted) < 0.9 * len(lines)
    found = judge(client, bundle, lines)
    different = [(line, a, b) for line, a, b in zip(lines, wanted, found, strict=True) if a != b]
    assert not different, f"{len(different)} decisions differ: {different[:3]}"


def said(decision: Hit | Miss) -> Any:
    """The variant, or the reasons against each."""
    if isinstance(decision, Hit):
        return decision.variant.id
    return [f"{name}: {reason}" for name, reason in decision.reasons.items()]


def judge(client: Path, bundle: Path, lines: list[str]) -> list[Any]:
    """The client's decisions on calls, one a line."""
    command: list[Any] = [client / "aotpack-judge", bundle]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def recorded(record: Any, manifest: Any, model: Any) -> Any:
    """Calls as guards see them: planned, made, described; those that do not bind are left out."""
    import inspect

    signature = inspect.signature(model.forward)
    planner, count = Planner(manifest, signature, 3), 0
    while count < CALLS:
        plan: Plan = planner.next()
        made: list[Any] = []
        args, kwargs = [make(part, made) for part in plan.args], {name: make(part, made) for name, part in plan.kwargs}
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        count += 1
        trees, leaves = flatten_all(tuple(bound.arguments.values()))
        with surrounded(plan.mode):
            call = describe(trees, leaves, "cpu")
        yield call.trees, call.leaves, call.state


def written(entry: str, call: Call) -> Any:
    def leaf(one: Any) -> Any:
        if isinstance(one, TensorMeta):
            return {"tensor": {name: getattr(one, name) for name in TensorMeta.__slots__}}
        return {"other": one.type_name} if isinstance(one, Other) else {"scalar": dump_scalar(one)}

    return {
        "entry": entry,
        "device": "cpu",
        "trees": call.trees,
        "leaves": [leaf(one) for one in call.leaves],
        "state": call.state,
    }


def ask(client: Path, bundle: Path, entry: str, requests: list[Any]) -> list[Any]:
    """What the sample server answers to each request; it must end well."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    command: list[Any] = [client / "aotpack-serve", bundle, entry, LIBTORCH]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ready, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ready["ready"] == entry
    return answers


@pytest.mark.parametrize("entry", ["mlp", "conv", "attention", "embed", "cell", "branches", "optional", "reshape"])
def test_the_client_answers_with_the_bits_that_python_gives(client: Path, entry: str) -> None:
    bundle = property_models()
    called = apr.load(bundle, tensors="torch")[entry]
    rng = random.Random(0)
    for variant in called.variants:
        guards = variant.guards
        requests, wanted = [], []
        for example in variant.examples:
            leaves = make_leaves(guards, example, called.record.fills, seed=rng.randrange(99))
            requests.append(
                {
                    guard.path: one.tolist() if isinstance(one, torch.Tensor) else dump_scalar(one)
                    for guard, one in zip(guards.leaves, leaves, strict=True)
                }
            )
            with torch.no_grad():
                args, kwargs = split_arguments(
                    called.record.parameters, [unflatten(tree, leaves) for tree in guards.trees]
                )
                wanted.append(called(*args, **kwargs))
        for answer, result in zip(ask(client, bundle, entry, requests), wanted, strict=True):
            if "error" in answer:
                assert "0" in str(requests), answer  # nested lists cannot say every shape without elements
                continue
            found = [one for one in answer["results"] if one is not None]
            _, tensors = flatten_all((result,))
            for ours, theirs in zip(found, [one for one in tensors if isinstance(one, torch.Tensor)], strict=True):
                assert ours["shape"] == list(theirs.shape)
                assert ours["data"] == theirs.reshape(-1).tolist()


def test_state_is_kept_between_the_calls_of_a_client(client: Path) -> None:
    bundle = property_models()
    called = apr.load(bundle, tensors="torch")["running"]
    x = torch.ones(2, 4)
    answers = ask(client, bundle, "running", [{"x": x.tolist()}] * 3)
    for answer in answers:
        assert answer["results"][0]["data"] == called(x).tolist()


def test_what_no_variant_takes_is_an_error_and_the_server_goes_on(client: Path) -> None:
    good = {"ids": [[1, 2, 3]]}
    answers = ask(client, property_models(), "embed", [{"ids": [[99, 1]]}, {"ids": [1]}, {"x": 1}, {"ids": "a"}, good])
    said = [answer.get("error", "") for answer in answers]
    assert "refused the call" in said[0]
    assert "no variant fits this call" in said[1]
    assert "expected 2 dims" in said[1]
    assert "the request has no ids" in said[2]
    assert said[3]
    assert answers[4]["results"][0]["shape"] == [1, 8]


@pytest.mark.parametrize("what", ["library", "weights", "index"])
def test_a_changed_file_is_refused_before_it_is_used(client: Path, tmp_path: Path, what: str) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(property_models(), bundle)
    if what == "index":
        (bundle / "index.json").write_text((bundle / "index.json").read_text()[:-100])
        done = subprocess.run(
            [client / "aotpack-serve", bundle, "mlp", LIBTORCH], input="", capture_output=True, text=True, check=False
        )
        assert (done.returncode, "not JSON at byte" in done.stderr) == (1, True)
        return
    for path in [*bundle.rglob("*.so")] if what == "library" else [*bundle.rglob("*.safetensors")]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    (answer,) = ask(client, bundle, "mlp", [{"x": [[0.5] * 16]}])
    assert "the file changed after packing" in answer["error"]


def leaf(value: Any, device: str = "cpu", where: str = "host", **said: Any) -> Any:
    """A NumPy array as a leaf of `calls`: its memory, and what it says of itself."""
    itemsize = value.itemsize
    steps = [step // itemsize for step in value.strides]
    base = value
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert base.flags.c_contiguous
    skip = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return {
        "hex": bytes(base.data).hex(), "where": where, "device": device, "dtype": value.dtype.name,
        "shape": list(value.shape), "strides": steps, "start": skip,
    } | said  # fmt: skip


def made_calls(client: Path, calls: list[Any]) -> list[Any]:
    lines = "".join(json.dumps(call) + "\n" for call in calls)
    command: list[Any] = [client / "calls", property_models(), LIBTORCH, "cpu"]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


ARRAYS: Mapping[str, Callable[[Any], Any]] = {
    "right": lambda x: x,
    "rank-0": lambda x: np.array(x[0, 0]),
    "rank-5": lambda x: x.reshape(1, 1, 1, 4, 16),
    "no-rows": lambda x: x[:0].copy(),
    "no-columns": lambda x: x[:, :0].copy(),
    "backwards": lambda x: x[::-1],
    "columns-backwards": lambda x: x[:, ::-1],
    "one-row-four-times": lambda x: np.broadcast_to(x[:1], (4, 16)),
    "every-second-row": lambda x: np.tile(x, (2, 1))[::2],
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "four-bytes-on": lambda x: np.zeros(65, np.float32)[1:].reshape(4, 16),
    "other-dtype": lambda x: x.astype(np.float64),
    "complex": lambda x: x.astype(np.complex64),
    "int8": lambda x: x.astype(np.int8),
    "too-many-rows": lambda x: np.tile(x, (9, 1)),
    "one-column-more": lambda x: np.ones((4, 17), np.float32),
}


def test_arrays_of_every_kind_are_answered_or_refused_as_python_does(client: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    given = {name: make(x.copy()) for name, make in ARRAYS.items()}
    found = made_calls(client, [{"entry": "mlp", "leaves": [leaf(array)]} for array in given.values()])
    with apr.load(property_models(), mode="strict", tensors="array") as session:
        for (name, array), ours in zip(given.items(), found, strict=True):
            decision = session["mlp"].explain(array)
            if isinstance(decision, Hit):
                assert ours["results"][0]["hex"] == session["mlp"](array).tobytes().hex(), name
            else:
                assert ours["miss"], (name, ours)
                assert all(f"{variant}: {reason}" in ours["error"] for variant, reason in decision.reasons.items()), (
                    name
                )
        assert ours["miss"]


HOSTILE: Mapping[str, tuple[Any, str]] = {
    "null": ({"where": "null"}, "has elements at address 0"),
    "dtype-unknown": ({"dtype": "float33"}, "has elements of float33"),
    "dtype-empty": ({"dtype": ""}, "has elements of "),
    "dtype-no-text": ({"dtype": "\x1b[31m\n\ud800"}, "has elements of \\x1b[31m\\x0a\\xed\\xa0\\x80"),
    "size-below-0": ({"shape": [-4, 16]}, "has a size below 0: [-4, 16]"),
    "strides-too-few": ({"strides": [16]}, "has 1 strides for 2 dims"),
    "strides-none": ({"strides": []}, "has 0 strides for 2 dims"),
    "strides-huge": ({"strides": [2**62, 1]}, "reaches beyond the memory of any process"),
    "strides-huge-backwards": ({"strides": [-(2**63), 1]}, "reaches beyond the memory of any process"),
    "size-huge": ({"shape": [2**62, 16], "strides": [0, 1]}, "x.shape[0]: expected 1, got 4611686018427387904"),
    "sizes-huge": ({"shape": [2**63 - 1] * 2, "strides": [0, 0]}, "x.shape[0]: expected 1, got 9223372036854775807"),
    "sizes-huge-and-0": ({"shape": [2**62, 0], "strides": [1, 1]}, "x.shape[0]: expected 1, got 4611686018427387904"),
    "many-dims": ({"shape": [1] * 1000, "strides": [1] * 1000}, "expected 2 dims, got 1000"),
    "misaligned": ({"skip": 2}, "lies 2 bytes past an address divisible by 16"),
    "conj": ({"conj": True}, "has its conj bit set"),
    "device": ({"device": "cuda:0"}, "x.device: expected cpu, got cuda:0"),
    "device-unknown": ({"device": "\ud800"}, "x.device: expected cpu, got \\xed\\xa0\\x80"),
    "device-empty": ({"device": ""}, "x.device: expected cpu, got "),
}


def test_calls_that_nobody_may_make_are_misses_and_the_next_is_answered(client: Path) -> None:
    right = leaf(np.ones((4, 16), np.float32))
    calls: list[Any] = [{"entry": "mlp", "leaves": [right | said]} for said, _ in HOSTILE.values()]
    calls += [
        {"entry": "mlp", "leaves": leaves} for leaves in ([], [right] * 2, [{"scalar": 1}], [{"scalar": "\ud800"}])
    ]
    words = [*(words for _, words in HOSTILE.values()), "expected 1 leaves, got 0", "expected 1 leaves, got 2",
             "expected a float32 tensor, got 1", "expected a float32 tensor, got '\\xed\\xa0\\x80'"]  # fmt: skip
    for answer, wanted in zip(made_calls(client, calls), words, strict=True):
        assert answer["miss"], answer
        assert wanted in answer["error"]
    errors = [
        {"entry": "mlp", "leaves": [{"scalar": scalar}]}
        for scalar in ([1], {"float": "x"}, {"float": "0x1p+5000"}, 1.5, {})
    ]
    *refused, good = made_calls(client, [*errors, {"entry": "mlp", "leaves": [right], "threads": 3}])
    assert [answer["miss"] for answer in refused] == [False] * len(errors)
    assert good["results"][0]["shape"] == [4, 4]


def test_a_written_argument_that_is_locked_or_shared_is_a_miss(client: Path) -> None:
    x = np.ones((2, 4), np.float32)
    variant = apr.load(property_models(), tensors="array")["writing"].variants[0]
    leaves = [leaf(x[: guard.dims[0] if isinstance(guard.dims[0], int) else 2]) for guard in variant.guards.leaves]  # type: ignore[union-attr]
    written = next(n for n, guard in enumerate(variant.guards.leaves) if getattr(guard, "written", False))
    leaves[written]["read_only"] = True
    (answer,) = made_calls(client, [{"entry": "writing", "leaves": leaves}])
    assert "may not be written" in answer["error"] or "expected" in answer["error"]


def test_a_request_that_is_none_is_an_error_and_the_server_goes_on(client: Path) -> None:
    good = json.dumps({"x": [[0.5] * 16]})
    lines = [
        "", "[]", "{", "nan", '{"x": [[0.5, [1]]]}', '{"x": [[1], 2]}', '{"x": [[1, 2], [3]]}', '{"x": "\\ud800"}', '{"x": null}',
        '{"x": [[1e999]]}', '{"x": ' + "[" * 5000 + "]" * 5000 + "}", '{"x": [[true]], "y": 1}', '{"x": {"a": 1}}',
        '{"x": [[0.5]], "x": 1}', "\x00\xff",
    ]  # fmt: skip
    command: list[Any] = [client / "aotpack-serve", property_models(), "mlp", LIBTORCH]
    done = subprocess.run(command, input="\n".join([*lines, good]) + "\n", capture_output=True, text=True, check=True)
    _, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(answer) for answer in answers] == [["error"]] * len(lines) + [["results"]]


def test_a_folder_that_is_replaced_changes_nothing_for_a_server(client: Path, tmp_path: Path) -> None:
    bundle, request = tmp_path / "bundle", json.dumps({"x": [[0.5] * 16]}) + "\n"
    shutil.copytree(property_models(), bundle)
    command: list[Any] = [client / "aotpack-serve", bundle, "mlp", LIBTORCH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        for path in [*bundle.rglob("*.so"), *bundle.rglob("*.safetensors")]:
            path.unlink()
            path.write_bytes(b"other")
        server.stdin.write(request)
        server.stdin.close()
        assert "results" in json.loads(server.stdout.readline())
