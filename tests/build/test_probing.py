"""What is known of a size once it was tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="programs are tried with torch")

import torch
from torch.export import Dim

from aotpack.compilers.exported import compile as export
from aotpack.compilers.probing import _fixed
from aotpack.compilers.shapes import TensorLeaf, guards_of
from aotpack.compilers.sizes import named_sizes
from aotpack.manifest import read_manifest
from aotpack.plan import EntryPlan, make_plan
from aotpack.torch_jobs import source_job
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.codec import parse_guards
from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard
from aotpack_runtime.store import Store
from tests.support.building import entry, write_zoo


@pytest.mark.parametrize(("name", "closed"), [("x.shape[0]", 5), ("keep", Range(5, 5))])
def test_a_size_that_may_not_vary_is_fixed_whatever_it_is_a_size_of(name: str, closed: int | Range) -> None:
    wide = Range(2, 9)
    x = TensorGuard(path="x", dtype="float32", device="cpu", dims=(wide, wide))
    guards = Guards(trees=(), leaves=(x, IntGuard(path="keep", dim=wide)))
    before, after = dict(named_sizes(guards)), dict(named_sizes(_fixed(guards, name, 5)))
    assert after == {**before, name: closed}


MODELS = """
import torch
from torch import nn

class Corner(nn.Module):
    def forward(self, x):
        x = x * 2 if x.shape[0] == 1 else x + 1
        return x * 3 if x.shape[1] == 1 else x - 1

class Encodes(nn.Module):
    def __init__(self, nested):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

    def forward(self, x, padding):
        return self.layers(x, src_key_padding_mask=padding)

class Attends(nn.Module):
    def forward(self, q, cache):
        keys, values = torch.cat([cache["keys"], q], 2), torch.cat([cache["values"], q], 2)
        return nn.functional.scaled_dot_product_attention(q, keys, values)

def corner(): return Corner().eval()
def attends(): return Attends().eval()
def encodes(nested): return Encodes(nested).eval()
"""


def test_small_sizes_have_programs_beside_each_other_too(tmp_path: Path) -> None:
    """A convolutional net over images of one cell: each side alone had a program, and both at once had none."""
    sides = {"h": {"min": 1, "max": 8}, "w": {"min": 1, "max": 8}}
    inputs = {"x": {"shape": ["h", "w"], "dtype": "float32"}}
    path = write_zoo(tmp_path, MODELS, {"corner": entry("corner", inputs, [{"dims": sides}])})
    (plan,) = make_plan(read_manifest(path)).entries
    assert isinstance(plan, EntryPlan)
    record = export(source_job(plan, tmp_path).payload, Store(tmp_path / "store"))
    taken = [
        {size for size in (1, 2) if all(size == dim or (isinstance(dim, Range) and size in dim) for dim in dims)}
        for program in record["programs"]
        for dims in [[dim for _, dim in named_sizes(parse_guards(program["guards"]))]]
    ]
    assert {1, 2} <= set().union(*taken)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
def test_a_model_that_is_exported_another_way_than_it_runs_is_refused(*, nested: bool, tmp_path: Path) -> None:
    """nn.TransformerEncoder gives zeros for padding in eager, by nested tensors, and not when it is exported. An example
    without padding does not show it."""
    inputs = {"x": {"shape": ["b", 5, 8], "dtype": "float32"}, "padding": {"shape": ["b", 5], "dtype": "bool"}}
    points = [{"dims": {"b": {"min": 1, "max": 8}}}]
    encodes = entry("encodes", inputs, points, args={"nested": nested})
    (plan,) = make_plan(read_manifest(write_zoo(tmp_path, MODELS, {"encodes": encodes}))).entries
    assert isinstance(plan, EntryPlan)
    job, store = source_job(plan, tmp_path).payload, Store(tmp_path / "store")
    if nested:
        with pytest.raises(CompileError, match=r"where a bool argument is set.*enable_nested_tensor=False"):
            export(job, store)
    else:
        assert export(job, store)["programs"]


def test_attention_is_given_as_many_values_as_keys(tmp_path: Path) -> None:
    """torch compares them nowhere: on a CPU it reads past the shorter, with cuDNN the process ends."""
    part = {"shape": ["b", 2, "past", 8], "dtype": "float32"}
    inputs = {"q": {"shape": ["b", 2, 1, 8], "dtype": "float32"}, "cache": {"dict": {"keys": part, "values": part}}}
    points = [{"dims": {"b": {"min": 1, "max": 4}, "past": {"min": 2, "max": 16}}}]
    (plan,) = make_plan(
        read_manifest(write_zoo(tmp_path, MODELS, {"attends": entry("attends", inputs, points)}))
    ).entries
    assert isinstance(plan, EntryPlan)
    record = export(source_job(plan, tmp_path).payload, Store(tmp_path / "store"))
    (program,) = json.loads(json.dumps(record["programs"]))
    where = [relation.text for relation in parse_guards(program["guards"]).where]
    assert "cache['values'].shape[2] == cache['keys'].shape[2]" in where


@torch.library.custom_op("probing::scaled_dot_product_sum", mutates_args=())
def scaled_sum(x: torch.Tensor, times: int) -> torch.Tensor:
    return x * times


@scaled_sum.register_fake
def _scaled_sum(x: torch.Tensor, times: int) -> torch.Tensor:
    return torch.empty_like(x)


class OfItsOwn(torch.nn.Module):
    """An operator of the user's that is called like attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_sum(x, 2)


class ByValues(torch.nn.Module):
    """How many keys and values there are, values say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = x[x[:, 0] > 0][None], x[x[:, 1] > 0][None]
        return torch.nn.functional.scaled_dot_product_attention(x[None], keys, values)


@pytest.mark.parametrize("model", [OfItsOwn, ByValues])
def test_what_no_guard_can_say_of_attention_is_left_as_torch_has_it(model: type[torch.nn.Module]) -> None:
    exported = torch.export.export(model(), (torch.randn(6, 8),), dynamic_shapes=((Dim.AUTO, Dim.STATIC),))
    (guard,), where = guards_of(exported, [TensorLeaf("x", "float32", ("n", 8))], name="model")
    assert isinstance(guard, TensorGuard)
    assert guard.dims == (Range(2, None), 8)
    assert where == ()
