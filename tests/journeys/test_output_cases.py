"""Cases A10, A11, A12 and their kind: a call gives back what eager gives back, whatever a result is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from aotpack.jobs import Result
from aotpack_runtime import GuardMiss, Session, load
from tests.support import output_state_cases
from tests.support.serving import WAYS, assert_same, imported, in_process, served, strided, wider


@pytest.fixture(scope="session")
def bundle() -> Path:
    return output_state_cases.bundle()


@pytest.fixture(scope="module")
def zoo(bundle: Path) -> Iterator[ModuleType]:
    with imported(bundle.parent) as module:
        yield module


@pytest.fixture
def session(bundle: Path, zoo: ModuleType) -> Iterator[Session]:
    with load(bundle, mode="eager") as loaded:
        yield loaded


@pytest.fixture(scope="session")
def refused() -> Result:
    return output_state_cases.refused()


tiers = pytest.mark.parametrize("tier", list(WAYS))


# ------------------------------------------------------------------------- A10: optional inputs, outputs of any kind


def test_a10_an_optional_input_that_was_absent_is_a_miss_when_it_is_given(session: Session) -> None:
    optional, mask = session["optional"], torch.full((2,), 7.0)
    assert "mask: expected None, got a float32[2] tensor" in str(optional.explain(torch.ones(2), mask))
    assert_served(("source", torch.full((2,), 7.0)), served(optional, torch.ones(2), mask))
    assert_served(("source", torch.full((2,), 7.0)), served(optional, torch.ones(2), mask=mask))
    assert_served(("hit", torch.full((2,), 2.0)), served(optional, torch.ones(2)))
    assert_served(("hit", torch.full((2,), 2.0)), served(optional, torch.ones(2), None))


@pytest.mark.parametrize(("mode", "source"), [("strict", "auto"), ("eager", "never")])
def test_a10_without_a_fallback_that_reaches_it_the_miss_names_the_argument(
    bundle: Path, mode: Any, source: Any
) -> None:
    with load(bundle, mode=mode, source=source) as session, pytest.raises(GuardMiss, match="mask: expected None"):
        session["optional"](torch.ones(2), torch.ones(2))


@tiers
def test_a_decorator_of_forward_may_add_arguments_by_name(session: Session, zoo: ModuleType, tier: str) -> None:
    """BertModel's does: with a None at the place of what it adds, the call would have two values for it."""
    decorated, x, mask = session["decorated"], WAYS[tier](torch.arange(5.0)), WAYS[tier](torch.full((5,), 3.0))
    for args in ((x,), (x, mask)):
        assert_served((tier, zoo.make("Decorated")(*args)), served(decorated, *args))


@pytest.mark.parametrize(
    ("tier", "size"), [*((tier, size) for tier in WAYS for size in (2, 5)), ("hit", 1), ("source", 1)]
)
def test_a10_outputs_have_the_types_that_eager_gives(session: Session, zoo: ModuleType, tier: str, size: int) -> None:
    x = WAYS[tier](torch.arange(float(size)))
    found_tier, found = served(session["leaves"], x)
    assert found_tier == tier
    assert_same(zoo.make("Leaves")(x), found)
    kinds = [type(found[name][1]) for name in ("int", "str", "float", "bool", "none", "size")]
    assert kinds == [int, str, float, bool, type(None), int]
    assert found["size"][1] == size
    assert found["computed"] == 2 * size + 1


def test_a10_each_call_gives_containers_of_its_own(session: Session) -> None:
    leaves = session["leaves"]
    first = leaves(torch.ones(2))
    first["nested"].clear()
    first.clear()
    assert len(leaves(torch.ones(2))["nested"]) == 3


@tiers
def test_a10_a_model_that_returns_nothing_writes_its_argument(session: Session, tier: str) -> None:
    x = WAYS[tier](torch.zeros(2))
    assert served(session["silent"], x) == (tier, None)
    assert x.tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------ A11: dataclasses


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(torch.clone, id="hit"),
        pytest.param(strided, id="program"),
        pytest.param(torch.Tensor.double, id="source"),
    ],
)
def test_a11_dataclasses_are_arguments_however_they_are_registered(
    session: Session, zoo: ModuleType, change: Any, request: pytest.FixtureRequest
) -> None:
    one, two = change(torch.ones(3)), change(torch.full((3,), 2.0))
    arguments = [
        kind(one.clone() if change is not strided else one, two) for kind in (zoo.Inp, zoo.Registered, zoo.Named)
    ]
    tier, found = served(session["classes"], *arguments)
    assert f"[{tier}]" in request.node.name
    assert_same(zoo.make("Classes")(*arguments), found)
    assert found[0].tolist() == [3, 3, 3]


