"""From a call that missed to what is compiled for it, its key, and what is said about it; pure, and without torch."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotpack_runtime.errors import AotpackError
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard, ValueGuard
from aotpack_runtime.format.index import ArtifactRef, File, Recipe, RecipeTarget, Variant
from aotpack_runtime.format.order import in_order
from aotpack_runtime.format.output import Outputs, Result
from aotpack_runtime.format.target import Target
from aotpack_runtime.format.tensor import Call, Scalar, TensorMeta, channels_last_strides, contiguous_strides
from aotpack_runtime.jit.misslog import MissLog
from aotpack_runtime.jit.observed import Family, Shape, Shapes
from aotpack_runtime.jit.request import Request, exact, ranged, shape_key, why_not
from aotpack_runtime.logs import PARTS, configure, guard_failed, in_dynamos_words

Json = Any
TARGET = RecipeTarget(target=Target("cpu", {"cpu": "x86-64-v3"}), job={"cpu": {"march": "x86-64-v3"}})


def program(**changes: Any) -> Variant:
    """x[rows, 4], y[2 * rows + 1], a flag, an int n of 0..100; rows of at most 4096."""
    leaves = (
        TensorGuard(path="x", dtype="float32", dims=(Range(0, 4096), 4), device="cpu", layout="any"),
        TensorGuard(path="y", dtype="float32", dims=(Range(1, 8193),), device="cpu", layout="any"),
        ValueGuard(path="flag", value=True),
        IntGuard(path="n", dim=Range(0, 100)),
    )
    guards = Guards(("*",) * 4, leaves, (parse("y.shape[0] == 2 * x.shape[0] + 1"),))
    outputs = Outputs("*", (Result(0, "float32", ()),))
    file = File("a" * 64, 10)
    made = Variant(
        id="e/program0", point="", tier="rare", target=Target("cpu", {}), guards=guards, outputs=outputs, weights="",
        artifact=ArtifactRef("exported", "a" * 64, {"program.pt2": file}), constants=(), examples=(((2, 4), (5,), None, 3),),
        recipe=Recipe(outputs=outputs, options={}, targets=(TARGET,)),
    )  # fmt: skip
    return replace(made, **changes)


def tensor(*shape: int, **changes: Any) -> TensorMeta:
    return replace(TensorMeta("float32", "cpu", shape, contiguous_strides(shape)), **changes)


def call(rows: int, *, flag: Scalar = True, n: int = 7, **changes: Any) -> Call:
    return Call(("*",) * 4, (tensor(rows, 4, **changes), tensor(2 * rows + 1), flag, n))


def test_an_exact_request_fixes_every_size_of_the_call() -> None:
    made = exact("e", program(), TARGET, call(70))
    assert made.leaves == (
        {"path": "x", "dtype": "float32", "shape": [70, 4], "layout": "contiguous"},
        {"path": "y", "dtype": "float32", "shape": [141], "layout": "contiguous"},
        {"path": "flag", "value": True},
        {"path": "n", "low": 0, "high": 14},  # the middle, with which it is traced, is what was seen
    )
    assert (made.dims, made.label) == ({}, "70x4_141")


def test_a_range_covers_what_was_seen_rounded_out_and_what_follows_it() -> None:
    made = ranged("e", program(), TARGET, call(70), {"x.shape[0]": {33, 70, 65}})
    assert made is not None
    assert made.dims == {"d0": (32, 128, 70)}
    assert [leaf.get("shape") for leaf in made.leaves] == [["d0", 4], ["2 * d0 + 1"], None, None]
    assert made.label == "32_128x4_65_257"


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        pytest.param({1, 2, 3}, (1, 4), id="from-one"),
        pytest.param({0, 2, 3}, (0, 4), id="from-zero"),
        pytest.param({3, 3000, 4000}, (2, 4096), id="to-the-end"),
        pytest.param({3, 4}, None, id="two-sizes-are-no-change"),
    ],
)
def test_a_range_stays_inside_of_what_the_program_takes(seen: set[int], wanted: tuple[int, int] | None) -> None:
    made = ranged("e", program(), TARGET, call(3), {"x.shape[0]": seen})
    assert (None if made is None else made.dims["d0"][:2]) == wanted


def test_only_sizes_that_vary_by_themselves_are_open() -> None:
    *_, sizes = shape_key(program(), call(5))
    assert sizes == {"x.shape[0]": 5}


def test_shapes_of_one_family_differ_in_open_sizes_only() -> None:
    (one, family), (two, same), (three, other) = [
        shape_key(program(), made)[:2] for made in (call(5), call(6, n=9), call(5, flag=False))
    ]
    assert one != two
    assert family == same
    assert (one, family) != (three, other)
    assert shape_key(program(), call(5))[:2] == (one, family)


@pytest.mark.parametrize(
    ("made", "word"),
    [
        pytest.param(call(5), "", id="plain"),
        pytest.param(call(5, strides=(8, 2)), "strides [8, 2] are neither", id="gaps"),
        pytest.param(call(5, needs_grad=True), "requires grad", id="grad"),
        pytest.param(call(5, odd="has its conj bit set"), "conj bit", id="odd"),
        pytest.param(Call(("*",) * 4, call(5).leaves, ("autocast is on",)), "autocast", id="autocast"),
    ],
)
def test_what_no_variant_would_take_is_not_compiled(made: Call, word: str) -> None:
    assert word in why_not(program(), made)
    assert bool(word) == bool(why_not(program(), made))
    assert "older format" in why_not(program(recipe=None), call(5))


def test_channels_last_arguments_get_a_variant_of_their_own() -> None:
    leaf = TensorGuard(path="x", dtype="float32", dims=(Range(1, 8), 3, 8, 8), device="cpu", layout="any")
    wide = program(guards=Guards(("*",), (leaf,)), examples=(((1, 3, 8, 8),),))
    shape = (2, 3, 8, 8)
    last = Call(("*",), (TensorMeta("float32", "cpu", shape, channels_last_strides(shape)),))
    assert why_not(wide, last) == ""
    assert exact("e", wide, TARGET, last).leaves[0]["layout"] == "channels_last"


def _keys(*requests: Request) -> set[str]:
    return {request.key("bundle", "cpu") for request in requests}


def test_a26_every_factor_makes_another_key_and_nothing_else_does() -> None:
    base = exact("e", program(), TARGET, call(5))
    wide = ranged("e", program(), TARGET, call(5), {"x.shape[0]": {5, 6, 7}})
    assert wide is not None
    other = RecipeTarget(target=TARGET.target, job={"cpu": {"march": "x86-64-v4"}})
    recipe = program().recipe
    assert recipe is not None
    others = [
        wide,
        exact("f", program(), TARGET, call(5)),
        exact("e", program(), other, call(5)),
        exact("e", program(), TARGET, call(6)),
        exact("e", program(), TARGET, call(5, n=9)),
        exact("e", program(artifact=ArtifactRef("exported", "c" * 64, {})), TARGET, call(5)),
        exact("e", program(recipe=replace(recipe, options={"max_autotune": True})), TARGET, call(5)),
    ]
    keys = _keys(base, *others)
    assert len(keys) == len(others) + 1
    assert all(len(key) == 64 for key in keys)
    assert base.key("another", "cpu") not in keys
    assert base.key("bundle", "cuda:1") not in keys
    assert _keys(exact("e", program(), TARGET, call(5)), base) == _keys(base)
    assert base.key("bundle", "cuda:0") == base.key("bundle", "cuda:1")  # GPUs of one kind share what is compiled


def test_exact_shapes_come_before_ranges_and_narrow_ranges_before_wide_ones() -> None:
    def of(*dims: Any) -> Variant:
        guard = TensorGuard(path="x", dtype="float32", dims=dims, device="cpu")
        return program(id=str(dims), guards=Guards(("*",), (guard,)))

    wide, narrow, fixed, endless = of(Range(1, 64), 4), of(Range(8, 16), 4), of(5, 4), of(Range(1, None), 4)
    assert in_order([endless, wide, narrow, fixed]) == [fixed, narrow, wide, endless]


def test_shapes_that_missed_longest_ago_are_forgotten() -> None:
    shapes = Shapes(limit=10)
    family = shapes.family("one", lambda: Family(program()))
    for number in range(25):
        shapes.family(number, lambda: Family(program()))
        shapes.add(number, Shape(call(5), family))
        shapes.find(0)
    assert len(shapes) == 10
    assert shapes.find(0) is not None
    assert shapes.find(5) is None
    for size in range(1000):
        family.note({"x.shape[0]": size})
    assert len(family.sizes["x.shape[0]"]) == 64
    assert {min(family.sizes["x.shape[0]"]), max(family.sizes["x.shape[0]"])} == {0, 999}


# ----------------------------------------------------------------------------------------------- what is said of it


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ("seq.shape[0]: expected 8..64, got 70", "expected seq.shape[0] in [8, 64], actual 70"),
        ("x.shape[1]: expected 2 or more, got 1", "expected x.shape[1] in [2, inf], actual 1"),
        ("x.dtype: expected float32, got float64", "expected x.dtype == float32, actual float64"),
        ("k: expected 3, got 5", "expected k == 3, actual 5"),
        ("x requires grad and grad mode is on", "x requires grad and grad mode is on"),
    ],
)
def test_a_miss_reads_as_dynamos_would(reason: str, wanted: str) -> None:
    assert in_dynamos_words(reason) == wanted


def test_misses_of_a_kind_are_said_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aotpack.guards")
    for count in range(1, 1001):
        guard_failed("encoder", "x.shape[0]: expected 8..64, got 70", count)
    assert len(caplog.messages) == 10
    assert caplog.messages[0] == "encoder: miss 1 of its kind: expected x.shape[0] in [8, 64], actual 70"


def test_aotpack_log_sets_levels_and_names_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = {part: logging.getLogger(f"aotpack.{part}") for part in PARTS}
    root = logging.getLogger("aotpack")
    before = {part: logger.level for part, logger in loggers.items()}, root.handlers[:], root.propagate
    try:
        monkeypatch.setenv("AOTPACK_LOG", "+dispatch,guards,-jit")
        configure()
        configure()
        levels = [loggers[part].level for part in ("dispatch", "guards", "jit")]
        assert levels == [logging.DEBUG, logging.INFO, logging.ERROR]
        assert len(root.handlers) == len(before[1]) + 1
        monkeypatch.setenv("AOTPACK_LOG", "dispach")
        with pytest.raises(AotpackError, match="AOTPACK_LOG names 'dispach'; expected some of bundle, dispatch"):
            configure()
    finally:
        for part, level in before[0].items():
            loggers[part].setLevel(level)
        root.handlers[:], root.propagate = before[1], before[2]


def test_the_miss_log_holds_shapes_and_no_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "misses.jsonl"
    assert not MissLog()
    MissLog().write("e", "miss", call(5))
    monkeypatch.setenv("AOTPACK_MISS_LOG", str(path))
    log = MissLog()
    log.write("e", "miss", call(5, flag="a secret"), reason="x.shape[0]: expected 4, got 5")
    log.write("e", "total", call(5), calls=3)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["leaves"] == [{"dtype": "float32", "shape": [5, 4]}, {"dtype": "float32", "shape": [11]}, "str", 7]
    assert (first["reason"], second["calls"]) == ("x.shape[0]: expected 4, got 5", 3)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_miss_log_ends_at_its_bound_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aotpack_runtime.jit.misslog.MOST_BYTES", 1000)
    for place in (tmp_path / "misses.jsonl", tmp_path / "nowhere" / "misses.jsonl"):
        monkeypatch.setenv("AOTPACK_MISS_LOG", str(place))
        log = MissLog()
        for _ in range(100):
            log.write("e", "miss", call(5))
        assert not place.exists() or place.stat().st_size <= 1000
    assert len(caplog.messages) == 2
