"""Kernels: process start to the first right result, and what one launch costs. Needs a GPU.

    aotpack build bench/kernels.yaml -o DIR && python bench/kernel_start.py DIR --out bench/results/NAME.json

Every start is a fresh process; Triton's caches are private, empty for `triton-cold` and filled for `triton-warm`. The
launches of all ways are timed in one process, and each start checks its result.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
N = 100_000
BLOCK = 256
LAUNCHES, REPEATS = 5000, 5


# ---------------------------------------------------------------------------------------------- one start, one process


def start_bundle(bundle: str, began: float) -> dict[str, Any]:
    """Neither torch nor triton: memory comes from the driver."""
    import aotpack_runtime as apr

    session = apr.load(bundle, device="cuda", mode="strict")
    loaded = time.perf_counter()
    add = session["add"]
    from cuda.bindings import driver as cu

    from aotpack_runtime.drivers import cuda

    device = cuda.device(0)
    device_ready = time.perf_counter()
    with device.current():
        a, b = array.array("f", range(N)), array.array("f", [2.0] * N)
        buffers = [cuda.call(cu.cuMemAlloc, 4 * N) for _ in range(3)]
        for buffer, host in zip(buffers, (a, b), strict=False):
            cuda.call(cu.cuMemcpyHtoD, buffer, host.buffer_info()[0], 4 * N)
        x, y, o = (Array(int(buffer), N) for buffer in buffers)
        add(x, y, o, N)
        out = array.array("f", bytes(4 * N))
        cuda.call(cu.cuMemcpyDtoH, out.buffer_info()[0], buffers[2], 4 * N)
    ended = time.perf_counter()
    right = all(out[i] == a[i] + 2.0 for i in range(N))
    return {
        "total": ended - began, "interpreter": T0 - began, "load": loaded - T0, "device": device_ready - loaded,
        "first_call": ended - device_ready, "right": right,
        "torch_imported": "torch" in sys.modules, "triton_imported": "triton" in sys.modules,
        "hits": session.status()["hits"],
    }  # fmt: skip


class Array:
    """Memory on the GPU as kernels are given it."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "typestr": "<f4", "shape": (length,), "version": 3}


