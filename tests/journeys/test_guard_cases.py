"""A01 to A09 and A16: calls that differ in one way from what a variant was built for get eager's answer.

Each test is named after its case. `cases.check` asserts the result and who served it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cases are torch models")

import torch

from aotpack_runtime import GuardMiss, load
from tests.support.guard_cases import Cases, Tier, assert_same, in_child, opened

ones, zeros, arange = torch.ones, torch.zeros, torch.arange


@pytest.fixture(scope="module")
def cases() -> Iterator[Cases]:
    with opened() as found:
        yield found


# ---------------------------------------------------------------------------------------------------------- A01


@pytest.mark.parametrize(
    ("x", "tier", "reason"),
    [
        pytest.param(ones(2, 8), "program", "x.shape[0]: expected 4, got 2", id="fewer-rows"),
        pytest.param(ones(4, 16), "program", "x.shape[1]: expected 8, got 16", id="more-columns"),
        pytest.param(ones(4, 9), "program", "x.shape[1]: expected 8, got 9", id="one-column-more"),
        pytest.param(ones(32), "source", "x: expected 2 dims, got 1 [32]", id="rank-1"),
        pytest.param(torch.tensor(1.0), "source", "x: expected 2 dims, got 0 []", id="rank-0"),
        *[
            pytest.param(ones(4, 8, dtype=dtype), "source", f"x.dtype: expected float32, got {str(dtype)[6:]}", id=str(dtype))
            for dtype in (
                torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
            )
        ],
    ],
)  # fmt: skip
def test_a01_another_size_rank_or_dtype_is_a_miss_with_eagers_answer(
    cases: Cases, x: Any, tier: Tier, reason: str
) -> None:
    found = cases.check("affine", x, tier=tier)
    assert found.shape == x.shape
    assert found.dtype == (torch.int64 if x.dtype is torch.bool else x.dtype)
    assert (found == 3).all()
    assert reason in cases.miss("affine", x)


def test_a01_the_size_and_dtype_it_was_built_for_hit(cases: Cases) -> None:
    assert (cases.check("affine", ones(4, 8), tier="hit") == 3).all()


def test_a01_a_dtype_that_eager_refuses_is_eagers_error(cases: Cases) -> None:
    fp8 = ones(4, 8).to(torch.float8_e4m3fn)
    assert isinstance(cases.refuses("affine", fp8), NotImplementedError)
    assert "got float8_e4m3fn" in cases.miss("affine", fp8)


def test_a01_a_size_that_only_values_bind_to_another_is_bound_to_it_by_its_name(cases: Cases) -> None:
    """The trace leaves the mask's rows open, while its program looks up a row that is not there."""
    cases.check("looks_up", ones(8, 4), ones(8, 4), tier="hit")
    cases.check("looks_up", ones(40, 4), ones(40, 4), tier="program")
    cases.check("looks_up", ones(8, 4), ones(2, 4), tier="source")


# ---------------------------------------------------------------------------------------------------------- A02


@pytest.mark.parametrize("b", [2, 16])
def test_a02_the_ends_of_a_range_hit(cases: Cases, b: int) -> None:
    assert torch.equal(cases.check("sum_rows", ones(b, 8), tier="hit"), torch.full((8,), float(b)))


@pytest.mark.parametrize("b", [17, 100, 1, 0])
def test_a02_beyond_a_range_is_a_miss_with_eagers_answer(cases: Cases, b: int) -> None:
    assert torch.equal(cases.check("sum_rows", ones(b, 8), tier="program"), torch.full((8,), float(b)))
    assert f"x.shape[0]: expected 2..16, got {b}" in cases.miss("sum_rows", ones(b, 8))


@pytest.mark.parametrize("b", [1, 2, 16])
def test_a02_a_declared_minimum_of_1_is_served_from_1_on(cases: Cases, b: int) -> None:
    cases.check("affine_rows", torch.randn(b, 8), tier="hit")


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a02_torchs_own_switch_changes_nothing(cases: Cases, switch: str) -> None:
    code = """
        import json
        seen = {}
        for b in (2, 16, 17, 100, 1, 0):
            assert torch.equal(session["sum_rows"](torch.ones(b, 8)), torch.full((8,), float(b))), b
        for b in (1, 2, 16):
            assert torch.equal(session["affine_rows"](torch.ones(b, 8)), torch.full((b, 8), 3.0)), b
        odd = torch.arange(20.0).as_strided((4, 1, 5), (5, 999, 1))
        assert torch.equal(session["gap"](odd), odd * 2 + 1)
        assert torch.equal(session["hundreds"](torch.zeros(300)), torch.ones(100, 3))
        print(json.dumps({name: session[name].counts()["hits"] for name in ("sum_rows", "affine_rows", "gap", "hundreds")}))
    """
    hits = json.loads(in_child(cases.path, code, AOTI_RUNTIME_CHECK_INPUTS=switch))
    assert hits == {"sum_rows": 2, "affine_rows": 3, "gap": 1, "hundreds": 1}


