"""Triton kernels for tests; imported by the builder from this folder."""

# Kernels are Triton's language rather than Python's: names and types of arguments are as that has them.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917
# mypy: ignore-errors

from __future__ import annotations

import kernel_constants
import triton
import triton.language as tl

SCALE = tl.constexpr(2)


@triton.jit
def strided_copy(x, o, n, s, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(o + i, tl.load(x + i * s, mask=mask), mask=mask)


@triton.jit
def add(x, y, o, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(o + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def matmul(a, b, c, M, N, K, alpha, negate, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, columns, inner = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + inner[None, :] + k)
        right = tl.load(b + (inner[:, None] + k) * N + columns[None, :])
        total += tl.dot(left, right)
    if negate:
        total = -total
    tl.store(c + rows[:, None] * N + columns[None, :], (total * alpha).to(tl.float16))


@triton.jit
def descriptor_copy(d, o, n):
    tile = d.load([tl.program_id(0) * 64, 0])
    i = tl.arange(0, 64)
    tl.store(o + i[:, None] * n + i[None, :], tile)


@triton.jit
def device_descriptor_copy(x, o, n):
    d = tl.make_tensor_descriptor(x, shape=[n, n], strides=[n, 1], block_shape=[64, 64])
    tile = d.load([tl.program_id(0) * 64, 0])
    i = tl.arange(0, 64)
    tl.store(o + i[:, None] * n + i[None, :], tile)


@triton.jit
def scalars(o, a, b, c, d, e, f, g, h):
    tl.store(o, a.to(tl.float32) + b + c + d + e + f + g + h)


@triton.jit
def _scaled(x):
    return x * SCALE + kernel_constants.OFFSET


@triton.jit
def uses_others(x, n):
    tl.store(x + n, _scaled(tl.load(x + n)))


@triton.jit
def wrong(x, n):
    tl.store(x, tl.nothing(n))


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n)


NOT_A_KERNEL = 3