def start_triton(bundle: str, began: float) -> dict[str, Any]:
    import torch
    from kernels.add import add_kernel

    imported = time.perf_counter()
    x = torch.arange(N, device="cuda", dtype=torch.float32)
    y, o = torch.full_like(x, 2.0), torch.empty_like(x)
    torch.cuda.synchronize()
    device_ready = time.perf_counter()
    add_kernel[(-(-N // BLOCK),)](x, y, o, N, BLOCK=BLOCK)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    return {
        "total": ended - began, "interpreter": T0 - began, "import": imported - T0, "device": device_ready - imported,
        "first_call": ended - device_ready, "right": bool(torch.equal(o, x + y)),
    }  # fmt: skip


def start_bundle_torch(bundle: str, began: float) -> dict[str, Any]:
    """With torch in the process, as a server of models has it."""
    import torch

    import aotpack_runtime as apr

    imported = time.perf_counter()
    session = apr.load(bundle, device="cuda", mode="strict")
    loaded = time.perf_counter()
    x = torch.arange(N, device="cuda", dtype=torch.float32)
    y, o = torch.full_like(x, 2.0), torch.empty_like(x)
    torch.cuda.synchronize()
    device_ready = time.perf_counter()
    session["add"](x, y, o, N)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    return {
        "total": ended - began, "interpreter": T0 - began, "import": imported - T0, "load": loaded - imported,
        "device": device_ready - loaded, "first_call": ended - device_ready, "right": bool(torch.equal(o, x + y)),
        "hits": session.status()["hits"],
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launches


def launches(bundle: str, began: float) -> dict[str, Any]:
    """Microseconds a launch, host side, by way; and whether each way's last result was right."""
    import torch
    import triton
    from kernels.add import add_kernel

    import aotpack_runtime as apr
    from aotpack_runtime.drivers import cuda

    session = apr.load(bundle, device="cuda", mode="strict")
    add = session["add"]
    x, y = torch.randn(N, device="cuda"), torch.randn(N, device="cuda")
    o = torch.empty_like(x)
    grid = triton.cdiv(N, BLOCK)
    ways: dict[str, Callable[[], Any]] = {
        "bundle": lambda: add(x, y, o, N),
        "triton": lambda: add_kernel[(grid,)](x, y, o, N, BLOCK=BLOCK),
        "torch.add": lambda: torch.add(x, y, out=o),
        "bundle as torch operator": lambda: torch.ops.aotpack_bench.add(x, y, o, N),
        "empty python call of four arguments": lambda: _nothing(x, y, o, N),
    }
    variant = next(v for v in add.variants if v.axes["align"] == 16 and v.artifact.kind == "cubin")
    executable = add._executable(variant, 0)
    handle, block = executable._function.handle, executable._new_block()
    pack = cuda.packer([(p.offset, p.code) for p in variant.launch.parameters], variant.launch.bytes)
    hidden = [0] * (len(variant.launch.parameters) - 4)
    pack(block.memory, 0, x.data_ptr(), y.data_ptr(), o.data_ptr(), N, *hidden)
    threads = variant.launch.block[0]({})
    ways["cuda.bindings, parameters prepared"] = lambda: cuda.launch(
        handle, grid, 1, 1, threads, 1, 1, 0, 0, block.pointers, 0
    )
    raw = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    raw.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    number = int(handle)
    ways["ctypes, parameters prepared"] = lambda: raw(number, grid, 1, 1, threads, 1, 1, 0, 0, block.pointers, None)
    try:
        from cuda.core import Device, LaunchConfig, ObjectCode, launch

        device = Device()
        device.set_current()
        data = Path(session.bundle.files(variant)["kernel.cubin"]).read_bytes()
        kernel = ObjectCode.from_cubin(data).get_kernel(variant.launch.symbol)
        stream, config = device.create_stream(), LaunchConfig(grid=grid, block=threads)
        import numpy as np

        given = [x.data_ptr(), y.data_ptr(), o.data_ptr(), np.int32(N), *hidden]
        ways["cuda.core"] = lambda: launch(stream, config, kernel, *given)
    except ImportError:
        pass
    found: dict[str, Any] = {}
    for name, way in ways.items():
        o.fill_(torch.nan)
        way()
        torch.cuda.synchronize()
        right = name.startswith("empty") or bool(torch.equal(o, x + y))
        found[name] = {"us": _each(way, torch.cuda.synchronize), "right": right}
    sizes = iter(range(1, 10**9))
    found["bundle, another n at each launch"] = {
        "us": _each(lambda: add(x, y, o, next(sizes) % N + 1), torch.cuda.synchronize, count=1000), "right": None,
    }  # fmt: skip
    return found


def _nothing(x: Any, y: Any, o: Any, n: int) -> None:
    pass


def _each(way: Callable[[], Any], wait: Callable[[], None], count: int = LAUNCHES) -> list[float]:
    for _ in range(200):
        way()
    wait()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(count):
            way()
        times.append(1e6 * (time.perf_counter() - start) / count)
        wait()
    return sorted(times)


# ------------------------------------------------------------------------------------------------------------ parent

MODES = {
    "bundle": start_bundle, "bundle-torch": start_bundle_torch, "triton-cold": start_triton,
    "triton-warm": start_triton, "launches": launches,
}  # fmt: skip


def run(mode: str, bundle: str, cache: str) -> dict[str, Any]:
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, __file__, bundle, "--mode", mode, "--began", repr(time.perf_counter())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{mode} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--began", type=float)
    options = parser.parse_args()
    if options.mode:
        print(json.dumps(MODES[options.mode](options.bundle, options.began)))
        return
    starts: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("bundle", "bundle-torch", "triton-cold", "triton-warm"):
            samples = options.samples if mode != "triton-cold" else min(options.samples, 3)
            for sample in range(samples):
                cache = f"{folder}/cold{sample}" if mode == "triton-cold" else f"{folder}/cold0"
                starts.setdefault(mode, []).append(run(mode, options.bundle, cache))
        overhead = run("launches", options.bundle, f"{folder}/cold0")
    wrong = [mode for mode, samples in starts.items() if not all(sample["right"] for sample in samples)]
    wrong += [way for way, seen in overhead.items() if seen["right"] is False]
    report = {
        "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "machine": machine(),
        "start_s": {mode: {"median": statistics.median(s["total"] for s in samples), "samples": samples}
                    for mode, samples in starts.items()},
        "launch_us": {way: {"median": statistics.median(seen["us"]), "samples": seen["us"]}
                      for way, seen in overhead.items()},
        "wrong": wrong,
    }  # fmt: skip
    for mode, seen in report["start_s"].items():
        print(f"start   {mode:40} {seen['median']:8.3f} s")
    for way, seen in report["launch_us"].items():
        print(f"launch  {way:40} {seen['median']:8.2f} us")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    if wrong:
        raise SystemExit(f"wrong results: {', '.join(wrong)}")


def machine() -> dict[str, Any]:
    names = ("aotpack-runtime", "torch", "triton", "cuda-bindings", "cuda-core", "numpy")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    gpu = subprocess.run(
        ["/usr/bin/env", "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {"gpu": gpu, "python": platform.python_version(), "cpus": os.cpu_count(), "versions": versions}


T0 = time.perf_counter()

if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
