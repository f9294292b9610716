"""Nine variants of MiniLM built from nothing: by `aotpack build` in one process and in two, and by nine bare calls of
torch's `aoti_compile_and_package` in two processes.

    python bench/build_speed.py --out bench/results/build_minilm_cpu.json

Whole processes, caches empty and private, one after another. The build of a bundle also exports the program that serves
misses, runs every variant against eager and packs; the bare calls export, compile and write nine packages, each with
the weights in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aotpack.bench.report import machine

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "manifests"
POINTS = [(batch, seq) for batch in (1, 4, 8, 16) for seq in ((8, 64), (65, 128))] + [(None, (2, 256))]
"""Batch and the range of seq, as in manifests/minilm.yaml; a batch of None varies from 1 to 32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare is not None:
        bare(options.bare)
        return
    # The bare calls stand between the two builds, so that a machine that slows down favours neither.
    seconds = {"aotpack_two": built(2), "bare_two": in_two_processes(), "aotpack_one": built(1)}
    report = {
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "one_of_two": round(seconds["aotpack_one"] / seconds["aotpack_two"], 3),
        "two_of_bare": round(seconds["aotpack_two"] / seconds["bare_two"], 3),
        "machine": machine(),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def built(jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "aotpack", "build", str(MANIFESTS / "minilm.yaml"), "-q", "-j", str(jobs)]
        start = time.perf_counter()
        subprocess.run([*command, "-o", f"{folder}/out"], check=True, env=private(folder), stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def in_two_processes() -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, str(Path(__file__)), "--bare"]
        both = [
            subprocess.Popen([*command, str(place)], cwd=folder, env=private(f"{folder}/{place}")) for place in (0, 1)
        ]
        codes = [process.wait() for process in both]
        if any(codes):
            raise SystemExit("a bare build failed")
        return time.perf_counter() - start


def private(folder: str) -> dict[str, str]:
    return os.environ | {
        "AOTPACK_CACHE_DIR": f"{folder}/aotpack",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "OMP_NUM_THREADS": "1",
    }


def bare(place: int) -> None:
    import torch

    sys.path.insert(0, str(MANIFESTS))
    from models.minilm import build

    model = build()
    for number, (batch, (low, high)) in list(enumerate(POINTS))[place::2]:
        seq = torch.export.Dim("seq", min=low, max=high)
        dims = {1: seq} if batch is not None else {0: torch.export.Dim("batch", min=1, max=32), 1: seq}
        ids = torch.ones(batch or 8, (low + high) // 2, dtype=torch.int64)
        with torch.no_grad():
            program = torch.export.export(model, (ids, ids.clone()), dynamic_shapes=(dims, dims), strict=False)
            torch._inductor.aoti_compile_and_package(program, package_path=f"{os.getcwd()}/{number}.pt2")


if __name__ == "__main__":
    main()
