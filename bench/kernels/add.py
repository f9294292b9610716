# ruff: noqa: ANN001, ANN201, N803 - the language of Triton, whose arguments have no Python types
# mypy: ignore-errors
"""The kernel that launch overhead is measured with: four arguments and almost no work."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, o, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(o + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)
