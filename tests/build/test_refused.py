"""Sizes that eager itself refuses on the device: an error where the manifest declares them, said where they were only
tried, and nothing else is hidden by them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are built and verified with torch")
import torch
from torch import nn

from aotpack.build import build
from aotpack.compilers.probing import Probe, Trial
from aotpack.declared import only_tried
from aotpack.manifest import read_manifest
from aotpack.manifest_values import Range
from aotpack.plan import make_plan
from aotpack.torch_assembly import _tried
from aotpack.verify import Bundle, verify_bundle
from aotpack_runtime.errors import CompileError
from aotpack_runtime.store import Store

Json = Any

MODEL = """
import os
import torch
from torch import nn

class Refuses(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        if "REFUSED" in os.environ and x.shape[0] == int(os.environ["REFUSED"]):
            raise AttributeError("'NoneType' object has no attribute 'transpose'")
        return self.layer(x) + float(os.environ.get("ADDED", 0))

def refuses(): return Refuses().eval()
"""


# ---------------------------------------------------------------------------------------------- what is declared


def plan_of(*dims: dict[str, Range]) -> Any:
    return SimpleNamespace(variants=[SimpleNamespace(dims=each) for each in dims], device="cuda")


LEAVES = [{"path": "x", "dtype": "float32", "shape": ["n", "2*m+1", 8]}, {"path": "k", "low": 1, "high": 9}]
POINTS = ({"n": Range(1, 16, 4), "m": Range(2, 2, 2)}, {"n": Range(4, None, 8), "m": Range(0, 3, 1)})


@pytest.mark.parametrize(
    ("example", "tried"),
    [
        ([[1, 5, 8], 3], False),
        ([[16, 5, 8], 9], False),
        ([[99, 1, 8], 3], False),
        ([[0, 5, 8], 3], True),  # no point has n = 0
        ([[17, 5, 8], 3], False),  # the second point has no end
        ([[3, 1, 8], 3], True),  # m = 0 is of the second point, n = 3 of the first
        ([[4, 4, 8], 3], True),  # no m gives 4
        ([[4, 5, 1], 3], True),  # a size that the manifest fixes
        ([[4, 5, 8], 0], True),
    ],
)
def test_an_example_is_declared_if_a_point_has_all_of_its_sizes(example: Json, *, tried: bool) -> None:
    program = {"leaves": LEAVES, "examples": [[[4, 5, 8], 3], example]}
    assert only_tried(plan_of(*POINTS), program) == ([example] if tried else [])


def test_what_a_program_was_traced_with_was_not_only_tried() -> None:
    assert only_tried(plan_of(*POINTS), {"leaves": LEAVES, "examples": [[[2, 5, 9], 3]]}) == []


def test_a_gpu_may_refuse_what_was_tried_elsewhere_and_a_cpu_may_not() -> None:
    export = {"programs": [{"leaves": LEAVES, "examples": [[[4, 5, 8], 3], [[0, 5, 8], 3]]}]}
    programs: Any = [SimpleNamespace(id="e/program0/gpu")]
    assert _tried(plan_of(*POINTS), export, programs) == {"tried": {"e/program0/gpu": [[[0, 5, 8], 3]]}}
    on_cpu: Any = SimpleNamespace(device="cpu")
    assert _tried(on_cpu, export, programs) == {}


# ------------------------------------------------------------------------------------------------- verification


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one model, whose program was let take 0."""
    found = tmp_path_factory.mktemp("refused")
    (found / "refusing.py").write_text(MODEL)
    (found / "m.yaml").write_text("""
schema: aotpack.manifest/v1
bundle: {name: refused, version: 1.0.0}
targets: {cpu: {kind: cpu}}
entries:
  e:
    kind: torch_export
    source: "refusing:refuses"
    inputs: {x: {shape: [n, 8], dtype: float32}}
    points: [{dims: {n: {min: 1, max: 16, opt: 4}}}]
""")
    build(read_manifest(found / "m.yaml"), found / "out", store=Store(found / "store"), jobs=1)
    return found


VARIANT, PROGRAM = "e/n1_16/cpu", "e/program0"


def opened(folder: Path, *, tried: bool = True) -> Bundle:
    """The bundle as one for a GPU says which sizes of its program were only tried."""
    bundle = Bundle(str(folder / "out"), folder)
    record = bundle.session("cpu")["e"].record
    plan: Any
    (plan,) = make_plan(read_manifest(folder / "m.yaml")).entries
    (program,) = record.programs
    sizes: Any = program.examples
    assert sizes == (((4, 8),), ((0, 8),))
    leaves = [{"path": "x", "dtype": "float32", "shape": ["n", 8]}]
    record_of = {"leaves": leaves, "examples": [[list(example[0])] for example in sizes]}
    examples = only_tried(plan, record_of)
    assert examples == [[[0, 8]]]
    let_refuse(bundle, examples if tried else [])
    return bundle


def let_refuse(bundle: Bundle, examples: list[Json]) -> None:
    settings: Any = bundle.session("cpu")["e"].record.verify
    settings["tried"] = {PROGRAM: examples}


def test_a_size_that_was_only_tried_may_be_refused_and_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = opened(folder)
    whole = bundle.verify("e", PROGRAM)
    monkeypatch.setenv("REFUSED", "0")
    seen = bundle.verify("e", PROGRAM)
    assert seen.refused == ([(0, 8)],)
    assert (seen.cases, whole.refused) == (whole.cases - 1, ())
    assert bundle.verify("e", VARIANT).refused == ()


@pytest.mark.parametrize(
    ("variant", "refused", "tried"),
    [(PROGRAM, 0, False), (PROGRAM, 4, True), (VARIANT, 1, True), (VARIANT, 16, True)],
)
def test_a_size_that_the_manifest_declares_must_not_be_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variant: str, refused: int, *, tried: bool
) -> None:
    monkeypatch.setenv("REFUSED", str(refused))
    with pytest.raises(
        CompileError, match="eager itself fails at these sizes: AttributeError: 'NoneType' object has no"
    ):
        opened(folder, tried=tried).verify("e", variant)


