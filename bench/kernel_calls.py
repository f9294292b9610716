"""What a call of a kernel costs the host up to the driver's launch: known, and with numbers that were not seen. No GPU.

    PYTHONPATH=.:runtime python bench/kernel_calls.py --out bench/results/kernel_calls_cpu.json

The driver and torch's tensors are the tests' stand-ins (`tests/support`), and a launch does nothing: what is measured
is ours alone. `add` has two variants (aligned or not), `rmsnorm` twelve for each dtype and a table of
choices. Microseconds are the least of many short rounds; `full` is a call whose kind is forgotten before it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotpack.bench.report import machine
from aotpack_runtime.drivers import cuda
from tests.support.fake_cuda import Array, install
from tests.support.kernels import (
    Tensor,
    install_torch,
    integer,
    kernel_entry,
    kernel_variant,
    number,
    open_kernels,
    pointer,
    write_kernels,
)

CALLS, ROUNDS = 8, 500
A, B, C = 1 << 20, 2 << 20, 3 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        driver = install(patch)
        patch.setattr(cuda, "launch", lambda *numbers: (0,))
        install_torch(patch)
        bundle = write_kernels(Path(folder, "bundle"), add=add(), rmsnorm=rmsnorm())
        figures = {}
        for kind, make in (("torch's tensors", Tensor), ("CUDA array interface", Array)):
            session = open_kernels(bundle, driver)
            figures[kind] = {
                "add": costs(session["add"], lambda n, make=make: (make(A), make(B), make(C), n), 16),
                "rmsnorm": costs(
                    session["rmsnorm"], lambda n, make=make: (make(A), make(B), make(C), 4096, 4096, 4096, 1e-6, n), 1
                ),
            }
    report = {"us": figures, "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv), "machine": machine()}
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def costs(entry: Any, arguments: Callable[[int], tuple[Any, ...]], step: int) -> dict[str, float]:
    """Microseconds of a call with the same number, with another one each time, and judged in full."""
    *fixed, last = arguments(step)
    place = len(fixed)
    numbers = itertools.count(step, step)

    def another() -> None:
        entry(*fixed[:place], next(numbers))

    def in_full() -> None:
        entry._kinds.clear()
        another()

    return {
        "known": least(lambda: entry(*fixed, last)),
        "number not seen": least(another),
        "full": least(in_full),
    }


def least(call: Callable[[], object]) -> float:
    def round_of(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            call()
        return 1e6 * (time.perf_counter() - begun) / count

    round_of(20)
    return round(min(round_of(CALLS) for _ in range(ROUNDS)), 2)


def add() -> Any:
    blocks = "ceil_div(n, 1024)"
    return kernel_entry(
        [
            kernel_variant(
                name,
                [*(pointer(path, aligned=aligned) for path in "xyo"), integer("n")],
                [("Q", 0), ("Q", 1), ("Q", 2), ("i", 3), ("Q", None), ("Q", None)],
                where=[*where, f"0 <= {blocks} <= 2147483647"], grid=[blocks],
            )
            for name, aligned, where in (("aligned", True, ["n % 16 == 0"]), ("any", False, []))
        ],
        "Tensor Tensor Tensor int", writes=["o"],
    )  # fmt: skip


def rmsnorm() -> Any:
    blocks, warps = (1024, 4096, 8192), (4, 8)
    variants = [
        kernel_variant(
            f"{dtype} {aligned} {block} {count}",
            [*(pointer(path, dtype, aligned=aligned) for path in "xwy"), integer("n_cols"), integer("stride_x"),
             integer("stride_y"), number("eps"), integer("rows")],
            [("Q", 0), ("Q", 1), ("Q", 2), ("i", 3), ("i", 4), ("i", 5), ("f", 6), ("Q", None), ("Q", None)],
            where=[f"n_cols <= {block}", "0 <= rows <= 2147483647"]
            + [f"{name} % 16 == 0" for name in ("n_cols", "stride_x", "stride_y") if aligned],
            grid=["rows"], block=[str(32 * count)], axes={"BLOCK": block, "num_warps": count},
        )
        for dtype in ("float32", "float16", "bfloat16") for aligned in (True, False)
        for block in blocks for count in warps
    ]  # fmt: skip
    rows = [
        {"sizes": {"n_cols": block}, "given": {}, "pick": {"BLOCK": block, "num_warps": count}}
        for block in blocks
        for count in warps
    ]
    types = "Tensor Tensor Tensor int int int float int"
    return kernel_entry(variants, types, writes=["y"], choice={"tables": {"sm_90": rows}})


if __name__ == "__main__":
    main()
