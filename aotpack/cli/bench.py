"""`aotpack bench BUNDLE`: what a cold start costs with it, and with what people do today."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, device_of, note, result
from aotpack_runtime.errors import UsageError

Json = Any


def command(
    bundle: Path = typer.Argument(help="A bundle folder or archive."),
    entry: str | None = typer.Option(None, "--entry", help="The entry to time. Default: the only one."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda or cuda:N. Default: cpu, for kernels cuda."),
    call: list[str] = typer.Option(
        [],
        "--call",
        metavar="'x=8x128 y=8x128'",
        help="Shapes to call with, in this order (of a kernel numbers of a point: n=4096). Default: the hot ones.",
    ),
    source: Path | None = typer.Option(None, "--source", help="Folder in which the source is looked up first."),
    manifest: Path | None = typer.Option(
        None, "--manifest", help="What the bundle was built from: says how nvrtc-cold compiles."
    ),
    modes: str | None = typer.Option(None, "--modes", metavar="A,B", help="Ways of starting to compare. Default: all."),
    samples: int = typer.Option(5, "--samples", min=1, help="Fresh processes for each."),
    steady: bool = typer.Option(True, "--steady/--no-steady", help="Also time calls until they are steady."),
    out: Path | None = typer.Option(None, "--out", help="Also keep the JSON here, as it is after each sample."),
    html: Path | None = typer.Option(None, "--html", help="Also write a page with plots. Needs matplotlib."),
    baseline: Path | None = typer.Option(None, "--baseline", help="The JSON of an older run, for --fail-if."),
    fail_if: list[str] = typer.Option([], "--fail-if", metavar="'first_output>1.10x'", help="A release gate."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> int:
    """Time process start to the first right output, in fresh processes, and each next shape's first call."""
    from aotpack.bench.gate import parse_gate, read_baseline
    from aotpack.bench.report import table
    from aotpack.bench.run import run_bench

    gates = [parse_gate(text) for text in fail_if]
    older = None if baseline is None else read_baseline(baseline)
    for gate in gates:
        gate.require(older)
    page = None if html is None else import_module("aotpack.bench.html")  # what it lacks is told before it is needed
    wanted = modes.split(",") if modes else None
    report = run_bench(
        bundle,
        entry=entry,
        device=None if device is None else device_of(device, None),
        calls=[_shapes(text) for text in call],
        source=source,
        manifest=manifest,
        modes=wanted,
        samples=samples,
        steady=steady,
        report=note,
        keep=partial(_keep, out) if out else lambda found: None,
    )
    if page is not None:
        page.write_page(report, html)
    broken = [text for gate in gates if report["ok"] and (text := gate.broken(report, older))]
    report["gates"] = {"broken": broken, "ok": not broken}
    report["ok"] = report["ok"] and not broken
    result(report, as_json=as_json, text=table(report))
    for text in broken:
        note(f"gate broken: {text}")
    return 0 if report["ok"] else 1


def _keep(path: Path, report: Json) -> None:
    """The report at `path`, whole at every moment."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(report, indent=2) + "\n")
    beside.replace(path)


def _shapes(text: str) -> dict[str, tuple[int, ...]]:
    """`x=8x128 y=` -> {"x": (8, 128), "y": ()}."""
    shapes: dict[str, tuple[int, ...]] = {}
    for word in text.split():
        name, equals, sizes = word.partition("=")
        parts = [part for part in sizes.split("x") if part]
        if not name or not equals or not all(part.isdecimal() for part in parts):
            raise UsageError(f"--call {text!r}: {word!r} is not an argument with its sizes, such as x=8x128")
        shapes[name] = tuple(map(int, parts))
    return shapes
