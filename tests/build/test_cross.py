"""Builds for a GPU that is not here, as far as any torch can show: records of devices, the plan's way, the gate, the
move of a program, what is chosen, and that nothing of the pretence stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from aotpack.compilers import inductor
from aotpack.compilers.attention import Attentions, attention_for, possible
from aotpack.compilers.cross import gate
from aotpack.compilers.cross.choices import Choices, config_record, kernel_digest
from aotpack.compilers.cross.compile import _require_dtypes as require_dtypes
from aotpack.compilers.cross.compile import constant_names
from aotpack.compilers.cross.lowered import Lowered
from aotpack.compilers.cross.moving import compile as move
from aotpack.compilers.exported import compile as export
from aotpack.devices import DEVICES
from aotpack.manifest import read_manifest
from aotpack.plan import EntryPlan, make_plan
from aotpack.steps import steps
from aotpack.torch_jobs import compile_jobs, move_job, own_names, source_job
from aotpack.torch_tuning import read_picks, write_picks
from aotpack.ways import way_of
from aotpack.workers import Workers
from aotpack_runtime.errors import AotpackError, CompileError, ManifestError, SourceError
from aotpack_runtime.format.gpu import SHARED_BYTES, parse_arch
from aotpack_runtime.store import Store

Json = Any
SERVED_ON = ("a10", "a100", "l4", "l40s", "h100", "h200", "b200", "rtx4090", "rtx5090")

MODELS = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.layer.bias = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.layer(x) * torch.tensor([2.0]).to(x.device) + torch.arange(8, device=x.device)

class Asks(nn.Module):
    def forward(self, x):
        return x.half().float() if x.is_cuda else x + 1

class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)

class Stays(nn.Module):
    def forward(self, x):
        return x + 1, torch.ones(3)

class Mixes(nn.Module):
    def forward(self, x):
        return x + torch.ones(8)

class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t.half().float() if t.is_cuda else t * 2, (x,))

class Decides(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t * 2, (x,))

class Hides(nn.Module):
    def forward(self, x):
        if isinstance(x, torch._subclasses.FakeTensor) and torch.fx.experimental.proxy_tensor.get_proxy_mode() is None:
            raise RuntimeError("it needs values")
        return x + 1

class Exported(nn.Module):
    def forward(self, x):
        if x.is_cuda and not torch.compiler.is_exporting():
            raise RuntimeError("this way is not the one that was exported")
        return x.view(-1) + 1

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(x)[0]

@torch.library.custom_op("moved_models::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)

class Custom(nn.Module):
    def forward(self, x):
        return twice(x.contiguous())

def custom(): return Custom().eval()
def exported(): return Exported().eval()
def recurrent(): return Recurrent().eval()
def branches(): return Branches().eval()
def decides(): return Decides().eval()
def hides(): return Hides().eval()
def plain(): return Plain().eval()
def asks(): return Asks().eval()
def casts(): return Casts().eval()
def stays(): return Stays().eval()
def mixes(): return Mixes().eval()
"""


def manifest(folder: Path, target: str, model: str = "plain", more: str = "", entry: str = "") -> Path:
    (folder / "moved_models.py").write_text(MODELS)
    path = folder / "m.yaml"
    path.write_text(f"""
schema: aotpack.manifest/v1
bundle: {{name: small, version: 1.0.0}}
targets:
  cpu: {{kind: cpu}}
  gpu: {{kind: cuda, {target}}}
{more}
entries:
  e:
    kind: torch_export
    source: "moved_models:{model}"
    inputs: {{x: {{shape: [n, 8], dtype: float32}}}}
    points: [{{dims: {{n: {{min: 1, max: 16, opt: 4}}}}}}]
    {entry}
""")
    return path


def gpu_plan(path: Path) -> EntryPlan:
    (found,) = [e for e in make_plan(read_manifest(path)).entries if isinstance(e, EntryPlan) and e.device == "cuda"]
    return found


# ------------------------------------------------------------------------------------------------------- devices


def test_there_is_a_record_of_every_gpu_that_people_serve_on() -> None:
    assert sorted(DEVICES) == sorted(SERVED_ON)


@pytest.mark.parametrize("name", SERVED_ON)
def test_a_record_is_whole_and_names_its_source(name: str) -> None:
    device = DEVICES[name]
    assert device.source
    assert device.shared_per_block_bytes == SHARED_BYTES[parse_arch(device.arch).capability]
    assert device.shared_per_block_bytes < device.shared_per_multiprocessor_bytes
    assert device.registers_per_multiprocessor == 65536
    assert device.memory_bytes > device.l2_bytes > device.shared_per_multiprocessor_bytes
    properties = device.properties()
    assert (properties["major"], properties["minor"]) == parse_arch(device.arch).capability
    asked = SimpleNamespace(**properties)
    assert asked.multi_processor_count == device.multiprocessors
    assert asked.warp_size == 32


