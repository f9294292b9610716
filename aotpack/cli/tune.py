"""`aotpack tune MANIFEST`: time the candidates of tuned kernels on this GPU."""

from __future__ import annotations

from pathlib import Path

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, note, result


def command(
    manifest: Path = typer.Argument(help="The manifest whose `choose: tuned` entries are timed."),
    only: str = typer.Option("*", "--only", metavar="GLOB", help="Only entries or variants that match."),
    sets: list[str] = typer.Option([], "--set", metavar="K=V", help="Change a value of the manifest by its path."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> None:
    """Write the tables that `choose: tuned` reads, beside the manifest. Needs a GPU; the server times nothing."""
    from aotpack.manifest import read_manifest
    from aotpack.tune import tune

    written = [str(path) for path in tune(read_manifest(manifest, sets), only=only, report=note)]
    result({"ok": True, "tables": written}, as_json=as_json, text="\n".join(written))
