"""`aotpack plan MANIFEST`: what a build would do; compiles nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, note, result, table

SECONDS_A_JOB = {
    "export": 4.0, "aoti": 10.0, "move": 4.0, "cross": 15.0, "triton": 0.15, "nvrtc": 1.0, "triton_source": 1.0,
    "nvrtc_source": 0.1,
}  # fmt: skip
"""Seen for MiniLM and quickstart with torch 2.13, and for the kernels of manifests/ with triton 3.9 and NVRTC 12.9, on
two 2.x GHz cores; an estimate for people, not a promise."""
BYTES_A_JOB = {"aoti": 500_000, "cross": 500_000, "triton": 12_000, "nvrtc": 110_000}
"""Seen for the same: 0.4 to 0.6 MB a library with weights outside, 5 to 40 kB a Triton kernel, a file of C++ ones."""


def command(
    manifest: Path = typer.Argument(help="The manifest to plan."),
    only: str = typer.Option("*", "--only", metavar="GLOB", help="Only variants or entries that match."),
    target: str | None = typer.Option(None, "--target", metavar="NAME", help="One target of the manifest."),
    sets: list[str] = typer.Option([], "--set", metavar="K=V", help="Change a value of the manifest by its path."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> None:
    """Show every job: what is cached, what would be built and which part changed. Example: aotpack plan m.yaml"""
    from aotpack.build import default_jobs
    from aotpack.manifest import read_manifest
    from aotpack.plan import make_plan
    from aotpack.steps import steps

    read = read_manifest(manifest, sets)
    plan = make_plan(read, only=only, target=target)
    found = steps(plan)
    todo = [step for step in found if not step.cached and not step.way.startswith("impossible")]
    seconds = sum(SECONDS_A_JOB[step.kind] for step in todo) / default_jobs(read)
    rows = [(step.kind, step.name, step.target, step.status) for step in found]
    ways = dict.fromkeys(f"{step.target}: {step.way}" for step in found if step.way)
    named = dict.fromkeys(
        f"{step.name.partition('/')[0]}: attention by {', else '.join(step.attention)}"
        for step in found
        if step.attention
    )
    size_bytes = sum(BYTES_A_JOB.get(step.kind, 0) for step in todo)
    result(
        {
            "ok": True,
            "jobs": [{**asdict(step), "cached": step.cached} for step in found],
            "to_run": len(todo),
            "estimated_seconds": round(seconds),
            "estimated_bytes": size_bytes,
        },
        as_json=as_json,
        text="\n".join([table(rows, ("job", "name", "target", "status")), *ways, *named]),
    )
    note(f"{len(todo)} of {len(found)} jobs to run, about {seconds:.0f} s and {size_bytes / 1e6:.1f} MB")
