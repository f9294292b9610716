"""Beside the cases A01 to A16: other ways in which a call differs from what a variant was built for."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cases are torch models")

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from aotpack_runtime import GuardMiss
from tests.support.guard_cases import Cases, Tier, assert_same, opened

ones, zeros, arange, randn = torch.ones, torch.zeros, torch.arange, torch.randn


@pytest.fixture(scope="module")
def cases() -> Iterator[Cases]:
    with opened() as found:
        yield found


# -------------------------------------------------------------------------------------------------- dims and ints


@pytest.mark.parametrize(
    ("x", "y", "tier", "reason"),
    [
        pytest.param(8, 5, "hit", "", id="as-built"),
        pytest.param(2, 2, "hit", "", id="minimum"),
        pytest.param(32, 17, "hit", "", id="maximum"),
        pytest.param(34, 18, "program", "x.shape[0]: expected 2..32, got 34", id="beyond"),
        pytest.param(0, 1, "program", "x.shape[0]: expected 2..32, got 0", id="below"),
        pytest.param(7, 5, "program", "x.shape[0]: must be divisible by 2, got 7", id="odd"),
        pytest.param(8, 4, "program", "y.shape[0] == 1 + x.shape[0] // 2 does not hold", id="apart"),
    ],
)
def test_sizes_that_follow_one_dim_are_guarded_together(cases: Cases, x: int, y: int, tier: Tier, reason: str) -> None:
    cases.check("derived", randn(x), randn(y), tier=tier)
    if reason:
        assert reason in cases.miss("derived", ones(x), ones(y))


@pytest.mark.parametrize("sizes", [(4, 5), (5, 4), (1, 16), (0, 1), (17, 17)], ids=str)
def test_two_inputs_of_one_dim_may_still_differ_where_the_model_lets_them(cases: Cases, sizes: tuple[int, int]) -> None:
    cases.check("apart", *map(randn, sizes), tier="program")


def test_two_inputs_of_one_dim_hit_when_they_are_equal(cases: Cases) -> None:
    for size in (1, 4, 16):
        cases.check("apart", randn(size), randn(size), tier="hit")


@pytest.mark.parametrize(
    ("s", "t", "tier"),
    [
        (3, 5, "hit"),
        (1, 1, "hit"),
        (1, 8, "hit"),
        (8, 1, "hit"),
        (9, 1, "program"),
        (0, 3, "program"),
        (3, 0, "program"),
    ],
)
def test_broadcasting_is_right_at_every_size(cases: Cases, s: int, t: int, tier: Tier) -> None:
    assert cases.check("outer", randn(s, 1), randn(1, t), tier=tier).shape == (s, t)


def test_broadcasting_the_other_way_round_is_eagers(cases: Cases) -> None:
    cases.check("outer", randn(3, 4), randn(1, 4), tier="source")
    cases.refuses("outer", randn(3, 4), randn(1, 5))


@pytest.mark.parametrize(("n", "tier"), [(1, "program"), (2, "hit"), (8, "hit"), (9, "program"), (0, "program")])
def test_squeezing_a_dim_that_may_be_1_is_right_at_1(cases: Cases, n: int, tier: Tier) -> None:
    x = randn(n, 5)
    shape = (5,) if n == 1 else (n, 5)
    assert [result.shape for result in cases.check("squeezes", x, tier=tier)] == [shape] * 3
    assert cases.check("counts_dims", x, tier="source" if n == 0 else tier)[1] == len(shape)


@pytest.mark.parametrize("n", [4, 5, 16, 17, 3, 2, 1, 0])
def test_a_size_that_follows_another_is_computed_anew(cases: Cases, n: int) -> None:
    cases.agree("halves", randn(n), tier="hit" if 4 <= n <= 16 else None)


@pytest.mark.parametrize(("n", "tier"), [(3, "hit"), (16, "hit"), (2, "program"), (17, "program")])
def test_a_declared_size_that_the_trace_leaves_out_has_a_program(cases: Cases, n: int, tier: Tier) -> None:
    cases.check("rest", randn(n, 8), tier=tier)


@pytest.mark.parametrize(("n", "tier"), [(2, "hit"), (16, "hit"), (1, "program"), (17, "program"), (0, "program")])
def test_an_int_that_cuts_a_view_to_1_is_right_there(cases: Cases, n: int, tier: Tier) -> None:
    x = randn(20)
    found = cases.check("cuts", x, n, tier=tier)
    assert found.shape == (() if n == 1 else (n,))
    assert found.data_ptr() == x.data_ptr() or not n


@pytest.mark.parametrize("n", [16, 64, 8, 12, 17, 7, 1, 0, 128, 129])
def test_a_branch_on_a_size_is_taken_anew(cases: Cases, n: int) -> None:
    cases.agree("branches", randn(n), tier="hit" if n in (16, 64) else None)


@pytest.mark.parametrize("n", [2, 3, 1000, 100_000])
def test_a_range_without_an_end_has_none(cases: Cases, n: int) -> None:
    cases.check("open_end", randn(n), tier="hit")


@pytest.mark.parametrize("n", [1, 0])
def test_a_range_without_an_end_has_a_beginning(cases: Cases, n: int) -> None:
    cases.check("open_end", randn(n), tier="program")
    assert f"x.shape[0]: expected 2 or more, got {n}" in cases.miss("open_end", ones(n))


@pytest.mark.parametrize(("name", "shape"), [("linear_empty", (0, 6)), ("mean_rows", (0, 8)), ("mean_rows", (1, 8))])
def test_a_dim_from_0_hits_at_0(cases: Cases, name: str, shape: tuple[int, ...]) -> None:
    cases.check(name, zeros(shape), tier="hit")


@pytest.mark.parametrize(
    ("s", "tier"),
    [
        pytest.param(torch.tensor(2.5), "hit", id="0-d"),
        pytest.param(ones(1), "source", id="one-element"),
        pytest.param(torch.tensor(2), "source", id="0-d-int"),
        pytest.param(torch.tensor(2.5, dtype=torch.float64), "source", id="0-d-float64"),
        pytest.param(2.5, "source", id="number"),
        pytest.param(arange(7.0)[3], "hit", id="element-of-a-tensor"),
    ],
)
def test_a_tensor_without_dims_is_not_a_number_nor_a_vector(cases: Cases, s: Any, tier: Tier) -> None:
    cases.check("scalar_tensor", randn(4), s, tier=tier)


class Four(enum.IntEnum):
    N = 4


@pytest.mark.parametrize(("n", "tier"), [(1, "hit"), (2, "hit"), (63, "hit"), (64, "hit"), (0, "program")])
def test_a_dynamic_int_is_right_at_its_borders(cases: Cases, n: int, tier: Tier) -> None:
    assert cases.check("narrow", arange(64.0), n, tier=tier) == n * (n - 1) / 2


@pytest.mark.parametrize(
    "n", [65, -1, 2**40, 2**70, True, 4.0, None, "4", Four.N, torch.tensor(4)], ids=lambda n: f"{type(n).__name__}-{n}"
)
def test_what_is_no_int_in_the_range_is_eagers_to_judge(cases: Cases, n: Any) -> None:
    cases.agree("narrow", arange(64.0), n)


def test_a_dynamic_int_is_judged_against_the_tensor_it_cuts(cases: Cases) -> None:
    cases.check("narrow", arange(40.0), 30, tier="program")
    cases.refuses("narrow", arange(40.0), 50)


# ----------------------------------------------------------------------------------------------------- containers


def nested(left: Any, right: Any, a: Any, b: Any = 3) -> tuple[Any, Any]:
    return {"left": left, "right": [right]}, (a, b)


def test_containers_are_told_apart_by_type_keys_and_length(cases: Cases) -> None:
    x = randn(4)
    whole, pair = nested(x, x, x)
    cases.check("nested", whole, pair, tier="hit")
    cases.check("nested", whole, list(pair), tier="source")
    cases.check("nested", {"left": x, "right": (x,)}, pair, tier="source")
    cases.check("nested", {"left": x, "right": [x, None]}, pair, tier="source")
    cases.check("nested", {"right": [x], "left": x}, pair, tier="source")
    cases.check("nested", {**whole, "extra": 1}, pair, tier="source")
    cases.check("nested", OrderedDict(whole), pair, tier="source")
    cases.refuses("nested", {"left": x}, pair)
    cases.refuses("nested", whole, (x, 3, 3))
    assert "batch['right']: expected list of 1, got tuple of 1" in cases.miss(
        "nested", {"left": x, "right": (x,)}, pair
    )


def test_leaves_of_containers_are_guarded_like_arguments(cases: Cases) -> None:
    x = randn(4)
    cases.check("nested", *nested(x, x, x, 3.0), tier="source")
    cases.check("nested", *nested(x, x.double(), x), tier="source")
    cases.check("nested", *nested(x, randn(1), x), tier="program")
    cases.check("nested", *nested(x, x, randn(1)), tier="source")
    cases.check("nested", *nested(x, x, randn(8)[::2]), tier="program")
    for size in (1, 8):
        cases.check("nested", *nested(randn(size), randn(size), randn(size)), tier="hit")
    cases.check("nested", *nested(randn(9), randn(9), randn(9)), tier="program")
    assert "pair[1]: expected 3, got 4" in cases.miss("nested", *nested(x, x, x, 4))
    assert "batch['right'][0].shape[0]: must equal batch['left'].shape[0] = 4" in cases.miss(
        "nested", *nested(x, ones(3), x)
    )


# --------------------------------------------------------------------------------------------------------- layout


LAYOUTS = {
    "transposed": lambda: arange(20.0).reshape(5, 4).t(),
    "sliced": lambda: arange(80.0).reshape(8, 10)[::2, ::2],
    "expanded-rows": lambda: arange(5.0).expand(4, 5),
    "expanded-columns": lambda: arange(4.0).reshape(4, 1).expand(4, 5),
    "overlapping": lambda: arange(20.0).as_strided((4, 5), (2, 1)),
    "from-the-middle": lambda: arange(40.0)[13:33].view(4, 5),
    "one-row-odd-stride": lambda: arange(20.0).as_strided((1, 5), (999, 1)),
    "flipped": lambda: arange(20.0).reshape(4, 5).flip(0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["flattens", "asks_layout", "squeezes", "affine"])
def test_any_layout_gives_eagers_answer(cases: Cases, name: str, layout: str) -> None:
    cases.agree(name, LAYOUTS[layout]())


@pytest.mark.parametrize("length", [200, 300])
def test_a_slice_is_reshaped_as_eager_does(cases: Cases, length: int) -> None:
    cases.agree("hundreds", arange(2.0 * length)[::2])


def test_a_write_reaches_the_callers_memory_in_any_layout(cases: Cases) -> None:
    for x in (arange(32.0).reshape(8, 4).t(), arange(64.0).reshape(4, 16)[:, ::2], ones(4, 8).requires_grad_(False)):
        wanted = x.clone() * 2
        found, _ = cases.call("writes", x)
        assert torch.equal(x, wanted)
        assert_same(found, x)
        assert found.data_ptr() == x.data_ptr()


# ------------------------------------------------------------------------------------------- tensors of another kind


class Quiet(torch.Tensor):
    """A subclass that changes nothing."""


class Tripling(torch.Tensor):
    """A subclass whose products are three times as large; a program's operators do not say `mul`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return torch.add(result, result, alpha=2) if func is torch.Tensor.mul else result


