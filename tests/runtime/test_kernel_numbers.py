"""Calls of a kernel whose numbers change: judged by the function of their kind, with the result of a full judgement."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from aotpack_runtime import GuardMiss, Session
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.expression_source import SCOPE, source
from aotpack_runtime.kernel_entry import KernelEntry
from aotpack_runtime.kernel_numbers import MAX_KINDS
from tests.support.fake_cuda import Array, FakeDriver, install
from tests.support.kernels import (
    Read,
    Tensor,
    binary,
    descriptor,
    install_torch,
    integer,
    kernel_entry,
    kernel_variant,
    literal,
    open_kernels,
    pointer,
    reader,
    write_kernels,
)

Json = Any
Serve = Callable[..., Any]
P = 1 << 20
BLOCKS = "ceil_div(n, 1024)"
LIMIT = f"0 <= {BLOCKS} <= 2147483647"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.fixture
def judgements(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Gets one item for each call that is judged in full."""
    seen: list[object] = []
    judge = KernelEntry._judge

    def counted(self: KernelEntry, ordinal: int, call: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(call)
        return judge(self, ordinal, call, *args, **kwargs)

    monkeypatch.setattr(KernelEntry, "_judge", counted)
    return seen


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    sessions: list[Session] = []

    def make(driver: FakeDriver, entry: Json, **more: Any) -> Any:
        driver.look = reader(entry)
        bundle = write_kernels(tmp_path / f"bundle{len(sessions)}", k=entry)
        sessions.append(open_kernels(bundle, driver, **more))
        return sessions[-1]["k"]

    yield make
    for session in sessions:
        session.close()


def variant(name: str, n: Json, *, where: tuple[str, ...] = (), aligned: bool = False, **more: Any) -> Json:
    grid = more.pop("grid", ["1"] if "value" in n else [BLOCKS])
    limit = () if "value" in n else (LIMIT,)
    leaves = [pointer("x", aligned=aligned), n, integer("m")]
    return kernel_variant(name, leaves, [("Q", 0), ("i", 1), ("i", 2)], where=[*where, *limit], grid=grid, **more)


def last(driver: FakeDriver) -> Read:
    found = driver.seen[-1]
    assert isinstance(found, Read)
    return found


KINDS = pytest.mark.parametrize("kind", ["torch", "interface"])
THREE = [
    variant("one", literal("n", 1), aligned=True),
    variant("sixteen", integer("n", 0), where=("n % 16 == 0",), aligned=True),
    variant("any", integer("n", -5)),
]


def arrays(kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    if kind == "torch":
        install_torch(monkeypatch)
        return Tensor
    return Array


@KINDS
def test_numbers_of_a_kind_are_judged_by_its_function(
    driver: FakeDriver, serve: Serve, judgements: list[object], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    entry, make = serve(driver, kernel_entry(THREE, "Tensor int int")), arrays(kind, monkeypatch)
    x = make(P)
    entry(x, 5, 0)
    entry(x, 6, 0)
    del judgements[:]
    for n, name in [(1, "one"), (16, "sixteen"), (160, "sixteen"), (17, "any"), (2001, "any"), (2**31 - 1, "any")] * 2:
        entry(x, n, 7)
        assert (last(driver).symbol, last(driver).values) == (name, (P, n, 7))
        assert last(driver).grid == (-(-n // 1024), 1, 1)
    assert judgements == []
    counts = entry.counts()
    assert counts["hits"] == 14
    assert counts["hits_by_variant"] == {"any": 8, "one": 2, "sixteen": 4}
    entry(make(P + 4), 16, 7)  # of another kind
    assert (last(driver).symbol, len(judgements)) == ("any", 1)


@KINDS
@pytest.mark.parametrize("n", [-6, 2**31, 2**70, True, 1.0, None, "1"])
def test_numbers_that_nothing_takes_are_a_miss_as_ever(
    driver: FakeDriver, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, n: Any
) -> None:
    entry, make = serve(driver, kernel_entry(THREE, "Tensor int int")), arrays(kind, monkeypatch)
    with pytest.raises(GuardMiss) as first:
        entry(make(P), n, 0)
    for good in (5, 6, 7):
        entry(make(P), good, 0)
    with pytest.raises(GuardMiss) as later:
        entry(make(P), n, 0)
    assert later.value.reasons == first.value.reasons
    assert entry.counts()["errors"] == 2


def test_a_grid_without_blocks_launches_nothing(driver: FakeDriver, serve: Serve, judgements: list[object]) -> None:
    entry = serve(driver, kernel_entry(THREE, "Tensor int int"))
    for n in (5, 6, 0):
        entry(Array(P), n, 0)
    assert (len(driver.seen), len(judgements)) == (2, 2)
    assert entry.counts()["hits"] == 3


def test_a_grid_without_blocks_needs_no_block_size(driver: FakeDriver, serve: Serve) -> None:
    entry = serve(driver, kernel_entry([variant("k", integer("n"), block=["64 // n"])], "Tensor int int"))
    for n in (1, 2, 0, 0):
        entry(Array(P), n, 0)
    assert [one.block[0] for one in driver.seen] == [64, 32]
    assert entry.counts()["hits"] == 4


def test_the_choice_is_that_of_a_full_judgement(driver: FakeDriver, serve: Serve, judgements: list[object]) -> None:
    rows = [{"sizes": {"n": size}, "given": {}, "pick": {"B": pick}} for size, pick in ((64, 1), (1024, 2), (4096, 3))]
    choice = {"tables": {"sm_90": rows}, "rules": [{"when": "m // n > 1", "pick": {"B": 3}}]}
    variants = [
        variant(f"B{b}", integer("n"), where=("n % 2 == 0",) if b == 2 else (), axes={"B": b}) for b in (1, 2, 3)
    ]
    numbers = [(n, m) for n in (1, 60, 255, 256, 257, 1000, 1001, 2048, 2049, 10**6) for m in (0, 5000)]
    entry = serve(driver, kernel_entry(variants, "Tensor int int", choice=choice))
    entry(Array(P), 3, 1)
    entry(Array(P), 4, 1)
    del judgements[:]
    for n, m in numbers:
        entry(Array(P), n, m)
        fresh = serve(driver, kernel_entry(variants, "Tensor int int", choice=choice))
        assert last(driver).symbol == fresh.explain(Array(P), n, m).variant.id
    assert judgements == []


def test_what_divides_by_zero_is_judged_in_full(driver: FakeDriver, serve: Serve, judgements: list[object]) -> None:
    variants = [variant("divides", integer("n"), where=("n % m == 0",)), variant("any", integer("n"))]
    entry = serve(driver, kernel_entry(variants, "Tensor int int"))
    for n, m, name in [(4, 2, "divides"), (5, 2, "any"), (6, 2, "divides"), (6, 0, "any"), (8, 0, "any")]:
        entry(Array(P), n, m)
        assert last(driver).symbol == name
    assert len(judgements) == 4


def test_numbers_that_the_device_cannot_launch_go_to_the_next_variant(
    driver: FakeDriver, serve: Serve, judgements: list[object]
) -> None:
    shared = variant("shared", integer("n"), shared="n * 16")
    entry = serve(driver, kernel_entry([shared, variant("any", integer("n"))], "Tensor int int"))
    driver.shared_limit = 1600
    for n, name in [(1, "shared"), (2, "shared"), (100, "shared"), (101, "any"), (3, "shared")]:
        entry(Array(P), n, 0)
        assert (last(driver).symbol, last(driver).shared) == (name, 16 * n if name == "shared" else 0)
    assert len(judgements) == 3  # the two that made the kind known, and the one that was refused


def test_a_variant_that_does_not_load_is_set_aside_at_its_first_number(driver: FakeDriver, serve: Serve) -> None:
    driver.broken = {binary("sixteen")}
    entry = serve(driver, kernel_entry(THREE, "Tensor int int"))
    for n, name in [(5, "any"), (6, "any"), (16, "any"), (32, "any"), (1, "one")]:
        entry(Array(P), n, 0)
        assert last(driver).symbol == name
    assert "does not load" in entry.counts()["skipped"]["sixteen"]
    assert driver.loads.count(binary("sixteen")) == 2  # by the function of the kind, and by the judgement in full


def test_a_flood_of_numbers_leaves_no_memory_behind(driver: FakeDriver, serve: Serve) -> None:
    entry = serve(driver, kernel_entry(THREE, "Tensor int int"))
    entry._memo_limit = 50
    for n in range(2000):
        entry(Array(P), n, n % 7)
        assert len(entry._memo) <= 50
    for offset in range(4):
        for n in range(3):
            entry(Array(P + 4 * offset), n, 0)
    for number in range(2 * MAX_KINDS):
        kinds = entry._kinds
        kinds.judged((number, 0, f"kind {number}"), lambda: None)
        assert len(kinds._seen) <= MAX_KINDS
        assert len(kinds._known) <= MAX_KINDS


def test_a_tensor_that_is_nowhere_is_judged_each_time(
    driver: FakeDriver, serve: Serve, judgements: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(monkeypatch)
    entry = serve(driver, kernel_entry(THREE, "Tensor int int"))
    for n in (5, 6, 7):
        entry(Tensor(P), n, 0)
    del judgements[:]
    entry(Tensor(0, shape=(0,)), 8, 0)
    entry(Tensor(0, shape=(0,)), 8, 0)
    with pytest.raises(GuardMiss, match="without memory of its own"):
        entry(Tensor(0), 9, 0)
    assert len(judgements) == 3


def test_tensors_passed_by_descriptor_are_judged_in_full(
    driver: FakeDriver, serve: Serve, judgements: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotpack_runtime.drivers.cuda.encode_tensor_map", lambda *args, **kwargs: bytes(128))
    box = {"descriptor": 0, "offset": 0, "block": [8, 8], "swizzle": 1, "element": 7}
    boxed = kernel_variant(
        "box", [descriptor("x"), integer("n")], [box, [128, "i", 1]], grid=["n"], where=["0 <= n <= 9"]
    )
    entry = serve(driver, kernel_entry([boxed], "Tensor int"))
    for n in (1, 2, 3, 4):
        entry(Array(P, "<f4", (8, 64)), n)
    assert len(judgements) == 4


def test_an_expression_that_is_too_deep_for_one_function_is_judged_in_full(
    driver: FakeDriver, serve: Serve, judgements: list[object]
) -> None:
    deep = "n"
    for _ in range(110):
        deep = f"ceil_div({deep}, 1)"
    entry = serve(driver, kernel_entry([variant("deep", integer("n"), where=(f"{deep} < 99",))], "Tensor int int"))
    for n in (1, 2, 3, 4):
        entry(Array(P), n, 0)
        assert last(driver).values == (P, n, 0)
    assert len(judgements) == 4
    with pytest.raises(GuardMiss):
        entry(Array(P), 99, 0)


@pytest.mark.parametrize(
    "text",
    [
        "a and b + 1", "(a and b) + 1", "(a or b) * 3", "not a", "(not a) + b", "a < b < 3", "(a < b) + (b < 3)", "-a // 2 % 3",
        "-(a % -3)", "ceil_div(a, b)", "min(a, b, 3) - max(a, -b)", "a == b == 1", "a != b", "a % b == 0 or b == 0", "True + a",
        "a >= b > -2", "12345678901234567890 * a",
    ],
)  # fmt: skip
def test_the_text_of_an_expression_computes_what_its_closures_do(text: str) -> None:
    expression = parse(text)
    written = compile(source(expression, {"a": "n0", "b": "n1"}), "", "eval")

    def outcome(evaluate: Callable[[], object]) -> object:
        try:
            return int(evaluate())  # type: ignore[call-overload]
        except ZeroDivisionError:
            return "divides by 0"

    for a, b in itertools.product(range(-4, 5), repeat=2):
        wanted = outcome(partial(expression, {"a": a, "b": b}))
        assert outcome(partial(eval, written, dict(SCOPE), {"n0": a, "n1": b})) == wanted, (a, b)
