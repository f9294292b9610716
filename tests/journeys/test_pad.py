"""on_miss: pad serves a miss from a padded variant, where verification proved that the results can be cut back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aotpack_runtime as apr
from aotpack_runtime.errors import CompileError
from tests.support.building import ROOT, build_in, build_zoo, entry, zoo_module

MODELS = """
import torch


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)

    def forward(self, ids, mask):
        weight = mask.unsqueeze(-1).float()
        rows = self.table(ids)
        return {"mean": (rows * weight).sum(1) / weight.sum(1), "rows": [rows]}


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean(1)


def masked():
    torch.manual_seed(0)
    return Masked().eval()


def mean():
    return Mean().eval()
"""

INPUTS = {
    "ids": {"shape": ["batch", "seq"], "dtype": "int64", "fill": {"randint": [1, 50]}},
    "mask": {"shape": ["batch", "seq"], "dtype": "int64", "fill": "ones"},
}


@pytest.fixture(scope="module")
def bundle() -> Path:
    on_miss = {"policy": "pad", "pad": {"batch": 4, "seq": [16, 32]}}
    return build_zoo(
        "pad", MODELS, {"masked": entry("masked", INPUTS, [{"dims": {"batch": 4, "seq": [16, 32]}}], on_miss=on_miss)}
    )


@pytest.mark.parametrize(
    ("batch", "seq", "tier"),
    [(4, 16, "hit"), (3, 11, "pad"), (1, 1, "pad"), (4, 17, "pad"), (4, 33, "program"), (5, 16, "program")],
)
def test_a_miss_is_padded_up_to_a_variant_and_cut_back(bundle: Path, batch: int, seq: int, tier: str) -> None:
    masked, eager = apr.load(bundle)["masked"], zoo_module(bundle).masked()
    for _ in range(2):  # judged, then remembered
        ids, mask = torch.randint(1, 50, (batch, seq)), torch.ones(batch, seq, dtype=torch.int64)
        torch.testing.assert_close(masked(ids, mask), eager(ids, mask), rtol=1e-5, atol=1e-6)
    counts = masked.counts()
    assert counts["hits"] == (2 if tier == "hit" else 0)
    assert counts["misses_by_tier"] == ({} if tier == "hit" else {tier: 2})


def test_padding_that_reaches_the_results_fails_the_build() -> None:
    inputs = {"x": {"shape": [2, "seq"], "dtype": "float32"}}
    on_miss = {"policy": "pad", "pad": {"seq": 16}}
    folder = ROOT / "pad_refused"
    with pytest.raises(CompileError, match="padded and cut back it disagrees with eager at sizes"):
        build_in(folder, MODELS, {"mean": entry("mean", inputs, [{"dims": {"seq": [16]}}], on_miss=on_miss)})
    assert not (folder / "bundle").exists()


def test_strict_mode_pads_nothing(bundle: Path) -> None:
    masked = apr.load(bundle, mode="strict")["masked"]
    with pytest.raises(apr.GuardMiss, match=r"ids.shape\[0\]: expected 4, got 3"):
        masked(torch.ones(3, 16, dtype=torch.int64), torch.ones(3, 16, dtype=torch.int64))