def test_the_record_of_an_h200_is_what_its_driver_says() -> None:
    """As read on one with torch 2.11."""
    found = DEVICES["h200"].properties()
    seen = {"multi_processor_count": 132, "total_memory": 150754820096, "L2_cache_size": 62914560,
            "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472,
            "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048}  # fmt: skip
    assert {name: found[name] for name in seen} == seen


OWN = "devices: {{mine: {{like: h100, multiprocessors: 114, memory: 64GiB}}, other: {{{other}}}}}"
WHOLE = "arch: sm_86, multiprocessors: 60, shared_memory: 100KiB, l2: 4MiB, memory: 16GiB, clock_mhz: 1500, bandwidth_gb_s: 400"


def test_a_manifest_adds_devices_of_its_own(tmp_path: Path) -> None:
    more = OWN.format(other=WHOLE)
    mine = gpu_plan(manifest(tmp_path, "arch: [sm_90], device: mine", more=more)).gpu
    assert mine is not None
    assert (mine.multiprocessors, mine.memory_bytes, mine.l2_bytes) == (114, 64 * 2**30, DEVICES["h100"].l2_bytes)
    other = gpu_plan(manifest(tmp_path, "arch: [sm_86], device: other", more=more)).gpu
    assert other is not None
    assert (other.arch, other.shared_per_block_bytes) == ("sm_86", 101376)


def test_each_architecture_takes_the_device_of_its_own(tmp_path: Path) -> None:
    path = manifest(tmp_path, "arch: [sm_80, sm_90, sm_100], device: [b200, a100]")
    plans = [plan for plan in make_plan(read_manifest(path)).entries if isinstance(plan, EntryPlan) and plan.arch]
    found = {plan.arch: plan.gpu.name if plan.gpu else None for plan in plans}
    assert found == {"sm_100": "NVIDIA B200", "sm_90": None, "sm_80": "NVIDIA A100"}


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("arch: [sm_90], device: h101", "", "targets.gpu.device: unknown device 'h101'; did you mean 'h100'?"),
        ("arch: [sm_90], device: a100", "", "targets.gpu.device: a100 is sm_80, which is not among the target's architectures"),
        ("arch: [sm_90], device: [h100, h100]", "", "targets.gpu.device"),
        ("arch: [sm_90], device: 7", "", "targets.gpu.device: expected text, found the number 7"),
        ("arch: [sm_90], device: x", "devices: {x: {like: h1000}}", "devices.x.like: unknown device 'h1000'; did you mean 'h100'?"),
        ("arch: [sm_90], device: x", "devices: {x: {arch: sm_90}}", "devices.x: a device that is `like` no other needs multiprocessors,"),
        ("arch: [sm_90], device: x", "devices: {x: {like: h100, sms: 3}}", "devices.x: unknown key 'sms'"),
    ],
)  # fmt: skip
def test_a_device_that_is_none_is_an_error_at_its_place(tmp_path: Path, target: str, more: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        read_manifest(manifest(tmp_path, target, more=more))
    assert message in str(caught.value)


# -------------------------------------------------------------------------------------------------- way and gate


def with_record(folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: Json) -> None:
    """The versions of this environment, with a record of them and CUDA headers to be found."""
    torch_version, triton_version = gate.versions()
    record = {"schema": gate.SCHEMA, "torch": torch_version, "triton": triton_version, "arch": "sm_90",
              "gpu": "NVIDIA H200", "passed": True, "whole": True, **changed}  # fmt: skip
    (folder / "record.json").write_text(json.dumps(record))
    found = list(gate.proofs_in(folder))
    monkeypatch.setattr(gate, "proofs", lambda: found)


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a CUDA build of torch, Triton and headers, and no GPU."""
    from aotpack.compilers import toolchain
    from aotpack_runtime.machine import this_machine

    machine = this_machine()
    machine.__dict__.update(devices=("cpu",), gpus=(), torch_cuda="13.0")
    for module in (gate, toolchain):
        monkeypatch.setattr(module, "this_machine", lambda: machine)
    monkeypatch.setattr(gate, "cuda_headers", lambda: Path("/usr"))
    monkeypatch.setattr(gate, "_version", {"torch": "2.11.0", "triton": "3.6.0"}.__getitem__)


def test_versions_with_a_record_are_built_across(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record(tmp_path, monkeypatch)
    way = way_of(gpu_plan(manifest(tmp_path, "arch: [sm_90], device: h200")))
    assert (way.kind, way.reason) == (
        "cross", "for a NVIDIA H200, proven with torch 2.11.0 with triton 3.6.0 on sm_90 (NVIDIA H200)",
    )  # fmt: skip
    other = way_of(gpu_plan(manifest(tmp_path, "arch: [sm_80], device: a100")))
    assert other.kind == "cross"
    assert other.reason.startswith("for a NVIDIA A100, proven on another architecture only: ")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"torch": "2.14.0"}, "torch 2.11.0 with triton 3.6.0 was not proven for cross builds (proven: torch 2.14.0 with triton 3.6.0)"),
        ({"triton": "3.7.0"}, "was not proven for cross builds (proven: torch 2.11.0 with triton 3.7.0)"),
        ({"whole": False}, "was not proven for cross builds (proven: none yet)"),
        ({"passed": False}, "was not proven for cross builds (proven: none yet)"),
        ({"schema": "another"}, "was not proven for cross builds (proven: none yet)"),
    ],
)  # fmt: skip
def test_versions_without_a_record_are_refused_and_the_native_way_is_named(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch, changed: Mapping[str, Json], reason: str
) -> None:
    with_record(tmp_path, monkeypatch, **changed)
    way = way_of(gpu_plan(manifest(tmp_path, "arch: [sm_90], device: h200")))
    assert way.kind == "impossible"
    assert reason in way.reason
    assert way.reason.endswith("build natively on a GPU of sm_90: aotpack build --target gpu")


def test_a_user_may_take_versions_that_nobody_proved(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record(tmp_path, monkeypatch, passed=False)
    monkeypatch.setenv("AOTPACK_ALLOW", "torch,cross")
    way = way_of(gpu_plan(manifest(tmp_path, "arch: [sm_90], device: h200")))
    assert (way.kind, way.reason) == ("cross", "for a NVIDIA H200, not proven: torch 2.11.0, triton 3.6.0")


def test_a_target_without_a_device_waits_for_its_gpu(tmp_path: Path, cuda_torch: None) -> None:
    way = way_of(gpu_plan(manifest(tmp_path, "arch: [sm_90]")))
    assert way.kind == "impossible"
    assert "needs a GPU of capability 9.0; this host has no CUDA device" in way.reason
    assert "a target that names its `device` is built without one" in way.reason


@pytest.mark.parametrize(("arch", "device"), [("sm_75", "turing"), ("sm_90a", "h200")])
def test_an_architecture_that_was_not_looked_at_is_refused(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch, arch: str, device: str
) -> None:
    with_record(tmp_path, monkeypatch)
    more = "devices: {turing: {like: h100, arch: sm_75}}"
    way = way_of(gpu_plan(manifest(tmp_path, f"arch: [{arch}], device: {device}", more=more)))
    assert way.kind == "impossible"
    assert f"cross builds are for plain architectures from sm_80 on, not for {arch}" in way.reason


def test_an_option_that_times_kernels_is_refused(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record(tmp_path, monkeypatch)
    path = manifest(tmp_path, "arch: [sm_90], device: h200", entry="inductor: {max_autotune_gemm: true}")
    way = way_of(gpu_plan(path))
    assert way.kind == "impossible"
    assert "inductor.max_autotune_gemm times kernels while it compiles, which takes a GPU; build natively" in way.reason


def test_torchs_own_form_for_several_architectures_is_refused_for_one_variant_each(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record(tmp_path, monkeypatch)
    option = "inductor: {aot_inductor.emit_multi_arch_kernel: true}"
    way = way_of(gpu_plan(manifest(tmp_path, "arch: [sm_90], device: h200", entry=option)))
    assert way.kind == "impossible"
    assert "takes nvcc, and its PTX is compiled by each server's driver; a variant for each of the" in way.reason


def test_a_cpu_build_of_torch_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build")
    path = manifest(tmp_path, "arch: [sm_90], device: h200")
    way = way_of(gpu_plan(path))
    assert way.kind == "impossible"
    assert "a cross build needs a CUDA build of torch" in way.reason
    shown = [step for step in steps(make_plan(read_manifest(path)), Store(tmp_path / "store")) if step.target == "gpu"]
    assert [(step.kind, step.status, step.way) for step in shown] == [
        ("aoti", "needs a GPU", f"impossible: {way.reason}")
    ]
    from aotpack.build import build

    with pytest.raises(AotpackError) as caught:
        build(read_manifest(path), tmp_path / "out", store=Store(tmp_path / "store"))
    assert caught.value.exit_code == 4
    assert "a cross build needs a CUDA build of torch" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_plan_shows_the_way_of_each_job_and_one_export(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record(tmp_path, monkeypatch)
    path = manifest(tmp_path, "arch: [sm_90], device: h200")
    shown = steps(make_plan(read_manifest(path)), Store(tmp_path / "store"))
    assert [(step.kind, step.target, step.status) for step in shown] == [
        ("export", "cpu", "new"),
        ("aoti", "cpu", "after e/export/cpu"),
        ("move", "gpu", "after e/export/cpu"),
        ("cross", "gpu", "after e/move"),
    ]
    assert [step.way.partition(":")[0] for step in shown] == ["", "", "", "cross"]
    assert not any(step.needs_gpu for step in shown)


def test_architectures_share_an_export_and_a_move(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record(tmp_path, monkeypatch)
    path = manifest(tmp_path, "arch: [sm_80, sm_90, sm_100], device: [b200, a100, h200]", entry="targets: [gpu]")
    shown = steps(make_plan(read_manifest(path)), Store(tmp_path / "store"))
    assert [(step.kind, step.name) for step in shown] == [
        ("export", "e/export/gpu"),
        ("move", "e/move"),
        ("cross", "e/n1_16/gpu/sm_100"),
        ("cross", "e/n1_16/gpu/sm_90"),
        ("cross", "e/n1_16/gpu/sm_80"),
    ]


# ------------------------------------------------------------------------------------------------- move a program


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def moved(folder: Path, store: Store, model: str, entry: str = "") -> tuple[EntryPlan, Json, Json]:
    plan = replace(gpu_plan(manifest(folder, "arch: [sm_90], device: h200", model, entry=entry)), across=True)
    record = json.loads(json.dumps(export(source_job(plan, folder).payload, store)))
    return plan, record, json.loads(json.dumps(move(move_job(plan, record, folder).payload, store)))


def test_an_export_for_a_cpu_is_shared_and_moved(tmp_path: Path, store: Store) -> None:
    plan, before, after = moved(tmp_path, store, "plain")
    (cpu,) = [
        e
        for e in make_plan(read_manifest(tmp_path / "m.yaml")).entries
        if isinstance(e, EntryPlan) and e.device == "cpu"
    ]
    assert source_job(plan, tmp_path).key == source_job(cpu, tmp_path).key
    (program,) = after["programs"]
    assert {leaf["device"] for leaf in program["guards"]["leaves"]} == {"cuda"}
    assert {leaf["device"] for leaf in program["leaves"]} == {"cuda"}
    assert program["origin"] == before["programs"][0]["file"] != program["file"]
    assert after["weights"] == before["weights"]
    assert after["program_of_variant"] == {"e/n1_16/cpu": 0}
    assert own_names(plan, after)["program_of_variant"] == {"e/n1_16/gpu": 0}
    from aotpack_runtime.loaders.programs import read_program

    graph = read_program(store.object(program["file"]["sha256"])).graph_module
    places = {
        str(value.device)
        for node in graph.graph.nodes
        for value in [node.meta.get("val")]
        if isinstance(value, torch.Tensor)
    }
    assert places == {"cuda:0"}
    text = graph.code
    assert "cpu" not in text
    again = json.loads(json.dumps(move(move_job(plan, before, tmp_path).payload, store)))
    assert again == after


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("asks", "does otherwise on a GPU than on a CPU"),
        ("casts", "does otherwise on a GPU than on a CPU"),
        ("stays", "returns a tensor in host memory when it is on a GPU (result 1)"),
        ("mixes", "fails on a GPU"),
        ("branches", "does otherwise on a GPU than on a CPU"),
        ("hides", "what it does on a GPU cannot be looked at without values: RuntimeError: it needs values"),
    ],
)
def test_a_model_that_is_another_one_on_a_gpu_is_refused(
    tmp_path: Path, store: Store, model: str, problem: str
) -> None:
    with pytest.raises(SourceError) as caught:
        moved(tmp_path, store, model)
    assert problem in str(caught.value)
    assert "build this target on a GPU" in str(caught.value.hint)


def test_a_model_is_looked_at_as_it_is_exported_and_its_views_may_copy(tmp_path: Path, store: Store) -> None:
    """nn.TransformerEncoder looks at the values of its mask when nothing traces it; and attention gives another layout
    on a GPU, where the trace made nothing of the contiguous() before a view."""
    _, _, after = moved(tmp_path, store, "exported")
    from aotpack_runtime.loaders.programs import read_program

    code = read_program(store.object(after["programs"][0]["file"]["sha256"])).graph_module.code
    assert "aten.reshape.default" in code
    assert "aten.view.default" not in code


@pytest.mark.parametrize(
    ("model", "entry", "layout"), [("plain", "", "any"), ("custom", "imports: [moved_models]", "contiguous")]
)
def test_layouts_that_a_cpus_kernels_take_are_not_let_in_for_those_of_a_gpu(
    tmp_path: Path, store: Store, model: str, entry: str, layout: str
) -> None:
    """A custom operator has another kernel there, and the trace dropped the copy that eager makes for it."""
    _, before, after = moved(tmp_path, store, model, entry)
    here, there = [
        [leaf.get("layout", "contiguous") for leaf in part["programs"][0]["guards"]["leaves"]]
        for part in (before, after)
    ]
    assert (here, there) == (["any"], [layout])


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's own LSTM sets some while it is exported
def test_recurrent_layers_are_refused_by_name(tmp_path: Path, store: Store) -> None:
    path = manifest(tmp_path, "arch: [sm_90], device: h200", "recurrent", entry="targets: [gpu]")
    (entry,) = make_plan(read_manifest(path, ["entries.e.points[0].dims.n=4"])).entries
    assert isinstance(entry, EntryPlan)
    plan = replace(entry, across=True)
    record = json.loads(json.dumps(export(source_job(plan, tmp_path).payload, store)))
    with pytest.raises(SourceError) as caught:
        move(move_job(plan, record, tmp_path).payload, store)
    assert "its lstm is cuDNN's on a GPU, which asks the CUDA driver for itself" in str(caught.value)
    assert caught.value.hint == "build this target on a GPU"


def test_every_branch_of_a_model_is_looked_at(tmp_path: Path, store: Store) -> None:
    before = torch.cond
    _, _, after = moved(tmp_path, store, "decides")
    assert len(after["programs"]) == 1
    assert torch.cond is before


@pytest.mark.parametrize(
    ("arch", "dtype", "refused"),
    [("sm_80", "float8_e4m3fn", True), ("sm_86", "float8_e4m3fn", True), ("sm_89", "float8_e4m3fn", False),
     ("sm_90", "float8_e4m3fn", False), ("sm_80", "float8_e5m2", False), ("sm_80", "bfloat16", False)],
)  # fmt: skip
def test_numbers_that_an_architecture_does_not_know_are_refused_before_it_is_compiled_for(
    arch: str, dtype: str, *, refused: bool
) -> None:
    class Rounds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(getattr(torch, dtype)).float()

    exported = torch.export.export(Rounds(), (torch.ones(4),))
    context: Any = pytest.raises(CompileError) if refused else contextlib.nullcontext()
    with context as caught:
        require_dtypes(exported, {"variant": "e/n4/gpu", "arch": arch})
    if refused:
        assert caught.value.message == f"e/n4/gpu: float8_e4m3fn takes sm_89 or newer, and this is for {arch}"


def test_a_variant_is_known_by_its_device_and_its_table(tmp_path: Path, store: Store) -> None:
    plan, _, after = moved(tmp_path, store, "plain")
    after = own_names(plan, after)
    (job,) = compile_jobs(plan, after, tmp_path)
    assert (job.kind, job.apart) == ("cross", True)
    assert job.payload["cross"]["properties"]["multi_processor_count"] == 132
    (other,) = compile_jobs(replace(plan, gpu=DEVICES["h100"]), after, tmp_path)
    assert other.key != job.key
    (tuned,) = compile_jobs(replace(plan, compile={**plan.compile, "tuning": "t.json"}), after, tmp_path)
    assert tuned.key == job.key
    write_picks(tmp_path / "t.json", "e", "sm_90", {"gpu": "x", "kernels": {"d": {"pick": {"XBLOCK": 64}}}})
    (tuned,) = compile_jobs(replace(plan, compile={**plan.compile, "tuning": "t.json"}), after, tmp_path)
    assert tuned.key != job.key
    assert tuned.payload["cross"]["table"]["kernels"] == {"d": {"XBLOCK": 64}}


# ------------------------------------------------------------------------------------------- worker processes


def test_jobs_apart_see_no_gpu_and_share_no_process_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tells.py").write_text(
        "import os\n"
        "def tell(job, store):\n"
        "    if job.get('crash'): os.abort()\n"
        "    names = ('CUDA_VISIBLE_DEVICES', 'OMP_WAIT_POLICY', 'OMP_NUM_THREADS')\n"
        "    return [os.getpid(), *map(os.environ.get, names)]\n"
    )
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, root, root / "runtime"))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12))
    original = subprocess.Popen

    def started(command: list[str], **kwargs: Any) -> Any:
        """The worker with one more kind of job."""
        code = "import aotpack.worker as w, sys; w.JOBS['tell'] = 'tells:tell'; w.main(sys.argv[1])"
        return original([command[0], "-P", "-c", code, command[-1]], **kwargs)

    monkeypatch.setattr("aotpack.workers.subprocess.Popen", started)
    with Workers(Store(tmp_path / "store"), 1) as workers:
        first = workers.submit({"kind": "tell", "entry": "a"}).result()
        across = workers.submit({"kind": "tell", "entry": "b"}, apart=True).result()
        again = workers.submit({"kind": "tell", "entry": "c"}, apart=True).result()
        back = workers.submit({"kind": "tell", "entry": "d"}).result()
        with pytest.raises(CompileError, match="its process died: killed by SIGABRT"):
            workers.submit({"kind": "tell", "entry": "e", "crash": True}, apart=True).result()
        after = workers.submit({"kind": "tell", "entry": "f"}).result()
    assert (first[1], across[1], back[1]) == ("3", "", "3")
    assert across == again
    assert across[0] not in (first[0], back[0])
    assert after[1] == "3"
    assert not _alive(across[0])
    assert {one[2] for one in (first, across, after)} == {"PASSIVE"}
    assert (first[3], across[3]) == ("12", "12")


def test_the_same_job_beside_itself_waits_for_its_folder(tmp_path: Path) -> None:
    from aotpack.compilers.inductor import build_folder

    store, inside, most = Store(tmp_path), 0, 0

    def work() -> None:
        nonlocal inside, most
        with build_folder(store, "k" * 64) as folder:
            inside += 1
            most = max(most, inside)
            (folder / "made").write_text("")
            time.sleep(0.1)
            assert (folder / "made").exists()
            inside -= 1

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result()
    assert most == 1
    assert list((tmp_path / "build").iterdir()) == []


@pytest.mark.parametrize(("count", "among", "threads"), [(12, 1, 12), (12, 5, 2), (2, 5, 6), (64, 50, 1)])
def test_jobs_that_run_at_once_share_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, among: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12))
    with Workers(Store(tmp_path), count) as workers:
        monkeypatch.setattr(workers, "_run", lambda job, **how: how)
        assert workers.submit({}, fresh=True, among=among).result()["threads"] == threads


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- choices


class _Launcher(SimpleNamespace):
    """What Inductor keeps of a compiled configuration."""


TOO_MUCH = -1


def launcher(warps: int, spills: int, **blocks: int) -> _Launcher:
    config = SimpleNamespace(kwargs=blocks, num_warps=warps, num_stages=1)
    return _Launcher(config=config, n_spills=spills, n_regs=32)


class _Tuner:
    """Inductor's of one kernel: compiles the configurations that it has when it is told to."""

    def __init__(self, *launchers: _Launcher, name: str, source: str) -> None:
        self.configs, self.launchers, self.compile_results = [one.config for one in launchers], list[Any](), list[Any]()
        self.inductor_meta, self.fn = {"kernel_name": name}, SimpleNamespace(src=source, __name__=name)
        self.compiled: list[Any] = []
        self._known = launchers

    def precompile(self) -> None:
        assert not self.launchers
        self.compiled += self.configs
        for config in self.configs:
            new = _Launcher(config=config, n_spills=0, n_regs=32)
            made = next((one for one in self._known if one.config is config), new)
            self.launchers += [made] * (made.n_spills != TOO_MUCH)
        if not self.launchers:
            raise RuntimeError("No valid triton configs. OutOfResources: out of resource: shared memory")


def tuner(*launchers: _Launcher, name: str = "k_0", source: str = "def k_0(x): pass") -> Any:
    return _Tuner(*launchers, name=name, source=source)


def test_without_a_table_the_first_that_does_not_spill_is_taken_and_none_behind_it_compiled() -> None:
    choices = Choices()
    refused, spilling = launcher(4, TOO_MUCH, XBLOCK=2048), launcher(4, 40, XBLOCK=1024)
    calm, other = launcher(8, 0, XBLOCK=512), launcher(4, 0, XBLOCK=256)
    kernel = tuner(refused, spilling, calm, other)
    assert choices.choose(kernel) is calm
    assert kernel.compiled == [refused.config, spilling.config, calm.config]
    (made,) = choices.made
    assert (made.taken, made.why) == (2, "rule")
    assert made.candidates[3] == {"XBLOCK": 256, "num_warps": 4, "num_stages": 1}


def test_a_table_decides_by_the_kernels_source_whatever_a_build_calls_it() -> None:
    wanted = {"XBLOCK": 256, "num_warps": 4, "num_stages": 1}
    choices = Choices({kernel_digest("def k_0(x): pass", "k_0"): wanted})
    first, second = launcher(8, 0, XBLOCK=512), launcher(4, 0, XBLOCK=256)
    kernel = tuner(first, second, name="k_17", source="def k_17(x): pass")
    assert choices.choose(kernel) is second
    assert kernel.compiled == [second.config]
    assert choices.choose(tuner(first, second, name="k_17", source="def k_17(y): pass")) is first
    assert [made.why for made in choices.made] == ["table", "rule"]


@pytest.mark.parametrize(
    ("wanted", "why", "taken"),
    [
        pytest.param({"XBLOCK": 1, "R0_BLOCK": 1024, "num_warps": 8, "num_stages": 1}, "table", 2, id="halved"),
        pytest.param({"XBLOCK": 1, "R0_BLOCK": 96, "num_warps": 8, "num_stages": 1}, "rule", 0, id="no candidate"),
        pytest.param({"XBLOCK": 8, "R0_BLOCK": 64, "num_warps": 8, "num_stages": 1}, "rule", 0, id="does not compile"),
    ],
)
def test_a_table_may_have_what_inductor_adds_and_nothing_else(wanted: dict[str, int], why: str, taken: int) -> None:
    choices = Choices({kernel_digest("def k_0(x): pass", "k_0"): wanted})
    offered = launcher(8, 0, XBLOCK=1, R0_BLOCK=2048), launcher(8, TOO_MUCH, XBLOCK=8, R0_BLOCK=64)
    chosen = choices.choose(tuner(*offered))
    (made,) = choices.made
    assert (made.why, made.taken) == (why, taken)
    assert (config_record(chosen.config) == wanted) == (why == "table")
    assert made.candidates[made.taken] == config_record(chosen.config)


def test_what_all_spill_is_taken_as_inductor_orders_it() -> None:
    choices, first = Choices(), launcher(4, 99, XBLOCK=1024)
    assert choices.choose(tuner(first, launcher(8, 90, XBLOCK=512))) is first


def test_a_kernel_that_fits_in_no_way_is_told_in_inductors_words() -> None:
    with pytest.raises(RuntimeError, match="No valid triton configs"):
        Choices().choose(tuner(launcher(4, TOO_MUCH, XBLOCK=64), launcher(8, TOO_MUCH, XBLOCK=32)))


def test_a_table_keeps_what_was_not_timed_again(tmp_path: Path) -> None:
    path = tmp_path / "t" / "e.json"
    assert read_picks(path, "e", "sm_90") == {"kernels": {}, "attention": {}}
    write_picks(path, "e", "sm_90", {"gpu": "x", "kernels": {"a": {"pick": {"XBLOCK": 1}}}})
    write_picks(path, "e", "sm_80", {"gpu": "y", "kernels": {"a": {"pick": {"XBLOCK": 2}}}})
    write_picks(path, "e", "sm_90", {"gpu": "x", "kernels": {"b": {"pick": {"XBLOCK": 3}}}})
    write_picks(path, "e", "sm_90", {"gpu": "x", "kernels": {}, "attention": {"words": {"pick": "flash"}}})
    kernels = {"a": {"XBLOCK": 1}, "b": {"XBLOCK": 3}}
    assert read_picks(path, "e", "sm_90") == {"kernels": kernels, "attention": {"words": "flash"}}
    assert read_picks(path, "e", "sm_80")["kernels"] == {"a": {"XBLOCK": 2}}
    assert read_picks(path, "e", "sm_100") == {"kernels": {}, "attention": {}}


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "x", "entry": "e"}', '{"schema": "aotpack.torch-tuning/v1", "entry": "f", "archs": {}}', '{"schema": "aotpack.torch-tuning/v1", "entry": "e", "archs": {"sm_90": {"kernels": {"a": {"pick": {"X": "y"}}}}}}'])  # fmt: skip
def test_a_file_that_is_no_table_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(CompileError, match="is no tuning table"):
        read_picks(tmp_path / "t.json", "e", "sm_90")


