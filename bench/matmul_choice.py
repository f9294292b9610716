"""Does the bundle's table choose as well as `@triton.autotune` on the same GPU? Needs a GPU, torch and triton.

    aotpack tune manifests/llm_kernels.yaml --only matmul
    aotpack build manifests/llm_kernels.yaml --only matmul -o DIR && python bench/matmul_choice.py DIR --out FILE.json

For each shape both choose, autotune by timing and the bundle by its table. Then both choices are launched from the
bundle, so that only the choice differs, and timed in turn with triton.testing.do_bench (median), three rounds of each,
of which the best counts. Results are checked against float64.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROUNDS = 3
CONFIGS = (
    ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}, 8, 3),
    ({"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8}, 4, 4),
    ({"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 1}, 4, 4),
)
"""Those of manifests/llm_kernels.yaml."""

SHAPES = (
    *((m, 4096, 4096) for m in (1, 16, 64, 256, 1024, 4096)),
    *((m, 14336, 4096) for m in (1, 16, 128, 1024)),
    (100, 208, 1008),
    (1000, 208, 1008),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch
    import triton

    import aotpack_runtime as apr
    from aotpack.bench.report import machine
    from kernels.matmul import matmul_kernel

    configs = [triton.Config(dict(kwargs), num_warps=warps, num_stages=stages) for kwargs, warps, stages in CONFIGS]
    tuned = triton.autotune(configs=configs, key=["M", "N", "K"])(matmul_kernel)
    entry = apr.load(options.bundle, device="cuda", mode="strict")["matmul"]
    rows: list[dict[str, Any]] = []
    for m, n, k in SHAPES:
        a = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        b = torch.randn(k, n, device="cuda").to(torch.bfloat16)
        outs = [torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        numbers = (m, n, k, k, 1, n, 1, n, 1)

        def grid(meta: Any, m: int = m, n: int = n) -> tuple[int]:
            return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

        tuned[grid](a, b, outs[0], *numbers)
        entry(a, b, outs[1], *numbers)
        best = {**tuned.best_config.kwargs, "num_warps": tuned.best_config.num_warps,
                "num_stages": tuned.best_config.num_stages}  # fmt: skip
        values = dict(zip(entry.record.parameter_names, (a, b, outs[1], *numbers), strict=True))
        same = next(v for v in entry.variants if v.axes["dtype"] == "bf16" and best.items() <= v.axes.items())
        chosen = entry.explain(a, b, outs[1], *numbers).variant
        ways = {"autotune": entry.prepare(same, values), "bundle": entry.prepare(chosen, values)}
        wanted = a.double() @ b.double()
        errors = [float((out.double() - wanted).norm() / wanted.norm()) for out in outs]
        seconds: dict[str, float] = {}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                took = triton.testing.do_bench(way, warmup=25, rep=100, return_mode="median")
                seconds[name] = min(took, seconds.get(name, took))
        picked = {name: value for name, value in chosen.axes.items() if name != "dtype"}
        rows.append({
            "shape": [m, n, k], "autotune_us": 1000 * seconds["autotune"], "bundle_us": 1000 * seconds["bundle"],
            "ratio": seconds["bundle"] / seconds["autotune"], "relative_errors": errors,
            "autotune_picks": best, "bundle_picks": picked,
        })  # fmt: skip
        print(f"{m:5} {n:6} {k:5}  autotune {rows[-1]['autotune_us']:8.1f} us  bundle {rows[-1]['bundle_us']:8.1f} us  "
              f"ratio {rows[-1]['ratio']:.3f}")  # fmt: skip
    worst = max(row["ratio"] for row in rows)
    print(f"worst ratio {worst:.3f}")
    if options.out:
        report = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "machine": machine(), "rows": rows}
        options.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    if not all(error <= 1e-2 for row in rows for error in row["relative_errors"]):
        raise SystemExit("a result is wrong")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent / "manifests"), str(HERE)]  # both hold a package `kernels`
    main()
