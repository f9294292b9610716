"""A04, A05, A09 and A16 at build time: what a model does not take is one line with its place and the next step, and
the other entries are built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the cases are torch models")

from aotpack.jobs import Result
from aotpack.manifest import read_manifest
from aotpack_runtime import load
from aotpack_runtime.errors import ManifestError
from tests.support.building import build_in, entry, write_zoo
from tests.support.guard_cases import dims, floats

MODELS = """
import os

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.eval()


class Good(Model):
    def forward(self, x):
        return x * 2 + 1


class Branches(Model):
    def forward(self, x):
        if x.sum() > 0:
            return x + 1
        return x - 1


class Sizes(Model):
    def forward(self, x):
        return torch.zeros(int(x.max()))


class Adds(Model):
    def forward(self, x, y):
        return x + y


class Counts(Model):
    def forward(self, x, n):
        for _ in range(n):
            x = x + 1
        return x


class Long(Model):
    def forward(self, x):
        return x + 1 if x.shape[0] > 10 else x - 1


class Pools(Model):
    def forward(self, x):
        return nn.functional.adaptive_avg_pool1d(x, 4)


class Fixed(Model):
    def forward(self, x):
        return x.reshape(4, 2)


class Divides(Model):
    def forward(self, x):
        if x.shape[1] == 0:
            os.abort()  # as grouped attention without heads does (torch 2.11)
        return x + 1
"""
MANY = dims({"n": {"min": 1, "max": 64, "opt": 16}})
ENTRIES = {
    "good": entry("Good", {"x": floats(4, 8)}),
    "branches": entry("Branches", {"x": floats("n")}, MANY),
    "sizes": entry("Sizes", {"x": floats("n")}, MANY),
    "adds": entry(
        "Adds",
        {"x": floats("a"), "y": floats("b")},
        dims({"a": {"min": 2, "max": 16, "opt": 4}, "b": {"min": 2, "max": 16, "opt": 4}}),
    ),
    "adds_apart": entry(
        "Adds",
        {"x": floats("a"), "y": floats("b")},
        dims({"a": {"min": 2, "max": 16, "opt": 4}, "b": {"min": 2, "max": 16, "opt": 5}}),
    ),
    "counts": entry("Counts", {"x": floats(3), "n": {"dtype": "int", "range": [1, 64]}}),
    "long": entry("Long", {"x": floats("n")}, MANY),
    "pools": entry("Pools", {"x": floats(1, 2, "n")}, dims({"n": {"min": 4, "max": 16, "opt": 8}})),
    "divides": entry("Divides", {"x": floats("n", 4)}, MANY),
    "fixed": entry("Fixed", {"x": floats("n")}, dims({"n": {"min": 1, "max": 64, "opt": 8}})),
}
LINE = {text.strip(): number for number, text in enumerate(MODELS.splitlines(), 1)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One build of all these entries that keeps going."""
    return build_in(tmp_path_factory.mktemp("guard_builds"), MODELS, ENTRIES, keep_going=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        pytest.param(
            "branches",
            [f"depends on the values of a tensor at zoo.py:{LINE['if x.sum() > 0:']}", "use torch.cond or torch.where"],
            id="a16-branch-on-values",
        ),
        pytest.param(
            "sizes",
            [f"depends on the values of a tensor at zoo.py:{LINE['return torch.zeros(int(x.max()))']}", "torch._check"],
            id="a16-size-from-values",
        ),
        pytest.param(
            "adds",
            ["The values of b = y.shape[0] and a = x.shape[0] must always be equal", "take one name in the manifest"],
            id="a04-two-names",
        ),
        pytest.param(
            "adds_apart",
            [f"at zoo.py:{LINE['return x + y']}", "must match the size", "take one name in the manifest"],
            id="a04-two-names-two-sizes",
        ),
        pytest.param(
            "counts",
            ["'n' is declared as a range, but torch.export's trace holds for 32 only", "give it one"],
            id="a09-int-that-counts",
        ),
        pytest.param(
            "long",
            ["the model treats the sizes of 'n' apart", "needs x.shape[0] 11..64", "`ranges: [{min, max}, ...]`"],
            id="branch-on-a-size",
        ),
        pytest.param(
            "pools",
            ["dim 'n' is declared 4..16, but the model fixes x.shape[2] to 8", "give it one size"],
            id="a03-size-that-the-compiler-fixes",
        ),
        pytest.param(
            "fixed",
            ["'n' is declared as a range, but torch.export's trace holds for 8 only", "give it one size"],
            id="size-that-is-fixed",
        ),
    ],
)
def test_what_a_model_does_not_take_is_one_line_with_its_place_and_a_hint(
    built: Result, name: str, parts: list[str]
) -> None:
    (message,) = [text for variant, text in built.failures.items() if variant.startswith(f"{name}/")]
    assert "\n" not in message
    for part in (name, *parts):
        assert part in message


@pytest.mark.slow
def test_a16_the_other_entries_are_built_and_the_failures_reported(built: Result) -> None:
    assert {variant.partition("/")[0] for variant in built.failures} == ENTRIES.keys() - {"good", "divides"}
    with load(built.path, mode="strict", source="never") as session:
        assert sorted(session) == ["divides", "good"]


@pytest.mark.slow
def test_a16_the_command_line_says_it_in_lines_and_exits_with_1(tmp_path: Path) -> None:
    manifest = write_zoo(tmp_path, MODELS, {"branches": ENTRIES["branches"]})
    done = subprocess.run(
        [sys.executable, "-m", "aotpack", "build", str(manifest), "-o", str(tmp_path / "out"), "-q"],
        env={**os.environ, "AOTPACK_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    problem, hint = done.stderr.splitlines()
    assert problem.startswith(
        "error: branches/n1_64/cpu: a branch or size depends on the values of a tensor at zoo.py:"
    )
    assert hint.startswith("hint: use torch.cond")
    assert not (tmp_path / "out").exists()


def test_a05_an_example_outside_the_range_is_an_error_of_the_manifest(tmp_path: Path) -> None:
    point = dims({"n": {"min": 1, "max": 8, "opt": 9}})
    manifest = write_zoo(tmp_path, MODELS, {"good": entry("Good", {"x": floats("n")}, point)})
    with pytest.raises(ManifestError, match="opt 9 is outside the range, 1 to 8") as error:
        read_manifest(manifest)
    (problem,) = error.value.problems
    assert problem.path == "entries.good.points[0].dims.n.opt"
    assert '"opt": 9' in manifest.read_text().splitlines()[problem.line - 1]
