"""A report as one page that needs nothing else: figures as inline SVG, all numbers in tables, no scripts."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import Any

from aotpack.bench.report import table
from aotpack_runtime.errors import MissingDependency

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise MissingDependency("matplotlib", needed_for="--html", install="'aotpack[bench]'") from error

Json = Any

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
pre{{overflow-x:auto;background:#f4f4f4;padding:1rem}}svg{{max-width:100%;height:auto}}</style>
<h1>{title}</h1>
<p>Entry <b>{entry}</b>, {date}, torch {torch}, Python {python}, {cpus} CPUs, {processor}. Every sample is a fresh
process with private caches. Results were compared with {reference}.</p>
<h2>Process start to first right output</h2>{first}
<h2>First call of each shape, in the order of the calls</h2>{calls}
<h2>Figures</h2><pre>{table}</pre>
<h2>Ways of starting</h2><ul>{modes}</ul>
<details><summary>The whole report as JSON</summary><pre>{json}</pre></details>
</html>
"""


def write_page(report: Json, path: Path) -> None:
    """Write the page of `report` to `path`, in place of what is there."""
    measured = {name: mode for name, mode in report["modes"].items() if "first_output_s" in mode}
    bundle, machine = report["bundle"], report["machine"]
    page = _PAGE.format(
        title=html.escape(f"{bundle['name']} {bundle['version']}"), entry=html.escape(report["entry"]),
        date=report["date"], torch=html.escape(report["torch"]), python=machine["python"], cpus=machine["cpus"],
        processor=html.escape(machine["processor"]), reference=report["reference"],
        first=_first_outputs(measured), calls=_first_calls(report, measured), table=html.escape(table(report)),
        modes="".join(f"<li><b>{html.escape(name)}</b>: {html.escape(mode['what'])}</li>"
                      for name, mode in report["modes"].items()),
        json=html.escape(json.dumps(report, indent=1, sort_keys=True)),
    )  # fmt: skip
    path.write_text(page)


def _first_outputs(measured: Json) -> str:
    figure = Figure(figsize=(9, 0.5 * len(measured) + 1))
    axes = figure.subplots()
    names = list(measured)[::-1]
    medians = [measured[name]["first_output_s"]["median"] for name in names]
    low = [m - measured[name]["first_output_s"]["low"] for name, m in zip(names, medians, strict=True)]
    high = [measured[name]["first_output_s"]["high"] - m for name, m in zip(names, medians, strict=True)]
    axes.barh(names, medians, xerr=[low, high], capsize=3)
    axes.set_xlabel("seconds, median with 95 % interval")
    return _svg(figure)


def _first_calls(report: Json, measured: Json) -> str:
    figure = Figure(figsize=(9, 4))
    axes = figure.subplots()
    names = [case["name"] for case in report["cases"]]
    for name, mode in measured.items():
        if mode["calls"]:
            axes.plot(names, [call["first_s"]["median"] for call in mode["calls"]], marker="o", label=name)
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.legend(fontsize="small")
    return _svg(figure)


def _svg(figure: Figure) -> str:
    """The figure as an element; without what would make two pages of one report differ."""
    out = io.StringIO()
    figure.tight_layout()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)
