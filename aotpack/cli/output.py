"""What all commands share: where results and messages go, how errors end, and the options they have in common."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from aotpack_runtime.errors import AotpackError, CompileError, ManifestError, TargetMismatch

if TYPE_CHECKING:
    from aotpack_runtime.machine import Machine

Json = Any
INTERRUPTED = 130
TERMINATED = 143
"""128 and the number of the signal, as shells have it."""

JSON_OPTION = typer.Option(False, "--json", help="One JSON document on stdout, also on failure.")
DEVICE_OPTION = typer.Option(None, "--device", help="cpu, cuda or cuda:1. Default: cpu, with --machine cuda.")
MACHINE_OPTION = typer.Option(
    None, "--machine", metavar="sm_86[,driver=12.4]", help="Judge for a host with this GPU instead of this host."
)
DEBUG_OPTION = typer.Option(False, "--debug", help="Show tracebacks and the logs of failed jobs.")


def result(value: Json, *, as_json: bool, text: str) -> None:
    """Print the result of a command to stdout: `value` as one JSON document, or `text`.

    A reader that has gone away is not an error: the command ends as it would have.
    """
    try:
        typer.echo(json.dumps(value, indent=2, sort_keys=True) if as_json else text)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)


def note(text: str, *, end: str = "\n") -> None:
    """Say something to the person who watches: stderr. Nobody need be there."""
    if sys.stderr is None:
        return
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def run(app: typer.Typer) -> int:
    """Run the app; errors of ours become one line (all lines of a manifest's), everything else a line and a request."""
    as_json, debug = "--json" in sys.argv, "--debug" in sys.argv
    signal.signal(signal.SIGTERM, _terminated)  # so that what was begun is cleaned up
    try:
        # Without a command there is help, which is not the result of anything.
        with contextlib.redirect_stdout(sys.stderr) if len(sys.argv) < 2 else contextlib.nullcontext():
            status = app(standalone_mode=False)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except AotpackError as error:
        return _fail(error, error.exit_code, as_json=as_json, debug=debug)
    except Exception as error:
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is None or code is None:
            return _fail(error, 1, as_json=as_json, debug=debug)
        if as_json:  # usage errors of typer, which print themselves
            _print_failure({"type": "UsageError", "message": error.format_message()}, int(code))  # type: ignore[attr-defined]
        show()
        return int(code)
    if status in {INTERRUPTED, TERMINATED}:
        said = f"interrupted; {_left[-1]} has what was done so far" if _left else "interrupted; nothing was written"
        if as_json:
            _print_failure({"type": "Interrupted", "message": said}, status)
        note(said)
    return status if isinstance(status, int) else 0


_left: list[str] = []


def leave(path: Path) -> None:
    """Were the command to be interrupted now, `path` has what was done so far."""
    _left.append(str(path))


def _terminated(number: int, frame: object) -> NoReturn:
    raise typer.Exit(TERMINATED)


def _silence(stream: TextIO) -> None:
    """Let nothing more be written where it cannot be, not even what Python flushes when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(error: Exception, code: int, *, as_json: bool, debug: bool) -> int:
    if debug:
        note("".join(traceback.format_exception(error)))
        if isinstance(error, CompileError) and error.log:
            note(error.log)
    if as_json:
        _print_failure(_record(error), code)
    elif isinstance(error, ManifestError):
        note("\n".join(map(str, error.problems)))
    elif isinstance(error, AotpackError):
        note(f"error: {error.message}{_hint_line(error)}")
    elif isinstance(error, OSError):
        note(f"error: {error.filename or 'output'}: {error.strerror}{_hint_line(error)}")
        if error.filename is None and sys.stdout is not None:
            _silence(sys.stdout)
    else:
        note(f"error: {type(error).__name__}: {error}")
        note("hint: this is a bug of aotpack; run again with --debug and report it")
    return code


def _hint(error: Exception) -> str:
    """The next step, "" where none is known."""
    if isinstance(error, OSError):
        from aotpack_runtime.machine import cache_dir

        ours = error.filename is not None and Path(str(error.filename)).is_relative_to(cache_dir())
        return "results are kept there; AOTPACK_CACHE_DIR names another folder" if ours else ""
    return str(getattr(error, "hint", ""))


def _hint_line(error: Exception) -> str:
    hint = _hint(error)
    return f"\nhint: {hint}" if hint else ""


def _print_failure(record: Mapping[str, Json], code: int) -> None:
    result({"ok": False, "exit_code": code, "error": record}, as_json=True, text="")


def _record(error: Exception) -> Mapping[str, Json]:
    record: dict[str, Json] = {"type": type(error).__name__, "message": str(getattr(error, "message", error))}
    if hint := _hint(error):
        record["hint"] = hint
    if isinstance(error, ManifestError):
        record["problems"] = [
            {"file": p.file, "line": p.line, "col": p.col, "path": p.path, "message": p.message} for p in error.problems
        ]
    if isinstance(error, TargetMismatch):
        record["reasons"] = error.reasons
    return record


def machine_of(text: str | None) -> Machine:
    """The host that `--machine` makes up, else this one."""
    from aotpack_runtime.machine import made_up, this_machine

    if text is None:
        return this_machine()
    try:
        return made_up(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--machine") from None


def device_of(text: str | None, machine: str | None) -> str:
    """`--device`, else what a made-up machine is asked about."""
    from aotpack_runtime.format.target import DEVICE

    if text is not None and not re.fullmatch(DEVICE, text):
        raise typer.BadParameter(f"{text!r} is not cpu, cuda or cuda:N", param_hint="--device")
    return text or ("cuda" if machine else "cpu")


def table(rows: Sequence[tuple[str, ...]], heads: tuple[str, ...]) -> str:
    """Columns padded to their widest cell, the last one left ragged."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [heads, *rows]
    ]
    return "\n".join(lines)


def size_text(size_bytes: int) -> str:
    """1536 -> "1.5 kB"."""
    amount = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")
