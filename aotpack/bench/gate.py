"""Release gates: a figure of the bundle against a limit, or against the same figure of an older report."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotpack_runtime.errors import UsageError

Json = Any

METRICS: dict[str, Callable[[Json], float]] = {
    "first_output": lambda report: report["modes"]["bundle"]["first_output_s"]["median"],
    "first_call": lambda report: report["modes"]["bundle"]["phases_s"]["first_call"],
    "load": lambda report: report["modes"]["bundle"]["phases_s"]["load"],
    "steady": lambda report: report["modes"]["bundle"]["calls"][0]["steady_s"]["median"],
    "steady_ratio": lambda report: report["steady"]["cases"][0]["ratios"]["bundle"]["median"],
    "launch": lambda report: report["modes"]["bundle"]["calls"][0]["launch_s"]["median"],
    "peak_rss": lambda report: report["modes"]["bundle"]["peak_rss_bytes"],
    "bytes": lambda report: report["bundle"]["bytes"],
}
"""Figures of the bundle: seconds, bytes, and its steady call over the JIT compiler's in the same run."""

_FORM = re.compile(r"(?P<metric>\w+)\s*(?P<sign>>=|>|<=|<)\s*(?P<limit>\d+(\.\d+)?)(?P<times>x?)")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gate:
    """`first_output>1.10x`: fail when the metric is more than 1.1 times the baseline's; without x, than the number."""

    text: str
    metric: str
    sign: str
    limit: float
    relative: bool

    def require(self, baseline: Json | None) -> None:
        """UsageError when the gate compares with a baseline and there is none."""
        if self.relative and baseline is None:
            raise UsageError(f"--fail-if {self.text!r} needs --baseline", hint="give the JSON of an older run")

    def broken(self, report: Json, baseline: Json | None) -> str | None:
        """What broke the gate in one line, None when it holds."""
        try:
            found = METRICS[self.metric](report)
        except (KeyError, IndexError, TypeError):
            raise UsageError(f"--fail-if {self.text!r}: this run did not measure {self.metric}") from None
        limit = self.limit
        self.require(baseline)
        if self.relative:
            try:
                limit *= METRICS[self.metric](baseline)
            except (KeyError, IndexError, TypeError):
                raise UsageError(f"--fail-if {self.text!r}: --baseline did not measure {self.metric}") from None
        if not _SIGNS[self.sign](found, limit):
            return None
        return f"{self.text}: {self.metric} is {found:.6g}, the limit is {limit:.6g}"


def read_baseline(path: Path) -> Json:
    """The report at `path`; UsageError for what is none."""
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"--baseline {path}: {error}", hint="give the JSON of an older run") from None
    if not isinstance(report, dict) or not {"modes", "bundle"} <= report.keys():
        raise UsageError(f"--baseline {path}: is no report of a run", hint="give the JSON of an older run")
    return report


def parse_gate(text: str) -> Gate:
    """UsageError when `text` is not of the form METRIC>NUMBER[x]."""
    match = _FORM.fullmatch(text.strip())
    if match is None or match["metric"] not in METRICS:
        raise UsageError(
            f"--fail-if {text!r}: expected such as 'first_output>1.10x' or 'load>0.05'; metrics: {', '.join(METRICS)}"
        )
    return Gate(text, match["metric"], match["sign"], float(match["limit"]), bool(match["times"]))
