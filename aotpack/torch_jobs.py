"""The jobs of a torch entry: one export an entry and precision, then one compile a variant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from aotpack.compilers.toolchain import cpu_level, gpu_tools, toolchain
from aotpack.jobs import Job
from aotpack.plan import EntryPlan
from aotpack.revisions import AOTI_REVISION, CROSS_REVISION, EXPORT_REVISION, GPU_EXPORT_REVISION
from aotpack.torch_tuning import read_picks
from aotpack_runtime.format.fingerprint import fingerprint

Json = Any


def source_job(entry: EntryPlan, folder: Path) -> Job:
    """Export the model; for a GPU that is not here, as for a CPU."""
    export = entry.twin if entry.across and entry.twin is not None else entry.export
    gpu = {"gpu": GPU_EXPORT_REVISION} if "device" in export else {}
    return Job(
        kind="export",
        name="/".join(part for part in (entry.entry, "export", entry.precision, entry.target) if part),
        target=entry.target,
        parts={
            **{name: value for name, value in export.items() if name != "entry"},
            "folder": str(folder),
            "toolchain": {
                "torch": toolchain()["torch"], "python": sys.version.split()[0], "aotpack": EXPORT_REVISION, **gpu,
            },
        },
        payload={**export, "folder": str(folder)},
        variants=tuple(variant.id for variant in entry.variants),
        fresh=True,
    )  # fmt: skip


def warm_up_job(entry: EntryPlan, among: int) -> dict[str, Json]:
    """What gets a worker ready to compile variants of the entry, `among` so many that the store has seen then."""
    own = {"inductor": entry.compile["inductor"], "cpu": _host(entry), "device": entry.device}
    return {"kind": "aoti_warm", "variant": "warm-up", "among": among, **own}


def _host(entry: EntryPlan) -> dict[str, Json]:
    """What host code is compiled for."""
    level = cpu_level(entry.compile["cpu"]["march"], entry.compile["cpu"]["simd"])
    return {"march": level.march, "simd_bits": level.simd_bits, "needs": level.needs}


def move_name(entry: EntryPlan) -> str:
    """The name of its `move_job`, before there is an export to move."""
    return "/".join(part for part in (entry.entry, "move", entry.precision) if part)


def move_job(entry: EntryPlan, export: Json, folder: Path) -> Job:
    """Move the programs of an export for a CPU to a GPU that is not here; the same for all of an entry's GPUs."""
    record = {name: value for name, value in export.items() if name != "depends"}
    shared = {**(entry.twin or {}), "program_of_variant": export["program_of_variant"]}
    return Job(
        kind="move",
        name=move_name(entry),
        target=entry.target,
        parts={
            "export": fingerprint(record),
            **{name: value for name, value in shared.items() if name != "entry"},
            "folder": str(folder),
            "toolchain": {"torch": toolchain()["torch"], "aotpack": CROSS_REVISION},
        },
        payload={**shared, "export": record, "folder": str(folder)},
        variants=tuple(variant.id for variant in entry.variants),
        fresh=True,
        apart=True,
    )


def own_names(entry: EntryPlan, moved: Json) -> Json:
    """What a move gave, with the entry's own variants in the place of those whose export it was."""
    shared = [variant["id"] for variant in (entry.twin or {})["variants"]]
    numbers = [moved["program_of_variant"][name] for name in shared]
    own = {variant.id: number for variant, number in zip(entry.variants, numbers, strict=True)}
    return {**moved, "program_of_variant": own}


def compile_jobs(entry: EntryPlan, export: Json, folder: Path) -> list[Job]:
    """Compile each variant from what the export gave."""
    host = _host(entry)
    gpu = {"arch": entry.arch, **gpu_tools()} if entry.device == "cuda" else {}
    across: dict[str, Json] = {}
    if entry.across and entry.gpu is not None:
        table = entry.compile["tuning"]
        picks = read_picks(folder / table if table else None, entry.entry, entry.arch)
        across = {"properties": entry.gpu.properties(), "table": picks}
        gpu |= {"gpu": fingerprint(across), "cross": str(CROSS_REVISION)}
    attention = {"attention": entry.compile["attention"]} if entry.compile["attention"] else {}
    jobs = []
    for variant in entry.variants:
        program = export["programs"][export["program_of_variant"][variant.id]]
        own = {"example", "examples", "file"} if "content" in program else {"example", "examples"}
        parts = {
            "program": fingerprint({name: program[name] for name in sorted(program) if name not in own}),
            "sizes": variant.record()["dims"],
            "options": entry.compile["inductor"],
            "target": {**host, **gpu},
            "toolchain": {**toolchain(), "aotpack": AOTI_REVISION},
            **attention,
        }
        payload = {
            "variant": variant.id, "key": fingerprint(parts), "program": program,
            "dims": variant.record()["dims"], "fills": entry.export["fills"],
            "inductor": entry.compile["inductor"], "cpu": host, "device": entry.device, "arch": entry.arch,
            "folder": str(folder), "imports": entry.export["imports"], **attention,
        }  # fmt: skip
        if across:
            native = f"build it on a GPU of {entry.arch}: aotpack build --target {entry.target}"
            payload["cross"] = {**across, "native": native}
        jobs.append(
            Job(
                kind="cross" if across else "aoti",
                name=variant.id,
                target=entry.target,
                parts=parts,
                payload=payload,
                variants=(variant.id,),
                apart=bool(across),
            )
        )
    return jobs
