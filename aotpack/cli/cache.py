"""`aotpack cache`: the variants that misses compiled on this host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, result, size_text, table

app = typer.Typer(no_args_is_help=True, help="Variants that misses compiled on this host: list, trim, remove, promote.")


@app.command("ls")
def list_(as_json: bool = JSON_OPTION, debug: bool = DEBUG_OPTION) -> None:
    """List them by bundle, the least recently used first."""
    from aotpack_runtime.machine import cache_dir

    path, records = cache_dir() / "overlay", _records(cache_dir())
    rows = [
        (item["bundle"][:12], item["variant"], size_text(item["bytes"]), f"{item['unused_seconds']:.0f} s ago")
        for item in records
    ]
    text = table(rows, ("bundle", "variant", "size", "used")) if rows else f"nothing in {path}"
    result({"ok": True, "path": str(path), "variants": records}, as_json=as_json, text=text)


@app.command()
def gc(
    max_size: str = typer.Option("2GiB", "--max-size", help="What all of them may take, such as 500MB."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> None:
    """Remove those that were not used for longest until the rest takes at most --max-size."""
    from aotpack.manifest_values import parse_bytes
    from aotpack_runtime.jit.overlay import evict
    from aotpack_runtime.machine import cache_dir

    try:
        limit = parse_bytes(max_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-size") from None
    _removed(evict(cache_dir(), limit), as_json=as_json)


@app.command()
def clear(as_json: bool = JSON_OPTION, debug: bool = DEBUG_OPTION) -> None:
    """Remove all of them; processes that have one loaded keep it."""
    from aotpack_runtime.jit.overlay import clear as clear_all
    from aotpack_runtime.machine import cache_dir

    _removed(clear_all(cache_dir()), as_json=as_json)


@app.command()
def promote(
    bundle: Path = typer.Argument(help="The bundle whose misses were compiled, a folder or archive."),
    out: Path = typer.Option(..., "-o", "--out", help="Where to write the bundle that has them."),
    version: str | None = typer.Option(None, "--version", help="Its version. Default: that of the bundle."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> None:
    """Write a new bundle that has the variants which misses compiled on this host as its own."""
    from aotpack.promote import promote as write

    made = write(bundle, out, version=version)
    value = {"ok": True, "path": str(out), "digest": made.digest, "variants": made.variants, "skipped": made.skipped}
    lines = [f"{name}: left out: {reason}" for name, reason in made.skipped.items()]
    result(value, as_json=as_json, text="\n".join([*lines, *made.variants, str(out)]))


def _records(cache: Path) -> list[dict[str, Any]]:
    from aotpack_runtime.jit.overlay import Overlay, everything, read_record

    records = []
    for kept in everything(cache):
        path = Overlay(kept.root).record(kept.key)
        try:
            made = read_record(kept.key, path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError) as error:
            name, words, seconds = f"(unreadable: {error})", [], None
        else:
            name, words, seconds = made.variant.id, made.variant.guards.words(), made.seconds
        records.append(
            {
                "bundle": kept.root.parent.name,
                "host": kept.root.name,
                "key": kept.key,
                "variant": name,
                "guards": words,
                "bytes": kept.size_bytes,
                "unused_seconds": max(0.0, round(time.time() - kept.used, 1)),
                "seconds": seconds
                and {"compile": seconds.compile, "fallback": seconds.fallback, "variant": seconds.variant},
            }
        )
    return records


def _removed(gone: list[Any], *, as_json: bool) -> None:
    total = sum(kept.size_bytes for kept in gone)
    value = {"ok": True, "removed": [kept.key for kept in gone], "bytes": total}
    result(value, as_json=as_json, text=f"removed {len(gone)} variants, {size_text(total)}")
