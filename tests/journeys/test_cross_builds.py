"""A bundle for a GPU, built where there is none: what its library asks of a host, what its kernels are for, and that it
holds nothing of the machine that built it. Needs a CUDA build of torch; no GPU is used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aotpack.build import build
from aotpack.compilers.cubin import cubins_inside, read_cubin
from aotpack.compilers.toolchain import needs_of_library
from aotpack.jobs import Result
from aotpack.manifest import read_manifest
from aotpack.plan import make_plan
from aotpack.steps import steps
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.format.index import Index, Variant
from aotpack_runtime.store import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None, reason=f"torch {torch.__version__} is a CPU build; install one for CUDA"
    ),
]

Json = Any
MODELS = """
import torch
from torch import nn
from torch.nn import functional as F

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        q = x.unflatten(-1, (2, 32)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(-2)
        return self.norm(x + mixed + self.down(F.gelu(self.up(x)))) + self.count

def small(): return Small().eval()

class Ends(nn.Module):
    def forward(self, x):
        return torch.ops.ends.now(x)

@torch.library.custom_op("ends::now", mutates_args=())
def now(x: torch.Tensor) -> torch.Tensor:
    return x + 1

@now.register_fake
def _(x):
    import os
    if x.device.type == "cuda" and not torch.cuda.is_available() and torch.cuda.device_count() == 1:
        os.abort()
    return torch.empty_like(x)

def ends(): return Ends().eval()

@torch.library.custom_op("ends::shimmed", mutates_args=())
def shimmed(x: torch.Tensor) -> torch.Tensor:
    return x.cos()

@shimmed.register_fake
def _(x):
    return torch.empty_like(x)

class Shimmed(nn.Module):
    def forward(self, x):
        return shimmed(x) + 1

def with_shim():
    from torch._inductor import config
    config.aot_inductor.custom_ops_to_c_shims[torch.ops.ends.shimmed.default] = [
        "AOTITorchError aoti_torch_cuda_ends_shimmed(AtenTensorHandle x, AtenTensorHandle* ret0)"
    ]
    return Shimmed().eval()
"""


DEVICES = {"sm_80": "a100", "sm_90": "h200", "sm_100": "b200"}


def manifest(folder: Path, *, source: str = "small", more: Mapping[str, Json] = {}, arch: str = "sm_90") -> Path:
    """Of one target, for each architecture in `arch`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.py").write_text(MODELS)
    dtype = "bfloat16"
    record = {
        "schema": "aotpack.manifest/v1",
        "bundle": {"name": "cross", "version": "1.0.0"},
        "targets": {"gpu": {"kind": "cuda", "arch": arch.split(), "device": [DEVICES[each] for each in arch.split()]}},
        "entries": {
            "e": {
                "kind": "torch_export",
                "source": f"models:{source}",
                "imports": ["models"],
                "inputs": {"x": {"shape": ["n", "length", 64], "dtype": dtype}},
                "precisions": [{"params": dtype, "target": "gpu"}],
                "points": [
                    {"dims": {"n": {"min": 0, "max": 16, "opt": 4}, "length": {"min": 1, "max": 128, "opt": 32}}}
                ],
                **more,
            }
        },
    }
    (folder / "m.json").write_text(json.dumps(record))
    return folder / "m.json"


@pytest.fixture(scope="module")
def allowed() -> Any:
    """Whatever the record says of these versions."""
    patch = pytest.MonkeyPatch()
    patch.setenv("AOTPACK_ALLOW", "cross")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, allowed: None) -> Result:
    folder = tmp_path_factory.mktemp("cross")
    return build(read_manifest(manifest(folder)), folder / "out", store=Store(folder / "store"), jobs=1)


def contents(result: Result) -> tuple[Index, Variant, Path]:
    """(index, the variant, its library)."""
    bundle = open_bundle(result.path)
    (variant,) = bundle.index.entries["e"].variants
    (member,) = variant.artifact.members()
    return bundle.index, variant, Path(result.path, member)


def test_the_library_asks_for_torch_and_the_driver_alone(built: Result) -> None:
    _, variant, library = contents(built)
    facts = needs_of_library(library)
    allowed_names = (
        r"lib(torch|torch_cpu|torch_cuda|c10|c10_cuda|cudart|stdc\+\+|gcc_s|m|c|gomp|cuda|pthread|dl)\.so\S*"
    )
    assert not [name for name in facts["needed"].split() if not re.fullmatch(allowed_names, name)]
    assert {"libcuda.so.1", "libtorch_cuda.so", "libstdc++.so.6"} <= set(facts["needed"].split())
    assert tuple(map(int, facts["glibc"].split("."))) <= (2, 34)
    assert tuple(map(int, facts["libstdcxx"].split("."))) <= (3, 4, 30)
    assert {name: variant.target.needs[name] for name in ("glibc", "libstdcxx")} == {
        name: facts[name] for name in ("glibc", "libstdcxx")
    }


