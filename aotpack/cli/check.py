"""`aotpack check BUNDLE`: does it fit this host, variant by variant."""

from __future__ import annotations

from pathlib import Path

import typer

from aotpack.cli.output import (
    DEBUG_OPTION,
    DEVICE_OPTION,
    JSON_OPTION,
    MACHINE_OPTION,
    device_of,
    machine_of,
    result,
    table,
)


def command(
    bundle: Path = typer.Argument(help="A bundle folder or archive."),
    device: str | None = DEVICE_OPTION,
    machine: str | None = MACHINE_OPTION,
    strict: bool = typer.Option(False, "--strict", help="Fail when any variant does not fit."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> int:
    """Judge every variant against this host: exit code 0 when it fits, 6 when it does not. Needs no torch imported."""
    from aotpack_runtime.bundle import open_bundle
    from aotpack_runtime.errors import TargetMismatch
    from aotpack_runtime.machine import allowed_mismatches
    from aotpack_runtime.verdict import judge, reject_variant

    opened = open_bundle(bundle)
    opened.close()
    kind, host, allow = device_of(device, machine), machine_of(machine), allowed_mismatches()
    host = host.on(int(kind.partition(":")[2] or 0))
    try:
        verdict, _, _ = judge(opened.index, kind, host, allow, strict=strict)
        fits = not strict or verdict == "fits"
        failure = {}
    except TargetMismatch as error:
        verdict, fits = error.message, False
        failure = {"error": {"type": "TargetMismatch", "message": error.message, "reasons": error.reasons}}
    rows = [
        (item.id, item.artifact.kind, reject_variant(item, kind, host, allow) or _fits(item.artifact.kind))
        for item in opened.index.variants()
    ]
    value = {"ok": fits, "verdict": verdict, "variants": {name: reason for name, _, reason in rows}, **failure}
    result(value, as_json=as_json, text=table(rows, ("variant", "kind", "verdict")) + f"\n{verdict}")
    return 0 if fits else 6


def _fits(kind: str) -> str:
    return "fits, once the driver has compiled it (PTX)" if kind == "ptx" else "fits"