# ----------------------------------------------------------------------------------------------------- attention


def on(name: str) -> SimpleNamespace:
    return SimpleNamespace(**DEVICES[name].properties())


@pytest.fixture
def new_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "case",
    [
        ("h200", BF16, False, False, 8, 64, "cudnn"),
        ("h200", BF16, True, False, 8, 128, "cudnn"),
        ("b200", BF16, False, True, 8, 64, "cudnn"),
        ("h200", BF16, False, False, 2, 64, "cudnn"),
        ("h200", BF16, False, False, 8, 256, "flash"),
        ("h200", BF16, False, False, 8, 20, "flash"),
        ("h200", BF16, True, False, 8, 256, "efficient"),
        ("h200", BF16, True, False, 8, 20, "math"),
        ("a100", BF16, False, True, 8, 64, "flash"),
        ("rtx5090", BF16, False, False, 8, 64, "flash"),
        ("a100", BF16, True, False, 8, 64, "efficient"),
        ("h200", F32, False, False, 8, 64, "efficient"),
        ("h200", F32, True, False, 8, 6, "math"),
        ("h200", torch.float64, False, False, 8, 64, "math"),
        ("l4", BF16, False, False, 3, 64, "math"),
    ],
)  # fmt: skip
def test_attention_is_what_torch_would_choose_on_the_device(new_cudnn: None, case: tuple[Any, ...]) -> None:
    device, dtype, mask, causal, heads, size, way = case
    query, key = torch.empty(2, 8, 16, size, dtype=dtype), torch.empty(2, heads, 16, size, dtype=dtype)
    bias = torch.empty(2, 1, 16, 16, dtype=dtype) if mask else None
    found = possible(on(device), query, key, key, bias, dropout_p=0.0, is_causal=causal, enable_gqa=heads != 8)
    assert found[0] == way
    assert found[-1] == "math"