def complex_pair() -> Any:
    return torch.tensor([1 + 2j, 3 - 4j, 5j])


@pytest.mark.parametrize(
    ("name", "x", "tier"),
    [
        pytest.param("complex", complex_pair(), "hit", id="complex"),
        pytest.param("complex", complex_pair().conj(), "program", id="conj-view"),
        pytest.param("complex", complex_pair().conj().resolve_conj(), "hit", id="conj-resolved"),
        pytest.param("complex", complex_pair().conj().conj(), "hit", id="conj-twice"),
        pytest.param("open_end", complex_pair().conj().imag, "program", id="neg-view-strided"),
        pytest.param("open_end", torch._neg_view(arange(4.0)), "program", id="neg-view"),
        pytest.param("open_end", complex_pair().real, "program", id="real-part"),
        pytest.param("affine", ones(4, 8, device="meta"), "source", id="meta"),
        pytest.param("affine", torch.nn.Parameter(randn(4, 8)), "hit", id="parameter-without-grad-mode"),
        pytest.param("affine", randn(4, 8).as_subclass(Quiet), "program", id="subclass"),
    ],
)
def test_tensors_of_another_kind_give_eagers_answer(cases: Cases, name: str, x: Any, tier: Tier) -> None:
    cases.check(name, x, tier=tier)


