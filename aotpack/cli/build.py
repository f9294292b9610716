"""`aotpack build MANIFEST`: manifest to bundle; the last line of stdout is its path."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, note, result

if TYPE_CHECKING:
    from aotpack.jobs import Reporter, Result

SOME_FAILED = 5


def command(
    manifest: Path = typer.Argument(help="The manifest to build."),
    out: Path | None = typer.Option(
        None, "-o", "--output", help="Folder, or FILE.aotpack (FILE.zip) for an archive. Default: dist/NAME-VERSION."
    ),
    jobs: int | None = typer.Option(
        None, "-j", "--jobs", min=1, help="Processes at a time. Default: AOTPACK_JOBS, the manifest's, else one a CPU."
    ),
    only: str = typer.Option("*", "--only", metavar="GLOB", help="Build only variants or entries that match."),
    target: str | None = typer.Option(None, "--target", metavar="NAME", help="Build for one target of the manifest."),
    sets: list[str] = typer.Option([], "--set", metavar="K=V", help="Change a value of the manifest by its path."),
    keep_going: bool = typer.Option(
        False, "--keep-going", help="Leave out what fails, and build the rest (exit code 5)."
    ),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="No progress."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> int:
    """Build a bundle: export, compile, verify against eager, pack. Example: aotpack build manifests/quickstart.yaml"""
    from aotpack.build import build
    from aotpack.jobs import COMPILES
    from aotpack.manifest import read_manifest

    start = time.perf_counter()
    built = build(
        read_manifest(manifest, sets), out, jobs=jobs, only=only, target=target, keep_going=keep_going,
        reporter=None if quiet else _reporter(),
    )  # fmt: skip
    for name, reason in built.failures.items():
        note(f"left out: {name}: {reason}")
    if not quiet:
        for line in _unverified(built):
            note(line)
        exported, compiled = built.count("export"), built.count(*COMPILES)
        counts = f"{exported} exported, {compiled} compiled, {built.count('verify')} verified"
        note(f"{counts} in {time.perf_counter() - start:.1f} s; sha256 {built.digest}")
    value = {
        "ok": not built.failures,
        "path": str(built.path),
        "digest": built.digest,
        "exported": built.count("export"),
        "compiled": built.count(*COMPILES),
        "verified": dict(built.verified),
        "unverified": built.unverified,
        "notes": built.notes,
        "failures": built.failures,
        "seconds": round(time.perf_counter() - start, 3),
    }
    result(value, as_json=as_json, text=str(built.path))
    return SOME_FAILED if built.failures else 0


def _unverified(built: Result) -> list[str]:
    """Notes; what is packed without having been run, by the reason; sizes at which nothing could be compared."""
    reasons: dict[str, int] = {}
    for reason in built.unverified.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    lines = [f"{count} variants were compiled and not run here: {reason}" for reason, count in reasons.items()]
    lines += [
        f"{name}: {seen['reference']} itself refuses {', '.join(map(str, seen['refused']))}, which no point asks for"
        for name, seen in built.verified.items()
        if seen.get("refused")
    ]
    return [*built.notes, *lines, *(["run `aotpack verify` on a GPU of their kind"] if reasons else [])]


def _reporter() -> Reporter:
    from aotpack.jobs import DONE, Reporter

    class Lines(Reporter):
        """One line a job on stderr, and on a terminal a line that says how many are left."""

        def __init__(self) -> None:
            self.total = self.count = 0
            self.live = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

        def begin(self, kind: str, total: int) -> None:
            self.total, self.count = total, 0
            self._status(kind)

        def add(self) -> None:
            self.total += 1

        def done(self, kind: str, name: str, seconds: float, problem: str | None) -> None:
            self.count += 1
            clear = "\r\x1b[K" if self.live else ""
            word = "failed" if problem else DONE[kind]
            why = f": {problem}" if problem else ""
            note(f"{clear}[{self.count}/{max(self.total, self.count)}] {word} {name} ({seconds:.1f} s){why}")
            if self.count < self.total:
                self._status(kind)

        def _status(self, kind: str) -> None:
            if self.live:
                note(f"\r\x1b[K{kind}: {self.count} of {self.total} done ...", end="")

    return Lines()
