"""What one launch of a kernel of four arguments costs the host, by way of launching. Needs a GPU, torch and Triton.

    aotpack build bench/kernels.yaml -o DIR && python bench/launches.py DIR --out bench/results/launches_h200.json

All ways are in one process and take turns; a figure is the median of the rounds, in microseconds until the launch is
queued, and `of_torch_add` the median of its ratio to `torch.add` in the same round: hosts differ by a factor of two, so
that microseconds of two machines do not compare. Each way's result is compared first. The start of a process is
measured by `aotpack bench`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aotpack.bench.report import machine

HERE = Path(__file__).resolve().parent
N, BLOCK = 100_000, 256
LAUNCHES, ROUNDS = 1000, 15
Way = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    import torch

    import aotpack_runtime as apr

    add = apr.load(options.bundle, device="cuda", mode="strict")["add"]
    x, y = torch.randn(N, device="cuda"), torch.randn(N, device="cuda")
    o = torch.empty_like(x)
    ways = {**public(add, x, y, o), **prepared(add, x, y, o)}
    wrong = [name for name, way in ways.items() if not right(way, x, y, o)]
    for way in ways.values():
        batch(way, 200)
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seen[name].append(batch(way, LAUNCHES))
    sizes = iter(range(1, 10**9))
    new = [batch(lambda: add(x, y, o, next(sizes) % N + 1), 500) for _ in range(5)]
    report = {
        "us": {name: round(statistics.median(times), 2) for name, times in seen.items()},
        "of_torch_add": {
            name: round(statistics.median(a / b for a, b in zip(times, seen["torch.add"], strict=True)), 3)
            for name, times in seen.items()
        },
        "us_of_a_size_not_seen_before": round(statistics.median(new), 2),
        "rounds": ROUNDS, "launches": LAUNCHES, "wrong": wrong, "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv), "machine": machine(),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"wrong results: {', '.join(wrong)}")


def public(add: Any, x: Any, y: Any, o: Any) -> dict[str, Way]:
    """What a user writes."""
    import torch
    import triton
    from kernels.add import add_kernel

    grid = triton.cdiv(N, BLOCK)
    return {
        "bundle": lambda: add(x, y, o, N),
        "triton": lambda: add_kernel[(grid,)](x, y, o, N, BLOCK=BLOCK),
        "torch.add": lambda: torch.add(x, y, out=o),
        "bundle as torch operator": lambda: torch.ops.aotpack_bench.add(x, y, o, N),
    }


def prepared(add: Any, x: Any, y: Any, o: Any) -> dict[str, Way]:
    """The same launch with its addresses taken and its parameters packed before: what a launch cannot go below."""
    from aotpack_runtime.drivers import cuda
    from aotpack_runtime.loaders import torch_launch

    variant = next(v for v in add.variants if v.axes["align"] == 16 and v.artifact.kind == "cubin")
    executable = add._executable(variant, 0)
    handle, block = executable._function.handle, executable._new_block()
    hidden = [0] * (len(variant.launch.parameters) - 4)
    given = (x.data_ptr(), y.data_ptr(), o.data_ptr(), N, *hidden)
    cuda.packer([(p.offset, p.code) for p in variant.launch.parameters], variant.launch.bytes)(block.memory, 0, *given)
    threads, grid = variant.launch.block[0]({}), variant.launch.grid[0]({"n": N})
    raw = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    raw.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    number, pointers = int(handle), block.pointers

    def through_bindings(kept: cuda.Block = block) -> Any:  # `pointers` is an address: it keeps nothing alive
        return cuda.launch(handle, grid, 1, 1, threads, 1, 1, 0, 0, pointers, 0)

    def through_ctypes(kept: cuda.Block = block) -> Any:
        return raw(number, grid, 1, 1, threads, 1, 1, 0, 0, pointers, None)

    ways: dict[str, Way] = {
        "cuda.bindings, parameters packed": through_bindings, "ctypes, parameters packed": through_ctypes,
    }  # fmt: skip
    launch, types = torch_launch.launcher(), torch_launch.types(variant.launch)
    if launch is not None:
        ways["torch's launcher, addresses taken"] = lambda: launch(
            number, grid, 1, 1, threads // 32, 0, types, given, 0
        )
    try:
        import numpy as np
        from cuda.core import Device, LaunchConfig, ObjectCode
        from cuda.core import launch as core_launch
    except ImportError:
        return ways
    device = Device()
    device.set_current()
    (path,) = add._bundle.files(variant).values()
    kernel = ObjectCode.from_cubin(Path(path).read_bytes()).get_kernel(variant.launch.symbol)
    stream, config = device.create_stream(), LaunchConfig(grid=grid, block=threads)
    numbers = [*given[:3], np.int32(N), *hidden]
    ways["cuda.core, addresses taken"] = lambda: core_launch(stream, config, kernel, *numbers)
    return ways


def right(way: Way, x: Any, y: Any, o: Any) -> bool:
    import torch

    o.fill_(torch.nan)
    torch.cuda.synchronize()
    way()
    torch.cuda.synchronize()
    return bool(torch.equal(o, x + y))


def batch(way: Way, count: int) -> float:
    """Microseconds until one launch is queued."""
    import torch

    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        way()
    spent = time.perf_counter() - begun
    torch.cuda.synchronize()
    return 1e6 * spent / count


if __name__ == "__main__":
    main()
