"""What importing the runtime, variants on disk and a rebuild with nothing changed cost. CPU.

    aotpack build manifests/minilm.yaml -o MODEL
    python bench/small_costs.py MODEL manifests/llm_kernels.yaml --out bench/results/small_costs_cpu.json

An import is the least of 15 fresh processes over the least of 15 bare ones, taken in turn, in CPU time. The manifest is
built twice; the second build, in which nothing changed, counts, and is asked which modules it imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aotpack.bench.report import machine
from aotpack_runtime.format import index_json, layout

PAIRS = 15
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
REPORT = "; print(open('/proc/self/statm').read().split()[1])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = {
        "import": imported("import aotpack_runtime"),
        "import_load": imported("import aotpack_runtime; aotpack_runtime.load"),
        "disk": disk(options.bundle),
        "rebuild": rebuilt(options.manifest),
        "machine": machine(),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def imported(code: str) -> dict[str, float]:
    """CPU milliseconds and resident megabytes over those of a bare interpreter."""

    def run(code: str) -> tuple[float, int]:
        process = subprocess.Popen([sys.executable, "-c", code + REPORT], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        pages = int(process.stdout.read())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return 1e3 * (used.ru_utime + used.ru_stime), pages

    pairs = [(run("pass"), run(code)) for _ in range(PAIRS)]
    bare, with_it = (tuple(map(min, zip(*runs, strict=True))) for runs in zip(*pairs, strict=True))
    return {"ms": round(with_it[0] - bare[0], 1), "mb": round((with_it[1] - bare[1]) * PAGE_BYTES / 1e6, 1)}


def disk(bundle: Path) -> dict[str, Any]:
    """Megabytes of the weights, and of all else by variant."""
    index = index_json.parse((bundle / layout.INDEX).read_bytes())
    weights = index.weights_file.size_bytes if index.weights_file else 0
    whole = sum(file.size_bytes for file in index.members().values()) + (bundle / layout.INDEX).stat().st_size
    count = sum(len(entry.variants) for entry in index.entries.values())
    return {
        "bundle": index.name, "variants": count, "weights_mb": round(weights / 1e6, 2),
        "else_mb_a_variant": round((whole - weights) / count / 1e6, 3),
    }  # fmt: skip


def rebuilt(manifest: Path) -> dict[str, Any]:
    """Seconds of a build in which nothing changed, and what it imported of what it should not."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "importtime", "-m", "aotpack", "build", str(manifest), "-o", f"{folder}/out"]
        subprocess.run(command, check=True, capture_output=True)
        before, begun = os.times(), time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, after = time.perf_counter() - begun, os.times()
        modules = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
        count = sum(
            len(entry.variants)
            for entry in index_json.parse(Path(folder, "out", layout.INDEX).read_bytes()).entries.values()
        )
    return {
        "manifest": str(manifest), "variants": count, "wall_s": round(seconds, 2),
        "cpu_s": round(after.children_user + after.children_system - before.children_user - before.children_system, 2),
        "heavy": sorted(modules & {"torch", "triton", "transformers", "sympy"}),
    }  # fmt: skip


if __name__ == "__main__":
    main()