def test_an_old_cudnn_is_not_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    query = torch.empty(2, 8, 16, 64, dtype=BF16)
    found = possible(on("h200"), query, query, query, None, dropout_p=0.0, is_causal=False, enable_gqa=False)
    assert found == ("flash", "efficient", "math")


@pytest.mark.parametrize(("wanted", "taken"), [("efficient", "efficient"), ("nonsense", "cudnn"), (None, "cudnn")])
def test_a_table_picks_among_the_operators_of_attention_that_are_possible(
    new_cudnn: None, wanted: str | None, taken: str
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    attentions = Attentions({"bfloat16 8x64 2x64 causal": wanted} if wanted else {})
    with FakeTensorMode(), attention_for(on("h200"), attentions):
        query, key = (torch.empty(2, heads, 16, 64, dtype=BF16, device="cuda:0") for heads in (8, 2))
        result = nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    assert result.shape == query.shape
    (made,) = attentions.made
    assert (made.key, made.taken, made.ways) == (
        "bfloat16 8x64 2x64 causal", taken, ("cudnn", "flash", "efficient", "math"),
    )  # fmt: skip


def traced_attention(attentions: Attentions, dtype: torch.dtype = BF16, device: str = "h200") -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), attention_for(on(device), attentions, "e/n4/gpu"):
        query = torch.empty(2, 8, 16, 64, dtype=dtype, device="cuda:0")
        return nn.functional.scaled_dot_product_attention(query, query, query)


