"""The zoo `guard_cases`: one small model for each way in which a call can differ from what a variant was built for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.building import build_zoo, entry

MODELS = """
import torch
from torch import nn


def affine():
    return Plain(lambda x: x * 2 + 1)


def total():
    return Plain(lambda x: x.sum(0))


def mean():
    return Plain(lambda x: x.mean(0))


def hundreds():
    return Plain(lambda x: x.reshape(100, -1) + 1)


def conv():
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).eval()


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 2).eval()


def squeeze_first():
    return Plain(lambda x: x.squeeze(0) * 2)


def squeeze_all():
    return Plain(lambda x: x.squeeze() * 2)


def shift():
    return Plain(lambda x: x + 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.eval()


class Plain(Model):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Folds(Model):
    def forward(self, x, y):
        return x.view(y.shape[0], -1) * 2


class Adds(Model):
    def forward(self, x, y):
        return x + y


class Apart(Model):
    def forward(self, x, y):
        return x.sum() * 2 + y.sum()


class Affine(Model):
    def forward(self, x, k, flag=True, alpha=0.5):
        return x * k + alpha if flag else x * k - alpha


class Narrows(Model):
    def forward(self, x, n):
        return x.narrow(0, 0, n).sum()


class Branches(Model):
    def forward(self, x):
        if x.shape[0] % 8 == 0:
            return x.reshape(-1, 8).sum(1)
        return x - 1


class Conditions(Model):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Selects(Model):
    def forward(self, x):
        return x[x > 0]


class Counts(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("c", torch.zeros(4))

    def forward(self, x):
        y = torch.cond(self.c.sum() > 2, lambda x: x * 10, lambda x: x * 1, (x,))
        self.c.add_(1)
        return y


class Nested(Model):
    def forward(self, batch, pair):
        a, b = pair
        return {"ids": [batch["left"] + a, batch["right"][0] * b], "sizes": (batch["left"].shape[0], None, "ok")}


class Scales(Model):
    def forward(self, x, s):
        return x * s
"""


def floats(*shape: Any, **more: Any) -> dict[str, Any]:
    """An input of float32."""
    return {"shape": list(shape), "dtype": "float32", **more}


def dims(*points: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"dims": point} for point in points]


ENTRIES: dict[str, dict[str, Any]] = {
    "affine": entry("affine", {"x": floats(4, 8)}),
    "affine_rows": entry("affine", {"x": floats("b", 8)}, dims({"b": {"min": 1, "max": 16}})),
    "gap": entry("affine", {"x": floats(4, 1, 5)}),
    "sum_rows": entry("total", {"x": floats("b", 8)}, dims({"b": {"min": 2, "max": 16}})),
    "mean_rows": entry("mean", {"x": floats("b", 8)}, dims({"b": {"min": 0, "max": 16}})),
    "hundreds": entry("hundreds", {"x": floats("n")}, dims({"n": {"min": 100, "max": 400, "opt": 200}})),
    "folds": entry(
        "Folds",
        {"x": floats("n"), "y": floats("m")},
        dims({"n": {"min": 0, "max": 64, "opt": 12}, "m": {"min": 0, "max": 64, "opt": 3}}),
    ),
    "adds": entry("Adds", {"x": floats("n"), "y": floats("n")}, dims({"n": {"min": 2, "max": 16, "opt": 4}})),
    "apart": entry("Apart", {"x": floats("n"), "y": floats("n")}, dims({"n": {"min": 1, "max": 16, "opt": 4}})),
    "outer": entry(
        "Adds",
        {"x": floats("s", 1), "y": floats(1, "t")},
        dims({"s": {"min": 1, "max": 8}, "t": {"min": 1, "max": 8}}),
    ),
    "derived": entry(
        "Apart",
        {"x": floats("2*n"), "y": floats("n+1")},
        dims({"n": {"min": 1, "max": 16, "opt": 4}}),
    ),
    "linear": entry("linear", {"input": floats("b", 6)}, dims({"b": {"min": 1, "max": 8, "opt": 1}})),
    "linear_one": entry("linear", {"input": floats("b", 6)}, dims({"b": {"min": 1, "max": 1}})),
    "linear_empty": entry("linear", {"input": floats("b", 6)}, dims({"b": {"min": 0, "max": 8}})),
    "open_end": entry("affine", {"x": floats("n")}, dims({"n": {"min": 2, "max": None}})),
    "conv": entry("conv", {"input": floats(1, 3, 8, 8)}),
    "conv_last": entry("conv", {"input": floats("b", 3, 8, 8, layout="channels_last")}, dims({"b": {"min": 1, "max": 4}})),
    "scalars": entry("Affine", {"x": floats(3), "k": {"value": 3}}),
    "narrow": entry("Narrows", {"x": floats(64), "n": {"dtype": "int", "range": [1, 64]}}),
    "scalar_tensor": entry("Scales", {"x": floats("n"), "s": floats()}, dims({"n": {"min": 1, "max": 8}})),
    "squeeze_first": entry("squeeze_first", {"x": floats("n", 5)}, dims({"n": {"min": 1, "max": 8}})),
    "squeeze_all": entry("squeeze_all", {"x": floats("n", 5)}, dims({"n": {"min": 1, "max": 8}})),
    "branches": entry("Branches", {"x": floats("n")}, dims({"n": {"min": 1, "max": 64, "opt": 16}})),
    "cond": entry("Conditions", {"x": floats("n")}, dims({"n": {"min": 1, "max": 8}})),
    "selects": entry("Selects", {"x": floats("n")}, dims({"n": {"min": 1, "max": 8}})),
    "counts": entry("Counts", {"x": floats("n")}, dims({"n": {"min": 1, "max": 8}})),
    "nested": entry(
        "Nested",
        {
            "batch": {"dict": {"left": floats("n"), "right": {"list": [floats("n")]}}},
            "pair": {"tuple": [floats("n"), {"value": 3}]},
        },
        dims({"n": {"min": 1, "max": 8}}),
    ),
    "complex": entry("affine", {"x": {"shape": ["n"], "dtype": "complex64"}}, dims({"n": {"min": 1, "max": 8}})),
}


def bundle() -> Path:
    """The zoo's bundle, built at most once however many test processes ask."""
    return build_zoo("guard_cases", MODELS, ENTRIES)
