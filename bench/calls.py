"""What a call costs besides the model: against torch's runner, against the number of variants, from two threads. CPU.

    aotpack build bench/calls.yaml -o DIR && python bench/calls.py DIR --out bench/results/calls_cpu.json

All ways are in one process with one torch thread and take turns; figures are medians of the rounds, ratios are medians
of the ratios of a round. Results of every way are compared with eager's first.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from call_models import layers, one_tensor

import aotpack_runtime as apr
from aotpack.bench.report import machine
from aotpack_runtime.format import index_json, layout
from aotpack_runtime.format.guard import Guards, TensorGuard

ROUNDS, CALLS = 15, 20_000
COUNTS = (1, 100, 10_000)
SECONDS = 1.0
Call = Callable[[torch.Tensor], torch.Tensor]
Way = tuple[Callable[[Any], Any], Any]
"""What is called, and with what: the runner takes a list."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        report = {
            "call": floor(options.bundle),
            "variants": counts(options.bundle, Path(folder)),
            "threads": threads(options.bundle),
            "machine": machine(),
        }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------------ one call


def floor(bundle: Path) -> dict[str, Any]:
    """Microseconds a call of a model of one tensor, and times the runner's own."""
    model, x = one_tensor(), torch.arange(8, dtype=torch.float32)
    entry = apr.load(bundle, mode="strict")["one"]
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library(bundle, "exact")), 1)
    program = torch.export.export(model, (x,), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/one.pt2")
        loaded = torch._inductor.aoti_load_package(package)
    ways: dict[str, Way] = {
        "runner": (runner.run, [x]),
        "bundle": (entry, x),
        "eager": (model, x),
        "aoti_load_package": (loaded, x),
        "torch_compile": (torch.compile(model), x),
    }
    for name, (call, given) in ways.items():
        found = call(given)
        assert torch.equal(found[0] if name == "runner" else found, x + 1), name
    seconds = in_turn(ways)
    return {
        name: {
            "us": round(statistics.median(own) * 1e6, 3),
            "of_runner": round(statistics.median(a / b for a, b in zip(own, seconds["runner"], strict=True)), 3),
        }
        for name, own in seconds.items()
    }


def library(bundle: Path, point: str) -> Path:
    found = index_json.parse((bundle / layout.INDEX).read_bytes())
    variant = next(one for one in found.variants() if one.id.startswith("one/") and one.point == point)
    return bundle / layout.artifact("aoti", variant.artifact.digest, "model.so")


# --------------------------------------------------------------------------------------------------- number of variants


def counts(bundle: Path, folder: Path) -> dict[str, Any]:
    """Microseconds a call that was judged before, and the judgement of one that was not, by number of variants: exact
    sizes over the one library that takes them all."""
    entries = {
        count: apr.load(with_variants(bundle, folder / str(count), count), mode="strict")["one"] for count in COUNTS
    }
    x = torch.arange(COUNTS[0], dtype=torch.float32)
    for entry in entries.values():
        assert torch.equal(entry(x), x + 1)
    again = in_turn({count: (entry, x) for count, entry in entries.items()})
    judged = in_turn({count: (entry.explain, x) for count, entry in entries.items()}, calls=2000)
    return {
        str(count): {
            "call_us": round(statistics.median(again[count]) * 1e6, 3),
            "explain_us": round(statistics.median(judged[count]) * 1e6, 3),
            "of_one": round(statistics.median(a / b for a, b in zip(again[count], again[1], strict=True)), 3),
            "explain_of_one": round(statistics.median(a / b for a, b in zip(judged[count], judged[1], strict=True)), 3),
        }
        for count in COUNTS
    }  # fmt: skip


def with_variants(bundle: Path, out: Path, count: int) -> Path:
    """A copy of the bundle in which `one` has a variant for each size from 1 to `count`."""
    shutil.copytree(bundle, out)
    found = index_json.parse((out / layout.INDEX).read_bytes())
    entry = found.entries["one"]
    general = next(variant for variant in entry.variants if variant.point == "any")
    guard = general.guards.leaves[0]
    assert isinstance(guard, TensorGuard)
    variants = tuple(
        replace(
            general, id=f"one/size{size}/cpu",
            guards=Guards(general.guards.trees, (replace(guard, dims=(size,)),)),
        )
        for size in range(1, count + 1)
    )  # fmt: skip
    entries = {**found.entries, "one": replace(entry, variants=variants)}
    (out / layout.INDEX).write_bytes(index_json.dump(replace(found, entries=entries)))
    return out


# -------------------------------------------------------------------------------------------------------------- threads


def threads(bundle: Path) -> dict[str, Any]:
    """Calls a second of a model whose work releases the GIL, from one thread and from two."""
    entry, model = apr.load(bundle, mode="strict")["layers"], layers()
    x = torch.randn(64, 512)
    assert torch.allclose(entry(x), model(x), rtol=1e-4, atol=1e-5)
    ways = {"bundle": entry, "eager": model}
    rates = {name: [(rate(call, x, 1), rate(call, x, 2)) for _ in range(5)] for name, call in ways.items()}
    return {
        name: {
            "one_per_s": round(statistics.median(one for one, _ in found)),
            "two_per_s": round(statistics.median(two for _, two in found)),
            "two_of_one": round(statistics.median(two / one for one, two in found), 3),
        }
        for name, found in rates.items()
    }


def rate(call: Call, x: torch.Tensor, number: int) -> float:
    done, stop = [0] * number, threading.Event()

    def work(place: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while not stop.is_set():
                call(x)
                done[place] += 1

    workers = [threading.Thread(target=work, args=(place,)) for place in range(number)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    time.sleep(SECONDS)
    stop.set()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - start)


def in_turn(ways: dict[Any, Way], *, calls: int = CALLS) -> dict[Any, list[float]]:
    """Seconds a call of each way, one figure a round."""
    seconds: dict[Any, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (call, given) in ways.items():
            start = time.perf_counter()
            for _ in range(calls):
                call(given)
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


if __name__ == "__main__":
    main()
