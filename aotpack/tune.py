"""Time the candidates of tuned kernels on this GPU and write what was seen, for the next build to put into the bundle.

Every candidate that fits a point is timed on the inputs that verification would use. All times are kept, so that a
reviewer sees how close the second was.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aotpack.build import build
from aotpack.kernel_plan import KernelPlan, candidates, tuned_axes
from aotpack.kernel_verify import make_arguments
from aotpack.manifest_model import Manifest
from aotpack.plan import EntryPlan, Plan, make_plan
from aotpack.tables import write_json
from aotpack.torch_tuning import PARTS, write_picks
from aotpack.tuning import SCHEMA, load_table
from aotpack.workers import Workers
from aotpack_runtime import load
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.errors import MissingDependency, MissingDevice, UsageError
from aotpack_runtime.format.gpu import Gpu, parse_arch, reject_cubin
from aotpack_runtime.format.index import Variant
from aotpack_runtime.kernel_entry import KernelEntry
from aotpack_runtime.machine import cache_dir, this_machine
from aotpack_runtime.store import Store

Json = Any

WARMUP_MS, MEASURED_MS = 25, 100
"""Of each candidate at each point; triton.testing.do_bench's own defaults."""


def tune(manifest: Manifest, *, only: str = "*", report: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Write the table of each entry that has one (`tuning`), for this GPU's architecture; the paths.

    Kernels are those that are `choose: tuned`; of a torch entry the kernels that a cross build makes for it are timed.

    Rows of other architectures stay, if they are of the same candidates. Raises MissingDevice without a GPU,
    MissingDependency without torch or triton, and UsageError when no entry is tuned.
    """
    gpu = this_machine().gpu
    if gpu is None:
        raise MissingDevice(
            "tuning needs a CUDA device, and this host has none", hint="run it on a GPU of the target's kind"
        )
    testing = _testing()
    wanted = make_plan(manifest, only=only)
    plans, models = _tuned(wanted, gpu), _tuned_models(wanted, gpu)
    if not plans and not models:
        raise UsageError(
            "no entry of the manifest is tuned",
            hint="give a kernel `choose: tuned`, `key` and `tuning`; a torch entry `tuning`, and its target a `device`",
        )
    with tempfile.TemporaryDirectory() as folder:
        written = [_tune_model(manifest, model, gpu, Path(folder), report) for model in models]
        for name, plan in plans.items():
            # The table that is to be written need not be there, and may be of other candidates.
            bundle = build(manifest, Path(folder, name), only=name, target=plan.target, tables=False)
            with load(bundle.path, device="cuda", mode="strict") as session:
                entry = session[name]
                assert isinstance(entry, KernelEntry)
                rows = _rows(entry, plan, testing, report)
            measured = {
                "gpu": gpu.name,
                "cuda_driver": ".".join(map(str, gpu.driver)),
                "tools": dict(session.bundle.index.provenance["tools"]),
                "rows": rows,
            }
            written.append(_write(manifest.path.absolute().parent, plan, str(gpu), measured))
    return written


def _tuned_models(plan: Plan, gpu: Gpu) -> list[EntryPlan]:
    """Torch entries with a table and a device of this GPU's capability; one target each."""
    found: dict[str, EntryPlan] = {}
    for entry in plan.entries:
        if not isinstance(entry, EntryPlan) or entry.gpu is None or not entry.compile["tuning"]:
            continue
        if parse_arch(entry.arch).capability == gpu.capability:
            found.setdefault(entry.entry, entry)
    return list(found.values())


def _tune_model(manifest: Manifest, plan: EntryPlan, gpu: Gpu, folder: Path, report: Callable[[str], None]) -> Path:
    """Build the entry as if no GPU was here, and time what was chosen between."""
    store = Store(cache_dir() / "build")
    made = build(
        manifest, folder / plan.entry, only=plan.entry, target=plan.target, tables=False, across=True, store=store
    )
    index = open_bundle(made.path).index
    times: dict[str, dict[str, Json]] = {part: {} for part in PARTS}
    with Workers(store, 1) as workers:
        for variant in index.entries[plan.entry].variants:
            record = store.get_record("to_time", variant.artifact.files["model.so"].digest)
            if record is None:
                continue
            name = variant.id
            seen = workers.submit({"kind": "time", "variant": name, "to_time": record["sha256"]}).result()
            report(f"{name}: timed {len(seen['kernels'])} kernels, {len(seen['attention'])} calls of attention")
            for part, found in times.items():
                found.update(seen[part])
    path = manifest.path.absolute().parent / str(plan.compile["tuning"])
    measured = {
        "gpu": gpu.name,
        "cuda_driver": ".".join(map(str, gpu.driver)),
        "tools": dict(index.provenance["tools"]),
        **times,
    }
    write_picks(path, plan.entry, str(gpu), measured)
    return path


def _testing() -> Any:
    for package in ("torch", "triton"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependency(package, needed_for="tuning") from error
    return importlib.import_module("triton.testing")


def _tuned(plan: Plan, gpu: Gpu) -> dict[str, KernelPlan]:
    """The plan of each tuned entry for a target that this GPU runs; all targets have the same candidates."""
    found: dict[str, KernelPlan] = {}
    for entry in plan.entries:
        if isinstance(entry, KernelPlan) and entry.record.choose == "tuned":
            archs = {variant.arch for variant in entry.variants if variant.arch.startswith("sm_")}
            if any(reject_cubin(arch, gpu) is None for arch in archs):
                found.setdefault(entry.entry, entry)
    return found


def _rows(entry: KernelEntry, plan: KernelPlan, testing: Any, report: Callable[[str], None]) -> list[Json]:
    key, axes = plan.record.key, plan.record.axis_values()
    names = tuned_axes(plan.record)
    rows: dict[str, Json] = {}
    for seed, case in enumerate(entry.record.verify["cases"]):
        groups: dict[str, dict[str, Variant]] = {}
        for variant in entry.variants:
            under = {axis: variant.axes[axis] for axis in key if axis in axes}
            values = make_arguments(entry.record, variant, case, seed=seed)
            if entry.reject(variant, values) is None:
                pick = json.dumps({name: variant.axes[name] for name in names}, sort_keys=True)
                groups.setdefault(json.dumps(under, sort_keys=True), {}).setdefault(pick, variant)
        for given, fits in groups.items():
            sizes = {name: case[name] for name in key if name in case}
            times = {}
            for pick, variant in fits.items():
                run = entry.prepare(variant, make_arguments(entry.record, variant, case, seed=seed))
                milliseconds = testing.do_bench(run, warmup=WARMUP_MS, rep=MEASURED_MS, return_mode="median")
                times[pick] = round(1000 * float(milliseconds), 3)
            ranked = sorted(times.items(), key=lambda item: item[1])
            report(f"{plan.entry} {sizes} {given}: {ranked[0][0]} {ranked[0][1]} us, of {len(ranked)}")
            rows[json.dumps([sizes, given], sort_keys=True)] = {
                "sizes": sizes,
                "given": json.loads(given),
                "pick": json.loads(ranked[0][0]),
                "times_us": [[json.loads(pick), time] for pick, time in ranked],
            }
    return list(rows.values())


def _write(folder: Path, plan: KernelPlan, arch: str, measured: Json) -> Path:
    assert plan.record.tuning is not None
    parse_arch(arch)
    path = folder / plan.record.tuning
    wanted = candidates(plan.record)
    old = load_table(path, plan.entry)
    archs: Mapping[str, Json] = {}
    if old is not None and sorted(map(_text, old["candidates"])) == sorted(map(_text, wanted)):
        archs = old["archs"]
    table = {"schema": SCHEMA, "entry": plan.entry, "candidates": wanted, "archs": {**archs, arch: measured}}
    write_json(path, table)
    return path


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True)
