"""What all commands share: where results and messages go, how errors end, and the options they have in common."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import typer

from aotpack_runtime.errors import AotpackError, CompileError, ManifestError, TargetMismatch

Json = Any
INTERRUPTED = 130

JSON_OPTION = typer.Option(False, "--json", help="One JSON document on stdout, also on failure.")
DEBUG_OPTION = typer.Option(False, "--debug", help="Show tracebacks and the logs of failed jobs.", hidden=False)


def result(value: Json, *, as_json: bool, text: str) -> None:
    """Print the result of a command to stdout: `value` as one JSON document, or `text`."""
    typer.echo(json.dumps(value, indent=2, sort_keys=True) if as_json else text)


def note(text: str) -> None:
    """Say something to the person who watches: stderr."""
    print(text, file=sys.stderr, flush=True)


def run(app: typer.Typer) -> int:
    """Run the app; errors of ours become one line (all lines of a manifest's), everything else a line and a request."""
    as_json, debug = "--json" in sys.argv, "--debug" in sys.argv
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except AotpackError as error:
        return _fail(error, error.exit_code, as_json=as_json, debug=debug)
    except KeyboardInterrupt:
        note("interrupted; nothing was written")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is not None and code is not None:  # usage errors of typer, which print themselves
            if as_json:
                typer.echo(json.dumps({"ok": False, "exit_code": code, "error": {"message": str(error)}}))
            show()
            return int(code)
        if code is not None:
            return int(code)
        return _fail(error, 1, as_json=as_json, debug=debug)


def _fail(error: Exception, code: int, *, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
        if isinstance(error, CompileError) and error.log:
            note(error.log)
    if as_json:
        typer.echo(json.dumps({"ok": False, "exit_code": code, "error": _record(error)}, indent=2, sort_keys=True))
    elif isinstance(error, ManifestError):
        note("\n".join(map(str, error.problems)))
    elif isinstance(error, AotpackError):
        note(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
    else:
        note(f"error: {type(error).__name__}: {error}\nhint: this is a bug of aotpack; run again with --debug and report it")
    return code


def _record(error: Exception) -> Mapping[str, Json]:
    record: dict[str, Json] = {"type": type(error).__name__, "message": str(getattr(error, "message", error))}
    if getattr(error, "hint", ""):
        record["hint"] = error.hint  # type: ignore[attr-defined]
    if isinstance(error, ManifestError):
        record["problems"] = [
            {"file": p.file, "line": p.line, "col": p.col, "path": p.path, "message": p.message} for p in error.problems
        ]
    if isinstance(error, TargetMismatch):
        record["reasons"] = error.reasons
    return record


def table(rows: list[tuple[str, ...]], heads: tuple[str, ...]) -> str:
    """Columns padded to their widest cell, the last one left ragged."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [heads, *rows]]
    return "\n".join(lines)


def size_text(size_bytes: int) -> str:
    """1536 -> "1.5 kB"."""
    amount = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")
