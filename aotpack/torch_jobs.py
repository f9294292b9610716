"""The jobs of a torch entry: one export an entry and precision, then one compile a variant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from aotpack.compilers.toolchain import cpu_level, gpu_tools, toolchain
from aotpack.jobs import Job
from aotpack.plan import EntryPlan
from aotpack.revisions import AOTI_REVISION, EXPORT_REVISION
from aotpack_runtime.format.fingerprint import fingerprint

Json = Any


def source_job(entry: EntryPlan, folder: Path) -> Job:
    """Export the model."""
    return Job(
        kind="export",
        name="/".join(part for part in (entry.entry, "export", entry.precision, entry.target) if part),
        target=entry.target,
        parts={
            **{name: value for name, value in entry.export.items() if name != "entry"},
            "folder": str(folder),
            "toolchain": {
                "torch": toolchain()["torch"], "python": sys.version.split()[0], "aotpack": EXPORT_REVISION,
            },
        },
        payload={**entry.export, "folder": str(folder)},
        variants=tuple(variant.id for variant in entry.variants),
        fresh=True,
    )  # fmt: skip


def warm_up_job(entry: EntryPlan) -> dict[str, Json]:
    """What gets a worker ready to compile variants of the entry."""
    own = {"inductor": entry.compile["inductor"], "cpu": _host(entry), "device": entry.device}
    return {"kind": "aoti_warm", "variant": "warm-up", **own}


def _host(entry: EntryPlan) -> dict[str, Json]:
    """What host code is compiled for."""
    level = cpu_level(entry.compile["cpu"]["march"], entry.compile["cpu"]["simd"])
    return {"march": level.march, "simd_bits": level.simd_bits, "needs": level.needs}


def compile_jobs(entry: EntryPlan, export: Json, folder: Path) -> list[Job]:
    """Compile each variant from what the export gave."""
    host = _host(entry)
    gpu = {"arch": entry.arch, **gpu_tools()} if entry.device == "cuda" else {}
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
        }
        payload = {
            "variant": variant.id, "key": fingerprint(parts), "program": program,
            "dims": variant.record()["dims"], "fills": entry.export["fills"],
            "inductor": entry.compile["inductor"], "cpu": host, "device": entry.device, "arch": entry.arch,
            "folder": str(folder), "imports": entry.export["imports"],
        }  # fmt: skip
        jobs.append(
            Job(kind="aoti", name=variant.id, target=entry.target, parts=parts, payload=payload, variants=(variant.id,))
        )
    return jobs
