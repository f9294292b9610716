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
    from aotpack_runtime.machine import allowed_mismatches
    from aotpack_runtime.session import judge

    opened = open_bundle(bundle)
    try:
        verdict, skipped, _ = judge(
            opened.index, device_of(device, machine), machine_of(machine), allowed_mismatches(), strict=strict
        )
    finally:
        opened.close()
    rows = [
        (variant.id, variant.artifact.kind, skipped.get(variant.id, _fits(variant.artifact.kind)))
        for variant in opened.index.variants()
    ]
    failed = strict and verdict != "fits"
    value = {"ok": not failed, "verdict": verdict, "variants": {name: reason for name, _, reason in rows}}
    result(value, as_json=as_json, text=table(rows, ("variant", "kind", "verdict")) + f"\n{verdict}")
    return 6 if failed else 0


def _fits(kind: str) -> str:
    return "fits, once the driver has compiled it (PTX)" if kind == "ptx" else "fits"
