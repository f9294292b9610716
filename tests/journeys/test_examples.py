"""The servers of `examples/`, as a client meets them: ready, an answer, and a reason for what cannot be answered. What the
README shows, run as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

pytest.importorskip("torch", reason="real builds")

import torch

from aotpack.build import build
from aotpack.manifest import read_manifest
from aotpack_runtime.store import Store
from tests.support.building import QUICK, ROOT, build_zoo, entry, zoo_module

Json = Any
REPO = Path(__file__).parents[2]
MODELS = """
import torch


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, 8)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask.to(torch.float32).unsqueeze(-1)
        return (self.table(input_ids) * weights).sum(1) / weights.sum(1)


def encoder():
    torch.manual_seed(0)
    return Encoder().eval()
"""
INPUTS = {
    "input_ids": {"shape": ["batch", "seq"], "dtype": "int64", "fill": {"randint": [0, 64]}},
    "attention_mask": {"shape": ["batch", "seq"], "dtype": "int64", "fill": "ones"},
}


@pytest.fixture(scope="module")
def bundle() -> Path:
    ranged = {"batch": {"min": 1, "max": 8}, "seq": {"min": 1, "max": 32}}
    return build_zoo("examples", MODELS, {"encoder": entry("encoder", INPUTS, [{"dims": ranged}])})


@pytest.fixture(scope="module", params=["serve.py", "serve_arrays.py"])
def address(request: pytest.FixtureRequest, bundle: Path) -> Iterator[str]:
    """Where the server listens, on a port that was free."""
    server = subprocess.Popen(
        [sys.executable, REPO / "examples" / request.param, bundle, "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(REPO / "runtime")}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        match = re.search(r"on (127\.0\.0\.1:[1-9]\d*)$", said.strip())
        assert match, said
        yield f"http://{match[1]}"
    finally:
        server.terminate()
        server.communicate(timeout=60)


def fetched(url: str, data: bytes | None = None) -> tuple[int, Json]:
    try:
        with urllib.request.urlopen(url, data, timeout=60) as answer:  # noqa: S310 - our own server
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_server_is_ready_and_answers_what_eager_does(address: str, bundle: Path) -> None:
    code, status = fetched(f"{address}/ready")
    assert (code, status["ready"], status["verdict"]) == (200, True, "fits")
    rows = [[5, 6, 7], [8, 9, 63]]
    code, answer = fetched(f"{address}/encode", json.dumps({"input_ids": rows}).encode())
    ids = torch.tensor(rows)
    wanted = zoo_module(bundle).encoder()(ids, torch.ones_like(ids))
    assert code == 200
    torch.testing.assert_close(torch.tensor(answer["embedding"]), wanted)


@pytest.mark.parametrize(
    "body",
    [b"nope", b"{}", b"[]", b'{"input_ids": 5}', b'{"input_ids": [[1, 2], [3]]}', b'{"input_ids": [["a"]]}',
     b'{"input_ids": []}', b'{"input_ids": [[99]]}'],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_told_so_and_the_next_is_served(address: str, body: bytes) -> None:
    code, answer = fetched(f"{address}/encode", body)
    assert code == 400
    assert re.match(r"\w+: .", answer["error"])
    assert fetched(f"{address}/encode", b'{"input_ids": [[1]]}')[0] == 200


# -------------------------------------------------------------------------------------------------------- the README


def blocks(language: str) -> list[str]:
    """The README's blocks of code in `language`, in its order."""
    return re.findall(rf"```{language}\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def readme() -> Path:
    """A folder with the README's manifest and model, and the bundle that they give, as its commands have it."""
    folder = ROOT / "readme"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(ROOT / "readme.lock"):
        for name, text in (("manifest.yaml", blocks("yaml")[0]), ("model.py", blocks("python")[0])):
            if not (folder / name).exists() or (folder / name).read_text() != text:
                (folder / name).write_text(text)
        manifest = read_manifest(folder / "manifest.yaml", [f"entries.encoder.inductor={json.dumps(QUICK)}"])
        build(manifest, folder / "dist" / "demo-0.1.0", store=Store(ROOT / "store"))
    return folder


@pytest.mark.parametrize(
    ("number", "given", "said"),
    [
        (1, "import torch; new = torch.zeros(8, 256)", r"miss: .*expected 1\.\.256, got 300\nTrue\n"),
        (2, "bits = bytes(8 * 256 * 2)", ""),
    ],
)
def test_the_readmes_servers_run_on_the_readmes_model(readme: Path, number: int, given: str, said: str) -> None:
    """`given` is what a block leaves to its reader."""
    done = subprocess.run(
        [sys.executable, "-c", f"{given}\n{blocks('python')[number]}"],
        cwd=readme, env={**os.environ, "PYTHONPATH": str(REPO / "runtime")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(said, done.stdout), done.stdout
