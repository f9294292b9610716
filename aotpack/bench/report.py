"""Samples -> one document of figures: for machines as JSON, for people as a table."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from aotpack.bench.cases import Case
from aotpack.bench.harness import Runs
from aotpack.bench.modes import Mode
from aotpack.bench.stats import calls_to_pay, estimate
from aotpack.bench.steady import compare_steady, duration, steady_table
from aotpack_runtime.machine import this_machine

Json = Any
SCHEMA = "aotpack.bench/v1"
_PACKAGES = ("aotpack", "aotpack-runtime", "torch", "triton", "numpy", "transformers")


def make_report(
    runs: Runs,
    cases: Sequence[Case],
    *,
    modes: Mapping[str, Mode],
    bundle: Mapping[str, Json],
    entry: str,
    size_bytes: int,
    version: str,
) -> Json:
    """The whole document; a mode that answered wrong, or was not measured, has a reason in the place of figures."""
    found: dict[str, Json] = {}
    for name, samples in runs.samples.items():
        if name in runs.wrong:
            found[name] = {"what": modes[name].what, "wrong": runs.wrong[name]}
            continue
        found[name] = {
            "what": modes[name].what,
            "first_output_s": asdict(estimate([sample["first_output_s"] for sample in samples])),
            "phases_s": _medians([sample["phases_s"] for sample in samples]),
            "calls": _calls(samples),
            "first_rss_bytes": _first_rss(samples),
            "peak_rss_bytes": median(sample["peak_rss_bytes"] for sample in samples),
            "peak_gpu_bytes": samples[-1]["peak_gpu_bytes"],
            "compiles": max(sample["compiles"] for sample in samples),
            "hits": samples[-1]["hits"],
            "misses": samples[-1]["misses"],
            "samples_s": [sample["first_output_s"] for sample in samples],
        }
    for name, reason in runs.unmeasured.items():
        found[name] = {"what": modes[name].what if name in modes else "", "unmeasured": reason}
    return {
        "schema": SCHEMA,
        "ok": not runs.wrong and "bundle" not in runs.unmeasured,
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "torch": version,
        "bundle": {**bundle, "bytes": size_bytes},
        "entry": entry,
        "reference": runs.reference,
        "cases": [{"name": case.name, "kind": case.kind} for case in cases],
        "modes": found,
        "steady": compare_steady({name: runs.samples[name] for name in runs.samples if name not in runs.wrong}),
        "break_even": _break_even(found, cases),
    }


def table(report: Json) -> str:
    """Modes by their first output, and what each later shape cost at its first call."""
    names = [case["name"] for case in report["cases"]]
    heads = [
        "mode",
        "first output",
        "95 % interval",
        "x bundle",
        "import torch",
        *[f"{name}" for name in names[1:]],
        "peak MB",
        "compiles",
    ]
    base = report["modes"].get("bundle", {}).get("first_output_s", {}).get("median")
    rows: list[list[str]] = []
    notes: list[str] = []
    for name, mode in report["modes"].items():
        if "first_output_s" not in mode:
            word = "WRONG" if "wrong" in mode else "not measurable"
            notes.append(f"{name}: {word}: {mode.get('wrong') or mode.get('unmeasured')}")
            continue
        found = mode["first_output_s"]
        firsts = {call["case"]: call["first_s"]["median"] for call in mode["calls"]}
        rows.append([
            name, duration(found["median"]), f"{duration(found['low'])} .. {duration(found['high'])}",
            f"{found['median'] / base:.2f}" if base else "-",
            duration(mode["phases_s"]["import_torch"]) if "import_torch" in mode["phases_s"] else "-",
            *[duration(firsts[case]) if case in firsts else "-" for case in names[1:]],
            f"{mode['peak_rss_bytes'] / 1e6:.0f}", str(mode["compiles"]),
        ])  # fmt: skip
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) if n else cell.ljust(width) for n, (cell, width) in
                       enumerate(zip(row, widths, strict=True))) for row in [heads, *rows]]  # fmt: skip
    pays = [_pay_text(one) for one in report["break_even"]]
    first = (
        f"columns after `import torch`: seconds of the first call of each next shape, after {names[0]}"
        if names[1:]
        else ""
    )
    return "\n".join([*lines, *([first] if first else []), *steady_table(report), *notes, *pays])


def _calls(samples: Sequence[Json]) -> list[Json]:
    found = []
    for place, call in enumerate(samples[0]["calls"]):
        seconds = {
            name: asdict(estimate([sample["calls"][place][name] for sample in samples]))
            for name in ("first_s", "second_s", "steady_s", "launch_s")
            if call.get(name) is not None
        }
        found.append({"case": call["case"], "kind": call["kind"], **seconds})
    return found


def _break_even(modes: Mapping[str, Json], cases: Sequence[Case]) -> list[Json]:
    """For each case, how many calls a torch.compile at that shape takes to earn back its compile, against the bundle
    and against eager: medians of this run, with the range that the intervals give."""
    compiled = modes.get("compile-cold", {})
    if "calls" not in compiled:
        return []
    found = []
    for place, case in enumerate(cases):
        own = compiled["calls"][place]
        for name in ("bundle", "eager"):
            other = modes.get(name, {}).get("calls")
            if not other or "steady_s" not in own:
                continue
            compile_s, generic, special = own["first_s"], other[place]["steady_s"], own["steady_s"]
            found.append({
                "case": case.name, "against": name,
                "compile_s": max(compile_s["median"] - special["median"], 0.0),
                "calls": calls_to_pay(compile_s["median"] - special["median"], generic["median"], special["median"]),
                "low": calls_to_pay(compile_s["low"] - special["high"], generic["high"], special["low"]),
                "high": calls_to_pay(compile_s["high"] - special["low"], generic["low"], special["high"]),
            })  # fmt: skip
    return found


def _pay_text(one: Json) -> str:
    """Rounded to calls; the range is what the intervals of this run allow, and wide when they are."""
    what = f"torch.compile at {one['case']} ({one['compile_s']:.1f} s) against {one['against']}"
    if one["calls"] is None:
        return f"{what}: never pays; its calls are not faster"
    low, high = one["low"] or 0.0, "never" if one["high"] is None else f"{one['high']:.0f}"
    return f"{what}: pays after {one['calls']:.0f} calls ({low:.0f} .. {high})"


def _first_rss(samples: Sequence[Json]) -> float | None:
    """Resident memory after the first output; None for a mode that has none."""
    return median(sample["calls"][0]["rss_bytes"] for sample in samples) if samples[0]["calls"] else None


def _medians(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in phases) for name in phases[0]}


def machine() -> Json:
    """What a figure was seen on: interpreter, CPUs and packages."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "gpus": [f"{gpu.name}, driver for CUDA {'.'.join(map(str, gpu.driver))}" for gpu in this_machine().gpus],
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""
