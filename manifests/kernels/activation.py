# ruff: noqa: ANN001, ANN201, N803 (Triton parameters: the manifest types them)
"""The gate of a SwiGLU feed-forward layer."""

import triton
import triton.language as tl


@triton.jit
def silu_and_mul_kernel(x_ptr, y_ptr, d, stride_x, stride_y, BLOCK: tl.constexpr):
    """Write silu(x[:, :d]) * x[:, d : 2 * d] to y, BLOCK columns of one row a program; fp32 inside."""
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2**31
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < d
    gate_ptr = x_ptr + row * stride_x + cols
    gate = tl.load(gate_ptr, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + d, mask=keep, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * stride_y + cols, y.to(y_ptr.dtype.element_ty), mask=keep)
