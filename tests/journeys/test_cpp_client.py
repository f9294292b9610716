"""The C++ client: its guards decide as Python's do, and it answers as the Python runtime does, with neither Python nor
torch's packages in its process."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="bundles are built with torch")

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
