"""Which of several variants serves a call, and what a miss says: literal calls, no torch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aotpack_runtime.dispatch import Dispatcher, Hit, Miss
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.guard import Guards, IntGuard, LeafGuard, Range, TensorGuard, ValueGuard
from aotpack_runtime.format.index import ArtifactRef, Variant
from aotpack_runtime.format.output import Outputs
from aotpack_runtime.format.target import Target
from aotpack_runtime.format.tensor import Call, Leaf, Other, TensorMeta, contiguous_strides
from aotpack_runtime.format.tree import LEAF, Tree


def tensor(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None, **more: Any) -> TensorMeta:
    return TensorMeta(dtype, "cpu", shape, contiguous_strides(shape) if strides is None else strides, **more)


def x(*dims: int | Range, dtype: str = "float32", **more: Any) -> TensorGuard:
    return TensorGuard(path="x", dtype=dtype, dims=dims, device="cpu", **more)


def k(value: Any) -> ValueGuard:
    return ValueGuard(path="k", value=value)


def n(low: int, high: int) -> IntGuard:
    return IntGuard(path="n", dim=Range(low, high))


def variant(
    name: str, *leaves: LeafGuard, where: tuple[str, ...] = (), trees: tuple[Tree, ...] | None = None
) -> Variant:
    guards = Guards(trees or (LEAF,) * len(leaves), leaves, tuple(map(parse, where)))
    artifact = ArtifactRef("aoti", "0" * 64, {})
    return Variant(
        id=name, point="p", tier="hot", target=Target("cpu", {}), artifact=artifact, guards=guards,
        outputs=Outputs(("tuple",), ()), weights="", constants=(), examples=(),
    )  # fmt: skip


def call(*leaves: Leaf, trees: tuple[Tree, ...] | None = None, state: tuple[str, ...] = ()) -> Call:
    return Call(trees or (LEAF,) * len(leaves), leaves, state)


def chosen(variants: list[Variant], one: Call) -> str | None:
    parameters = tuple("xyz"[: len(one.trees)])
    found = Dispatcher(parameters, variants).choose(one)
    return found.variant.id if isinstance(found, Hit) else None


ONE, EIGHT = variant("b1", x(1, 4)), variant("b8", x(8, 4))
NARROW, WIDE = variant("b1_8", x(Range(1, 8), 4)), variant("b1_32", x(Range(1, 32), 4))
HALF = variant("half", x(8, 4, dtype="float16"))
ALL = [ONE, EIGHT, HALF, NARROW, WIDE]


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        pytest.param(tensor(1, 4), "b1", id="static"),
        pytest.param(tensor(8, 4), "b8", id="static-inside-two-ranges"),
        pytest.param(tensor(8, 4, dtype="float16"), "half", id="another-dtype-of-the-same-sizes"),
        pytest.param(tensor(5, 4), "b1_8", id="the-first-range"),
        pytest.param(tensor(9, 4), "b1_32", id="the-second-range"),
        pytest.param(tensor(32, 4), "b1_32", id="end-of-the-range"),
        pytest.param(tensor(33, 4), None, id="past-the-range"),
        pytest.param(tensor(0, 4), None, id="below-the-range"),
        pytest.param(tensor(8, 5), None, id="another-fixed-size"),
        pytest.param(tensor(8, 4, 1), None, id="another-rank"),
        pytest.param(tensor(5, 4, dtype="float16"), None, id="dtype-without-a-range"),
        pytest.param(tensor(8, 4, strides=(1, 8)), None, id="layout-that-no-variant-takes"),
        pytest.param(tensor(8, 4, needs_grad=True), None, id="grad"),
        pytest.param(None, None, id="none"),
        pytest.param(Other("an instance of a.B"), None, id="object"),
    ],
)
def test_a_call_is_served_by_the_most_specific_variant(leaf: Leaf, name: str | None) -> None:
    assert chosen(ALL, call(leaf)) == name


def test_static_comes_before_ranged_wherever_it_stands() -> None:
    assert chosen([WIDE, NARROW, EIGHT], call(tensor(8, 4))) == "b8"


def test_ranges_are_tried_in_the_order_they_are_given() -> None:
    assert chosen([WIDE, NARROW], call(tensor(5, 4))) == "b1_32"
    assert chosen([NARROW, WIDE], call(tensor(5, 4))) == "b1_8"


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        pytest.param(tensor(8, 4), "aligned", id="aligned"),
        pytest.param(tensor(8, 4, offset=4), "generic", id="4-bytes-off"),
        pytest.param(tensor(8, 4, strides=(1, 8), offset=4), "range", id="neither"),
    ],
)
def test_variants_of_the_same_sizes_are_told_apart_by_their_other_guards(leaf: Leaf, name: str) -> None:
    variants = [
        variant("range", x(Range(1, 8), 4, layout=(parse("1"), parse("x.shape[0]")))),
        variant("aligned", x(8, 4, aligned=True)),
        variant("generic", x(8, 4)),
    ]
    assert chosen(variants, call(leaf)) == name


def test_a_relation_that_does_not_hold_leaves_the_call_to_the_next_variant() -> None:
    by_four = variant("by four", x(Range(0, 100)), where=("x.shape[0] % 4 == 0",))
    rest = variant("rest", x(Range(0, 100)))
    assert [chosen([by_four, rest], call(tensor(size))) for size in (8, 9, 0)] == ["by four", "rest", "by four"]


VALUES: list[Any] = [True, 1, 1.0, 1 + 0j, False, 0, 0.0, -0.0, math.nan, None, "1", ""]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("sizes", [pytest.param((3,), id="static"), pytest.param((Range(1, 9),), id="ranged")])
def test_values_that_python_takes_for_equal_have_variants_of_their_own(value: Any, sizes: tuple[Any, ...]) -> None:
    variants = [variant(f"{item!r}", x(*sizes), k(item)) for item in VALUES]
    assert chosen(variants, call(tensor(3), value)) == repr(value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(3, "3", id="frozen-before-open"),
        pytest.param(4, "open", id="open"),
        pytest.param(9, None, id="past-the-range"),
        pytest.param(True, None, id="bool"),
        pytest.param(4.0, None, id="float"),
        pytest.param(Other("an instance of a.B"), None, id="object"),
        pytest.param(tensor(dtype="int64"), None, id="tensor"),
    ],
)
def test_an_open_int_takes_what_no_frozen_one_does(value: Leaf, name: str | None) -> None:
    assert chosen([variant("open", n(1, 8)), variant("3", k(3))], call(value)) == name


def test_containers_tell_variants_apart() -> None:
    trees: list[Tree] = [("tuple", LEAF), ("list", LEAF), ("dict", ("a",), LEAF), LEAF]
    variants = [variant(str(tree), x(2), trees=(tree,)) for tree in trees]
    assert [chosen(variants, call(tensor(2), trees=(tree,))) for tree in trees] == [str(tree) for tree in trees]
    assert chosen(variants, call(tensor(2), trees=(("dict", ("b",), LEAF),))) is None


def test_an_argument_may_be_absent() -> None:
    variants = [variant("with", x(2), x(2)), variant("without", x(2), k(None))]
    assert chosen(variants, call(tensor(2), tensor(2))) == "with"
    assert chosen(variants, call(tensor(2), None)) == "without"
    assert chosen(variants, call(None, tensor(2))) is None


def test_state_around_the_call_turns_every_variant_down() -> None:
    found = Dispatcher(("x",), ALL).choose(call(tensor(8, 4), state=("autocast is on for cpu with bfloat16",)))
    assert isinstance(found, Miss)
    assert set(found.reasons.values()) == {"autocast is on for cpu with bfloat16"}


def test_a_miss_names_every_variant_with_its_reason_in_order_and_those_for_other_hosts_last() -> None:
    found = Dispatcher(("x",), [ONE, WIDE, HALF], [("cuda", "no CUDA device on this host")]).choose(call(tensor(40, 4)))
    assert isinstance(found, Miss)
    assert list(found.reasons.items()) == [
        ("b1", "x.shape[0]: expected 1, got 40"),
        ("b1_32", "x.shape[0]: expected 1..32, got 40"),
        ("half", "x.dtype: expected float16, got float32"),
        ("cuda", "no CUDA device on this host"),
    ]
    assert str(found) == (
        "miss: b1: x.shape[0]: expected 1, got 40; b1_32: x.shape[0]: expected 1..32, got 40; "
        "half: x.dtype: expected float16, got float32; cuda: no CUDA device on this host"
    )


def test_a_hit_names_its_variant() -> None:
    assert str(Dispatcher(("x",), ALL).choose(call(tensor(1, 4)))) == "hit: b1"


def test_without_variants_everything_misses() -> None:
    found = Dispatcher(("x",), []).choose(call(tensor(1)))
    assert isinstance(found, Miss)
    assert found.reasons == {}
    assert str(found) == "miss: no variants"


def test_a_call_without_arguments_hits() -> None:
    assert chosen([variant("only")], call()) == "only"


def test_exact_sizes_are_found_without_trying_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of the contract: 10,000 variants cost what one does. Here: one is judged, not 10,000."""
    variants = [variant(f"b{size}", x(size, 4)) for size in range(10_000)]
    dispatcher = Dispatcher(("x",), variants)
    judged: list[object] = []
    original = Guards.reject

    def counted(self: Guards, *args: Any) -> str | None:
        judged.append(self)
        return original(self, *args)

    monkeypatch.setattr(Guards, "reject", counted)
    assert str(dispatcher.choose(call(tensor(9_999, 4)))) == "hit: b9999"
    assert judged == [variants[9_999].guards]