@pytest.mark.parametrize(
    ("named", "dtype", "device", "taken"),
    [
        (("flash", "efficient"), BF16, "h200", "flash"),
        (("efficient", "flash", "cudnn"), BF16, "h200", "efficient"),
        (("flash", "efficient"), F32, "h200", "efficient"),
        (("cudnn", "efficient"), BF16, "a100", "efficient"),
        (("math",), BF16, "h200", "math"),
    ],
)
def test_what_the_manifest_names_goes_before_a_table_and_torchs_choice(
    new_cudnn: None, named: tuple[Any, ...], dtype: torch.dtype, device: str, taken: str
) -> None:
    attentions = Attentions({"bfloat16 8x64 8x64": "cudnn"}, named)
    traced_attention(attentions, dtype, device)
    assert attentions.taken == [taken]


def test_a_call_that_nothing_named_can_serve_is_an_error_of_its_variant(new_cudnn: None) -> None:
    with pytest.raises(CompileError) as caught:
        traced_attention(Attentions(named=("flash", "cudnn")), F32)
    assert caught.value.message == (
        "e/n4/gpu: attention of float32 8x64 8x64 is served by efficient or math, and the manifest's `attention` names "
        "flash and cudnn alone"
    )
    assert caught.value.hint == "add one that can serve it to the entry's `attention`"


