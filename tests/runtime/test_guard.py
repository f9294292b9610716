"""What a guard lets through and what it says otherwise: literal calls, no torch. A row is one thing that may differ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard, ValueGuard
from aotpack_runtime.format.tensor import Call, Leaf, Other, TensorMeta, channels_last_strides, contiguous_strides
from aotpack_runtime.format.tree import LEAF, Tree

OTHER = Other("an instance of builtins.object")


def tensor(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None, **more: Any) -> TensorMeta:
    return TensorMeta(dtype, "cpu", shape, contiguous_strides(shape) if strides is None else strides, **more)


def guard(*dims: int | Range, dtype: str = "float32", path: str = "x", **more: Any) -> TensorGuard:
    return TensorGuard(path=path, dtype=dtype, dims=dims, device="cpu", **more)


def verdict(one: TensorGuard | ValueGuard | IntGuard, leaf: Leaf) -> str | None:
    return one.reject(leaf, {})


# -------------------------------------------------------------------------------------------------------- tensors

STATIC, RANGED = guard(4, 8), guard(Range(2, 16), 8)
LAST = guard(2, 3, 4, 5, layout="channels_last")
EXACT = guard(Range(1, 9), 4, layout=(parse("2 * x.shape[1]"), parse("1")))


@pytest.mark.parametrize(
    ("one", "leaf"),
    [
        pytest.param(STATIC, tensor(4, 8), id="static"),
        pytest.param(RANGED, tensor(2, 8), id="lowest"),
        pytest.param(RANGED, tensor(16, 8), id="highest"),
        pytest.param(guard(Range(0, None)), tensor(0), id="none"),
        pytest.param(guard(Range(2, None)), tensor(10**12), id="no-end"),
        pytest.param(guard(), tensor(), id="no-dims"),
        pytest.param(STATIC, replace(tensor(4, 8), device="cpu:0"), id="device-index"),
        pytest.param(STATIC, replace(tensor(4, 8), offset=4), id="address-where-none-is-asked"),
        pytest.param(guard(4, 8, aligned=True), tensor(4, 8), id="aligned"),
        pytest.param(guard(4, 1, 5), tensor(4, 1, 5, strides=(5, 999, 1)), id="stride-of-a-size-1-dim"),
        pytest.param(guard(1, 4), tensor(1, 4, strides=(0, 1)), id="one-row-expanded"),
        pytest.param(guard(1), tensor(1, strides=(7,)), id="one-element"),
        pytest.param(guard(0, 4), tensor(0, 4, strides=(1, 9)), id="strides-of-no-elements"),
        pytest.param(LAST, tensor(2, 3, 4, 5, strides=channels_last_strides((2, 3, 4, 5))), id="channels-last"),
        pytest.param(replace(LAST, dims=(2, 1, 4, 5)), tensor(2, 1, 4, 5), id="one-channel-is-both-layouts"),
        pytest.param(guard(2, 1, 4, 5), tensor(2, 1, 4, 5, strides=(20, 1, 5, 1)), id="one-channel-the-other-way"),
        pytest.param(EXACT, tensor(3, 4, strides=(8, 1)), id="exact-strides"),
        pytest.param(EXACT, tensor(1, 4, strides=(77, 1)), id="exact-strides-of-one-row"),
        pytest.param(guard(4, layout="any"), tensor(4, strides=(3,)), id="any-strides"),
        pytest.param(STATIC, replace(tensor(4, 8), shared=True), id="shared-and-only-read"),
        pytest.param(guard(4, written=True), tensor(4), id="written-and-apart"),
        pytest.param(STATIC, replace(tensor(4, 8), locked=True), id="locked-and-only-read"),
    ],
)
def test_a_tensor_that_fits_passes(one: TensorGuard, leaf: TensorMeta) -> None:
    assert verdict(one, leaf) is None


@pytest.mark.parametrize(
    ("one", "leaf", "message"),
    [
        pytest.param(STATIC, tensor(2, 8), "x.shape[0]: expected 4, got 2", id="size"),
        pytest.param(STATIC, tensor(4, 9), "x.shape[1]: expected 8, got 9", id="size-of-another-dim"),
        pytest.param(RANGED, tensor(1, 8), "x.shape[0]: expected 2..16, got 1", id="below"),
        pytest.param(RANGED, tensor(17, 8), "x.shape[0]: expected 2..16, got 17", id="above"),
        pytest.param(guard(Range(2, None)), tensor(1), "x.shape[0]: expected 2 or more, got 1", id="below-no-end"),
        pytest.param(STATIC, tensor(32), "x: expected 2 dims, got 1 [32]", id="rank"),
        pytest.param(STATIC, tensor(), "x: expected 2 dims, got 0 []", id="no-dims"),
        pytest.param(STATIC, tensor(4, 8, dtype="float64"), "x.dtype: expected float32, got float64", id="dtype"),
        pytest.param(STATIC, replace(tensor(4, 8), device="cuda:1"), "x.device: expected cpu, got cuda:1", id="device"),
        pytest.param(STATIC, tensor(4, 8, strides=(1, 4)), "x: expected contiguous strides [8, 1], got [1, 4]", id="transposed"),
        pytest.param(STATIC, tensor(4, 8, strides=(1, 0)), "x: expected contiguous strides [8, 1], got [1, 0]", id="expanded"),
        pytest.param(LAST, tensor(2, 3, 4, 5), "x: expected channels_last strides [60, 1, 15, 3], got [60, 20, 5, 1]", id="channels-first"),
        pytest.param(EXACT, tensor(3, 4), "x: expected exact strides [8, 1], got [4, 1]", id="exact-strides"),
        pytest.param(guard(4, 8, aligned=True), replace(tensor(4, 8), offset=4), "x: expected an address divisible by 16, got one 4 bytes past it", id="address"),
        pytest.param(STATIC, replace(tensor(4, 8), odd="has its conj bit set"), "x has its conj bit set", id="odd"),
        pytest.param(STATIC, replace(tensor(4, 8), needs_grad=True), "x requires grad and grad mode is on; a compiled variant records no gradients", id="grad"),
        pytest.param(guard(4, written=True), replace(tensor(4), shared=True), "x shares memory with another argument; the variant writes it and takes them to be apart", id="written-and-shared"),
        pytest.param(guard(4, written=True), replace(tensor(4), locked=True), "x may not be written: it is a read-only array, a copy that DLPack gave, or an inference tensor outside of its mode", id="written-and-locked"),
        pytest.param(STATIC, None, "x: expected a float32 tensor, got None", id="none"),
        pytest.param(STATIC, 3, "x: expected a float32 tensor, got 3", id="int"),
        pytest.param(STATIC, OTHER, "x: expected a float32 tensor, got an instance of builtins.object", id="object"),
        pytest.param(guard(4, path="q['a'][0]"), tensor(5), "q['a'][0].shape[0]: expected 4, got 5", id="inside-containers"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_turned_down_by_name(one: TensorGuard, leaf: Leaf, message: str) -> None:
    assert verdict(one, leaf) == message


# -------------------------------------------------------------------------------------------------------- scalars

SCALARS: list[Any] = [
    None, False, True, 0, 1, 2**70, 0.0, -0.0, 1.0, 0.5, math.inf, -math.inf, math.nan, 0j, complex(0.0, -0.0), 1 + 0j, "", "1", "True",
]  # fmt: skip


@pytest.mark.parametrize("wanted", SCALARS, ids=repr)
def test_a_frozen_scalar_takes_itself_and_nothing_else(wanted: Any) -> None:
    """No two of these are one to a guard, though Python says 1 == True == 1.0 and 0.0 == -0.0."""
    one = ValueGuard(path="k", value=wanted)
    taken = [index for index, given in enumerate(SCALARS) if verdict(one, given) is None]
    assert taken == [index for index, given in enumerate(SCALARS) if given is wanted]


def test_a_nan_made_elsewhere_is_the_same_nan() -> None:
    assert verdict(ValueGuard(path="k", value=math.nan), float("nan")) is None


@pytest.mark.parametrize(
    ("wanted", "given", "message"),
    [
        pytest.param(3, 5, "k: expected 3, got 5", id="int"),
        pytest.param(True, 1, "k: expected True, got 1", id="one-for-true"),
        pytest.param(1, 1.0, "k: expected 1, got 1.0", id="float-for-int"),
        pytest.param(0.0, -0.0, "k: expected 0.0, got -0.0", id="signed-zero"),
        pytest.param(None, tensor(2), "k: expected None, got a float32[2] tensor", id="tensor-for-none"),
        pytest.param("a", None, "k: expected 'a', got None", id="none-for-text"),
        pytest.param(1, OTHER, "k: expected 1, got an instance of builtins.object", id="object"),
    ],
)
def test_another_scalar_is_turned_down_by_value(wanted: Any, given: Leaf, message: str) -> None:
    assert verdict(ValueGuard(path="k", value=wanted), given) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(1, None, id="lowest"),
        pytest.param(64, None, id="highest"),
        pytest.param(0, "n: expected 1..64, got 0", id="below"),
        pytest.param(65, "n: expected 1..64, got 65", id="above"),
        pytest.param(2**70, f"n: expected 1..64, got {2**70}", id="big"),
        pytest.param(True, "n: expected an int, got True", id="bool"),
        pytest.param(1.0, "n: expected an int, got 1.0", id="float"),
        pytest.param(None, "n: expected an int, got None", id="none"),
        pytest.param(tensor(dtype="int64"), "n: expected an int, got a int64[] tensor", id="tensor"),
        pytest.param(OTHER, "n: expected an int, got an instance of builtins.object", id="object"),
    ],
)
def test_an_open_int_takes_ints_of_its_range(given: Leaf, message: str | None) -> None:
    assert verdict(IntGuard(path="n", dim=Range(1, 64)), given) == message


@pytest.mark.parametrize(
    ("high", "given", "message"),
    [
        (None, 2**63 - 1, None), (None, 2**63, f"n: expected an int of 64 bits, got {2**63}"),
        (None, 10**400, "n: expected an int of 64 bits, got an int of 1329 bits"),
        (2**64 - 1, 2**64 - 1, None), (2**64 - 1, 2**64, f"n: expected 0..{2**64 - 1}, got {2**64}"),
    ],
)  # fmt: skip
def test_an_int_without_an_end_has_64_bits(high: int | None, given: int, message: str | None) -> None:
    assert verdict(IntGuard(path="n", dim=Range(0, high)), given) == message


# ------------------------------------------------------------------------------------------------- whole calls


def guards(*leaves: Any, where: tuple[str, ...] = (), trees: tuple[Tree, ...] | None = None) -> Guards:
    return Guards(trees or (LEAF,) * len(leaves), leaves, tuple(map(parse, where)))


def call(*leaves: Leaf, trees: tuple[Tree, ...] | None = None, state: tuple[str, ...] = ()) -> Call:
    return Call(trees or (LEAF,) * len(leaves), leaves, state)


FREE, OTHER_FREE = guard(Range(0, None)), guard(Range(0, None), path="y")


@pytest.mark.parametrize(
    ("relation", "sizes", "message"),
    [
        pytest.param("x.shape[0] % 100 == 0", (300, 1), None, id="divisible"),
        pytest.param("x.shape[0] % 100 == 0", (0, 1), None, id="none-is-divisible"),
        pytest.param("x.shape[0] % 100 == 0", (250, 1), "x.shape[0]: must be divisible by 100, got 250", id="not-divisible"),
        pytest.param("y.shape[0] == x.shape[0]", (5, 5), None, id="equal"),
        pytest.param("y.shape[0] == x.shape[0]", (5, 3), "y.shape[0]: must equal x.shape[0] = 5, got 3", id="not-equal"),
        pytest.param("y.shape[0] == 2 * x.shape[0] + 1", (5, 11), None, id="linear"),
        pytest.param("y.shape[0] == 2 * x.shape[0] + 1", (5, 10), "y.shape[0] == 2 * x.shape[0] + 1 does not hold: x.shape[0] = 5, y.shape[0] = 10", id="not-linear"),
        pytest.param("x.shape[0] % y.shape[0] == 0", (12, 3), None, id="divisible-by-a-size"),
        pytest.param("x.shape[0] % y.shape[0] == 0", (13, 3), "x.shape[0] % y.shape[0] == 0 does not hold: x.shape[0] = 13, y.shape[0] = 3", id="not-divisible-by-a-size"),
        pytest.param("x.shape[0] % y.shape[0] == 0", (4, 0), "x.shape[0] % y.shape[0] == 0 cannot be computed: a divisor is 0", id="by-zero"),
        pytest.param("x.shape[0] <= y.shape[0] or x.shape[0] == 7", (7, 1), None, id="or"),
        pytest.param("1 < x.shape[0] < y.shape[0]", (1, 9), "1 < x.shape[0] < y.shape[0] does not hold: x.shape[0] = 1, y.shape[0] = 9", id="chain"),
    ],
)  # fmt: skip
def test_a_relation_between_sizes(relation: str, sizes: tuple[int, int], message: str | None) -> None:
    found = guards(FREE, OTHER_FREE, where=(relation,)).reject(call(tensor(sizes[0]), tensor(sizes[1])), ("x", "y"))
    assert found == message


def test_an_open_int_takes_part_in_relations() -> None:
    one = guards(FREE, IntGuard(path="n", dim=Range(1, 64)), where=("n <= x.shape[0]",))
    assert one.reject(call(tensor(4), 4), ("x", "n")) is None
    assert one.reject(call(tensor(4), 5), ("x", "n")) == "n <= x.shape[0] does not hold: n = 5, x.shape[0] = 4"


PAIR: Tree = ("tuple", LEAF, LEAF)
NAMED: Tree = ("dict", ("a", "b"), LEAF, LEAF)


@pytest.mark.parametrize(
    ("wanted", "given", "message"),
    [
        pytest.param(PAIR, PAIR, None, id="the-same"),
        pytest.param(PAIR, ("list", LEAF, LEAF), "q: expected tuple of 2, got list of 2", id="list-for-tuple"),
        pytest.param(PAIR, ("tuple", LEAF), "q: expected tuple of 2, got tuple of 1", id="shorter"),
        pytest.param(PAIR, LEAF, "q: expected tuple of 2, got one value", id="no-container"),
        pytest.param(LEAF, PAIR, "q: expected one value, got tuple of 2", id="container"),
        pytest.param(NAMED, ("dict", ("b", "a"), LEAF, LEAF), "q: expected dict with keys ['a', 'b'], got dict with keys ['b', 'a']", id="order-of-keys"),
        pytest.param(NAMED, ("dict", ("a",), LEAF), "q: expected dict with keys ['a', 'b'], got dict with keys ['a']", id="missing-key"),
        pytest.param(("dict", ("a",), PAIR), ("dict", ("a",), ("list", LEAF, LEAF)), "q['a']: expected tuple of 2, got list of 2", id="inside"),
        pytest.param(("class", "m:A", ("f",), LEAF), ("class", "m:B", ("f",), LEAF), "q: expected an instance of m:A, got an instance of m:B", id="class"),
        pytest.param(("class", "m:A", ("f",), PAIR), ("class", "m:A", ("f",), LEAF), "q.f: expected tuple of 2, got one value", id="field"),
    ],
)  # fmt: skip
def test_containers_are_compared_by_kind_and_keys(wanted: Tree, given: Tree, message: str | None) -> None:
    leaves = tuple(ValueGuard(path="q", value=None) for _ in range(2))
    found = Guards((wanted,), leaves).reject(Call((given,), (None, None)), ("q",))
    assert found == message


@pytest.mark.parametrize(
    ("one", "message"),
    [
        pytest.param(call(tensor(3), 1, state=("autocast is on for cpu with bfloat16",)), "autocast is on for cpu with bfloat16", id="state-first"),
        pytest.param(call(tensor(3), 1, trees=(LEAF, PAIR)), "y: expected one value, got tuple of 2", id="containers-before-leaves"),
        pytest.param(call(tensor(5, dtype="int64"), 2), "x.dtype: expected float32, got int64", id="leaves-in-order"),
        pytest.param(call(tensor(5), 2), "y: expected 1, got 2", id="leaves-before-relations"),
        pytest.param(call(tensor(5), 1), "x.shape[0]: must be divisible by 3, got 5", id="relations-last"),
        pytest.param(call(tensor(3), 1), None, id="nothing"),
    ],
)  # fmt: skip
def test_the_first_reason_is_given(one: Call, message: str | None) -> None:
    judge = guards(FREE, ValueGuard(path="y", value=1), where=("x.shape[0] % 3 == 0",))
    assert judge.reject(one, ("x", "y")) == message


@pytest.mark.parametrize(
    ("one", "static"),
    [
        pytest.param(guards(STATIC, ValueGuard(path="k", value=3)), True, id="fixed-sizes"),
        pytest.param(guards(RANGED), False, id="range"),
        pytest.param(guards(guard(Range(4, 4))), False, id="range-of-one"),
        pytest.param(guards(STATIC, IntGuard(path="n", dim=Range(1, 2))), False, id="open-int"),
        pytest.param(guards(), True, id="no-arguments"),
    ],
)
def test_guards_are_static_when_every_size_is_fixed(one: Guards, static: bool) -> None:  # noqa: FBT001
    assert one.static is static


def test_guards_in_words() -> None:
    one = guards(
        RANGED, LAST, ValueGuard(path="k", value="a"), IntGuard(path="n", dim=Range(1, None)), where=("n % 2 == 0",)
    )
    assert one.words() == [
        "x: float32[2..16, 8] on cpu",
        "x: float32[2, 3, 4, 5] on cpu channels_last",
        "k: 'a'",
        "n: int 1 or more",
        "n % 2 == 0",
    ]


def test_sizes_of_a_call_by_name() -> None:
    one = guards(RANGED, IntGuard(path="n", dim=Range(1, 9)))
    assert one.env(call(tensor(3, 8), 7)) == {"x.shape[0]": 3, "x.shape[1]": 8, "n": 7}


@pytest.mark.parametrize(
    ("left", "right", "both"),
    [
        pytest.param(Range(1, 8), Range(4, 16), Range(4, 8), id="overlap"),
        pytest.param(Range(1, None), Range(4, 16), Range(4, 16), id="one-open-end"),
        pytest.param(Range(1, None), Range(4, None), Range(4, None), id="two-open-ends"),
    ],
)
def test_two_ranges_meet_in_what_both_allow(left: Range, right: Range, both: Range) -> None:
    assert left.meet(right) == both
    assert right.meet(left) == both