def steps(count: int) -> list[tuple[int, int | None]]:
    return [(4 * number + 1, 4 * number + 4) for number in range(count)]


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param(steps(40), id="side-by-side"),
        pytest.param([(1, 4 * number + 4) for number in range(40)], id="nested"),
        pytest.param([(number, number + 9) for number in range(40)], id="overlapping"),
        pytest.param([*steps(30), (1, None), (50, None)], id="without-end"),
        pytest.param([(0, 0), (0, 200), *steps(20), (7, 7), (7, 9)], id="of-one-size"),
        pytest.param([(9, 2), *steps(20)], id="empty"),
    ],
)
def test_of_many_ranges_the_first_that_holds_is_found_as_if_all_were_tried(
    ranges: list[tuple[int, int | None]],
) -> None:
    variants = [variant(f"v{number}", x(Range(1, 8), Range(low, high))) for number, (low, high) in enumerate(ranges)]
    for size in range(210):
        one = call(tensor(3, size))
        first = next((each.id for each in variants if each.guards.reject(one, ("x",)) is None), None)
        assert chosen(variants, one) == first


def test_the_last_reason_of_a_miss_is_that_of_the_widest_variant() -> None:
    found = Dispatcher(("x",), ALL).choose(call(tensor(99, 4)))
    assert isinstance(found, Miss)
    assert found.last_reason() == found.reasons["b1_32"]
    assert Miss(call(tensor(1)), ("x",), ()).last_reason() is None