def test_an_error_that_is_none_of_attention_stays_what_it_is(new_cudnn: None) -> None:
    with pytest.raises(ZeroDivisionError), attention_for(on("h200"), Attentions(named=("flash",))):
        _ = 1 // 0


@pytest.mark.parametrize(
    ("target", "entry", "message"),
    [
        ("arch: [sm_90]", "attention: [flash, eficient]", "entries.e.attention[1]: expected one of cudnn, flash, efficient, math, found the text \"eficient\"; did you mean 'efficient'?"),
        ("arch: [sm_90]", "attention: flash", 'entries.e.attention: expected a list, found the text "flash"; write [flash]'),
        ("arch: [sm_90]", "attention: []", "entries.e.attention: is empty; expected at least one item"),
        ("arch: [sm_90]", "attention: [flash, flash]", "entries.e.attention[1]: is in the list twice; remove one"),
        ("arch: [sm_90]", "{attention: [flash], targets: [cpu]}", "entries.e.attention: is chosen for targets of kind cuda, and the entry has none; leave it out"),
    ],
)  # fmt: skip
def test_attention_that_is_none_is_an_error_at_its_place(tmp_path: Path, target: str, entry: str, message: str) -> None:
    entry = entry.strip("{}").replace(", targets", "\n    targets")
    with pytest.raises(ManifestError) as caught:
        read_manifest(manifest(tmp_path, target, entry=entry))
    assert message in str(caught.value)