def test_a_subclass_with_functions_of_its_own_is_left_to_the_source(cases: Cases) -> None:
    found = cases.check("affine", ones(4, 8).as_subclass(Tripling), tier="source")
    assert found.eq(7).all()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("writes", lambda: ones(4, 8).to_sparse(), id="coo"),
        pytest.param("writes", lambda: ones(4, 8).to_sparse_csr(), id="csr"),
        pytest.param("affine", lambda: torch.nested.nested_tensor([ones(8), ones(3)]), id="nested"),
        pytest.param(
            "affine", lambda: torch.nested.nested_tensor([ones(8), ones(3)], layout=torch.jagged), id="jagged"
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse CSR:UserWarning")
def test_tensors_without_strides_are_left_to_the_source(cases: Cases, name: str, make: Any) -> None:
    wanted = cases.eager(name)(make())
    found, served = cases.call(name, make())
    assert served == ["source"]
    assert (type(found), found.layout) == (type(wanted), wanted.layout)
    if wanted.is_nested:
        found, wanted = torch.cat(found.unbind()), torch.cat(wanted.unbind())
    assert torch.equal(found.to_dense(), wanted.to_dense())
    with pytest.raises(GuardMiss):
        cases.strict[name](make())


# ----------------------------------------------------------------------------------------------- modes and transforms


def test_a_fake_tensor_gives_a_fake_tensor(cases: Cases) -> None:
    with FakeTensorMode() as mode:
        x = ones(4, 8)
        inside, served = cases.call("affine", x)
    assert served == ["program"]
    outside, _ = cases.call("affine", mode.from_tensor(ones(2, 8)))
    for found, rows in ((inside, 4), (outside, 2)):
        assert isinstance(found, FakeTensor)
        assert found.shape == (rows, 8)
    cases.check("affine", ones(4, 8), tier="hit")


def test_a_dispatch_mode_sees_the_operators(cases: Cases) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = randn(3, 6)
    counts = []
    for function in (cases.eager("linear"), cases.session["linear"]):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            function(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_function_mode_that_changes_results_is_honoured(cases: Cases) -> None:
    class Tripled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 3 if func is torch.Tensor.mul else result

    x = ones(4, 8)
    for _ in range(2):
        with Tripled():
            wanted, found = cases.eager("affine")(x), cases.session["affine"](x)
        assert torch.equal(found, wanted)
        cases.check("affine", x, tier="hit")


def test_a_default_device_of_ones_own_kind_keeps_the_hit(cases: Cases) -> None:
    with torch.device("cpu"):
        _, served = cases.call("affine", ones(4, 8))
    assert served == ["hit"]


@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (3, 5)])
def test_vmap_over_an_entry_is_vmap_over_the_model(cases: Cases, rows: int, columns: int) -> None:
    batch = randn(5, rows, columns)
    with torch.no_grad():
        assert_same(torch.vmap(cases.session["affine"])(batch), torch.vmap(cases.eager("affine"))(batch))
    cases.check("affine", ones(4, 8), tier="hit")