def test_a11_a_class_of_the_same_fields_is_another_class(session: Session, zoo: ModuleType) -> None:
    @dataclass
    class Other:
        a: torch.Tensor
        b: torch.Tensor

    others = [Other(torch.ones(3), torch.ones(3)) for _ in range(3)]
    assert "q: expected an instance of zoo:Inp, got an instance of" in str(session["classes"].explain(*others))
    tier, found = served(session["classes"], *others)
    assert tier == "source"
    assert_same(zoo.make("Classes")(*others), found)


LOAD_AND_WARM = """
import sys
from aotpack_runtime import load
session = load({bundle!r}, mode="strict")
assert session.warmup().keys() >= {{"classes/fixed/cpu"}}
assert session["classes"].counts()["hits"] == 1, session["classes"].counts()
assert "zoo" not in sys.modules
"""
CALL = """
import torch, zoo
x = torch.ones(3)
results = session["classes"](zoo.Inp(x, x), zoo.Registered(x, x), zoo.Named(x, x))
print([result.tolist() for result in results], session["classes"].counts()["hits"])
"""


def test_a11_a_fresh_process_loads_without_the_classes_and_calls_with_them(bundle: Path) -> None:
    code = LOAD_AND_WARM.format(bundle=str(bundle))
    assert in_process(code) == ""
    assert in_process(code + CALL, bundle.parent) == "[[2.0, 2.0, 2.0], [3.0, 3.0, 3.0], [4.0, 4.0, 4.0]] 2\n"


# ----------------------------------------------------------------------------------------------------- A12: aliases


@tiers
def test_a12_outputs_alias_each_other_and_the_argument_as_in_eager(session: Session, tier: str) -> None:
    change = wider if tier == "source" else torch.clone
    x = change(torch.ones(2, 3))
    # Eager itself makes no view(-1) of what has gaps; autocast leaves a product of floats alone.
    with torch.autocast("cpu", enabled=tier == "program"):
        found_tier, out = served(session["aliases"], x)
        assert found_tier == tier
        assert out[2] is x
        out[0].add_(5)
        assert out[1].tolist() == [6] * 6
        out[2].add_(1)
        assert x.tolist() == [[2] * 3] * 2
        assert out[3].tolist() == [[2] * 2] * 3
        kept = [tensor.clone() for tensor in out]
        session["aliases"](change(torch.full((2, 3), 9.0)))
        for before, after in zip(kept, out, strict=True):
            assert torch.equal(before, after)


@tiers
def test_a12_outputs_that_are_parts_of_one_tensor_share_its_memory(
    session: Session, zoo: ModuleType, tier: str
) -> None:
    x = WAYS[tier](torch.arange(9.0).reshape(3, 3))
    wanted, (found_tier, found) = zoo.make("Shares")(x), served(session["shares"], x)
    assert found_tier == tier
    assert_same(wanted, found)
    for result in (wanted, found):
        for one, other in result.values():
            one.add_(1)
            other.mul_(2)
    assert_same(wanted, found)


@tiers
def test_a12_an_output_that_is_a_weight_is_the_callers_own(session: Session, zoo: ModuleType, tier: str) -> None:
    x, entry, eager = WAYS[tier](torch.ones(2)), session["gives_weights"], zoo.make("GivesWeights")
    for _ in range(3):
        wanted, (found_tier, found) = eager(x), served(entry, x)
        assert found_tier == tier
        assert_same(wanted, found)
        kept = {name: tensor.clone() for name, tensor in found.items()}
        session.update_weights({"scale": torch.tensor([1.0, 2.0])})
        assert_same(kept, found)
        for tensor in found.values():
            tensor.zero_()