def test_attention_is_part_of_what_a_variant_for_a_gpu_is_known_by(tmp_path: Path, store: Store) -> None:
    plan, _, after = moved(tmp_path, store, "plain")
    (plain,) = compile_jobs(plan, own_names(plan, after), tmp_path)
    assert "attention" not in plain.parts
    keys = {plain.key}
    for across, named in ((True, "[flash, efficient]"), (True, "[efficient, flash]"), (False, "[efficient, flash]")):
        path = manifest(tmp_path, "arch: [sm_90], device: h200", entry=f"attention: {named}")
        entries = [plan for plan in make_plan(read_manifest(path)).entries if isinstance(plan, EntryPlan)]
        (gpu,) = [replace(plan, across=across) for plan in entries if plan.device == "cuda"]
        (cpu,) = [plan for plan in entries if plan.device == "cpu"]
        (job,) = compile_jobs(gpu, own_names(gpu, after), tmp_path)
        assert job.payload["attention"] == job.parts["attention"] == gpu.compile["attention"]
        keys.add(job.key)
        assert cpu.compile["attention"] == []
    assert len(keys) == 4


def test_a_miss_on_a_gpu_keeps_to_what_the_manifest_names(tmp_path: Path) -> None:
    from aotpack.torch_assembly import _recipe

    program = {"compiled_outputs": {"tree": "*", "leaves": []}}
    path = manifest(tmp_path, "arch: [sm_90], device: h200", entry="attention: [flash, math]")
    plans = {plan.target: plan for plan in make_plan(read_manifest(path)).entries if isinstance(plan, EntryPlan)}
    (gpu,), (cpu,) = (_recipe(plans[target], program).targets for target in ("gpu", "cpu"))
    assert gpu.job["attention"] == ["flash", "math"]
    assert "attention" not in cpu.job


def test_the_plan_says_what_attention_is_named(
    tmp_path: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aotpack.cli import plan as command

    with_record(tmp_path, monkeypatch)
    path = manifest(tmp_path, "arch: [sm_90], device: h200", entry="attention: [flash, math]")
    shown = steps(make_plan(read_manifest(path)), Store(tmp_path / "store"))
    assert {step.name: step.attention for step in shown if step.attention} == {"e/n1_16/gpu": ("flash", "math")}
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(tmp_path / "cache"))
    command.command(path, "*", None, [], as_json=False, debug=False)
    assert "e: attention by flash, else math" in capsys.readouterr().out.splitlines()


def test_attention_outside_of_the_context_is_torchs_own() -> None:
    query = torch.randn(1, 2, 4, 8)
    before = nn.functional.scaled_dot_product_attention(query, query, query)
    attentions = Attentions()
    with attention_for(on("h200"), attentions):
        assert torch.allclose(nn.functional.scaled_dot_product_attention(query, query, query), before, atol=1e-6)
    assert torch.equal(nn.functional.scaled_dot_product_attention(query, query, query), before)
    assert attentions.made == []  # arguments in host memory are none of its business


