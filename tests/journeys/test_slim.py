"""`aotpack export slim`: what is written runs where no torch is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="bundles are built with torch")

from tests.support.array_cases import array_cases

SERVE = """
import json, sys
import aotpack_runtime as apr

session = apr.load(sys.argv[1])
entry = session["turned"]
x = apr.Array(memoryview(bytearray(b"\\0\\0\\x80\\x3f" * 12)), "float32", (2, 6))
result = entry(x)
try:
    entry(apr.Array(bytes(6 * 4 * 20), "float32", (20, 6)))
    said = "served"
except apr.GuardMiss as error:
    said = str(error)
names = [name for name in ("torch", "numpy") if name in sys.modules]
print(json.dumps([result.tolist(), said, names, session.verdict, sys.path]))
"""


def command(*words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aotpack", *map(str, words)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(the folder, what the command said)."""
    out = tmp_path_factory.mktemp("slim") / "out"
    done = command("export", "slim", array_cases(), out, "--json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_it_serves_where_no_torch_is_installed(slim: tuple[Path, Any]) -> None:
    out, _ = slim
    interpreter = os.path.realpath(sys.executable)  # outside of the environment that holds torch, and without `site`
    done = subprocess.run(
        [interpreter, "-S", "-c", SERVE, out / "bundle"],
        env={"PYTHONPATH": str(out / "python")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values, said, imported, verdict, path = json.loads(done.stdout)
    assert not any("site-packages" in folder for folder in path)
    assert (len(values), len(values[0]), imported, verdict) == (2, 3, [], "fits")
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert "no variant fits this call, and torch, which would run it, is missing" in said


def test_it_holds_the_libraries_that_are_needed_and_no_other_of_torch(slim: tuple[Path, Any]) -> None:
    out, said = slim
    libraries = {path.name for path in (out / "python" / "aotpack_libtorch" / "lib").iterdir()}
    assert {"libtorch_cpu.so", "libc10.so"} <= libraries
    assert not {"libtorch_python.so", "libtorch.so", "libshm.so"} & libraries
    assert not (out / "python" / "torch").exists()
    assert "libc.so.6" in said["host"]
    sizes = {
        str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*.so*") if "bundle" not in path.parts
    }
    assert {name: said["parts"][name] for name in sizes} == sizes
    assert said["bytes"] == sum(said["parts"].values())


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    done = command("export", "slim", array_cases(), tmp_path)
    assert done.returncode == 2
    assert "exists and is not an empty folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
