"""Launch every variant of bundles once, at the smallest case it fits: what compute-sanitizer is run over.

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tests/gpu/every_variant.py BUNDLE ...

cuda.bindings asks the driver for every function there may be, which is an API error for each that it lacks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import aotpack_runtime as apr
from aotpack.kernel_verify import make_arguments
from aotpack_runtime.kernel_entry import KernelEntry


def main() -> None:
    for path in sys.argv[1:]:
        session = apr.load(path, device="cuda", mode="strict")
        ran, left = 0, []
        for name in session:
            entry = session[name]
            assert isinstance(entry, KernelEntry)
            for variant in entry.variants:
                case = smallest(entry, variant)
                if case is None:
                    left.append(variant.id)
                    continue
                entry.run_variant(variant, make_arguments(entry.record, variant, case, seed=0))
                torch.cuda.synchronize()
                ran += 1
        sys.stdout.write(f"{path}: {ran} variants ran, without a case: {left}\n")


def smallest(entry: KernelEntry, variant: Any) -> dict[str, Any] | None:
    """The case of least work: the smallest product of its numbers."""

    def work(case: dict[str, Any]) -> int:
        total = 1
        for value in case.values():
            total *= max(int(value), 1)
        return total

    for case in sorted(entry.record.verify["cases"], key=work):
        if entry.reject(variant, make_arguments(entry.record, variant, case, seed=0)) is None:
            return dict(case)
    return None


if __name__ == "__main__":
    main()