# ------------------------------------------------------------------------------------------- what was lowered


def test_a_graph_for_a_gpu_runs_in_host_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def model(x: torch.Tensor) -> tuple[torch.Tensor]:
        ones = torch.ones(3, device=x.device)
        query = x.unsqueeze(0).unsqueeze(0)
        mixed = torch.ops.aten._scaled_dot_product_efficient_attention(query, query, query, None, False)[0]
        return (mixed.squeeze(0).squeeze(0) + ones,)

    with FakeTensorMode():
        graph = make_fx(model)(torch.empty(5, 3, device="cuda:0"))
    x = torch.randn(5, 3)
    (found,) = Lowered(graph).run([x])
    wanted = nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0] + 1
    assert torch.allclose(found, wanted)


def test_names_of_constants_are_read_from_the_wrapper() -> None:
    text = """
    constants_info_[0].name = "model_layer_weight";
    constants_info_[0].data_size = 256;
    constants_info_[0].original_fqn = "program.model.layer.weight";
    constants_info_[1].name = "b";
    constants_info_[1].original_fqn = "program.model.b";
    """
    assert constant_names(text) == {"model_layer_weight": "program.model.layer.weight", "b": "program.model.b"}


# --------------------------------------------------------------------------------------------- nothing stays


def test_everything_that_is_replaced_is_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("this process sees a GPU, where nothing is pretended")
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, graph
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import joint_graph

    from aotpack.compilers.cross import pretend

    monkeypatch.setattr(pretend, "cuda_headers", lambda: tmp_path)

    def look() -> list[Any]:
        import triton
        from triton.backends.nvidia.driver import CudaDriver

        owners = (torch.cuda, CudaInterface, CudaInterface.Worker, CudaDriver, PythonWrapperCodegen, graph, joint_graph)
        return [
            [dict(vars(owner)) for owner in owners],
            triton.runtime.driver._active,
            config.get_config_copy(),
            dict(os.environ),
        ]

    before = look()
    with contextlib.suppress(ZeroDivisionError), pretend.pretended(on("h200"), Choices()):
        assert torch.cuda.get_device_properties(0).multi_processor_count == 132
        assert torch.cuda.get_device_capability() == (9, 0)
        assert CudaInterface.is_available()
        assert not torch.cuda.is_available()
        assert look() != before
        _ = 1 // 0
    assert look() == before
    assert not CudaInterface.is_available()


def test_a_record_of_prove_cross_is_what_the_gate_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aotpack.prove import write_record

    record = {"schema": gate.SCHEMA, "torch": "2.11.0", "triton": "3.6.0", "arch": "sm_90", "gpu": "NVIDIA H200",
              "passed": True, "whole": True, "entries": {}}  # fmt: skip
    place = tmp_path / "bench" / "results" / "cross"
    assert write_record(record, place).name == "2.11.0-3.6.0-sm_90.json"
    (place / "README.md").write_text("# not a record")
    (place / "other.json").write_text("[1]")
    (place / "torn.json").write_text('{"schema": ')
    monkeypatch.setattr(gate, "__file__", str(tmp_path / "aotpack" / "compilers" / "cross" / "gate.py"))
    assert gate.proofs() == [gate.Proof("2.11.0", "3.6.0", "sm_90", "NVIDIA H200", passed=True)]
    monkeypatch.setattr(gate, "_version", {"torch": "2.11.0", "triton": "3.6.0"}.__getitem__)
    assert gate.proof_of("sm_90") == "proven with torch 2.11.0 with triton 3.6.0 on sm_90 (NVIDIA H200)"


def test_every_record_that_is_checked_in_is_one() -> None:
    folder = Path(__file__).resolve().parents[2] / "bench" / "results" / "cross"
    for path in folder.glob("*-*-sm_*.json"):
        record = gate._read(path)
        assert record is not None
        assert path.name == f"{record['torch']}-{record['triton']}-{record['arch']}.json"
        assert record["whole"] is True


def test_headers_are_looked_for_and_their_lack_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aotpack.compilers.cross import headers
    from aotpack_runtime.errors import MissingDependency

    monkeypatch.setattr(headers, "_folders", lambda: iter([tmp_path]))
    with pytest.raises(MissingDependency, match="CUDA headers"):
        headers.cuda_headers()
    (tmp_path / "include" / "crt").mkdir(parents=True)
    (tmp_path / "include" / "crt" / "host_defines.h").write_text("")
    assert headers.cuda_headers() == tmp_path


def test_torchs_own_ptxas_is_named_for_each_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch names it once a process: what a worker compiled second had other bytes than what it compiled first."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert inductor._assembler() == {}  # torch for a CPU has none
    ptxas = tmp_path / "bin" / "ptxas"
    ptxas.parent.mkdir()
    ptxas.touch(0o755)
    assert inductor._assembler() == {"TRITON_PTXAS_PATH": str(ptxas)}
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    assert inductor._assembler() == {"TRITON_PTXAS_PATH": "/opt/ptxas"}


def test_a_compile_of_a_model_has_that_ptxas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str | None] = []

    def compiled(*_: Any, **__: Any) -> str:
        seen.append(os.environ.get("TRITON_PTXAS_PATH"))
        raise RuntimeError("seen")

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(inductor, "_assembler", lambda: {"TRITON_PTXAS_PATH": "/torch/ptxas"})
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    for _ in range(2):
        with pytest.raises(CompileError, match="seen"):
            inductor.package(exported, "e/v", {}, {"march": "x86-64-v3", "simd_bits": 256}, tmp_path)
    assert seen == ["/torch/ptxas"] * 2
    assert "TRITON_PTXAS_PATH" not in os.environ
