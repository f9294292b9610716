"""`aotpack export slim BUNDLE OUT`: a bundle with what a server of it needs, and nothing else of torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, note, result, table


class Form(StrEnum):
    """What a bundle is exported as."""

    slim = "slim"


def command(
    form: Form = typer.Argument(help="slim: the bundle, the runtime, and torch's shared libraries that it needs."),
    bundle: Path = typer.Argument(help="A bundle folder or archive."),
    out: Path = typer.Argument(help="The folder to write; it must not exist, or be empty."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> int:
    """Write a bundle with all that a server needs besides Python: OUT/python goes on its import path.

    Example: aotpack export slim dist/demo-0.1.0 demo && PYTHONPATH=demo/python python server.py demo/bundle
    """
    from aotpack.slim import export_slim

    slim = export_slim(bundle, out)
    total = sum(part.size_bytes for part in slim.parts)
    if slim.unused_cuda:
        note(
            f"torch {slim.torch} is a CUDA build, whose libraries need those of CUDA; the bundle is for CPUs alone: "
            "exported where the CPU build of the same version is installed it is far smaller"
        )
    value = {
        "ok": True,
        "path": str(out),
        "torch": slim.torch,
        "parts": {part.name: part.size_bytes for part in slim.parts},
        "host": list(slim.host),
        "bytes": total,
    }
    rows = [(part.name, f"{part.size_bytes / 1e6:.1f} MB") for part in slim.parts]
    text = table([*rows, ("in all", f"{total / 1e6:.1f} MB")], ("part", "size"))
    result(value, as_json=as_json, text=f"{text}\nof the host: {', '.join(slim.host)}\n{out}")
    return 0