def test_vmap_reaches_a_model_with_weights(cases: Cases) -> None:
    batch = randn(5, 3, 6)
    with torch.no_grad():
        found = torch.vmap(cases.session["linear"])(batch)
        torch.testing.assert_close(found, cases.eager("linear")(batch))


@pytest.mark.parametrize("name", ["affine_rows", "linear"])
def test_the_gradient_of_an_entry_is_the_models(cases: Cases, name: str) -> None:
    x = randn(3, 8 if name == "affine_rows" else 6)

    def slope(model: Any) -> Any:
        return torch.func.grad(lambda x: (model(x) ** 2).sum())(x)

    torch.testing.assert_close(slope(cases.session[name]), slope(cases.eager(name)))
    torch.testing.assert_close(torch.func.jacrev(cases.session[name])(x), torch.func.jacrev(cases.eager(name))(x))


def test_autograd_records_through_an_entry(cases: Cases) -> None:
    slopes = []
    for model in (cases.eager("linear"), cases.session["linear"]):
        x = ones(2, 6).requires_grad_()
        (model(x) ** 2).sum().backward()
        slopes.append(x.grad)
    torch.testing.assert_close(*slopes)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_derivatives_pass_through_an_entry(cases: Cases) -> None:
    x, tangent = randn(3, 8), randn(3, 8)
    cases.check("affine_rows", x, tier="hit")
    with torch.no_grad():
        found = torch.func.jvp(cases.session["affine_rows"], (x,), (tangent,))
    assert torch.equal(found[1], tangent * 2)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        assert torch.equal(forward_ad.unpack_dual(cases.session["affine_rows"](dual)).tangent, tangent * 2)
    cases.check("affine_rows", x, tier="hit")


@pytest.mark.parametrize("name", ["affine", "nested"])
def test_a_compiled_function_may_call_an_entry(cases: Cases, name: str) -> None:
    entry = cases.session[name]

    def around(x: Any) -> Any:
        if name == "affine":
            return entry(x + 1) * 2
        return entry(*nested(x, x + 1, x))["ids"][1] * 2

    compiled = torch.compile(around, backend="eager")
    for x in (randn(4, 8), randn(5, 8)) if name == "affine" else (randn(4), randn(5)):
        before = entry.counts()
        with torch.no_grad():
            found = compiled(x)
            after = entry.counts()
            assert after["hits"] + after["misses"] == before["hits"] + before["misses"] + 1
            assert_same(found, around(x))
