"""What a call costs once a process is warm: by mode and case, and as a ratio to the JIT compiler's own steady call.

A process gives one number for each case, the median of its calls, so that the interval is over processes: calls of one
process share its memory layout and its moment of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from aotpack.bench.stats import ratio

Json = Any

COMPARED = {
    "compile-copied": "steady_s", "compile-cold": "steady_s", "compile-artifacts": "steady_s",
    "triton-warm": "launch_s", "triton-cold": "launch_s",
}  # fmt: skip
"""What steady calls are compared with, the first that was measured -> of which of its figures. How its caches were
filled does not matter any more. A launch is the time until it is queued."""


def compare_steady(samples: Mapping[str, Sequence[Json]]) -> Json:
    """{"against": mode, "of": figure, "cases": [{"case": name, "ratios": {mode: estimate}}]}; None when no JIT compiler
    was measured until it was steady."""
    for against, figure in COMPARED.items():
        if _measured(samples.get(against, ()), figure):
            break
    else:
        return None
    cases = []
    for place, call in enumerate(samples[against][0]["calls"]):
        base = [sample["calls"][place][figure] for sample in samples[against]]
        ratios = {
            name: asdict(ratio([sample["calls"][place][figure] for sample in own], base))
            for name, own in samples.items()
            if _measured(own, figure)
        }
        cases.append({"case": call["case"], "ratios": ratios})
    return {"against": against, "of": figure, "cases": cases}


def steady_table(report: Json) -> list[str]:
    """A line for each mode: its steady call at each case and the ratio; for kernels also its launch."""
    lines: list[str] = []
    compared = report.get("steady") or {"against": "", "of": "", "cases": []}
    ratios = {one["case"]: one["ratios"] for one in compared["cases"]}
    for figure, what in (("steady_s", "steady call"), ("launch_s", "launch, until it is queued")):
        rows = [
            (name, mode["calls"]) for name, mode in report["modes"].items()
            if mode.get("calls") and figure in mode["calls"][0]
        ]  # fmt: skip
        if not rows:
            continue
        against = f", x {compared['against']}" if compared["of"] == figure else ""
        lines.append(f"{what}{against}:")
        for name, calls in rows:
            cells = []
            for call in calls:
                cell = f"{call['case']} {duration(call[figure]['median'])}"
                found = ratios.get(call["case"], {}).get(name) if against else None
                cells.append(
                    f"{cell} ({found['median']:.2f}, {found['low']:.2f} .. {found['high']:.2f})" if found else cell
                )
            lines.append(f"  {name:17} " + "   ".join(cells))
    return lines


def duration(seconds: float) -> str:
    """Such as `1.20 s`, `3.4 ms`, `5.1 us`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"


def _measured(samples: Sequence[Json], figure: str) -> bool:
    return bool(samples) and bool(samples[0]["calls"]) and samples[0]["calls"][0].get(figure) is not None