@tiers
def test_a12_a_kept_output_that_is_a_weight_outlives_updates(session: Session, tier: str) -> None:
    x, entry = WAYS[tier](torch.ones(2)), session["gives_weights"]
    kept = []
    for number in range(4):
        session.update_weights({"scale": torch.full((2,), float(number)), "table": torch.full((2, 3), float(number))})
        kept.append(served(entry, x))
    for number, (found_tier, found) in enumerate(kept):
        assert found_tier == tier
        assert [found["scale"].unique().item(), found["table"].unique().item(), found["row"].unique().item()] == [
            number
        ] * 3
        assert found["count"].item() == number + 1


@tiers
def test_a12_arguments_written_in_place_are_returned_as_the_same_objects(
    session: Session, zoo: ModuleType, tier: str
) -> None:
    mine, theirs = ([WAYS[tier](torch.arange(3.0)), WAYS[tier](torch.ones(3))] for _ in range(2))
    wanted, (found_tier, found) = zoo.make("Writes")(*theirs), served(session["writes"], *mine)
    assert found_tier == tier
    assert_same(wanted, found)
    assert_same(theirs, mine)
    assert found[0] is mine[0]
    assert found[2] is mine[1]


@pytest.mark.parametrize("overlap", ["same", "part", "apart"])
def test_a12_a_model_that_writes_arguments_sees_that_they_overlap(
    session: Session, zoo: ModuleType, overlap: str
) -> None:
    def arguments() -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.arange(16.0)
        return memory[:4], {"same": memory[:4], "part": memory[2:6], "apart": memory[8:12]}[overlap]

    mine, theirs = arguments(), arguments()
    wanted, (tier, found) = zoo.make("Writes")(*theirs), served(session["writes"], *mine)
    assert_same(wanted, found)
    assert_same(theirs, mine)
    assert tier == ("hit" if overlap == "apart" else "program")


# ---------------------------------------------------------------------------------------------- names for outputs


@tiers
@pytest.mark.parametrize("kind", ["class", "dict", "tuple", "named"])
def test_named_outputs_are_a_dict_whatever_the_model_returns(session: Session, kind: str, tier: str) -> None:
    names = ["second", "first", "size"] if kind in ("class", "tuple") else ["second", "first"]
    x = WAYS[tier](torch.ones(2))
    found_tier, found = served(session[f"{kind}_fields"], x)
    first, second, size = x + 1, x + 2, 2
    if kind == "tuple":  # names are given in the order of the tuple
        first, second = second, first
    assert found_tier == tier
    assert_same({name: {"first": first, "second": second, "size": size}[name] for name in names}, found)


@tiers
def test_named_outputs_read_torchs_own_result_types(session: Session, tier: str) -> None:
    x = WAYS[tier](torch.arange(8.0).reshape(4, 2))
    found_tier, found = served(session["max_fields"], x)
    assert found_tier == tier
    assert_same({"values": x[3], "indices": torch.tensor([3, 3])}, found)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("named_tuple", ["zoo:Pair", "name the fields to return under `outputs`"]),
        ("dataclass", ["zoo:Output", "name the fields to return under `outputs`"]),
        ("structseq", ["output", "max", "name the fields under `outputs`"]),
        ("ordered_dict", ["output", "collections.OrderedDict"]),
        ("set", ["output", "builtins.set"]),
        ("unknown_name", ["'third'", "first", "second", "outputs"]),
        ("unknown_field", ["'third'", "first", "second", "outputs"]),
        ("too_few_names", ["3", "2", "outputs"]),
        ("parts", ["output[1]", "clone()"]),
        ("bits", ["output[1]", "int32", "clone()"]),
    ],
)
def test_results_that_cannot_be_kept_are_refused_with_their_place(
    refused: Result, entry: str, words: list[str]
) -> None:
    message = refused.failures[f"{entry}/fixed/cpu"]
    for word in words:
        assert word in message, message
    assert "\n" not in message


def test_the_other_entries_of_a_manifest_are_built_all_the_same(refused: Result) -> None:
    with load(refused.path, mode="strict") as session:
        assert list(session) == ["fine", "noise"]
        x = torch.zeros(2)
        session["fine"](x)
        assert x.tolist() == [1, 1]


def assert_served(wanted: tuple[str, Any], found: tuple[str, Any]) -> None:
    assert found[0] == wanted[0]
    assert_same(wanted[1], found[1])