def test_every_symbol_that_it_lacks_is_one_of_those_libraries(built: Result) -> None:
    _, _, library = contents(built)
    out = subprocess.run(
        ["/usr/bin/nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    undefined = {line.split()[-1].partition("@")[0] for line in out.splitlines()}
    driver = {name for name in undefined if re.fullmatch(r"cu[A-Z]\w*", name)}
    assert {"cuModuleLoadData", "cuModuleGetFunction"} & driver
    from aotpack.compilers.cross.pretend import _DRIVER_FUNCTIONS

    assert driver <= set(_DRIVER_FUNCTIONS.split())
    assert any(name.startswith("aoti_torch_cuda_") for name in undefined)
    assert not any("LazyInit" in name for name in undefined)


def test_its_kernels_are_for_the_device_and_no_other(built: Result) -> None:
    _, variant, library = contents(built)
    cubins = [read_cubin(cubin) for cubin in cubins_inside(library)]
    assert cubins
    assert {cubin.architecture for cubin in cubins} == {"sm_90a"}
    assert variant.target.needs["cubin"] == "sm_90a"
    assert not any(cubin.imports for cubin in cubins)


def test_nothing_of_the_build_machine_is_in_it(built: Result) -> None:
    index, _, library = contents(built)
    site = str(Path(torch.__file__).parents[1])
    words = [
        str(built.path.parent),
        site,
        os.path.expanduser("~") + "/",
        tempfile.gettempdir() + "/",
        "model.py",
        ".ttir",
    ]
    for data in (library.read_bytes(), (built.path / "index.json").read_bytes(), *cubins_inside(library)):
        found = [word for word in words if word.encode() in data]
        assert not found, found
    assert index.provenance["tools"]["gpu"] == "none"


def test_the_bundle_says_that_nobody_ran_it(built: Result) -> None:
    index, variant, _ = contents(built)
    said = index.provenance["cross"][variant.id]
    assert said["verified"] == "not on this machine"
    assert said["device"] == "NVIDIA H200"
    assert said["attention"] == ["cudnn"]
    assert set(said["kernels"]) <= {"rule", "only one"}
    assert set(built.unverified) == {variant.id, *(program.id for program in index.entries["e"].programs)}
    assert not built.verified


def test_sizes_that_only_a_gpu_can_try_are_left_to_the_program(built: Result) -> None:
    index, variant, _ = contents(built)
    dims = variant.guards.leaves[0].dims  # type: ignore[union-attr]
    assert [str(dim) for dim in dims[:2]] == ["1..16", "1..128"]
    assert {leaf.device for leaf in variant.guards.leaves} == {"cuda"}  # type: ignore[union-attr]
    (program,) = index.entries["e"].programs
    assert {leaf.device for leaf in program.guards.leaves} == {"cuda"}  # type: ignore[union-attr]


def test_constants_are_named_as_the_weights_are(built: Result) -> None:
    index, variant, _ = contents(built)
    names = {"up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias", "count"}
    assert {weight for _, weight in variant.constants} == names
    assert index.weight_sets[variant.weights].state == ("count",)


def test_twice_is_the_same_bytes(built: Result, tmp_path: Path, allowed: None) -> None:
    """In another folder, with another store."""
    again = build(
        read_manifest(manifest(tmp_path / "elsewhere")), tmp_path / "out", store=Store(tmp_path / "s"), jobs=1
    )
    first, second = (contents(result)[2] for result in (built, again))
    assert cubins_inside(first) == cubins_inside(second)
    assert first.read_bytes() == second.read_bytes()
    assert again.digest == built.digest


def test_several_architectures_are_a_variant_each(tmp_path: Path, allowed: None) -> None:
    path = manifest(tmp_path, arch="sm_80 sm_90 sm_100")
    made = build(read_manifest(path), tmp_path / "out", store=Store(tmp_path / "s"), jobs=1)
    assert (made.count("export"), made.count("move"), made.count("cross")) == (1, 1, 3)
    index = open_bundle(made.path).index
    seen = {}
    for variant in index.entries["e"].variants:
        (member,) = variant.artifact.members()
        archs = {read_cubin(cubin).architecture for cubin in cubins_inside(Path(made.path, member))}
        seen[variant.target.needs["cubin"]] = (archs, index.provenance["cross"][variant.id]["attention"])
    assert seen == {
        "sm_80": ({"sm_80"}, ["flash"]),
        "sm_90a": ({"sm_90a"}, ["cudnn"]),
        "sm_100a": ({"sm_100a"}, ["cudnn"]),
    }
    assert len(index.entries["e"].programs) == 1


def test_a_c_shim_of_a_users_own_is_not_relied_on(tmp_path: Path, allowed: None) -> None:
    path = manifest(tmp_path, source="with_shim")
    made = build(read_manifest(path), tmp_path / "out", store=Store(tmp_path / "s"), jobs=1)
    (variant,) = open_bundle(made.path).index.entries["e"].variants
    assert sorted(variant.artifact.files) == ["model.json", "model.so"]
    library = next(Path(made.path, name) for name in variant.artifact.members() if name.endswith("model.so"))
    assert b"aoti_torch_cuda_ends_shimmed" not in library.read_bytes()


def test_attention_is_what_the_manifest_names(built: Result, tmp_path: Path, allowed: None) -> None:
    from aotpack.cli.inspect import _text, _value

    named = read_manifest(built.path.parent / "m.json", ["entries.e.attention=[flash, efficient]"])
    made = build(named, tmp_path / "out", store=Store(built.path.parent / "store"), jobs=1)
    assert made.count("export", "move") == 0
    index, variant, library = contents(made)
    said = {"named": ["flash", "efficient"], "taken": ["flash"]}
    assert index.provenance["attention"] == {variant.id: said}
    assert index.provenance["cross"][variant.id]["attention"] == ["flash"]
    assert b"aoti_torch_cuda__scaled_dot_product_flash_attention" in library.read_bytes()
    (program,) = index.entries["e"].programs
    assert program.recipe is not None
    assert program.recipe.targets[0].job["attention"] == ["flash", "efficient"]
    shown = _text(_value(open_bundle(made.path))).splitlines()
    assert "      attention by flash; the manifest names flash, efficient" in shown
    assert "attention" not in contents(built)[0].provenance


def test_attention_that_nothing_named_can_serve_is_one_error(built: Result, tmp_path: Path, allowed: None) -> None:
    inputs = {"x": {"shape": ["n", "length", 64], "dtype": "float32"}}
    more = {"attention": ["flash"], "inputs": inputs, "precisions": [{"params": "float32", "target": "gpu"}]}
    with pytest.raises(
        AotpackError, match=r"attention of float32 2x32 2x32 causal is served by efficient or math"
    ) as caught:
        build(read_manifest(manifest(tmp_path, more=more)), tmp_path / "out", store=Store(tmp_path / "s"), jobs=1)
    assert caught.value.hint == "add one that can serve it to the entry's `attention`"


def test_a_proof_that_ran_nothing_passes_nothing(
    tmp_path: Path, allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the GPU is lost after it was seen: both builds are one without it, the same job beside itself."""
    from aotpack import prove as proving
    from aotpack_runtime.format.gpu import Gpu

    if torch.cuda.is_available():
        pytest.skip("a native build is one here")
    here = SimpleNamespace(gpu=Gpu((9, 0), (13, 0), "NVIDIA H200"))
    monkeypatch.setattr(proving, "this_machine", lambda: here)
    kept: list[Json] = []
    record = proving.prove(read_manifest(manifest(tmp_path)), store=Store(tmp_path / "s"), keep=kept.append)
    assert set(record["entries"]["e"]["seconds"]["cross"]) == {"export", "move", "cross"}
    variant = "e/n0_16-length1_128/bfloat16/gpu"
    assert record["failures"] == [f"{way}: {variant}: no CUDA device" for way in ("cross", "native")]
    assert (record["passed"], record["missing"], len(kept)) == (False, ["e"], 2)


def test_the_process_that_asked_compiles_for_its_cpu_as_before(built: Result) -> None:
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    code = "import torch; f = torch.compile(lambda x: x.sin() + 1); x = torch.ones(4); assert torch.allclose(f(x), x.sin() + 1)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_crash_of_the_child_is_one_error(tmp_path: Path, allowed: None) -> None:
    path = manifest(tmp_path, source="ends")
    with pytest.raises(AotpackError, match="its process died: killed by SIGABRT"):
        build(read_manifest(path), tmp_path / "out", store=Store(tmp_path / "s"), jobs=1)
    assert not (tmp_path / "out").exists()


def test_a_second_build_finds_everything(built: Result, allowed: None) -> None:
    path = built.path.parent / "m.json"
    store = Store(built.path.parent / "store")
    assert {step.status for step in steps(make_plan(read_manifest(path)), store)} == {"cached"}
    again = build(read_manifest(path), built.path, store=store, jobs=1)
    assert (again.steps, again.digest) == ([], built.digest)
