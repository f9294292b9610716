"""Random numbers drawn from a torch.Generator: one that is passed in is served by the source, as eager serves it; one that
the model keeps is no part of a program, and is refused before anything is compiled, whatever the target."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="models are exported with torch")
import torch

from aotpack.build import build
from aotpack.manifest import read_manifest
from aotpack_runtime import load
from aotpack_runtime.errors import CompileError
from aotpack_runtime.store import Store

pytestmark = pytest.mark.slow

MODELS = """
import torch
from torch import nn

class Given(nn.Module):
    def forward(self, x, generator=None):
        return x + torch.rand(x.shape, generator=generator, device=x.device)

class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator, device=x.device)

def given(): return Given().eval()
def kept(): return Kept().eval()
"""


def manifest(folder: Path, model: str, n: str) -> Path:
    (folder / "drawing.py").write_text(MODELS)
    (folder / "m.yaml").write_text(f"""
schema: aotpack.manifest/v1
bundle: {{name: drawing, version: 1.0.0}}
targets: {{cpu: {{kind: cpu}}}}
entries:
  e:
    kind: torch_export
    source: "drawing:{model}"
    inputs: {{x: {{shape: [n, 8], dtype: float32}}}}
    points: [{{dims: {{n: {n}}}}}]
""")
    return folder / "m.yaml"


def test_a_generator_that_is_passed_in_is_eagers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(read_manifest(manifest(tmp_path, "given", "4")), tmp_path / "out", store=Store(tmp_path / "s"), jobs=1)
    monkeypatch.syspath_prepend(tmp_path)
    x = torch.ones(4, 8)
    with load(made.path, mode="eager") as session:
        entry = session["e"]
        first, second = (entry(x, generator=torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(first, x + torch.rand(4, 8, generator=torch.Generator().manual_seed(3)))
        assert torch.equal(first, second)
        assert entry(x).shape == (4, 8)
        assert session.status()["entries"]["e"]["hits"] == 1


@pytest.mark.parametrize(
    ("model", "n", "problem", "hint"),
    [
        ("kept", "4", "draws from a torch.Generator of its own, which a program cannot hold", "torch.manual_seed()"),
        ("given", "{min: 2, max: 8}", "an operator that takes fixed sizes only is given a dim that varies at drawing.py:7", "leave it out, or give the dim one size"),
    ],
)  # fmt: skip
def test_what_no_program_can_hold_is_refused_before_it_is_compiled(
    tmp_path: Path, model: str, n: str, problem: str, hint: str
) -> None:
    with pytest.raises(CompileError) as caught:
        build(read_manifest(manifest(tmp_path, model, n)), tmp_path / "out", store=Store(tmp_path / "s"), jobs=1)
    assert problem in caught.value.message
    assert hint in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