def test_a_wrong_program_is_wrong_whatever_eager_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "0")
    monkeypatch.setenv("ADDED", "1")
    with pytest.raises(CompileError, match="disagrees with eager at sizes"):
        opened(folder).verify("e", PROGRAM)


def test_a_refusal_that_takes_the_device_down_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setenv("REFUSED", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(CompileError, match="eager itself fails at these sizes"):
        opened(folder).verify("e", PROGRAM)


def test_want_of_memory_is_no_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bundle = opened(folder)
    bundle.verify("e", PROGRAM)
    reference: Any
    (reference,) = bundle._references.values()
    monkeypatch.setattr(type(reference._module), "forward", full)
    let_refuse(bundle, [[[4, 8]], [[0, 8]]])
    with pytest.raises(CompileError, match="OutOfMemoryError"):
        bundle.verify("e", PROGRAM)


def test_the_command_says_what_eager_refuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aotpack.cli import verify as command

    def seen(*args: Any) -> Any:
        bundle = opened(folder)
        return {name: bundle.verify("e", name) for name in (VARIANT, PROGRAM)}, {}

    monkeypatch.setenv("REFUSED", "0")
    monkeypatch.setattr("aotpack.verify.verify_bundle", seen)
    assert command.command(folder / "out", folder, as_json=False, debug=False) == 0
    assert "eager itself refuses sizes [(0, 8)]" in capsys.readouterr().out


def test_on_a_cpu_every_size_of_a_program_is_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "0")
    verified, _ = verify_bundle(str(folder / "out"), folder)
    assert "eager itself fails at these sizes" in str(verified[PROGRAM])


# ------------------------------------------------------------------------------------------------------ probing


def test_a_size_that_eager_refuses_on_its_own_device_is_not_let_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is tried in host memory; what is let in is asked of the device, whose part a module of its own plays
    here."""
    from aotpack.compilers.exported import compile as export
    from aotpack.torch_jobs import source_job

    original = Probe._on_its_place

    def elsewhere(probe: Probe, program: Any) -> Trial:
        trial, there = original(probe, program), original(probe, program)

        class Refusing(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if x.shape[0] == 0:
                    raise AttributeError("'NoneType' object has no attribute 'transpose'")
                result: torch.Tensor = probe._module(x)
                return result

        there._module = Refusing()
        trial.there = there
        return trial

    plan: Any
    (plan,) = make_plan(read_manifest(folder / "m.yaml")).entries
    job = source_job(plan, folder).payload
    found = []
    for way in (original, elsewhere):
        monkeypatch.setattr(Probe, "_on_its_place", way)
        (program,) = export(job, Store(tmp_path / "store"))["programs"]
        found.append((program["guards"]["leaves"][0]["dims"][0], program["examples"][1:]))
    assert found == [([0, None], [[[0, 8]]]), ([1, None], [[[1, 8]]])]
