"""A source may be a program saved by torch.export.save: it is built and served like a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import aotpack_runtime as apr
from tests.support.building import ROOT, build_zoo, entry


class Model(torch.nn.Module):
    """Keyword argument, state, a buffer outside of the state dict, a literal tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("gain", torch.full((4,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        y = self.inner(x) * self.gain + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"y": y * mask, "calls": self.calls.clone()}


@pytest.fixture(scope="module")
def saved() -> Path:
    folder = ROOT / "saved_program"
    folder.mkdir(parents=True, exist_ok=True)
    batch = Dim("batch", min=1, max=64)
    program = torch.export.export(
        Model().eval(), (torch.randn(4, 6),), {"mask": torch.ones(4, 1)},
        dynamic_shapes={"x": {0: batch}, "mask": {0: batch}},
    )  # fmt: skip
    if not (folder / "model.pt2").exists():
        torch.export.save(program, folder / "model.pt2")
    inputs: dict[str, Any] = {
        "x": {"shape": ["batch", 6], "dtype": "float32"},
        "mask": {"shape": ["batch", 1], "dtype": "float32"},
    }
    point = {"dims": {"batch": {"min": 1, "max": 16}}}
    return build_zoo("saved_program", "", {"model": {**entry("", inputs, [point]), "source": "model.pt2"}})


def test_a_saved_program_serves_hits_and_misses_with_one_state(saved: Path) -> None:
    model = apr.load(saved)["model"]
    eager = Model().eval()
    for batch, tier in [(1, "hits"), (7, "hits"), (40, "misses"), (3, "hits")]:
        x, mask = torch.randn(batch, 6), torch.rand(batch, 1)
        before = model.counts()
        got, wanted = model(x, mask=mask), eager(x, mask=mask)
        assert model.counts()[tier] == before[tier] + 1
        assert list(got) == ["y", "calls"]
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert model.counts()["misses_by_tier"] == {"program": 1}


def test_a_saved_program_keeps_its_signature(saved: Path) -> None:
    model = apr.load(saved)["model"]
    with pytest.raises(TypeError, match="mask"):
        model(torch.randn(2, 6))
