"""Kernel entries from the call to the launch: which variant is taken, what is packed where, what the memo may answer.

The driver is a fake that reads parameter blocks back; everything else is what a server runs.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import itertools
import math
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from aotpack_runtime import GuardMiss, Hit, Miss, Session, SessionClosed, TargetMismatch, use_stream
from aotpack_runtime.drivers import cuda
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.format.gpu import Gpu, reject_cubin, reject_ptx
from aotpack_runtime.kernel_entry import KernelEntry
from tests.support.dlpack import Exporter
from tests.support.fake_cuda import Array, FakeDriver, install
from tests.support.kernels import (
    FakeTensor,
    Parameter,
    Read,
    Tensor,
    binary,
    descriptor,
    install_torch,
    integer,
    kernel_entry,
    kernel_files,
    kernel_index,
    kernel_variant,
    literal,
    number,
    open_kernels,
    pointer,
    reader,
    write_kernels,
)

Json = Any
Serve = Callable[..., Any]
P = 1 << 20
"""An address divisible by 16, on the first GPU."""
Q = (1 << 40) + P
"""One on the second."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Two GPUs of different architectures."""
    return install(monkeypatch, [(9, 0), (8, 0)])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(driver, entry)` is the entry, loaded; launches are written to `driver.seen` as `Read`."""
    sessions: list[Session] = []

    def make(driver: FakeDriver, entry: Json, **more: Any) -> Any:
        driver.look = reader(entry)
        folder = tmp_path / f"bundle{len(sessions)}"
        sessions.append(open_kernels(write_kernels(folder, k=entry), driver, **more))
        return sessions[-1]["k"]

    yield make
    for session in sessions:
        session.close()


def launched(driver: FakeDriver, entry: Any, *args: Any, **kwargs: Any) -> Read:
    """The one launch that a call makes."""
    before = len(driver.seen)
    assert entry(*args, **kwargs) is None
    (one,) = driver.seen[before:]
    assert isinstance(one, Read)
    return one


def why_not(entry: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the GuardMiss that a call is; `explain` says the same reasons."""
    found = entry.explain(*args, **kwargs)
    assert isinstance(found, Miss)
    with pytest.raises(GuardMiss) as caught:
        entry(*args, **kwargs)
    assert caught.value.reasons == found.reasons
    return str(caught.value)


# --------------------------------------------------------------------------------------------- A08, A31: which variant

V1 = kernel_variant(
    "V1", [pointer("x", aligned=True), pointer("o", aligned=True), integer("n"), literal("s", 1)],
    [("Q", 0), ("Q", 1), ("i", 2), ("Q", None), ("Q", None)], where=["n % 16 == 0", "0 <= ceil_div(n, 1024) <= 2147483647"],
    grid=["ceil_div(n, 1024)"],
)  # fmt: skip
V2 = kernel_variant(
    "V2", [pointer("x", aligned=True), pointer("o", aligned=True), integer("n"), integer("s")],
    [("Q", 0), ("Q", 1), ("i", 2), ("i", 3), ("Q", None), ("Q", None)],
    where=["n % 16 == 0", "0 <= ceil_div(n, 1024) <= 2147483647"], grid=["ceil_div(n, 1024)"],
)  # fmt: skip
V3 = kernel_variant(
    "V3", [pointer("x"), pointer("o"), integer("n"), integer("s")],
    [("Q", 0), ("Q", 1), ("i", 2), ("i", 3), ("Q", None), ("Q", None)],
    where=["0 <= ceil_div(n, 1024) <= 2147483647"], grid=["ceil_div(n, 1024)"],
)  # fmt: skip
COPY = kernel_entry([V1, V2, V3], "Tensor Tensor int int", writes=["o"])
A31 = [
    pytest.param((1024, 1, 0, 0), "V1", id="all-special"),
    pytest.param((1024, 2, 0, 0), "V2", id="another-stride"),
    pytest.param((1000, 1, 0, 0), "V3", id="not-divisible"),
    pytest.param((1024, 1, 4, 0), "V3", id="x-not-aligned"),
    pytest.param((1024, 1, 0, 8), "V3", id="o-not-aligned"),
    pytest.param((1024, 1, 8, 8), "V3", id="both-not-aligned"),
    pytest.param((16, 1, 0, 0), "V1", id="sixteen"),
    pytest.param((8, 1, 0, 0), "V3", id="eight"),
    pytest.param((1024, 0, 0, 0), "V2", id="stride-zero"),
    pytest.param((1024, -1, 0, 0), "V2", id="stride-negative"),
]


@pytest.mark.parametrize(("call", "name"), A31)
def test_a31_the_most_special_variant_that_holds_is_taken(
    driver: FakeDriver, serve: Serve, call: tuple[int, ...], name: str
) -> None:
    n, s, x, o = call
    entry = serve(driver, COPY)
    found = entry.explain(Array(P + x), Array(2 * P + o), n, s)
    assert isinstance(found, Hit)
    one = launched(driver, entry, Array(P + x), Array(2 * P + o), n, s)
    assert found.variant.id == one.symbol == name
    assert one.grid == (-(-n // 1024), 1, 1)
    folded = name == "V1"
    assert one.values == ((P + x, 2 * P + o, n, 0, 0) if folded else (P + x, 2 * P + o, n, s, 0, 0))
    assert one.offsets == ((0, 8, 16, 24, 32) if folded else (0, 8, 16, 20, 24, 32))


def test_a31_zero_is_divisible_by_16(driver: FakeDriver, serve: Serve) -> None:
    found = serve(driver, COPY).explain(Array(P), Array(P), 0, 1)
    assert isinstance(found, Hit)
    assert found.variant.id == "V1"


@pytest.mark.parametrize(("call", "name"), A31)
def test_a31_only_the_generic_variant_serves_everything(
    driver: FakeDriver, serve: Serve, call: tuple[int, ...], name: str
) -> None:
    n, s, x, o = call
    entry = serve(driver, kernel_entry([V3], "Tensor Tensor int int"))
    assert launched(driver, entry, Array(P + x), Array(P + o), n, s).symbol == "V3"


@pytest.mark.parametrize(("call", "name"), A31)
def test_a31_only_the_special_variant_misses_what_it_does_not_take(
    driver: FakeDriver, serve: Serve, call: tuple[int, ...], name: str
) -> None:
    n, s, x, o = call
    entry = serve(driver, kernel_entry([V1], "Tensor Tensor int int"))
    if name == "V1":
        assert launched(driver, entry, Array(P + x), Array(P + o), n, s).symbol == "V1"
    else:
        assert "V1: " in why_not(entry, Array(P + x), Array(P + o), n, s)
        assert driver.seen == []


def marked(name: str, *marks: bool) -> Json:
    leaves = [pointer(path, aligned=mark) for path, mark in zip("xyz", marks, strict=True)]
    return kernel_variant(name, leaves, [("Q", 0), ("Q", 1), ("Q", 2)])


MARKS = {"xyz": (True, True, True), "xy": (True, True, False), "yz": (False, True, True), "x": (True, False, False),
         "z": (False, False, True), "none": (False, False, False)}  # fmt: skip


@pytest.mark.parametrize("kind", ["interface", "torch"])
@pytest.mark.parametrize("generic", [True, False])
def test_a08_a_variant_is_taken_when_every_pointer_it_marks_is_aligned(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, *, generic: bool
) -> None:
    variants = [marked(name, *marks) for name, marks in MARKS.items() if generic or name != "none"]
    entry = serve(driver, kernel_entry(variants, "Tensor Tensor Tensor"))
    make: Any = Array if kind == "interface" else Tensor
    if kind == "torch":
        install_torch(monkeypatch)
    for _ in range(2):  # judged, and then from the memo
        for shifts in itertools.product((0, 4, 8, 16), repeat=3):
            arrays = [make(P + shift) for shift in shifts]
            wanted = next(
                (n for n, marks in MARKS.items() if not any(m and s % 16 for m, s in zip(marks, shifts, strict=True))),
                "",
            )
            if wanted == "none" and not generic:
                assert "address divisible by 16" in why_not(entry, *arrays)
                continue
            one = launched(driver, entry, *arrays)
            assert (one.symbol, one.values) == (wanted, tuple(P + shift for shift in shifts))


# ------------------------------------------------------------------------------------------------------------- guards

KINDS = kernel_entry(
    [
        kernel_variant(
            "only", [pointer("x"), integer("n", -8, 8), number("a"), number("b", "bool"), literal("one", 1)],
            [("Q", 0), ("i", 1), ("f", 2), ("?", 3)], where=["n % 4 == 0", "n != 8"],
        )
    ],
    "Tensor int float bool int",
)  # fmt: skip


class Colour(enum.IntEnum):
    FOUR = 4
    ONE = 1


class Odd:
    """Says nothing about itself."""


@pytest.mark.parametrize(
    ("change", "packed"),
    [
        pytest.param({}, (P, 4, 0.5, True), id="plain"),
        pytest.param({"n": 0}, (P, 0, 0.5, True), id="zero-is-divisible"),
        pytest.param({"n": -8}, (P, -8, 0.5, True), id="negative-is-divisible"),
        pytest.param({"n": Colour.FOUR}, (P, 4, 0.5, True), id="enum"),
        pytest.param({"one": Colour.ONE}, (P, 4, 0.5, True), id="enum-literal"),
        pytest.param({"a": 3}, (P, 4, 3.0, True), id="int-as-float"),
        pytest.param({"a": -0.0}, (P, 4, -0.0, True), id="minus-zero"),
        pytest.param({"a": math.inf}, (P, 4, math.inf, True), id="infinite"),
        pytest.param({"a": 1e300}, (P, 4, math.inf, True), id="beyond-float32"),
        pytest.param({"a": -1e300}, (P, 4, -math.inf, True), id="below-float32"),
        pytest.param({"a": 1e-60}, (P, 4, 0.0, True), id="underflow"),
        pytest.param({"b": False}, (P, 4, 0.5, False), id="false"),
        pytest.param({"x": Array(P + 1)}, (P + 1, 4, 0.5, True), id="any-address"),
        pytest.param({"x": Array(2**64 - 16, shape=(4,))}, (2**64 - 16, 4, 0.5, True), id="last-address"),
        pytest.param({"x": Array(0, shape=(0,))}, (0, 4, 0.5, True), id="no-elements"),
    ],
)  # fmt: skip
def test_what_fits_is_packed_as_it_is(
    driver: FakeDriver, serve: Serve, change: dict[str, Any], packed: tuple[Any, ...]
) -> None:
    entry = serve(driver, KINDS)
    for _ in range(2):
        one = launched(driver, entry, **{"x": Array(P), "n": 4, "a": 0.5, "b": True, "one": 1, **change})
        assert one.values == packed
        assert math.copysign(1, one.values[2]) == math.copysign(1, packed[2])
        assert one.offsets == (0, 8, 12, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"x": Array(P, "<f2")}, "x.dtype: expected float32, got float16", id="dtype"),
        pytest.param({"x": Array(P, ">f4")}, "x is big-endian", id="big-endian"),
        pytest.param({"x": None}, "x: expected a float32 tensor, got None", id="none-for-a-tensor"),
        pytest.param({"x": P}, f"x: expected a float32 tensor, got {P}", id="address-for-a-tensor"),
        pytest.param({"x": Odd()}, "x: expected a float32 tensor, got an instance of ", id="object-for-a-tensor"),
        pytest.param({"n": 9}, "n: expected -8..8, got 9", id="above"),
        pytest.param({"n": -12}, "n: expected -8..8, got -12", id="below"),
        pytest.param({"n": 2**64 + 4}, f"n: expected -8..8, got {2**64 + 4}", id="huge"),
        pytest.param({"n": 6}, "n: must be divisible by 4, got 6", id="divisor"),
        pytest.param({"n": -6}, "n: must be divisible by 4, got -6", id="negative-divisor"),
        pytest.param({"n": 8}, "n != 8 does not hold: n = 8", id="relation"),
        pytest.param({"n": True}, "n: expected an int, got True", id="bool-for-an-int"),
        pytest.param({"n": 4.0}, "n: expected an int, got 4.0", id="float-for-an-int"),
        pytest.param({"n": "4"}, "n: expected an int, got an instance of builtins.str", id="text-for-an-int"),
        pytest.param({"n": None}, "n: expected an int, got None", id="none-for-an-int"),
        pytest.param({"n": [4]}, "n: expected an int, got an instance of builtins.list", id="list-for-an-int"),
        pytest.param({"n": Array(P)}, "n: expected an int, got a float32[1024] tensor", id="array-for-an-int"),
        pytest.param({"a": True}, "a: expected a float, got True", id="bool-for-a-float"),
        pytest.param({"a": 1j}, "a: expected a float, got an instance of builtins.complex", id="complex-for-a-float"),
        pytest.param({"a": "0.5"}, "a: expected a float, got an instance of builtins.str", id="text-for-a-float"),
        pytest.param({"b": 1}, "b: expected a bool, got 1", id="int-for-a-bool"),
        pytest.param({"b": None}, "b: expected a bool, got None", id="none-for-a-bool"),
        pytest.param({"one": True}, "one: expected 1, got True", id="true-for-the-literal"),
        pytest.param({"one": 1.0}, "one: expected 1, got 1.0", id="float-for-the-literal"),
        pytest.param({"one": 2}, "one: expected 1, got 2", id="another-literal"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_miss_that_says_why(
    driver: FakeDriver, serve: Serve, change: dict[str, Any], reason: str
) -> None:
    entry, good = serve(driver, KINDS), {"x": Array(P), "n": 4, "a": 0.5, "b": True, "one": 1}
    entry(**good)  # the memo knows a call that is nearly this one
    for _ in range(2):
        assert f"only: {reason}" in why_not(entry, **{**good, **change})
    assert len(driver.seen) == 1
    assert entry.counts()["errors"] == 2


@pytest.mark.parametrize(
    "value", [pytest.param(10**3000, id="3000-digits"), pytest.param(10**5000, id="5000"), pytest.param(-(10**5000), id="minus")]
)  # fmt: skip
def test_an_int_that_python_does_not_spell_is_a_miss(driver: FakeDriver, serve: Serve, value: int) -> None:
    message = why_not(serve(driver, KINDS), Array(P), value, 0.5, True, 1)
    assert "only: n: expected -8..8, got " in message
    assert len(message) < 500


def test_nan_is_nan(driver: FakeDriver, serve: Serve) -> None:
    entry = serve(driver, KINDS)
    for value in (1.0, math.nan, 2.0):
        seen = launched(driver, entry, Array(P), 4, value, True, 1).values[2]
        assert math.isnan(seen) if math.isnan(value) else seen == value


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3, 4, 5, 6), {}), ((1,), {"x": 1}), ((), {"y": 1}), ((Array(P), 4, 0.5, True), {})],
)
def test_arguments_that_do_not_bind_are_a_type_error(
    driver: FakeDriver, serve: Serve, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    entry = serve(driver, KINDS)
    for call in (entry, entry.explain):
        with pytest.raises(TypeError):
            call(*args, **kwargs)


def test_a_miss_names_the_entry_the_first_four_variants_and_how_many_more(driver: FakeDriver, serve: Serve) -> None:
    variants = [kernel_variant(f"v{n}", [pointer("x", dtype)], [("Q", 0)]) for n, dtype in
                enumerate(["int8", "int16", "int32", "int64", "float16", "float64"])]  # fmt: skip
    entry = serve(driver, kernel_entry(variants, "Tensor"))
    message = why_not(entry, Array(P))
    assert message.startswith("k: no variant fits this call")
    assert "v0: x.dtype: expected int8, got float32; v1: " in message
    assert message.endswith("; and 2 more")
    assert "\n" not in message


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_a_miss_blames_the_mode_only_when_it_is_to_blame(driver: FakeDriver, serve: Serve, mode: str) -> None:
    entry = serve(driver, kernel_entry([V3], "Tensor Tensor int int", policy="jit"), mode=mode)
    assert "strict" not in why_not(entry, Array(P, "<f8"), Array(P), 1, 1)


@pytest.mark.parametrize("value", ["strict", "eager", "jit"])
def test_aotpack_mode_is_taken_and_a_miss_is_an_error_in_every_mode(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("AOTPACK_MODE", value)
    entry = serve(driver, kernel_entry([V3], "Tensor Tensor int int", policy="jit"), mode=None)
    assert entry.policy == {"strict": "error"}.get(value, value)
    why_not(entry, Array(P), Array(P), 2**31, 1)
    assert launched(driver, entry, Array(P), Array(P), 5, 1).symbol == "V3"


def test_another_aotpack_mode_is_refused(driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTPACK_MODE", "fast")
    with pytest.raises(AotpackError, match="AOTPACK_MODE is 'fast'; expected strict, eager or jit"):
        serve(driver, COPY, mode=None)


# ------------------------------------------------------------------------------------------------------ what is packed

INTS = {"b": 8, "B": 8, "h": 16, "H": 16, "i": 32, "I": 32, "q": 64, "Q": 64}


def ends(code: str) -> tuple[int, int]:
    bits = INTS[code]
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if code.islower() else (0, 2**bits - 1)


@pytest.mark.parametrize("code", INTS)
def test_an_int_is_packed_whole_and_one_that_is_wider_is_a_miss(driver: FakeDriver, serve: Serve, code: str) -> None:
    low, high = ends(code)
    leaves = [integer("before", 0, 255), integer("n", low, high), integer("after", 0, 255)]
    entry = serve(driver, kernel_entry([kernel_variant("k", leaves, [("B", 0), (code, 1), ("B", 2)])], "int int int"))
    for value in {low, low + 1, -1 if low else 0, 0, 1, high - 1, high}:
        assert launched(driver, entry, 255, value, 255).values == (255, value, 255)
    for value in (low - 1, high + 1, 2**64, -(2**63) - 1):
        assert f"n: expected {low}..{high}, got {value}" in why_not(entry, 255, value, 255)


@pytest.mark.parametrize(
    ("code", "value", "packed"),
    [
        ("d", 0.1, 0.1), ("d", 1e308, 1e308), ("d", 2, 2.0), ("d", 2**53 + 1, float(2**53)), ("d", -math.inf, -math.inf),
        ("f", 0.1, struct.unpack("f", struct.pack("f", 0.1))[0]), ("f", 16777217, 16777216.0), ("f", 1e39, math.inf),
        ("f", 3.4028235677973362e38, 3.4028234663852886e38), ("f", 3.4028235677973370e38, math.inf),
        ("f", -3.4028235677973370e38, -math.inf), ("f", 1e-46, 0.0), ("f", 2**127, 2.0**127),
        ("e", 0.1, struct.unpack("e", struct.pack("e", 0.1))[0]), ("e", 65504.0, 65504.0), ("e", -math.inf, -math.inf),
        ("?", True, True), ("?", False, False), ("i", True, 1), ("i", False, 0),
    ],
)  # fmt: skip
def test_floats_and_bools_are_packed_as_c_converts_them(
    driver: FakeDriver, serve: Serve, code: str, value: Any, packed: Any
) -> None:
    kind = "bool" if isinstance(value, bool) else "float"
    leaves = [integer("before", 0, 255), number("a", kind), integer("after", 0, 255)]
    variant = kernel_variant("k", leaves, [("B", 0), (code, 1), ("B", 2)])
    entry = serve(driver, kernel_entry([variant], f"int {kind} int"))
    for _ in range(2):
        one = launched(driver, entry, 255, value, 255)
        assert one.values == (255, packed, 255)


@pytest.mark.parametrize(
    ("slots", "values", "packed"),
    [
        pytest.param("df", (1e300, 1e300), (1e300, math.inf), id="a-double-beside-it-becomes-infinite"),
        pytest.param("f", (10**39,), (math.inf,), id="an-int-beyond-float32"),
        pytest.param("f", (10**400,), (math.inf,), id="an-int-beyond-float64"),
        pytest.param("d", (-(10**400),), (-math.inf,), id="an-int-beyond-float64-as-double"),
        pytest.param("f", (3.4028235677973366e38,), (math.inf,), id="half-of-the-last-bit-beyond"),
        pytest.param("e", (70000.0,), (math.inf,), id="beyond-float16"),
        pytest.param("e", (-1e30,), (-math.inf,), id="below-float16"),
    ],
)
def test_a_number_that_a_slot_cannot_hold_is_infinite_there_and_nowhere_else(
    driver: FakeDriver, serve: Serve, slots: str, values: tuple[Any, ...], packed: tuple[float, ...]
) -> None:
    leaves = [number(name) for name in "ab"[: len(slots)]]
    variant = kernel_variant("k", leaves, [(code, place) for place, code in enumerate(slots)])
    entry = serve(driver, kernel_entry([variant], " ".join(["float"] * len(slots))))
    assert launched(driver, entry, *values).values == packed


def test_a_block_of_every_type_lies_as_c_lays_it(driver: FakeDriver, serve: Serve) -> None:
    codes = ["b", "q", "h", "d", "?", "f", "B", "Q", "H", "e", "I", "i", "?"]
    leaves: list[Json] = []
    values: list[Any] = []
    for place, code in enumerate(codes):
        name = f"a{place}"
        if code in INTS:
            leaves.append(integer(name, *ends(code)))
            values.append(ends(code)[place % 2])
        else:
            leaves.append(number(name, "bool" if code == "?" else "float"))
            values.append(place % 2 == 0 if code == "?" else -1.5)
    types = " ".join("int" if code in INTS else "bool" if code == "?" else "float" for code in codes)
    entry = serve(driver, kernel_entry([kernel_variant("k", leaves, list(zip(codes, range(13), strict=True)))], types))
    one = launched(driver, entry, *values)
    assert one.values == tuple(values)
    assert one.offsets == (0, 8, 16, 24, 32, 36, 40, 48, 56, 58, 60, 64, 68)


def test_what_lies_between_parameters_and_hidden_slots_is_zero(driver: FakeDriver, serve: Serve) -> None:
    leaves, slots = (
        [integer("n", 0, 255), number("a"), integer("m", 0, 255)],
        [[8, "B", 0], [12, "f", 1], [24, "Q", None], [32, "Q", None], [63, "B", 2]],
    )
    entry = serve(driver, kernel_entry([kernel_variant("k", leaves, slots, bytes=64)], "int float int"))
    driver.look = lambda one: ctypes.string_at(one.address(0) - 8, 64)
    for n in (255, 1, 255):
        entry(n, -1.0, n)
        wanted = bytes(8) + bytes([n, 0, 0, 0]) + struct.pack("<f", -1.0) + bytes(47) + bytes([n])
        assert driver.seen[-1] == wanted


def test_an_argument_may_fill_no_slot(driver: FakeDriver, serve: Serve) -> None:
    variant = kernel_variant(
        "k",
        [pointer("x"), integer("n", 0, 9), integer("grid", 0, 9)],
        [("Q", 0), ("b", 1)],
        grid=["grid"],
    )
    one = launched(driver, serve(driver, kernel_entry([variant], "Tensor int int", only=["grid"])), Array(P), 7, grid=3)
    assert (one.values, one.grid) == ((P, 7), (3, 1, 1))


def test_a_kernel_without_parameters_is_launched(driver: FakeDriver, serve: Serve) -> None:
    entry = serve(driver, kernel_entry([kernel_variant("k", [], [])], "", names=[]))
    driver.look = lambda one: one.symbol
    assert entry() is None
    assert driver.seen == ["k"]


# ------------------------------------------------------------------------------------------------ grids, blocks, shared

PLACED = kernel_variant(
    "placed", [pointer("x"), *[integer(name) for name in ("gx", "gy", "gz", "bx", "by", "bz", "extra")]], [("Q", 0)],
    grid=["ceil_div(gx, 2)", "gy * 2", "max(gz, 1) - 1"], block=["bx", "by", "bz"], shared="1024 + 4 * extra",
    where=["0 <= ceil_div(gx, 2) <= 2147483647", "0 <= gy * 2 <= 65535", "0 <= max(gz, 1) - 1 <= 65535", "1 <= bx <= 1024",
           "1 <= by <= 1024", "1 <= bz <= 1024", "0 <= 1024 + 4 * extra <= 232448"],
)  # fmt: skip
SIZES = {"gx": 5, "gy": 3, "gz": 8, "bx": 8, "by": 4, "bz": 2, "extra": 10}


@pytest.mark.parametrize(
    ("change", "grid", "block", "shared"),
    [
        ({}, (3, 6, 7), (8, 4, 2), 1064),
        ({"gx": 1}, (1, 6, 7), (8, 4, 2), 1064),
        ({"gy": 32767}, (3, 65534, 7), (8, 4, 2), 1064),
        ({"gz": 65536}, (3, 6, 65535), (8, 4, 2), 1064),
        ({"gx": 2**31 - 1}, (2**30, 6, 7), (8, 4, 2), 1064),
        ({"bx": 1024, "by": 1, "bz": 1}, (3, 6, 7), (1024, 1, 1), 1064),
        ({"extra": 57856}, (3, 6, 7), (8, 4, 2), 232448),
    ],
)
def test_grid_block_and_shared_memory_are_computed_from_the_call(
    driver: FakeDriver, serve: Serve, change: dict[str, int], grid: tuple[int, ...], block: tuple[int, ...], shared: int
) -> None:
    entry = serve(driver, kernel_entry([PLACED], "Tensor" + " int" * 7, only=list(SIZES)))
    launched(driver, entry, Array(P), **SIZES)
    for _ in range(2):
        one = launched(driver, entry, Array(P), **{**SIZES, **change})
        assert (one.grid, one.block, one.shared) == (grid, block, shared)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gx": -3}, "0 <= ceil_div(gx, 2) <= 2147483647 does not hold: gx = -3"),
        ({"gy": 32768}, "0 <= gy * 2 <= 65535 does not hold: gy = 32768"),
        ({"gy": -1}, "0 <= gy * 2 <= 65535 does not hold: gy = -1"),
        ({"gz": 65537}, "0 <= max(gz, 1) - 1 <= 65535 does not hold: gz = 65537"),
        ({"bx": 0}, "1 <= bx <= 1024 does not hold: bx = 0"),
        ({"bz": 1025}, "1 <= bz <= 1024 does not hold: bz = 1025"),
        ({"extra": 57857}, "0 <= 1024 + 4 * extra <= 232448 does not hold: extra = 57857"),
        ({"extra": -257}, "does not hold: extra = -257"),
    ],
)
def test_what_no_launch_can_have_is_a_miss(
    driver: FakeDriver, serve: Serve, change: dict[str, int], reason: str
) -> None:
    entry = serve(driver, kernel_entry([PLACED], "Tensor" + " int" * 7, only=list(SIZES)))
    assert reason in why_not(entry, Array(P), **{**SIZES, **change})


@pytest.mark.parametrize("change", [{"gx": 0}, {"gx": -1}, {"gy": 0}, {"gz": 0}, {"gz": 1}])
def test_a_grid_of_nothing_is_served_without_a_launch(driver: FakeDriver, serve: Serve, change: dict[str, int]) -> None:
    entry = serve(driver, kernel_entry([PLACED], "Tensor" + " int" * 7, only=list(SIZES)))
    for count in range(1, 4):
        entry(Array(P), **{**SIZES, **change})
        assert (driver.seen, entry.counts()["hits"]) == ([], count)
    assert launched(driver, entry, Array(P), **SIZES).grid == (3, 6, 7)


def test_a_grid_of_nothing_returns_none(driver: FakeDriver, serve: Serve) -> None:
    assert serve(driver, COPY)(Array(P), Array(P), 0, 1) is None


def test_a_divisor_of_zero_is_a_miss(driver: FakeDriver, serve: Serve) -> None:
    variant = kernel_variant("k", [integer("n"), integer("m")], [("i", 0)], grid=["n // m"], where=["0 <= n // m <= 9"])
    entry = serve(driver, kernel_entry([variant], "int int"))
    assert "a divisor is 0" in why_not(entry, 4, 0)
    assert launched(driver, entry, 4, 2).grid == (2, 1, 1)


def test_shared_memory_beyond_this_gpu_is_a_miss_of_that_call_alone(driver: FakeDriver, serve: Serve) -> None:
    driver.shared_limit = 101376  # an sm_86; the guards allow what the largest GPU has
    entry = serve(driver, kernel_entry([PLACED], "Tensor" + " int" * 7, only=list(SIZES)))
    launched(driver, entry, Array(P), **SIZES)
    with pytest.raises(AotpackError):
        entry(Array(P), **{**SIZES, "extra": 57856})
    launched(driver, entry, Array(P), **{**SIZES, "extra": 11})


def test_a_call_that_the_device_refuses_goes_on_to_the_next_variant(driver: FakeDriver, serve: Serve) -> None:
    leaves = [pointer("x"), integer("n", 0, 10**6)]
    much = kernel_variant("much", leaves, [("Q", 0), ("i", 1)], shared="n")
    little = kernel_variant("little", leaves, [("Q", 0), ("i", 1)])
    driver.shared_limit = 1000
    entry = serve(driver, kernel_entry([much, little], "Tensor int"))
    symbols = [launched(driver, entry, Array(P), n).symbol for n in (1000, 1001, 1001, 1000, 5)]
    assert symbols == ["much", "little", "little", "much", "much"]
    assert entry.counts()["skipped"] == {}


def test_shared_memory_that_was_allowed_stays_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions, or two variants of one symbol: the driver has one attribute for both."""
    given: list[int] = []

    def cuFuncSetAttribute(handle: int, attribute: object, size: int) -> tuple[int]:  # noqa: N802 - the driver's name
        given.append(size)
        return (0,)

    attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    monkeypatch.setattr(
        cuda, "cu", SimpleNamespace(cuFuncSetAttribute=cuFuncSetAttribute, CUfunction_attribute=attribute)
    )
    monkeypatch.setattr(cuda, "_shared", {})
    device: Any = SimpleNamespace(ordinal=0, current=nullcontext)
    first, second = cuda.Function(7, device), cuda.Function(7, device)
    wanted = {100_000: 100_000, 200_000: 200_000, 90_000: 200_000, 150_000: 200_000, 210_000: 210_000}
    for holder, (asked, allowed) in zip(itertools.cycle([first, second]), wanted.items(), strict=False):
        holder.allow_shared(asked)
        assert given[-1] == allowed


# ------------------------------------------------------------------------------------------------------------ choices


def sized(block: int, **more: Any) -> Json:
    return kernel_variant(
        f"b{block}", [pointer("x"), integer("n"), integer("m")], [("Q", 0), ("i", 1)], axes={"B": block}, **more
    )


RULES = {
    "rules": [{"when": "n <= 64", "pick": {"B": 64}}, {"when": "n % 2 == 0", "pick": {"B": 256}}, {"pick": {"B": 9}}]
}
TABLE = {"tables": {
    "sm_90": [{"sizes": {"n": 16}, "given": {}, "pick": {"B": 256}}, {"sizes": {"n": 4096}, "given": {}, "pick": {"B": 64}}],
    "sm_80": [{"sizes": {"n": 16}, "given": {}, "pick": {"B": 64}}],
}}  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "n", "name"),
    [
        ({}, 1, "b128"), (RULES, 64, "b64"), (RULES, 66, "b256"), (RULES, 67, "b128"), (RULES, -1, "b64"),
        (TABLE, 1, "b256"), (TABLE, 255, "b256"), (TABLE, 256, "b256"), (TABLE, 257, "b64"), (TABLE, 10**6, "b64"), (TABLE, -5, "b256"),
    ],
)  # fmt: skip
def test_the_choice_takes_one_of_those_that_fit(
    driver: FakeDriver, serve: Serve, choice: Json, n: int, name: str
) -> None:
    entry = serve(driver, kernel_entry([sized(128), sized(64), sized(256)], "Tensor int int", choice=choice))
    for _ in range(2):
        assert launched(driver, entry, Array(P), n, 1).symbol == name
        assert entry.explain(Array(P), n, 1).variant.id == name


def test_the_choice_takes_nothing_that_does_not_fit(driver: FakeDriver, serve: Serve) -> None:
    choice = {"rules": [{"pick": {"B": 64}}]}
    entry = serve(driver, kernel_entry([sized(128), sized(64, where=["n != 7"])], "Tensor int int", choice=choice))
    assert [launched(driver, entry, Array(P), n, 1).symbol for n in (6, 7, 6)] == ["b64", "b128", "b64"]


def test_a_rule_that_cannot_be_computed_does_not_hold(driver: FakeDriver, serve: Serve) -> None:
    choice = {"rules": [{"when": "n % m == 0", "pick": {"B": 64}}]}
    entry = serve(driver, kernel_entry([sized(128), sized(64)], "Tensor int int", choice=choice))
    assert launched(driver, entry, Array(P), 4, 2).symbol == "b64"
    assert launched(driver, entry, Array(P), 4, 0).symbol == "b128"


# --------------------------------------------------------------------------------------------------------------- memo

TURNED = kernel_entry(
    [kernel_variant("k", [pointer("z", "complex64"), integer("n"), number("a"), number("b", "bool")], [("Q", 0), ("i", 1), ("f", 2), ("i", 3)])],
    "Tensor int float bool",
)  # fmt: skip


@pytest.mark.parametrize("warm", [False, True], ids=["first", "after-one-that-fits"])
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(Tensor(P, "complex64", bits="conj"), id="conj"),
        pytest.param(Tensor(P, "complex64", bits="neg"), id="neg"),
        pytest.param(FakeTensor(0, "complex64"), id="fake"),
        pytest.param(Tensor(0, "complex64"), id="its-memory-is-freed"),
        pytest.param(Tensor(P, "complex64", device=-1), id="on-the-cpu"),
    ],
)
def test_a_tensor_that_a_kernel_cannot_see_is_a_miss(
    driver: FakeDriver,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Tensor,
    *,
    warm: bool,
) -> None:
    entry = serve(driver, TURNED)
    install_torch(monkeypatch)
    if warm:
        launched(driver, entry, Tensor(P, "complex64"), 5, 1.0, True)
    with pytest.raises(GuardMiss):
        entry(wrong, 5, 1.0, True)


class Wrapper(Tensor):
    """A subclass that may have memory, and may have none: its address says which."""


@pytest.mark.parametrize("kind", [Tensor, Parameter, Wrapper])
def test_an_address_of_0_is_of_an_empty_tensor_or_a_miss_at_every_call(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: type[Tensor]
) -> None:
    entry = serve(driver, TURNED)
    install_torch(monkeypatch)
    for _ in range(2):
        for address, shape in ((P, (4,)), (0, (0,)), (P, (0,))):
            assert launched(driver, entry, kind(address, "complex64", shape=shape), 5, 1.0, True).values[0] == address
        with pytest.raises(GuardMiss):
            entry(kind(0, "complex64"), 5, 1.0, True)


class Growing:
    """An int-like object whose value changes."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_the_number_of_an_object_is_asked_at_each_call(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, count = serve(driver, COPY), Growing(1024)
    install_torch(monkeypatch)
    assert launched(driver, entry, Tensor(P), Tensor(P), count, 1).grid == (1, 1, 1)
    count.value = 2048
    assert launched(driver, entry, Tensor(P), Tensor(P), count, 1).grid == (2, 1, 1)


@pytest.mark.parametrize("kind", ["interface", "torch"])
@pytest.mark.parametrize(
    "number",
    [
        ("int8", 5),
        ("int64", 5),
        ("uint64", 5),
        ("float16", 0.5),
        ("float32", 0.5),
        ("float64", 0.5),
        ("bool_", True),
        ("bool_", False),
    ],
)
def test_numpys_numbers_are_numbers_the_second_time_too(
    driver: FakeDriver,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    number: tuple[str, Any],
) -> None:
    name, value = number
    numpy = pytest.importorskip("numpy")
    entry = serve(driver, TURNED)
    if kind == "torch":
        install_torch(monkeypatch)
    array = Tensor(P, "complex64") if kind == "torch" else Array(P, "<c8")
    place = 1 if "int" in name else 2 if "float" in name else 3
    args = [array, 7, 2.0, True]
    args[place] = getattr(numpy, name)(value)
    for _ in range(3):
        assert launched(driver, entry, *args).values[place] == value  # a bool as an int, of four bytes


def test_a_memo_that_is_full_starts_again_and_answers_right(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = serve(driver, COPY)
    entry._memo_limit = 8
    install_torch(monkeypatch)
    for array in (Array, Tensor):
        for n in [*range(64), *range(64, 0, -1)]:
            entry(array(P), array(P), n, 2)
            assert len(entry._memo) <= 8
            if n:
                assert driver.seen[-1].values[2] == n
                assert driver.seen[-1].symbol == ("V3" if n % 16 else "V2")


def test_a_judged_call_is_answered_without_judging_it_again(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = serve(driver, COPY)
    install_torch(monkeypatch)
    for array in (Array, Tensor):
        launched(driver, entry, array(P), array(P), 16, 1)
        with monkeypatch.context() as patch:
            patch.setattr(entry, "_judge", None)
            one = launched(driver, entry, array(3 * P), array(5 * P), 16, 1)
            assert one.values == (3 * P, 5 * P, 16, 0, 0)


@pytest.mark.parametrize("data", [(None, False), ("0", False), (P + 0.0, False), (-16, False), (2**64, False)])
def test_a_broken_interface_is_a_miss_the_second_time_too(
    driver: FakeDriver, serve: Serve, data: tuple[Any, bool]
) -> None:
    entry = serve(driver, kernel_entry([kernel_variant("k", [pointer("x")], [("Q", 0)])], "Tensor"))
    launched(driver, entry, Array(P))
    broken = Array(P)
    broken.__cuda_array_interface__["data"] = data
    with pytest.raises(GuardMiss):
        entry(broken)


# ------------------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize(
    ("said", "named", "stream"),
    [(None, None, 0), (None, 1, 1), (None, 2, 2), (None, 77, 77), (5, None, 5), (5, 77, 5), (0, 77, 0)],
)
def test_the_stream_is_the_one_said_else_the_arrays_own_else_the_default(
    driver: FakeDriver, serve: Serve, said: int | None, named: int | None, stream: int
) -> None:
    entry = serve(driver, COPY)
    with nullcontext() if said is None else use_stream(said):
        for _ in range(2):
            assert launched(driver, entry, Array(P, stream=named), Array(P), 16, 1).stream == stream


@pytest.mark.parametrize("stream", [-1, 2**64, 2.5, "5"])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after-one-that-fits"])
def test_a_stream_that_is_no_handle_is_a_miss(driver: FakeDriver, serve: Serve, stream: Any, *, warm: bool) -> None:
    entry = serve(driver, COPY)
    if warm:
        launched(driver, entry, Array(P), Array(P), 16, 1)
    with pytest.raises(GuardMiss):
        entry(Array(P, stream=stream), Array(P), 16, 1)


def test_a_judged_call_goes_to_the_stream_of_each_call(driver: FakeDriver, serve: Serve) -> None:
    entry = serve(driver, COPY)
    for stream in (4, None, 9, 9, 4):
        assert launched(driver, entry, Array(P, stream=stream), Array(P), 16, 1).stream == (stream or 0)


def test_streams_nest_and_are_given_back_after_an_error(driver: FakeDriver, serve: Serve) -> None:
    entry = serve(driver, COPY)

    def stream() -> int:
        return launched(driver, entry, Array(P), Array(P), 16, 1).stream

    with use_stream(1):
        with use_stream(2):
            assert stream() == 2
        with pytest.raises(GuardMiss), use_stream(3):
            entry(Array(P), Array(P), 2**40, 1)
        assert stream() == 1
    assert stream() == 0


def test_a_stream_is_said_to_one_thread(driver: FakeDriver, serve: Serve) -> None:
    entry, found, inside, leave = serve(driver, COPY), [], threading.Event(), threading.Event()

    def other() -> None:
        with use_stream(8):
            inside.set()
            leave.wait(30)
            found.append(launched(driver, entry, Array(P), Array(P), 16, 1).stream)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(30)
    assert launched(driver, entry, Array(P), Array(P), 16, 1).stream == 0
    leave.set()
    thread.join(30)
    assert found == [8]


def test_tensors_of_torch_go_to_its_current_stream(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = serve(driver, COPY)
    install_torch(monkeypatch)
    with use_stream(5):
        for arrays in ((Tensor(P), Tensor(P)), (Array(P, stream=7), Tensor(P)), (Tensor(P), Array(P))):
            for _ in range(2):
                assert launched(driver, entry, *arrays, 16, 1).stream == 100
        assert launched(driver, entry, Array(P), Array(P), 16, 1).stream == 5


def test_a_prepared_launch_runs_in_any_thread(driver: FakeDriver, serve: Serve) -> None:
    entry = serve(driver, COPY)
    run = entry.prepare(entry.variants[2], {"x": Array(P, stream=7), "o": Array(P), "n": 5, "s": 1})
    errors: list[BaseException] = []

    def other() -> None:
        try:
            run()
        except AttributeError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(30)
    for error in errors:
        raise error
    assert driver.seen[-1].stream == 7


# ------------------------------------------------------------------------------------------------- what an array promises


@pytest.mark.parametrize(("said", "asked"), [(None, 1), (0, 1), (5, 5)])
def test_an_exporter_is_asked_for_the_stream_that_the_launch_goes_to(
    driver: FakeDriver, serve: Serve, said: int | None, asked: int
) -> None:
    entry, x = serve(driver, COPY), Exporter(P)
    with nullcontext() if said is None else use_stream(said):
        for _ in range(2):
            assert launched(driver, entry, x, Array(P), 16, 1).stream == (said or 0)
    assert x.asked == [{"max_version": (1, 1), "stream": asked}] * 2


class Copied(Exporter):
    """Whose memory lives as long as its capsules: an exporter may copy."""

    @property
    def freed_all(self) -> bool:
        return self.freed == self.made


def test_a_capsule_is_held_until_the_kernel_is_launched(driver: FakeDriver, serve: Serve) -> None:
    entry, x = serve(driver, COPY), Copied(P)
    driver.look = lambda one: x.freed_all
    for _ in range(2):
        entry(x, Array(P), 16, 1)
    assert driver.seen == [False, False]


def test_capsules_are_given_back_after_the_launch_and_when_a_call_misses(driver: FakeDriver, serve: Serve) -> None:
    entry, x = serve(driver, COPY), Exporter(P)
    for n in (16, 16, 5):
        assert launched(driver, entry, x, Array(P), n, 1).values[0] == P
    with pytest.raises(GuardMiss):
        entry(x, Array(P), 2**40, 1)
    gc.collect()
    assert (x.made, x.freed) == (4, 4)


def test_a_read_only_array_is_read_and_never_written(driver: FakeDriver, serve: Serve) -> None:
    entry, array = serve(driver, COPY), Array(P)
    array.__cuda_array_interface__["data"] = (P, True)
    assert launched(driver, entry, array, Array(P), 16, 1).symbol == "V1"
    with pytest.raises(GuardMiss, match="o is read-only"):
        entry(Array(P), array, 16, 1)


def test_arguments_are_not_kept_after_a_call(driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = serve(driver, COPY)
    driver.look = lambda one: None
    install_torch(monkeypatch)
    for make in (Array, Exporter, Tensor):
        array = make(P)
        gone = weakref.ref(array)
        for n in (16, 16, 5):
            entry(array, array, n, 1)
        with pytest.raises(GuardMiss):
            entry(array, array, None, 1)
        with pytest.raises(GuardMiss):
            entry(array, array, array, 1)
        del array
        gc.collect()
        assert gone() is None


# ------------------------------------------------------------------------------------------------------------ threads


@pytest.mark.parametrize("kind", ["interface", "torch"])
def test_threads_that_launch_at_once_do_not_mix_their_parameters(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    variant = kernel_variant(
        "k",
        [pointer("x"), pointer("y", aligned=True), integer("n"), number("a")],
        [("Q", 0), ("Q", 1), ("i", 2), ("d", 3)],
        grid=["n"],
    )
    entry = serve(driver, kernel_entry([variant], "Tensor Tensor int float"))
    read = reader(kernel_entry([variant], "Tensor Tensor int float"))

    def look(one: Any) -> tuple[Read, Read]:
        first = read(one)
        time.sleep(0)  # another thread's turn, while this launch is made
        return first, read(one)

    driver.look = look
    make: Any = Array
    if kind == "torch":
        install_torch(monkeypatch)
        make = Tensor
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for step in range(150):
                n = thread * 1000 + step % 7 + 1
                with use_stream(n):
                    entry(make(P + 16 * n), make(2 * P + 16 * n), n, n + 0.5)
        except BaseException as error:
            errors.append(error)

    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert len(driver.seen) == entry.counts()["hits"] == 12 * 150
    assert len(driver.loads) == 1
    for first, second in driver.seen:
        n = first.values[2]
        assert first == second
        assert first.values == (P + 16 * n, 2 * P + 16 * n, n, n + 0.5)
        assert (first.grid, first.stream) == ((n, 1, 1), 100 if kind == "torch" else n)


def test_a_variant_is_set_aside_on_the_gpu_where_it_did_not_load_and_on_no_other(
    pair: FakeDriver, serve: Serve
) -> None:
    anywhere = [{**each, "target": {"device": "cuda", "needs": {}}} for each in (V1, V2, V3)]
    entry = serve(pair, COPY | {"variants": anywhere})
    pair.broken = {binary("V1")}
    assert launched(pair, entry, Array(Q), Array(Q), 16, 1).symbol == "V2"
    pair.broken = set()
    assert launched(pair, entry, Array(P), Array(P), 16, 1).symbol == "V1"
    assert launched(pair, entry, Array(Q), Array(Q), 32, 1).symbol == "V2"
    assert entry.counts()["skipped"] == {}


def test_many_threads_load_a_variant_once_and_set_a_broken_one_aside_once(driver: FakeDriver, serve: Serve) -> None:
    driver.broken = {binary("V1")}
    entry, barrier, errors = serve(driver, COPY), threading.Barrier(8), []

    def work() -> None:
        try:
            barrier.wait(30)
            entry(Array(P), Array(P), 16, 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert errors == []
    assert {one.symbol for one in driver.seen} == {"V2"}
    assert driver.loads.count(binary("V2")) == 1
    assert list(entry.counts()["skipped"]) == ["V1"]


# -------------------------------------------------------------------------------------------------------- several GPUs


def on_arch(name: str, arch: str, **more: Any) -> Json:
    return kernel_variant(name, [pointer("x"), integer("n")], [("Q", 0), ("i", 1)], needs={"cubin": arch}, **more)


TWO = kernel_entry([on_arch("k90", "sm_90a"), on_arch("k80", "sm_80")], "Tensor int")


@pytest.mark.parametrize("kind", ["interface", "torch"])
def test_each_gpu_has_the_variants_that_fit_it(
    pair: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    entry = serve(pair, TWO)
    if kind == "torch":
        install_torch(monkeypatch)
    arrays = [Tensor(P), Tensor(P, device=1)] if kind == "torch" else [Array(P), Array(Q)]
    for _ in range(2):
        for place, (array, name) in enumerate(zip(arrays, ["k90", "k80"], strict=True)):
            one = launched(pair, entry, array, 1)
            assert (one.symbol, one.device) == (name, place)
            assert entry.explain(array, 1).variant.id == name
            assert one.stream == (100 + place if kind == "torch" else 0)


@pytest.mark.parametrize("kind", ["interface", "torch"])
def test_arrays_on_two_gpus_are_a_miss_also_after_each_alone(
    pair: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    entry = serve(pair, COPY | {"variants": [{**V3, "target": {"device": "cuda", "needs": {}}}]})
    if kind == "torch":
        install_torch(monkeypatch)
    zero, one = (Tensor(P), Tensor(P, device=1)) if kind == "torch" else (Array(P), Array(Q))
    for arrays in ((zero, zero), (one, one)):
        entry(*arrays, 16, 1)
    for arrays in ((zero, one), (one, zero)):
        assert "arguments are on several devices: cuda:" in why_not(entry, *arrays, 16, 1)
    assert [each.device for each in pair.seen] == [0, 1]


@pytest.mark.parametrize("kind", ["interface", "torch"])
def test_a_session_for_the_second_gpu_serves_that_one_alone(
    pair: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    entry = serve(pair, TWO, device="cuda:1")
    if kind == "torch":
        install_torch(monkeypatch)
    zero, one = (Tensor(P), Tensor(P, device=1)) if kind == "torch" else (Array(P), Array(Q))
    for _ in range(2):
        found = launched(pair, entry, one, 1)
        assert (found.symbol, found.device) == ("k80", 1)
        assert "arguments are on cuda:0, the session is for cuda:1" in why_not(entry, zero, 1)
    assert entry.counts()["hits_by_variant"] == {"k80": 2}


def test_a_session_pinned_to_the_first_gpu_refuses_the_second(pair: FakeDriver, serve: Serve) -> None:
    entry = serve(pair, TWO, device="cuda:0")
    assert "arguments are on cuda:1, the session is for cuda:0" in why_not(entry, Array(Q), 1)


@pytest.mark.parametrize(
    "judge", [lambda gpu: reject_cubin("sm_100f", gpu), lambda gpu: reject_ptx("compute_100f 8.8", gpu)]
)
def test_code_for_a_family_does_not_run_on_a_gpu_of_another(judge: Callable[[Gpu], str | None]) -> None:
    assert judge(Gpu((10, 3), (12, 9))) is None
    assert judge(Gpu((10, 1), (12, 9)))


@pytest.mark.parametrize("device", ["cuda:2", "cuda:9"])
def test_a_gpu_that_is_not_there_is_a_mismatch(pair: FakeDriver, serve: Serve, device: str) -> None:
    with pytest.raises(TargetMismatch, match="no CUDA device"):
        serve(pair, TWO, device=device)


@pytest.mark.parametrize("device", ["cuda:-1", "cuda:x", "cuda:1.0"])
def test_a_device_that_is_none_is_refused_in_our_words(pair: FakeDriver, serve: Serve, device: str) -> None:
    with pytest.raises(AotpackError, match="device"):
        serve(pair, TWO, device=device)


def test_a_variant_that_does_not_load_on_the_second_gpu_is_a_miss(pair: FakeDriver, serve: Serve) -> None:
    pair.broken = {binary("k80")}
    entry = serve(pair, TWO)
    with pytest.raises(GuardMiss):
        entry(Array(Q), 1)


def test_launches_on_the_second_gpu_are_counted(pair: FakeDriver, serve: Serve) -> None:
    entry = serve(pair, TWO)
    launched(pair, entry, Array(Q), 1)
    assert entry.counts()["hits_by_variant"] == {"k80": 1}


def test_an_array_without_elements_is_on_the_gpu_of_the_others(pair: FakeDriver, serve: Serve) -> None:
    entry = serve(pair, COPY | {"variants": [{**V3, "target": {"device": "cuda", "needs": {}}}]})
    assert launched(pair, entry, Array(Q), Array(0, shape=(0,)), 16, 1).device == 1


# ------------------------------------------------------------------------------------------- what does not load, status


def test_a_variant_that_does_not_load_is_set_aside_and_the_next_serves(driver: FakeDriver, serve: Serve) -> None:
    driver.broken = {binary("V1")}
    entry = serve(driver, COPY)
    assert entry.explain(Array(P), Array(P), 16, 1).variant.id == "V1"
    for _ in range(3):
        assert launched(driver, entry, Array(P), Array(P), 16, 1).symbol == "V2"
    assert driver.loads == [binary("V1"), binary("V2")]
    assert entry.explain(Array(P), Array(P), 16, 1).variant.id == "V2"
    assert "CUDA_ERROR_INVALID_IMAGE" in entry.counts()["skipped"]["V1"]


def test_a_kernel_whose_parameters_are_not_those_of_its_launch_is_set_aside(driver: FakeDriver, serve: Serve) -> None:
    driver.parameters = {"V1": [8, 8, 4, 8], "V2": [8, 8, 4, 4, 8, 8]}
    entry = serve(driver, COPY)
    assert launched(driver, entry, Array(P), Array(P), 16, 1).symbol == "V2"
    assert list(entry.counts()["skipped"]) == ["V1"]


def test_when_nothing_loads_a_miss_says_so(driver: FakeDriver, serve: Serve) -> None:
    driver.broken = {binary(name) for name in ("V1", "V2", "V3")}
    entry = serve(driver, COPY)
    for _ in range(2):
        with pytest.raises(GuardMiss, match=r"V1: does not load: .*CUDA_ERROR_INVALID_IMAGE"):
            entry(Array(P), Array(P), 16, 1)
    assert len(driver.loads) == 3
    assert entry.counts()["misses_by_reason"] == {"no variants": 2}


@pytest.mark.parametrize("tier", ["hot", "all"])
def test_warmup_loads_every_variant_launches_nothing_and_reports_what_fails(
    tmp_path: Path, driver: FakeDriver, tier: Any
) -> None:
    driver.broken = {binary("V2")}
    driver.look = reader(COPY)
    with open_kernels(write_kernels(tmp_path / "b", k=COPY), driver) as session:
        assert session.status()["ready"] is False
        assert list(session.warmup(tier)) == ["V1", "V2", "V3"]
        status = session.status()
        assert (status["ready"], status["entries"]["k"]["loaded"]) == (True, ["V1", "V3"])
        assert list(status["entries"]["k"]["skipped"]) == ["V2"]
        assert driver.seen == []
        loads = list(driver.loads)
        assert launched(driver, session["k"], Array(P), Array(P), 16, 2).symbol == "V3"
        assert driver.loads == loads


def test_status_counts_launches_misses_and_their_reasons(tmp_path: Path, driver: FakeDriver) -> None:
    driver.look = reader(COPY)
    with open_kernels(write_kernels(tmp_path / "b", k=COPY), driver) as session:
        entry = session["k"]
        for n in (16, 16, 32, 5, 0):
            entry(Array(P), Array(P), n, 1)
        for wrong in (Array(P, "<f8"), None):
            with pytest.raises(GuardMiss):
                entry(wrong, Array(P), 16, 1)
        status = session.status()
        assert (status["hits"], status["misses"], status["errors"]) == (5, 2, 2)
        assert status["entries"]["k"]["hits_by_variant"] == {"V1": 4, "V3": 1}
        assert sum(status["entries"]["k"]["misses_by_reason"].values()) == 2
        assert status["verdict"] == "fits"


def test_a_closed_session_launches_and_loads_nothing(
    tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.look = reader(COPY)
    session = open_kernels(write_kernels(tmp_path / "b", k=COPY), driver)
    entry = session["k"]
    entry(Array(P), Array(P), 16, 1)
    install_torch(monkeypatch)
    entry(Tensor(P), Tensor(P), 16, 1)
    session.close()
    session.close()
    for array in (Array, Tensor):
        with pytest.raises(SessionClosed, match="k: the session is closed"):
            entry(array(P), array(P), 16, 1)
    assert len(driver.seen) == 2
    assert session.status()["ready"] is False


def test_a_closed_session_does_not_warm_up(tmp_path: Path, driver: FakeDriver) -> None:
    session = open_kernels(write_kernels(tmp_path / "b", k=COPY), driver)
    session.close()
    with pytest.raises(SessionClosed):
        session.warmup()
    assert driver.loads == []


def test_sessions_of_one_bundle_share_a_loaded_file_and_close_apart(tmp_path: Path, driver: FakeDriver) -> None:
    driver.look = reader(COPY)
    bundle = write_kernels(tmp_path / "b", k=COPY)
    first, second = open_kernels(bundle, driver), open_kernels(bundle, driver)
    first["k"](Array(P), Array(P), 16, 1)
    kept = second["k"]
    kept(Array(P), Array(P), 16, 1)
    first.close()
    kept(Array(P), Array(P), 16, 1)
    assert (len(driver.seen), driver.loads) == (3, [binary("V1")])
    second.close()


def test_bytes_that_were_not_checked_do_not_serve_a_session_that_checks(tmp_path: Path, driver: FakeDriver) -> None:
    driver.look = reader(COPY)
    good, bad = (write_kernels(tmp_path / name, k=COPY) for name in ("good", "bad"))
    member = next(name for name, data in kernel_files(kernel_index(k=COPY)).items() if data == binary("V1"))
    (bad / member).write_bytes(binary("XX"))
    with open_kernels(bad, driver, check="off") as session:
        session["k"](Array(P), Array(P), 16, 1)
    with open_kernels(good, driver, check="full") as session:
        session["k"](Array(P), Array(P), 16, 1)
    assert driver.loads == [binary("XX"), binary("V1")]


def test_a_file_that_changed_is_not_loaded(tmp_path: Path, driver: FakeDriver) -> None:
    bundle = write_kernels(tmp_path / "b", k=COPY)
    member = next(name for name, data in kernel_files(kernel_index(k=COPY)).items() if data == binary("V1"))
    (bundle / member).write_bytes(binary("XX"))
    with open_kernels(bundle, driver) as session, pytest.raises(AotpackError, match="sha256 is"):
        session["k"](Array(P), Array(P), 16, 1)
    assert driver.loads == []


# ------------------------------------------------------------------------------------------------- descriptors, launches


def test_a_descriptor_is_made_for_each_address_shape_and_strides(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cuda, "encode_tensor_map", lambda *args, **kwargs: repr((args, kwargs)).encode()[:128].ljust(128)
    )
    slots = [{"descriptor": 0, "offset": 0, "block": [16, 32], "swizzle": 3, "element": 7}, [128, "i", 0, "sizes", 0], [132, "i", 0, "sizes", 1],
             [136, "q", 0, "strides", 0], [144, "q", 0, "strides", 1], [152, "Q", None]]  # fmt: skip
    entry = serve(driver, kernel_entry([kernel_variant("k", [descriptor("x")], slots)], "Tensor"))
    install_torch(monkeypatch)
    for address, shape, strides in [
        (P, (8, 64), (64, 1)),
        (P + 16, (8, 64), (64, 1)),
        (P, (8, 60), (64, 1)),
        (P, (8, 64), (128, 1)),
        (P, (8, 64), (64, 1)),
    ]:
        for array in (
            Array(address, shape=shape, strides=tuple(4 * each for each in strides)),
            Tensor(address, shape=shape, strides=strides),
        ):
            for _ in range(2):
                one = launched(driver, entry, array)
                wanted = ((address, shape, [4 * strides[0]], (16, 32)), {"element": 7, "swizzle": 3})
                assert one.values == (repr(wanted).encode()[:128].ljust(128), *shape, *strides, 0)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((8, 511), None),
        ((8, 64), (1, 8)),
        ((8, 64), (-64, 1)),
        ((8, 64), (64, 2)),
        ((0, 64), None),
        ((64,), None),
        ((2, 8, 64), None),
    ],
)
def test_a33_a_descriptor_only_where_steps_are_divisible_by_16_bytes(
    driver: FakeDriver, serve: Serve, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    slots = [{"descriptor": 0, "offset": 0, "block": [16, 32], "swizzle": 3, "element": 7}]
    plain = kernel_variant("plain", [pointer("x")], [("Q", 0)])
    entry = serve(driver, kernel_entry([kernel_variant("k", [descriptor("x")], slots), plain], "Tensor"))
    steps = None if strides is None else tuple(4 * each for each in strides)
    assert launched(driver, entry, Array(P, shape=shape, strides=steps)).symbol == "plain"


@pytest.mark.parametrize(
    ("more", "given"),
    [
        ({"cluster": [2, 1, 1]}, {"cluster": (2, 1, 1), "cooperative": False, "overlap": False}),
        ({"cooperative": True}, {"cluster": (1, 1, 1), "cooperative": True, "overlap": False}),
        ({"overlap": True}, {"cluster": (1, 1, 1), "cooperative": False, "overlap": True}),
    ],
)
def test_a_launch_with_attributes_has_its_grid_and_its_parameters(
    driver: FakeDriver, serve: Serve, more: dict[str, Any], given: dict[str, Any]
) -> None:
    variant = kernel_variant(
        "k",
        [pointer("x"), integer("n")],
        [("Q", 0), ("i", 1)],
        grid=["n", "2"],
        block=["64", "2"],
        shared="n * 4",
        **more,
    )
    entry = serve(driver, kernel_entry([variant], "Tensor int"))
    for n in (1, 3, 1):
        one = launched(driver, entry, Array(P + n), n)
        assert (one.grid, one.block, one.shared, one.values) == ((n, 2, 1), (64, 2, 1), 4 * n, (P + n, n))
    assert driver.attributes == [given] * 2  # of the two calls that were judged


def test_a_wide_cluster_is_allowed_in_the_context_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = [False]
    seen: list[bool] = []

    @contextmanager
    def current() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def cuFuncSetAttribute(*args: object) -> tuple[int]:  # noqa: N802 - the driver's name
        seen.append(inside[0])
        return (0,)

    monkeypatch.setattr("cuda.bindings.driver.cuFuncSetAttribute", cuFuncSetAttribute)
    device: Any = SimpleNamespace(ordinal=0, current=current)
    cuda.Function(7, device).launcher((16, 1, 1), (32, 1, 1), 0, cluster=(16, 1, 1), cooperative=False, overlap=False)
    assert seen == [True]


@pytest.mark.parametrize("status", sorted(cuda.LOST_CONTEXT))
def test_a_thread_without_a_context_launches_once_in_that_of_the_device(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    entry, answers = serve(driver, COPY), [status]

    def launch(*args: Any) -> tuple[int]:
        return (answers.pop(),) if answers else driver.launch(*args)

    monkeypatch.setattr(cuda, "launch", launch)
    assert launched(driver, entry, Array(P), Array(P), 16, 1).symbol == "V1"
    assert entry.counts()["hits"] == 1


def test_a_launch_that_is_refused_is_an_error_of_ours_and_the_next_goes_on(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, answers = serve(driver, COPY), [701, 701, 400, 400]
    monkeypatch.setattr(cuda, "launch", lambda *args: (answers.pop(),) if answers else driver.launch(*args))
    for _ in range(3):
        with pytest.raises(AotpackError, match="the driver refuses its launch"):
            entry(Array(P), Array(P), 16, 1)
    assert entry.counts()["hits"] == 0
    assert launched(driver, entry, Array(P), Array(P), 16, 1).values == (P, P, 16, 0, 0)


# -------------------------------------------------------------------------------------------------------- mixed bundles


def test_entries_of_a_bundle_do_not_share_their_memo_or_counts(tmp_path: Path, driver: FakeDriver) -> None:
    other = kernel_entry(
        [kernel_variant("other", [pointer("x"), pointer("o"), integer("n"), integer("s")], [("i", 2)])],
        "Tensor Tensor int int",
    )
    driver.look = reader(COPY, other)
    with open_kernels(write_kernels(tmp_path / "b", k=COPY, j=other), driver) as session:
        for _ in range(2):
            assert launched(driver, session["k"], Array(P), Array(P), 16, 1).symbol == "V1"
            assert launched(driver, session["j"], Array(P), Array(P), 16, 1).values == (16,)
        counts = {name: entry["hits"] for name, entry in session.status()["entries"].items()}
        assert counts == {"k": 2, "j": 2}
        assert isinstance(session["k"], KernelEntry)


def test_a_kernel_entry_beside_a_model_for_the_cpu_is_listed_with_its_reasons(
    tmp_path: Path, driver: FakeDriver
) -> None:
    from tests.support.bundles import index_record, members, write_bundle

    index = kernel_index(k=COPY)
    index["entries"] |= index_record()["entries"]
    index["weights"] = index_record()["weights"]
    bundle = write_bundle(tmp_path / "mixed", index, {**kernel_files(kernel_index(k=COPY)), **members()})
    driver.look = reader(COPY)
    with open_kernels(bundle, driver) as session:
        assert list(session) == ["k"]
        with pytest.raises(TargetMismatch, match="is for cpu, this session is for cuda"):
            session["encoder"]
        assert launched(driver, session["k"], Array(P), Array(P), 16, 1).symbol == "V1"
    with open_kernels(bundle, driver, device="cpu", mode="eager", source="never", allow=["torch", "glibc"]) as session:
        assert list(session) == ["encoder"]
        with pytest.raises(TargetMismatch, match="is for cuda, this session is for cpu"):
            session["k"]


def test_a19_a_kernel_bundle_on_a_host_without_a_gpu_is_one_line(tmp_path: Path, driver: FakeDriver) -> None:
    from aotpack_runtime import load
    from tests.support.bundles import Host

    bundle = write_kernels(tmp_path / "b", k=COPY)
    for device in ("cuda", "cpu"):
        with pytest.raises(TargetMismatch) as caught:
            load(bundle, device=device, machine=Host())
        assert "\n" not in str(caught.value)
        assert "no CUDA device" in str(caught.value)
    assert driver.loads == []
