"""What the first call of a shape costs a server that runs already, and a steady one: bundles side by side. Needs a GPU.

    python bench/new_shapes.py cudnn=DIR efficient=DIR --out bench/results/new_shapes_h200.json

Made for one question, which operator serves attention (`attention` of a torch entry): bundles of the same models that
differ in it alone. Each bundle has fresh processes of its own, which take turns; a shape's figures are the medians of
them. Results are compared with the first bundle's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Json = Any
SHAPES = [(8, 128), (4, 128), (16, 256), (1, 128), (8, 129), (64, 512)]
"""(batch, seq) in the order they are called in: the shapes of the start-up table, and others of the range."""
STEADY_CALLS = 40
MOST_DIFFERENCE = 0.2
"""Of values to 4, bfloat16 through 12 layers; two attention operators round in other places."""


def main() -> None:
    if sys.argv[1] == "--child":
        print(json.dumps(child(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from aotpack.bench.report import machine

    bundles = dict(item.split("=", 1) for item in options.bundles)
    samples: dict[str, list[Json]] = {name: [] for name in bundles}
    for _ in range(options.samples):
        for name, path in bundles.items():
            done = subprocess.run(
                [sys.executable, __file__, "--child", path], check=True, stdout=subprocess.PIPE, text=True
            )
            samples[name].append(json.loads(done.stdout.splitlines()[-1]))
    first = next(iter(samples.values()))[0]
    differences = {
        name: max(
            abs(a - b) for shape in first for a, b in zip(first[shape]["some"], one[0][shape]["some"], strict=True)
        )
        for name, one in samples.items()
    }
    wrong = [name for name, found in differences.items() if not found <= MOST_DIFFERENCE]
    report = {
        "ms": {
            name: {
                shape: {
                    what: round(statistics.median(one[shape][what] for one in found), 3) for what in ("first", "steady")
                }
                for shape in found[0]
            }
            for name, found in samples.items()
        },
        "samples": options.samples, "largest_difference": differences, "wrong": wrong,
        "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv), "machine": machine(),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"wrong results: {', '.join(wrong)}")


def child(path: str) -> Json:
    """By shape: milliseconds of its first call and the median of steady ones, until the GPU is done; some values."""
    import torch

    import aotpack_runtime as apr

    session = apr.load(path, device="cuda", mode="strict")
    (name,) = session
    entry = session[name]
    torch.manual_seed(0)
    found = {}
    for shape in SHAPES:
        ids = torch.randint(0, 30000, shape, device="cuda")
        mask = torch.ones(shape, dtype=torch.int64, device="cuda")

        def run(ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> tuple[float, Any]:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            result = entry(input_ids=ids, attention_mask=mask)
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - begun), result

        first, result = run()
        steady = statistics.median(run()[0] for _ in range(STEADY_CALLS))
        values = result if isinstance(result, torch.Tensor) else result[0]
        found["x".join(map(str, shape))] = {
            "first": first, "steady": steady, "some": values.flatten()[:: max(values.numel() // 64, 1)].tolist(),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    main()
