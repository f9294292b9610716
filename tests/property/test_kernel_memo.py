"""What the memo answers is what a fresh session answers: no call is served by a judgement that was of another.

A first call and then a second one, that differs from it in little; the second is compared with the same call in a session
that has seen nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from aotpack_runtime import Session
from aotpack_runtime.drivers import cuda
from tests.support.fake_cuda import Array, FakeDriver, install
from tests.support.kernels import (
    Read,
    Tensor,
    descriptor,
    install_torch,
    integer,
    kernel_entry,
    kernel_variant,
    literal,
    number,
    open_kernels,
    pointer,
    reader,
    write_kernels,
)

P = 1 << 20
TYPES = {"float32": "<f4", "float16": "<f2", "complex64": "<c8"}


def variant(name: str, x: Any, y: Any, n: Any, *, where: tuple[str, ...] = (), slots: Any = None, **axes: int) -> Any:
    """Its grid follows n, or of a variant that n is folded into is one block."""
    blocks = "1" if "value" in n else "ceil_div(n, 16)"
    parameters = slots or [("Q", 0), ("Q", 1), ("q", 2), ("f", 3), ("?", 4), ("Q", None)]
    limit = () if "value" in n else (f"0 <= {blocks} <= 2147483647",)
    leaves = [x, y, n, number("a"), number("b", "bool")]
    return kernel_variant(name, leaves, parameters, where=[*where, *limit], grid=[blocks], axes=axes, needs={})


BOX = [
    {"descriptor": 0, "offset": 0, "block": [8, 8], "swizzle": 1, "element": 7},
    [128, "q", 0, "strides", 0],
    [136, "q", 2],
]
ENTRY = kernel_entry(
    [
        variant("both", pointer("x", aligned=True), pointer("y", aligned=True), integer("n", 0), where=("n % 16 == 0",), B=1),
        variant("x", pointer("x", aligned=True), pointer("y"), integer("n", 0), B=1),
        variant("y", pointer("x"), pointer("y", aligned=True), literal("n", 1), B=2),
        variant("none", pointer("x"), pointer("y"), integer("n"), B=2),
        variant("wide", pointer("x"), pointer("y"), integer("n", -(2**63), 2**63 - 1), B=3),
        variant("half", pointer("x", "float16"), pointer("y", "any"), integer("n"), B=3),
    ],
    "Tensor Tensor int float bool", choice={"rules": [{"when": "n > 64", "pick": {"B": 2}}, {"when": "n == 48", "pick": {"B": 3}}]},
)  # fmt: skip
BOXED = kernel_entry(
    [
        variant("box", descriptor("x"), pointer("y", aligned=True), integer("n", 0), slots=BOX),
        variant("plain", pointer("x", aligned=True), pointer("y"), integer("n")),
    ],
    "Tensor Tensor int float bool",
)  # fmt: skip


@dataclass(frozen=True)
class One:
    """An array of a call."""

    offset: int
    dtype: str
    device: int
    shape: tuple[int, ...]
    turned: bool
    masked: bool

    def strides(self) -> tuple[int, ...]:
        steps, step = [], 1
        for size in reversed(self.shape):
            steps.append(step)
            step *= size
        return tuple(steps if self.turned else reversed(steps))

    def make(self, kind: str) -> Any:
        address = (self.device << 40) + P + self.offset
        if kind == "torch":
            return Tensor(address, self.dtype, device=self.device, shape=self.shape, strides=self.strides())
        item = int(TYPES[self.dtype][2:])
        more = {"mask": object()} if self.masked else {}
        return Array(
            address, TYPES[self.dtype], self.shape, strides=tuple(item * step for step in self.strides()), **more
        )


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "offset": st.sampled_from([0, 0, 16, 4, 8, 20]), "dtype": st.sampled_from(["float32"] * 3 + ["float16", "complex64"]),
    "device": st.sampled_from([0, 0, 0, 1]), "shape": st.sampled_from([(8, 64), (8, 64), (8, 63), (512,), (0, 64), ()]),
    "turned": st.sampled_from([False, False, False, True]), "masked": st.sampled_from([False] * 7 + [True]),
}  # fmt: skip
ones = st.builds(One, **FIELDS)
NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "x": ones, "y": ones, "kinds": st.sampled_from([("array", "array"), ("torch", "torch"), ("torch", "array"), ("array", "torch")]),
    "n": st.sampled_from([0, 1, 1, 15, 16, 48, 64, 65, 2**31 - 1, 2**31, 2**35, -1, True, 1.0, 16.0, None, "16"]),
    "a": st.sampled_from([0.5, -1.5, 1e300, 2, True, None, float("inf")]), "b": st.sampled_from([True, False, True, 1, None]),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    x: One
    y: One
    kinds: tuple[str, str]
    n: Any
    a: Any
    b: Any

    def of(self, entry: Any) -> Callable[[], Any]:
        return partial(entry, self.x.make(self.kinds[0]), self.y.make(self.kinds[1]), self.n, self.a, self.b)


asked = st.builds(Asked, **NUMBERS)
plain = st.builds(
    One, st.sampled_from([0, 16, 4]), st.just("float32"), st.just(0), st.sampled_from([(8, 64), (8, 63)]), st.just(False), st.just(False)
)  # fmt: skip
fitting = st.builds(
    Asked, plain, plain, NUMBERS["kinds"], st.sampled_from([1, 16, 48, 65, 2**31 - 1, 2**35]), st.sampled_from([0.5, 1e300]), st.booleans()
)  # fmt: skip
"""Calls that some variant takes: what is changed of two of these is seen in what they launch."""


@st.composite
def two_calls(draw: st.DrawFn) -> tuple[Asked, Asked]:
    """A call, and one that is as it in all but one or two respects."""
    one = two = draw(fitting)
    for name in draw(st.lists(st.sampled_from([*NUMBERS, "x.", "y.", "x.", "y."]), min_size=1, max_size=2)):
        if name.endswith("."):
            field = draw(st.sampled_from([*FIELDS, "offset"]))
            two = replace(two, **{name[0]: replace(getattr(two, name[0]), **{field: draw(FIELDS[field])})})
        else:
            two = replace(two, **{name: draw(NUMBERS[name])})
    return draw(st.sampled_from([(one, two), (two, one)]))


@dataclass(frozen=True)
class Bench:
    driver: FakeDriver
    open: Callable[[], Session]

    def outcome(self, entry: Any, one: Asked) -> object:
        """The launch that a call makes, or its error in words."""
        self.driver.seen.clear()
        try:
            one.of(entry)()
        except Exception as error:
            return type(error), str(error)
        found: list[Read] = list(self.driver.seen)
        return found


def encode(address: int, *args: Any, **kwargs: Any) -> bytes:
    return repr((address, args, kwargs)).encode()[:128].ljust(128)


@pytest.fixture(scope="module", params=["one-gpu", "two-gpus"])
def benches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bench]]:
    with pytest.MonkeyPatch.context() as patch:
        driver = install(patch, [(9, 0), (8, 0)][: 1 + (request.param == "two-gpus")])
        patch.setattr(cuda, "encode_tensor_map", encode)
        folder: Path = tmp_path_factory.mktemp("memo")
        driver.look = reader(ENTRY | {"variants": [*ENTRY["variants"], *BOXED["variants"]]})
        made = {}
        for name, entry in (("plain", ENTRY), ("boxed", BOXED)):
            made[name] = Bench(driver, partial(open_kernels, write_kernels(folder / name, k=entry), driver))
        install_torch(patch)
        yield made


@pytest.mark.parametrize("name", ["plain", "boxed"])
@given(calls=two_calls())
@settings(max_examples=200)
def test_a_call_is_served_as_if_it_were_the_first(
    benches: dict[str, Bench], name: str, calls: tuple[Asked, Asked]
) -> None:
    bench = benches[name]
    first, second = calls
    with bench.open() as fresh, bench.open() as warm:
        wanted = bench.outcome(fresh["k"], second)
        bench.outcome(warm["k"], first)
        assert bench.outcome(warm["k"], second) == wanted
        assert bench.outcome(warm["k"], second) == wanted


@pytest.mark.parametrize("name", ["plain", "boxed"])
@given(call=fitting, numbers=st.lists(NUMBERS["n"] | st.integers(-40, 2100), min_size=3, max_size=8))
@settings(max_examples=150)
def test_numbers_are_served_as_if_each_were_the_first(
    benches: dict[str, Bench], name: str, call: Asked, numbers: list[Any]
) -> None:
    bench = benches[name]
    with bench.open() as warm:
        for n in (call.n, 17, *numbers):
            one = replace(call, n=n)
            with bench.open() as fresh:
                wanted = bench.outcome(fresh["k"], one)
            assert bench.outcome(warm["k"], one) == wanted


@pytest.mark.parametrize("name", ["plain", "boxed"])
@given(call=fitting | asked)
@settings(max_examples=120)
def test_explain_says_what_a_call_does(benches: dict[str, Bench], name: str, call: Asked) -> None:
    bench = benches[name]
    with bench.open() as session:
        entry: Any = session["k"]
        said = call.of(entry.explain)()
        done = bench.outcome(entry, call)
        if isinstance(done, list):
            blocks = -(-call.n // 16)
            assert [one.symbol for one in done] == ([said.variant.id] if blocks else [])
        else:
            assert isinstance(done, tuple)
            assert done[0].__name__ == "GuardMiss"
            assert set(said.reasons) == {variant.id for variant in entry.variants}


@given(calls=st.lists(fitting | asked, min_size=2, max_size=10))
@settings(max_examples=30)
def test_a_short_memo_forgets_and_never_confuses(benches: dict[str, Bench], calls: list[Asked]) -> None:
    bench = benches["plain"]
    with bench.open() as session:
        entry: Any = session["k"]
        entry._memo_limit = 3
        for call in [*calls, *calls]:
            with bench.open() as fresh:
                wanted = bench.outcome(fresh["k"], call)
            assert bench.outcome(entry, call) == wanted