# ---------------------------------------------------------------------------------------------------------- A03


@pytest.mark.parametrize(
    ("length", "tier"),
    [
        pytest.param(200, "hit", id="example"),
        pytest.param(300, "hit", id="multiple"),
        pytest.param(400, "hit", id="maximum"),
        pytest.param(500, "program", id="beyond"),
        pytest.param(100, "source", id="one-column"),
    ],
)
def test_a03_multiples_keep_all_their_elements(cases: Cases, length: int, tier: Tier) -> None:
    assert cases.check("hundreds", arange(float(length)), tier=tier).shape == (100, length // 100)


def test_a03_no_multiple_is_eagers_error_and_a_miss_that_says_so(cases: Cases) -> None:
    cases.refuses("hundreds", arange(250.0))
    assert "x.shape[0]: must be divisible by 100, got 250" in cases.miss("hundreds", arange(250.0))


def test_a03_one_size_divides_another_or_it_is_a_miss(cases: Cases) -> None:
    assert cases.check("folds", arange(12.0), ones(3), tier="hit").shape == (3, 4)
    cases.refuses("folds", arange(13.0), ones(3))
    reason = cases.miss("folds", arange(13.0), ones(3))
    assert "x.shape[0] % y.shape[0] == 0 does not hold: x.shape[0] = 13, y.shape[0] = 3" in reason


# ---------------------------------------------------------------------------------------------------------- A04


def test_a04_dims_of_one_name_hit_when_they_are_equal(cases: Cases) -> None:
    assert torch.equal(cases.check("adds", ones(5), ones(5), tier="hit"), torch.full((5,), 2.0))


@pytest.mark.parametrize("sizes", [(5, 1), (1, 5)], ids=str)
def test_a04_a_size_that_broadcasts_is_a_miss_with_eagers_answer(cases: Cases, sizes: tuple[int, int]) -> None:
    x, y = map(ones, sizes)
    assert torch.equal(cases.check("adds", x, y, tier="source"), torch.full((5,), 2.0))
    assert "expected 2..16, got 1" in cases.miss("adds", x, y)


@pytest.mark.parametrize("sizes", [(5, 3), (3, 5)], ids=str)
def test_a04_sizes_that_do_not_match_are_eagers_error(cases: Cases, sizes: tuple[int, int]) -> None:
    x, y = map(ones, sizes)
    assert "must match the size" in str(cases.refuses("adds", x, y))
    assert f"y.shape[0]: must equal x.shape[0] = {sizes[0]}, got {sizes[1]}" in cases.miss("adds", x, y)


# ---------------------------------------------------------------------------------------------------------- A05


@pytest.mark.parametrize("b", [1, 2, 3, 8])
def test_a05_a_hot_batch_of_1_does_not_fix_the_batch(cases: Cases, b: int) -> None:
    x = torch.randn(b, 6)
    found = cases.check("linear", x, tier="hit")
    torch.testing.assert_close(found, cases.eager("linear")(x).detach(), rtol=0, atol=1e-6)


def test_a05_beyond_the_range_is_a_miss(cases: Cases) -> None:
    cases.check("linear", torch.randn(9, 6), tier="program")
    assert "input.shape[0]: expected 1..8, got 9" in cases.miss("linear", ones(9, 6))


def test_a05_a_range_from_1_to_1_is_static(cases: Cases) -> None:
    (variant,) = cases.session["linear_one"].record.variants
    assert variant.guards.static
    cases.check("linear_one", torch.randn(1, 6), tier="hit")
    cases.check("linear_one", torch.randn(2, 6), tier="program")


# ---------------------------------------------------------------------------------------------------------- A06


def test_a06_an_empty_batch_is_served_and_the_process_lives(cases: Cases) -> None:
    code = """
        out = session["linear_empty"](torch.zeros(0, 6))
        print(list(out.shape), out.dtype, session["linear_empty"].counts()["hits"])
    """
    assert in_child(cases.path, code) == "[0, 2] torch.float32 1\n"


def test_a06_an_ambiguous_reshape_is_eagers_error_and_the_process_lives(cases: Cases) -> None:
    code = """
        for lengths in ((0, 0), (12, 0), (0, 3)):
            x, y = map(torch.zeros, lengths)
            try:
                wanted = x.view(y.shape[0], -1) * 2
            except RuntimeError as error:
                wanted = error
            try:
                found = session["folds"](x, y)
            except RuntimeError as error:
                found = error
            same = str(found) == str(wanted) if isinstance(wanted, Exception) else torch.equal(found, wanted)
            print(lengths, type(found).__name__, same)
    """
    seen = in_child(cases.path, code).splitlines()
    assert seen == ["(0, 0) RuntimeError True", "(12, 0) RuntimeError True", "(0, 3) Tensor True"]


def test_a06_the_mean_of_no_rows_is_nan_and_the_process_lives(cases: Cases) -> None:
    code = """
        out = session["mean_rows"](torch.zeros(0, 8))
        print(list(out.shape), bool(out.isnan().all()), session["mean_rows"].counts()["hits"])
    """
    assert in_child(cases.path, code) == "[8] True 1\n"


# ---------------------------------------------------------------------------------------------------------- A07


def channels_last(x: Any) -> Any:
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "x", "tier"),
    [
        pytest.param("conv", torch.randn(1, 3, 8, 8), "hit", id="conv-as-built"),
        pytest.param("conv", channels_last(torch.randn(1, 3, 8, 8)), "program", id="conv-channels-last"),
        pytest.param("conv_last", channels_last(torch.randn(2, 3, 8, 8)), "hit", id="channels-last-as-built"),
        pytest.param("conv_last", torch.randn(2, 3, 8, 8), "program", id="channels-last-contiguous"),
        pytest.param("conv_last", torch.randn(4, 8, 8, 3).permute(0, 3, 1, 2), "hit", id="channels-last-permuted"),
        pytest.param("affine", arange(32.0).reshape(8, 4).t(), "program", id="transposed"),
        pytest.param("affine", arange(4.0).reshape(4, 1).expand(4, 8), "program", id="expanded"),
        pytest.param("affine", arange(64.0).reshape(4, 16)[:, ::2], "program", id="every-other-column"),
        pytest.param("gap", arange(20.0).as_strided((4, 1, 5), (5, 999, 1)), "hit", id="stride-of-a-size-1-dim"),
    ],
)
def test_a07_layout_is_part_of_the_contract(cases: Cases, name: str, x: Any, tier: Tier) -> None:
    cases.check(name, x, tier=tier)


