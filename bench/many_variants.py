"""Opening a bundle of 1,000 variants and judging whether it fits this host. CPU, no torch.

    aotpack build manifests/minilm.yaml -o MODEL && aotpack build manifests/llm_kernels.yaml -o KERNELS
    python bench/many_variants.py MODEL KERNELS --out bench/results/many_variants_cpu.json

The index of each bundle is written again with its variants repeated up to 1,000, each with an id, sizes and an artifact
of its own. A sample is a fresh process that imports the runtime, then times reading the index and the verdict; figures
are medians of wall and of CPU time, in milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from aotpack_runtime.format import index_json, layout
from aotpack_runtime.format.guard import TensorGuard
from aotpack_runtime.format.index import ArtifactRef, Index, Variant

COUNT, SAMPLES = 1000, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(sample(options.bundles[0])))
        return
    from aotpack.bench.report import machine

    report: dict[str, Any] = {"variants": COUNT, "samples": SAMPLES}
    with tempfile.TemporaryDirectory() as folder:
        for bundle in options.bundles:
            index = index_json.parse((bundle / layout.INDEX).read_bytes())
            large = Path(folder, index.name)
            large.mkdir()
            (large / layout.INDEX).write_bytes(index_json.dump(repeated(index)))
            command = [sys.executable, __file__, str(large), "--one"]
            seen = [json.loads(subprocess.check_output(command)) for _ in range(SAMPLES)]
            report[index.name] = {
                "index_bytes": (large / layout.INDEX).stat().st_size,
                **{name: round(statistics.median(one[name] for one in seen), 1) for name in seen[0]},
            }
    report["machine"] = machine()
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def repeated(index: Index) -> Index:
    """The same index with 1,000 variants in all, spread over its entries."""
    each = COUNT // len(index.entries)
    entries = {}
    for name, entry in index.entries.items():
        like = cycle(entry.variants)
        entries[name] = replace(entry, variants=tuple(another(next(like), number) for number in range(each)))
    return replace(index, entries=entries)


def another(variant: Variant, number: int) -> Variant:
    """`variant` with sizes and files of its own."""
    digest = hashlib.sha256(f"{variant.id} {number}".encode()).hexdigest()
    files = {name: replace(file, digest=digest) for name, file in variant.artifact.files.items()}
    leaves = tuple(
        replace(guard, dims=(number + 1, *guard.dims[1:])) if isinstance(guard, TensorGuard) and guard.dims else guard
        for guard in variant.guards.leaves
    )
    artifact = ArtifactRef(variant.artifact.kind, digest, files)
    guards = replace(variant.guards, leaves=leaves)
    return replace(variant, id=f"{variant.id}/{number}", artifact=artifact, guards=guards)


def sample(bundle: Path) -> dict[str, float]:
    from aotpack_runtime.bundle import open_bundle
    from aotpack_runtime.errors import TargetMismatch
    from aotpack_runtime.machine import this_machine
    from aotpack_runtime.verdict import judge

    machine = this_machine()
    wall, cpu = time.perf_counter(), time.process_time()
    opened = open_bundle(bundle)
    read = time.perf_counter()
    with contextlib.suppress(TargetMismatch):  # kernels, on a host without a GPU: every variant was asked
        judge(opened.index, machine.devices[-1], machine)
    ended = time.perf_counter()
    return {
        "open_ms": 1e3 * (read - wall), "verdict_ms": 1e3 * (ended - read), "both_ms": 1e3 * (ended - wall),
        "both_cpu_ms": 1e3 * (time.process_time() - cpu),
    }  # fmt: skip


if __name__ == "__main__":
    main()
