"""The figures that the contract is judged by, each read from a file of bench/results: the table of docs/benchmarks.md.

    python bench/contract_table.py            # writes the table into docs/benchmarks.md, between its marks
    python bench/contract_table.py --check    # exit code 1 when it is not what the files say

A figure whose file is not there is "not measured". Nothing is rounded towards its aim.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench/contract_table.py: begin -->", "<!-- end -->"

Json = Any


@dataclass(frozen=True)
class Row:
    """One line: `value` gives the figure from the JSON in `file`, `limit` is the most that it may be (with `least`, the
    least), `beside` what else the same file says."""

    what: str
    aim: str
    file: str
    value: Callable[[Json], float]
    limit: float
    unit: str = ""
    digits: int = 2
    beside: Callable[[Json], str] = lambda found: ""
    least: bool = False

    def cells(self, results: Path) -> tuple[str, ...]:
        path = results / self.file
        try:
            found = json.loads(path.read_text())
            value, beside = float(self.value(found)), self.beside(found)
        except (FileNotFoundError, KeyError, IndexError, TypeError):
            return self.what, self.aim, "not measured", "", ""
        over = self.limit / value if self.least else value / self.limit
        met = "met" if over <= 1 else f"**off by {over:.2f} x**"
        return self.what, self.aim, f"{value:.{self.digits}f}{self.unit}, {met}", beside, f"`{self.file}`"


def first(r: Json, mode: str) -> float:
    return float(r["modes"][mode]["first_output_s"]["median"])


def load_ms(r: Json) -> float:
    """CPU time where the file has it: other work of the machine does not add to it."""
    torch = r["modes"]["torch"]
    return 1e3 * float(torch.get("cpu_s", torch["phases_s"])["load"])


def calls(r: Json) -> str:
    us = {name: f"{way['us']:.1f}" for name, way in r["call"].items()}
    return (
        f"{us['bundle']} us; runner {us['runner']}, eager {us['eager']}, `aoti_load_package` "
        f"{us['aoti_load_package']}, `torch.compile` {us['torch_compile']}"
    )


def lean(r: Json) -> str:
    s = {name: f"{mode['total_s']:.2f}" for name, mode in r["modes"].items()}
    return f"{s['arrays']} s; with torch {s['torch']}, eager {s['eager']}, `import torch` {s['import-torch']}"


def steady(r: Json) -> Json:
    return r["steady"]["cases"][0]["ratios"]["bundle"]


CPU = (
    Row(
        "call of a one-tensor entry, one thread, in calls of torch's C++ runner", "<= 2 x",
        "calls_cpu.json", lambda r: r["call"]["bundle"]["of_runner"], 2.0, " x", beside=calls,
    ),
    Row(
        "the same with 10,000 variants, in calls with one", "<= 1.1 x",
        "calls_cpu.json", lambda r: r["variants"]["10000"]["of_one"], 1.1, " x",
    ),
    Row(
        "calls a second of a model that releases the GIL, two threads over one", ">= 1.8 x",
        "calls_cpu.json", lambda r: r["threads"]["bundle"]["two_of_one"], 1.8, " x", least=True,
        beside=lambda r: f"eager {r['threads']['eager']['two_of_one']:.2f} x",
    ),
    Row(
        "load of MiniLM after `import torch`, without its first call", "<= 20 ms",
        "lean_start_minilm_cpu.json", load_ms, 20.0, " ms", 0,
        beside=lambda r: ("the main thread's CPU time; " if "cpu_s" in r["modes"]["torch"] else "")
        + f"{1e3 * r['modes']['torch']['phases_s']['load']:.0f} ms on the clock, first call "
        f"{1e3 * r['modes']['torch']['phases_s']['first_call']:.0f} ms",
    ),
    *(
        Row(
            f"start to first output, {what}, torch never imported, of `import torch`", "<= 0.35",
            f"lean_start_{name}_cpu.json", lambda r: r["ratios"]["arrays_of_import_torch"], 0.35, beside=lean,
        )
        for name, what in (("quickstart", "a small model"), ("minilm", "MiniLM"))
    ),
    Row(
        "resident memory after MiniLM's first call, torch never imported, of `import torch`", "<= 0.6",
        "lean_start_minilm_cpu.json", lambda r: r["ratios"]["arrays_rss_of_import_torch"], 0.6,
        beside=lambda r: "{arrays[rss_mb]:.0f} MB and {import-torch[rss_mb]:.0f} MB".format(**r["modes"]),
    ),
    Row(
        "nine variants of MiniLM on disk: what a variant adds to the weights", "<= 3 MB",
        "small_costs_cpu.json", lambda r: r["disk"]["else_mb_a_variant"], 3.0, " MB",
        beside=lambda r: f"weights {r['disk']['weights_mb']:.1f} MB, once",
    ),
    Row(
        "rebuild with nothing changed, over 100 variants, no torch imported", "<= 1 s",
        "small_costs_cpu.json", lambda r: r["rebuild"]["cpu_s"], 1.0, " s of CPU",
        beside=lambda r: f"{r['rebuild']['variants']} variants, {r['rebuild']['wall_s']:.2f} s on the clock; heavy "
        f"imports: {', '.join(r['rebuild']['heavy']) or 'none'}",
    ),
    *(
        Row(
            f"a bundle of 1,000 variants of {what}: open, verdict", "<= 50 ms",
            "many_variants_cpu.json", lambda r, name=name: r[name]["both_cpu_ms"], 50.0, " ms of CPU", 0,
            beside=lambda r, name=name: f"index {r[name]['index_bytes'] / 1e6:.1f} MB",
        )
        for name, what in (("minilm", "a model"), ("llm-kernels", "kernels"))
    ),
    Row(
        "call of a kernel with a number not seen before, up to its launch", "<= 30 us",
        "kernel_calls_cpu.json", lambda r: r["us"]["torch's tensors"]["rmsnorm"]["number not seen"], 30.0, " us",
        beside=lambda r: "known {known} us, judged in full {full}; twelve variants, a table".format(
            **r["us"]["torch's tensors"]["rmsnorm"]
        ),
    ),
    Row(
        "`import aotpack_runtime`", "<= 30 ms",
        "small_costs_cpu.json", lambda r: r["import"]["ms"], 30.0, " ms of CPU", 1,
        beside=lambda r: f"with `load` and all that it imports {r['import_load']['ms']:.0f} ms",
    ),
    Row(
        "its memory", "<= 5 MB", "small_costs_cpu.json", lambda r: r["import"]["mb"], 5.0, " MB", 1,
        beside=lambda r: f"with `load` {r['import_load']['mb']:.1f} MB",
    ),
    Row(
        "build of nine variants of MiniLM in one process over two", ">= 1.7 x",
        "build_minilm_cpu.json", lambda r: r["cpu"]["one_of_two"], 1.7, " x (CPU time)", least=True,
        beside=lambda r: "{aotpack_one} s and {aotpack_two} s".format(**r["cpu"]["seconds"])
        + ("" if "aotpack_one" in r["wall"]["seconds"] else "; the first is the sum of the second's jobs"),
    ),
    Row(
        "the same in two over nine bare `aoti_compile_and_package` in two", "<= 1.1 x",
        "build_minilm_cpu.json", lambda r: r["cpu"]["two_of_bare"], 1.1, " x (CPU time)",
        beside=lambda r: "{aotpack_two} s and {bare_two} s".format(**r["cpu"]["seconds"]),
    ),
)  # fmt: skip

H200 = (
    Row(
        "start to first output, BERT-base bf16, torch in the process", "<= 4.2 s",
        "bert_bench_h200.json", lambda r: first(r, "bundle"), 4.2, " s",
        beside=lambda r: f"of it `import torch` {r['modes']['bundle']['phases_s']['import_torch']:.2f} s; eager "
        f"{first(r, 'eager'):.1f}, `torch.compile` with copied caches {first(r, 'compile-copied'):.1f} s",
    ),
    Row(
        "the same over `import torch` alone", "<= 1.4 x",
        "bert_bench_h200.json", lambda r: first(r, "bundle") / first(r, "import-torch"), 1.4,
        " x", beside=lambda r: f"{first(r, 'bundle'):.2f} s over {first(r, 'import-torch'):.2f} s",
    ),
    Row(
        "`torch.compile` with copied caches over the same", ">= 4 x",
        "bert_bench_h200.json", lambda r: first(r, "compile-copied") / first(r, "bundle"), 4.0, " x", least=True,
    ),
    Row(
        "`aoti_load_package` with an empty compiler cache over the same", ">= 10 x",
        "bert_package_h200.json", lambda r: first(r, "package-cold") / first(r, "bundle"), 10.0, " x", 1, least=True,
        beside=lambda r: f"{first(r, 'package-cold'):.1f} s over {first(r, 'bundle'):.2f} s, one process each",
    ),
    Row(
        "start to first output, BERT-base bf16, torch never imported", "<= 1.0 s",
        "bert_start_h200.json", lambda r: first(r, "bundle-arrays"), 1.0, " s",
        beside=lambda r: f"{first(r, 'bundle-arrays') / first(r, 'import-torch'):.2f} of `import torch`",
    ),
    Row(
        "eager over the same", ">= 10 x",
        "bert_start_h200.json", lambda r: first(r, "eager") / first(r, "bundle-arrays"), 10.0, " x", least=True,
    ),
    Row(
        "`torch.compile` with copied caches over the same", ">= 15 x",
        "bert_start_h200.json", lambda r: first(r, "compile-copied") / first(r, "bundle-arrays"), 15.0, " x",
        least=True,
    ),
    Row(
        "steady call of BERT-base, 8 x 128, over `torch.compile`'s", "<= 1.02 x",
        "bert_bench_h200.json", lambda r: steady(r)["median"], 1.02, " x", 3,
        beside=lambda r: "interval {low:.3f} .. {high:.3f}".format(**steady(r)),
    ),
    Row(
        "start to first right result, a kernel, torch and Triton not imported", "<= 0.5 s",
        "kernel_add_h200.json", lambda r: first(r, "bundle"), 0.5, " s",
        beside=lambda r: f"Triton {first(r, 'triton-warm'):.2f} s warm, {first(r, 'triton-cold'):.2f} cold",
    ),
    Row(
        "launch of a kernel", "<= 5 us",
        "launches_h200.json", lambda r: r["us"]["bundle"], 5.0, " us",
        beside=lambda r: f"{r['of_torch_add']['bundle']:.2f} of `torch.add`, {r['us']['torch.add']:.1f} us; Triton "
        f"{r['us']['triton']:.1f}",
    ),
    Row(
        "a model built without a GPU over one built on it, no tuning table, the worst of all shapes", "<= 1.1 x",
        "cross/2.11.0-3.6.0-sm_90.json", lambda r: r["latency_ratio"]["worst"], 1.1, " x", 3,
        beside=lambda r: f"median {r['latency_ratio']['median']:.3f} of {len(r['entries'])} models, "
        f"{sum(len(entry['latency']) for entry in r['entries'].values())} shapes",
    ),
    Row(
        "the same with a table of `aotpack tune`", "<= 1.03 x",
        "cross_tuned_h200.json", lambda r: r["latency_ratio"]["worst"], 1.03, " x", 3,
        beside=lambda r: f"median {r['latency_ratio']['median']:.3f}",
    ),
)  # fmt: skip


def table(results: Path = RESULTS) -> str:
    return "\n".join(lines(results)) + "\n"


def lines(results: Path) -> Iterator[str]:
    for title, rows in (("two CPU cores", CPU), ("one H200", H200)):
        yield f"| {title} | aim | the bundle | beside it | file |"
        yield "|---|---|---|---|---|"
        for row in rows:
            yield "| " + " | ".join(row.cells(results)) + " |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page = f"{before}{BEGIN}\n{table()}{END}{after}"
    if options.check:
        sys.exit(page != PAGE.read_text())
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