def test_a07_a_miss_names_the_strides(cases: Cases) -> None:
    reason = cases.miss("affine", arange(32.0).reshape(8, 4).t())
    assert "x: expected contiguous strides [8, 1], got [1, 4]" in reason


# ---------------------------------------------------------------------------------------------------------- A08


def test_a08_a_slice_off_the_16_byte_boundary_is_right(cases: Cases) -> None:
    x = arange(33.0)[1:].reshape(4, 8)
    assert x.data_ptr() % 16 == 4
    cases.check("affine", x, tier="hit")


def test_a08_effects_and_aliases_refer_to_the_callers_slice(cases: Cases) -> None:
    base = arange(33.0)
    x = base[1:].reshape(4, 8)
    found, served = cases.call("writes", x)
    assert served == ["hit"]
    assert torch.equal(base, torch.cat([zeros(1), arange(1.0, 33.0) * 2]))
    assert_same(found, x)
    assert found.data_ptr() == x.data_ptr()


def with_aligned_variant(path: Path, folder: Path, *, generic: bool) -> Path:
    """The bundle with a twin of the variant of `adds` whose pointers have to be aligned, tried first."""
    shutil.copytree(path, folder)
    file = folder / "index.json"
    index = json.loads(file.read_text())
    (variant,) = index["entries"]["adds"]["variants"]
    aligned = json.loads(json.dumps(variant))
    aligned["id"] = "adds/aligned"
    for leaf in aligned["guards"]["leaves"]:
        leaf["aligned"] = True
    index["entries"]["adds"]["variants"] = [aligned, variant] if generic else [aligned]
    file.write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("shift_x", "shift_y", "aligned"),
    [
        pytest.param(0, 0, True, id="both-aligned"),
        pytest.param(1, 0, False, id="first-is-not"),
        pytest.param(0, 1, False, id="second-is-not"),
        pytest.param(4, 8, True, id="both-16-bytes-on"),
    ],
)
def test_a08_the_aligned_variant_runs_only_when_every_pointer_is(
    cases: Cases, tmp_path: Path, shift_x: int, shift_y: int, *, aligned: bool
) -> None:
    x, y = arange(16.0)[shift_x : shift_x + 5], arange(16.0)[shift_y : shift_y + 5]
    with load(with_aligned_variant(cases.path, tmp_path / "both", generic=True), mode="strict") as session:
        adds = session["adds"]
        adds(arange(5.0), arange(5.0))
        for _ in range(2):
            assert torch.equal(adds(x, y), x + y)
        assert adds.counts()["hits_by_variant"].get("adds/aligned") == (3 if aligned else 1)
    with load(with_aligned_variant(cases.path, tmp_path / "one", generic=False), mode="strict") as session:
        if aligned:
            assert torch.equal(session["adds"](x, y), x + y)
        else:
            with pytest.raises(GuardMiss, match="expected an address divisible by 16, got one 4 bytes past it"):
                session["adds"](x, y)


