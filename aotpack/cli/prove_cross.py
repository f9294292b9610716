"""`aotpack prove-cross MANIFEST`: build both ways on a GPU, compare, and write the record that opens the gate."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, leave, note, result


def command(
    manifest: Path = typer.Argument(help="A manifest with torch entries for a target that names its device."),
    out: Path = typer.Option(
        Path("bench/results/cross"), "-o", "--output", help="Folder of the record TORCH-TRITON-ARCH.json."
    ),
    folder: Path | None = typer.Option(None, "--keep", help="Folder to keep the bundles of both ways in."),
    at: list[str] = typer.Option(
        [], "--at", metavar="ENTRY:4x128", help="Sizes of the first argument to time as well, in its order of dims."
    ),
    only: str = typer.Option("*", "--only", metavar="GLOB", help="Only variants or entries that match."),
    sets: list[str] = typer.Option([], "--set", metavar="K=V", help="Change a value of the manifest by its path."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> int:
    """Prove that cross builds of this torch and Triton are what builds on this GPU are. Needs a GPU.

    What is known after each step is kept as TORCH-TRITON-ARCH.partial.json, and the next run goes on from there. A
    record of some entries, as --only gives, opens no gate.

    Example: aotpack prove-cross bench/cross.yaml
    """
    from aotpack.manifest import read_manifest
    from aotpack.prove import prove, write_record
    from aotpack_runtime.errors import UsageError

    wanted: dict[str, list[dict[str, int]]] = {}
    for text in at:
        match = re.fullmatch(r"([\w.-]+):(\d+(?:x\d+)*)", text)
        if match is None:
            raise UsageError(f"--at is {text!r}; expected an entry and sizes such as bert:4x128")
        sizes = {str(axis): int(size) for axis, size in enumerate(match[2].split("x"))}
        wanted.setdefault(match[1], []).append(sizes)

    def keep(record: Any) -> None:
        leave(write_record({**record, "passed": False, "whole": False}, out))

    record = prove(read_manifest(manifest, sets), only=only, folder=folder, at=wanted, report=note, keep=keep)
    path = write_record(record, out)
    for failure in record["failures"]:
        note(f"differs: {failure}")
    if not record["whole"]:
        note("it is of some entries of the manifest, and opens no gate")
    good = not record["failures"] and not record["missing"]
    result({"ok": good, "path": str(path), "record": record}, as_json=as_json, text=str(path))
    return 0 if good else 1
