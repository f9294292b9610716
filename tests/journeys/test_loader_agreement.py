"""The private runner, the C interface without the GIL and torch's public loader are three ways to one answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import aotpack_runtime as apr
from aotpack_runtime.loaders import aoti
from tests.support.building import build_zoo, entry, zoo_module

MODELS = """
import torch


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = torch.nn.Linear(16, 64), torch.nn.Linear(64, 8)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        y = self.outer(torch.relu(self.inner(x))) * self.scale
        return y, y.sum(0)


def mlp():
    return Mlp().eval()
"""


@pytest.fixture(scope="module")
def bundle() -> Path:
    inputs = {"x": {"shape": ["batch", 16], "dtype": "float32"}}
    return build_zoo(
        "loader_agreement", MODELS, {"mlp": entry("mlp", inputs, [{"dims": {"batch": {"min": 1, "max": 64}}}])}
    )


def loaded(bundle: Path) -> Any:
    session = apr.load(bundle, mode="strict")
    session.warmup()
    (executable,) = session["mlp"]._executables.values()
    return session, executable


def test_the_c_interface_agrees_with_the_runner_bit_for_bit(bundle: Path) -> None:
    _session, executable = loaded(bundle)
    executable._leave_gil()
    assert executable._container is not None
    for batch in (1, 2, 33, 64):
        x = torch.randn(batch, 16)
        for mine, theirs in zip(executable._container.run([x]), executable._runner.run([x]), strict=True):
            assert torch.equal(mine, theirs)


def test_the_public_loader_agrees_with_the_runner_bit_for_bit(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _executable = loaded(bundle)
    monkeypatch.setattr(aoti, "RUNNER_GATE", ((99, 0), (99, 1)))
    back_session, back = loaded(bundle)
    assert type(back._runner).__name__ == "PublicRunner"
    x = torch.randn(5, 16)
    for mine, theirs in zip(back_session["mlp"](x), session["mlp"](x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("way", ["runner", "container"])
def test_new_weights_reach_every_way_to_run(bundle: Path, way: str) -> None:
    session, executable = loaded(bundle)
    if way == "container":
        executable._leave_gil()
    model = zoo_module(bundle).mlp()
    new = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    for _ in range(3):
        session.update_weights(new)
    model.load_state_dict(new)
    x = torch.randn(7, 16)
    for mine, eager in zip(session["mlp"](x), model(x), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


def test_a_call_that_takes_long_is_made_without_the_gil(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, executable = loaded(bundle)
    monkeypatch.setattr(aoti, "GIL_LIMIT_NS", 0)
    x = torch.randn(7, 16)
    first = session["mlp"](x)
    assert executable.run == executable._container.run
    for mine, before in zip(session["mlp"](x), first, strict=True):
        assert torch.equal(mine, before)


VERIFY_KEY = """
import sys
import os
import subprocess
import sys
from pathlib import Path
from aotpack.verify_jobs import verify_key
from aotpack_runtime.format.index_json import parse
index = parse(Path(sys.argv[1], "index.json").read_bytes())
print(verify_key(index, "mlp", index.entries["mlp"].variants[0]))
"""


def test_what_was_verified_is_known_again_by_every_process(bundle: Path) -> None:
    keys = {
        subprocess.run(
            [sys.executable, "-c", VERIFY_KEY, str(bundle)], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2", "3", "4")
    }  # fmt: skip
    assert len(keys) == 1