# ---------------------------------------------------------------------------------------------------------- A09


@pytest.mark.parametrize(
    ("args", "kwargs", "tier", "value"),
    [
        pytest.param((3,), {}, "hit", 3.5, id="positional"),
        pytest.param((), {"k": 3}, "hit", 3.5, id="keyword"),
        pytest.param((), {"alpha": 0.5, "k": 3}, "hit", 3.5, id="keywords-in-another-order"),
        pytest.param((3, True, 0.5), {}, "hit", 3.5, id="defaults-spelt-out"),
        pytest.param((5,), {}, "source", 5.5, id="another-int"),
        pytest.param((3.0,), {}, "source", 3.5, id="float-for-int"),
        pytest.param((True,), {}, "source", 1.5, id="bool-for-int"),
        pytest.param((3, False), {}, "source", 2.5, id="another-flag"),
        pytest.param((3, 1), {}, "source", 3.5, id="int-for-flag"),
        pytest.param((3,), {"alpha": 9}, "source", 12.0, id="int-for-float"),
        pytest.param((3,), {"alpha": float("nan")}, "source", float("nan"), id="nan"),
        pytest.param((3,), {"alpha": -0.5}, "source", 2.5, id="another-float"),
        pytest.param((torch.tensor(3),), {}, "source", 3.5, id="tensor-for-int"),
    ],
)
def test_a09_scalars_bind_as_python_binds_them_and_are_guarded_by_value_and_type(
    cases: Cases, args: tuple[Any, ...], kwargs: dict[str, Any], tier: Tier, value: float
) -> None:
    found = cases.check("scalars", ones(3), *args, tier=tier, **kwargs)
    torch.testing.assert_close(found, torch.full((3,), value), equal_nan=True)


def test_a09_every_argument_may_be_named(cases: Cases) -> None:
    found, served = cases.call("scalars", x=ones(3), k=3)
    assert torch.equal(found, torch.full((3,), 3.5))
    assert served == ["hit"]


def test_a09_a_miss_names_the_value(cases: Cases) -> None:
    assert "k: expected 3, got 5" in cases.miss("scalars", ones(3), 5)
    assert "flag: expected True, got 1" in cases.miss("scalars", ones(3), 3, 1)


def test_a09_arguments_that_do_not_bind_are_pythons_type_error(cases: Cases) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        cases.session["scalars"](ones(3), 3, beta=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'k'"):
        cases.session["scalars"](ones(3))
    with pytest.raises(TypeError, match="multiple values for argument 'k'"):
        cases.session["scalars"](ones(3), 3, k=3)


@pytest.mark.parametrize(
    ("n", "total"), [pytest.param(4, 6.0, id="4"), pytest.param(7, 21.0, id="7"), pytest.param(1, 0.0, id="1")]
)
def test_a09_a_dynamic_int_is_a_symbol(cases: Cases, n: int, total: float) -> None:
    assert cases.check("narrow", arange(64.0), n, tier="hit") == total


# ---------------------------------------------------------------------------------------------------------- A16


@pytest.mark.parametrize("sign", [1, -1])
def test_a16_cond_takes_the_branch_of_the_values(cases: Cases, sign: int) -> None:
    for size in (2, 1, 8):
        assert torch.equal(cases.check("cond", sign * ones(size), tier="hit"), torch.full((size,), 2.0 * sign))


@pytest.mark.parametrize("size", [9, 0])
def test_a16_cond_outside_its_range_takes_the_branch_as_well(cases: Cases, size: int) -> None:
    cases.check("cond", ones(size), tier="program")


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        pytest.param([1.0, -1.0, 2.0], [1.0, 2.0], id="some"),
        pytest.param([-1.0, -2.0], [], id="none"),
        pytest.param([3.0], [3.0], id="the-only-one"),
    ],
)
def test_a16_a_result_may_be_as_long_as_the_values_say(cases: Cases, values: list[float], kept: list[float]) -> None:
    assert cases.check("selects", torch.tensor(values), tier="hit").tolist() == kept


def test_a16_a_buffer_is_read_before_it_is_written(cases: Cases) -> None:
    with load(cases.path, mode="eager", source="never") as session:
        found = [session["counts"](ones(2)) for _ in range(3)]
        assert session["counts"].counts()["hits"] == 3
        assert [value.tolist() for value in found] == [[1.0, 1.0], [10.0, 10.0], [10.0, 10.0]]
        assert session["counts"](ones(9)).tolist() == [10.0] * 9, "a fallback sees the state that hits wrote"
        assert session["counts"].counts()["misses_by_tier"] == {"program": 1}
