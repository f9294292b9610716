"""What a miss of a kernel asks for: one variant, compiled from the bundle's source, checked, put in the overlay.

The same compilers as for the manifest's variants. What a cubin says of its parameters, block and registers is compared
with the manifest as in a build; where there is a GPU and the manifest names a reference, the variant is run beside it,
on made-up tensors of the manifest's shapes at the numbers of the call that missed, and at its points.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotpack.compilers import nvrtc, triton
from aotpack.kernel_jobs import compile_jobs
from aotpack.kernel_plan import KernelPlan, KernelVariant
from aotpack.kernel_variants import kernel_variant
from aotpack.manifest_kernels import KernelEntry, NvrtcEntry, TritonEntry
from aotpack_runtime.bundle import Bundle, open_bundle
from aotpack_runtime.errors import CompileError, SourceError
from aotpack_runtime.format import layout
from aotpack_runtime.format.index import Entry, KernelRecipe, Variant
from aotpack_runtime.jit.overlay import Compiled, Overlay, Seconds
from aotpack_runtime.machine import this_machine
from aotpack_runtime.store import Store

Json = Any


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Compile and check the variant of `job` and put it in the overlay; the record says how long it took.

    CompileError when it cannot be compiled, takes other parameters than the manifest says, or is not its reference.
    """
    start = time.perf_counter()
    bundle = open_bundle(job["bundle"])
    if bundle.digest != job["digest"]:
        raise CompileError(job["variant"], f"the bundle at {job['bundle']} is another one by now")
    entry = bundle.index.entries[job["entry"]]
    recipe = entry.kernel.recipe if entry.kernel is not None else None
    assert recipe is not None
    folder = store.root / "source"
    _write_sources(bundle, recipe, folder)
    plan = _plan(job, entry, _manifest_entry(job, recipe))
    (compile_job,) = compile_jobs(plan, {"digest": ""}, folder)
    compiler = triton if plan.kind == "triton" else nvrtc
    record = compiler.compile(compile_job.payload, store)
    made = kernel_variant(plan, plan.variants[0], entry.parameter_names, record)
    variant = replace(made, id=job["variant"], point="jit", tier="warm")
    compile_s = time.perf_counter() - start
    ((name, file),) = variant.artifact.files.items()
    path = store.object(file.digest)
    checked = f"{_facts(plan, record)}; {_compared(job, entry, variant, path)}"
    Overlay(Path(job["overlay"])).put(
        Compiled(
            key=job["key"], entry=entry.name, variant=variant, seconds=Seconds(compile_s, 0.0, 0.0),
            parts=job["parts"], checked=checked,
        ),
        {name: path},
    )  # fmt: skip
    return {"seconds": [compile_s], "bytes": variant.artifact.size_bytes, "checked": checked}


def _write_sources(bundle: Bundle, recipe: KernelRecipe, folder: Path) -> None:
    """The source as it lay beside the manifest, each file checked against its digest."""
    for name, file in recipe.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(Path(bundle.path(layout.source(file.digest, layout.source_suffix(name)))).read_bytes())


def _manifest_entry(job: Mapping[str, Json], recipe: KernelRecipe) -> KernelEntry:
    """The manifest's entry, with the values that its axes take here among theirs."""
    record = dict(recipe.manifest)
    kind: type[TritonEntry | NvrtcEntry] = TritonEntry if record["kind"] == "triton" else NvrtcEntry
    field = "axes" if kind is TritonEntry else "template"
    axes: dict[str, Json] = {}
    for axis, values in record[field].items():
        value = job["axes"][axis]
        if isinstance(values, dict):
            axes[axis] = {**values, **({value: job["spelled"][axis]} if axis in job["spelled"] else {})}
        else:
            axes[axis] = [*values, *([] if value in values else [value])]
    try:
        return kind.model_validate({**record, field: axes})
    except ValueError as error:
        raise CompileError(job["variant"], f"the bundle's recipe is no entry of a manifest: {error}") from error


def _plan(job: Mapping[str, Json], entry: Entry, record: KernelEntry) -> KernelPlan:
    axes = job["axes"]
    words = {name: record.word(text) for name, text in job["words"].items()}
    spelled = {axis: record.spelling(axis, axes[axis]) for axis in record.axis_values()}
    expression = record.name_expression.format(**spelled) if isinstance(record, NvrtcEntry) else ""
    variant = KernelVariant(id=job["variant"], axes=axes, words=words, arch=job["arch"], expression=expression)
    return KernelPlan(entry=entry.name, target="jit", kind=record.kind, variants=(variant,), record=record)


def _facts(plan: KernelPlan, record: Json) -> str:
    kernel = record if plan.kind == "triton" else record["kernels"][plan.variants[0].expression]
    return (
        f"its parameters are where its cubin has them, {kernel['registers']} registers, "
        f"{kernel['spill_bytes']} bytes spilled"
    )


def _compared(job: Mapping[str, Json], entry: Entry, variant: Variant, path: Path) -> str:
    """What the variant was run beside, or why it was not run; CompileError where it is not what its reference is."""
    against = entry.verify.get("against")
    if not against:
        return "not run: the manifest names no reference"
    machine = this_machine()
    if machine.gpu is None:
        return "not run: there is no GPU"
    reason = variant.target.reject(machine, frozenset(job["allow"]))
    if reason:
        return f"not run: {reason}"
    verify = importlib.import_module("aotpack.kernel_verify")
    reference_room = importlib.import_module("aotpack_runtime.loaders.reference")
    try:
        reference = reference_room.import_reference(str(against), entry.source.files)
    except SourceError as error:
        return f"not run: {error}"
    # In mode jit: the bundle may hold nothing else that runs here. Variants are run by name, so nothing misses.
    session = importlib.import_module("aotpack_runtime").load(job["bundle"], device="cuda", mode="jit")
    served = session[entry.name]
    served.adopt([variant], lambda _: {name: str(path) for name in variant.artifact.files})
    unshaped = [name for name, kind in zip(entry.parameter_names, entry.kernel.types, strict=True)  # type: ignore[union-attr]
                if kind == "Tensor" and name not in entry.verify["shapes"]]  # fmt: skip
    if unshaped:
        return f"not run: the manifest gives no shape of {unshaped[0]}"
    count, worst = verify.compare(served, variant, [job["numbers"], *entry.verify["cases"]], reference)
    return f"run beside {against} at {count} calls, ||out - ref|| / ||ref|| at most {worst:.1e}"
