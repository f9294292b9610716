"""The zoo `custom_operator_cases`: a model that needs an operator which a module of the user's registers."""

from __future__ import annotations

from pathlib import Path

from aotpack_runtime.errors import AotpackError
from tests.support.building import ROOT, build_in, build_zoo, entry

OPERATORS = """
import torch


@torch.library.custom_op("apk::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)
"""
CHANGED = OPERATORS.replace("x: torch.Tensor)", "x: torch.Tensor, by: float)").replace("def _(x)", "def _(x, by)")
MODELS = """
import apk_ops
import torch
from torch import nn


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.eval()

    def forward(self, x):
        return torch.ops.apk.twice(x) + self.w
"""
INPUTS = {"x": {"shape": [3], "dtype": "float32"}}


def bundle() -> Path:
    """The zoo's bundle; `apk_ops.py` lies beside it."""
    folder = ROOT / "custom_operator_cases"
    folder.mkdir(parents=True, exist_ok=True)
    operators = folder / "apk_ops.py"
    if not operators.exists() or operators.read_text() != OPERATORS:
        operators.write_text(OPERATORS)
    return build_zoo(folder.name, MODELS, {"twice": entry("Twice", INPUTS, imports=["apk_ops"])})


def without_imports(folder: Path) -> str:
    """What a build says of the same model in `folder` when the manifest names no import; "" when it says nothing."""
    (folder / "apk_ops.py").write_text(OPERATORS)
    try:
        build_in(folder, MODELS, {"twice": entry("Twice", INPUTS)})
    except AotpackError as error:
        return str(error)
    return ""
