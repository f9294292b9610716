# ruff: noqa: ANN001, ANN003, ANN201, N803, PLR0917 - the language of Triton, whose arguments have no Python types
# mypy: ignore-errors
"""Kernels of the GPU tests: each is there for one thing that a launch must get right."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, y, M, N, stride, factor, BM: tl.constexpr, BN: tl.constexpr):
    """y = x * factor for a bf16 matrix, read through a descriptor or by pointers (A33)."""
    row, col = tl.program_id(0) * BM, tl.program_id(1) * BN
    rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([row, col])
    else:
        tile = tl.load(x + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=inside)
    out = (tile.to(tl.float32) * factor).to(tl.bfloat16)
    tl.store(y + rows[:, None].to(tl.int64) * N + cols[None, :], out, mask=inside)


@triton.jit
def copy_kernel(x, o, n, s, BLOCK: tl.constexpr):
    """o[i] = x[i * s] (A31)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(o + at, tl.load(x + at.to(tl.int64) * s, mask=inside), mask=inside)


@triton.jit
def fill_kernel(o, n, value, flag, BLOCK: tl.constexpr):
    """o[i] = value where flag, else -value, for counts of 32 and of 64 bits, a float and a bool."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + at, tl.where(flag, value, -value), mask=at < n)


@triton.jit
def cluster_kernel(x, o, n, BLOCK: tl.constexpr):
    """o = 2 x, by clusters of two blocks."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def rows(x, o, n, step, BLOCK: tl.constexpr):
    """o[row] = 2 x[row], a row of n elements that lie `step` apart at a time."""
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + (row * n + i) * step, mask=i < n)
    tl.store(o + row * n + i, value * 2, mask=i < n)


def rows_reference(x, n, step, count, **rest):
    return 2 * x.reshape(-1)[::step][: count * n]


def served_reference(x, **rest):
    return 2 * x


def wrong_reference(x, n, **rest):
    """Right at the manifest's point, and at no other: what a call asks for is tried out at its own numbers."""
    return 2 * x + (n != 50)
