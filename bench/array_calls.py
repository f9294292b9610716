"""What a call with arrays costs besides the model, and whether a million of them leave anything behind. CPU.

    aotpack build bench/calls.yaml -o DIR && python bench/array_calls.py DIR --out bench/results/array_calls_cpu.json

The ways take turns in one process; figures are medians of the rounds. The million is made in a process of its own, with
torch not imported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, CALLS = 15, 20_000
MILLION = """
import sys
import aotpack_runtime as apr
import numpy as np

entry, x = apr.load(sys.argv[1])["one"], np.arange(8, dtype=np.float32)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

for _ in range(10_000):
    entry(x)
before = resident()
for _ in range(1_000_000):
    entry(x)
assert "torch" not in sys.modules
print(resident() - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    grown = subprocess.run(
        [sys.executable, "-c", MILLION, options.bundle], check=True, capture_output=True, text=True
    ).stdout
    report = {"call_us": calls(options.bundle), "bytes_after_a_million_calls": int(grown), "machine": _machine()}
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def calls(bundle: Path) -> dict[str, float]:
    """Microseconds a call of a model of one tensor, by way of calling."""
    import numpy as np
    import torch

    import aotpack_runtime as apr

    torch.set_num_threads(1)
    x = np.arange(8, dtype=np.float32)
    own, tensor = apr.Array(x.tobytes(), "float32"), torch.from_numpy(x)
    by_arrays = apr.load(bundle, mode="strict", tensors="array")["one"]
    by_tensors = apr.load(bundle, mode="strict", tensors="torch")["one"]
    ways: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "numpy": (by_arrays, x),
        "Array": (by_arrays, own),
        "torch": (by_tensors, tensor),
        "eager": (lambda given: given + 1, tensor),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for call, given in ways.values():
            assert np.array_equal(np.asarray(call(given)), x + 1)
        for _ in range(ROUNDS):
            for name, (call, given) in ways.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    call(given)
                seconds[name].append((time.perf_counter() - start) / CALLS)
    return {name: round(statistics.median(each) * 1e6, 2) for name, each in seconds.items()}


def _machine() -> Any:
    from aotpack.bench.report import machine

    return machine()


if __name__ == "__main__":
    main()
