"""What was built with no GPU is what eager is on one: operators of every kind (tests/gpu/cross.yaml), by entry.

`AOTPACK_GPU_BUNDLES` may name a folder with a `cross` that was brought; else it is built here as if no GPU was there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from aotpack.build import build
from aotpack.manifest import read_manifest
from aotpack.verify import verify_bundle

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parent
ENTRIES = (
    "attention", "attention32", "attention_named", "buffers", "chosen", "cond", "convolutions", "custom", "embeddings",
    "float8", "kernel", "loops", "order", "products", "random", "scaled", "shimmed", "translates",
)  # fmt: skip
REFUSED = {
    "asks": "does otherwise on a GPU than on a CPU",
    "branches": "does otherwise on a GPU than on a CPU",
    "casts": "does otherwise on a GPU than on a CPU",
    "recurrent": "its lstm is cuDNN's on a GPU",
    "stays": "returns a tensor in host memory when it is on a GPU",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    brought = os.environ.get("AOTPACK_GPU_BUNDLES")
    path = Path(brought, "cross") if brought else Path()
    failures: dict[str, str] = {}
    if not brought or not path.exists():
        os.environ.setdefault("AOTPACK_ALLOW", "cross")
        out = tmp_path_factory.mktemp("cross") / "out"
        built = build(read_manifest(FOLDER / "cross.yaml"), out, across=True, keep_going=True)
        path, failures = built.path, built.failures
    verified, skipped = verify_bundle(str(path), FOLDER)
    assert not skipped
    return {"verified": verified, "failures": failures}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_variant_is_what_eager_is(seen: dict[str, Any], entry: str) -> None:
    ours = {name: found for name, found in seen["verified"].items() if name.startswith(f"{entry}/")}
    assert len(ours) == 2  # the variant and its program
    assert not {name: found for name, found in ours.items() if isinstance(found, str)}


@pytest.mark.parametrize("entry", sorted(REFUSED))
def test_what_cannot_be_built_across_says_why(seen: dict[str, Any], entry: str) -> None:
    if not seen["failures"]:
        pytest.skip("the bundle was brought")
    (reason,) = [why for name, why in seen["failures"].items() if name.startswith(f"{entry}/")]
    assert REFUSED[entry] in reason
