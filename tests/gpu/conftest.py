"""Bundles of the GPU tests: built here where triton is installed, or brought from a machine without a GPU.

`AOTPACK_GPU_BUNDLES` names a folder that holds `cases`, `llmk`, `sampler`, `bench` and `misses`, built from
tests/gpu/kernels.yaml, manifests/llm_kernels.yaml, manifests/sampler.yaml, bench/kernels.yaml and
tests/gpu/kernel_misses.yaml; what it does not hold (`torch`, which needs
the GPU) is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = {
    "cases": "tests/gpu/kernels.yaml",
    "llmk": "manifests/llm_kernels.yaml",
    "sampler": "manifests/sampler.yaml",
    "bench": "bench/kernels.yaml",
    "misses": "tests/gpu/kernel_misses.yaml",
    "torch": "tests/gpu/torch.yaml",
}


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Path of a bundle by its short name."""
    brought = os.environ.get("AOTPACK_GPU_BUNDLES")
    built: dict[str, str] = {}

    def find(name: str) -> str:
        if brought and Path(brought, name).exists():
            return str(Path(brought, name).absolute())
        if name not in built:
            from aotpack.build import build
            from aotpack.manifest import read_manifest

            out = tmp_path_factory.mktemp("bundles") / name
            built[name] = str(build(read_manifest(ROOT / MANIFESTS[name]), out).path)
        return built[name]

    return find
