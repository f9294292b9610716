"""Build a zoo of small real models once, and share it among tests and test processes.

A zoo is a module of models (text) and a manifest (a dict). It is built with the product's own `build` into a folder
that outlives the test run (`.test-cache`, not in git): the store makes a second run of unchanged models take no
compile, and a first run takes one compile a variant.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from aotpack.build import build
from aotpack.jobs import Result
from aotpack.manifest import read_manifest
from aotpack_runtime.store import Store

ROOT = Path(os.environ.get("AOTPACK_TEST_CACHE") or Path(__file__).resolve().parents[2] / ".test-cache")
QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0"}
"""Inductor options for tests: the wrapper is compiled in half the time, the kernels as ever."""


def entry(source: str, inputs: Mapping[str, Any], points: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    """An entry of a zoo's manifest; `source` is the name of a builder function in the zoo's module."""
    return {
        "kind": "torch_export",
        "source": f"zoo:{source}",
        "inputs": dict(inputs),
        "points": points or [{"dims": {}}],
        "inductor": QUICK,
        **more,
    }


def write_zoo(folder: Path, models: str, entries: Mapping[str, Any], **more: Any) -> Path:
    """Write `zoo.py` and its manifest (JSON is YAML) to `folder`; the manifest's path. What is unchanged is left."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "schema": "aotpack.manifest/v1",
        "bundle": {"name": folder.name.replace("_", "-"), "version": "1.0.0"},
        "targets": {"cpu": {"kind": "cpu"}},
        "entries": dict(entries),
        **more,
    }
    for name, text in (("zoo.py", models), ("manifest.yaml", json.dumps(manifest, indent=1))):
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return folder / "manifest.yaml"


def build_zoo(name: str, models: str, entries: Mapping[str, Any], *, jobs: int = 2, **more: Any) -> Path:
    """The bundle of a zoo, built now or by another test process before; its models lie in `zoo.py` beside it."""
    folder = ROOT / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(ROOT / f"{name}.lock"):
        return build_in(folder, models, entries, jobs=jobs, **more).path


def build_in(
    folder: Path, models: str, entries: Mapping[str, Any], *, jobs: int = 2, keep_going: bool = False, **more: Any
) -> Result:
    """Build a zoo in `folder` with the store all tests share; what the build said."""
    manifest = write_zoo(folder, models, entries, **more)
    return build(
        read_manifest(manifest), folder / "bundle", jobs=jobs, keep_going=keep_going, store=Store(ROOT / "store")
    )


def zoo_module(bundle: Path) -> Any:
    """The zoo's own module, imported fresh under a name of its own: eager, to compare with."""
    import importlib.util

    path = bundle.parent / "zoo.py"
    spec = importlib.util.spec_from_file_location(f"zoo_{bundle.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
