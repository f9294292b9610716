# ruff: noqa: ANN001, ANN201, N803, PLR0917 (Triton parameters: the manifest types them)
"""RMSNorm, alone and after the residual add, one program a row: a row is read once and stays in registers."""

import triton
import triton.language as tl


@triton.jit
def rmsnorm_kernel(x_ptr, w_ptr, y_ptr, n_cols, stride_x, stride_y, eps, BLOCK: tl.constexpr):
    """Write x / sqrt(mean(x**2) + eps) * w to y, a row of `n_cols` <= BLOCK a program; y may be x.

    Statistics and the product with w are in fp32, and the result is rounded once.
    """
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    cols = tl.arange(0, BLOCK)
    keep = cols < n_cols
    x = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(y_ptr + row * stride_y + cols, (x * scale * w).to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def fused_add_rmsnorm_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, n_cols, stride_x, stride_r, stride_y, eps, BLOCK: tl.constexpr
):
    """Add x to the residual in place, and write its RMSNorm to y; y may be x.

    The norm is of the sum in fp32, before it is rounded into the residual.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < n_cols
    x = tl.load(x_ptr + row * stride_x + cols, mask=keep, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * stride_r + cols, mask=keep, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    total = x + residual
    tl.store(residual_ptr + row * stride_r + cols, total.to(residual_ptr.dtype.element_ty), mask=keep)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / n_cols + eps)
    tl.store(y_ptr + row * stride_y + cols, (total * scale * w).to(y_ptr.dtype.element_ty), mask=keep)
