# ruff: noqa: ANN001, ANN201, N803, PLR0917 (Triton parameters: the manifest types them)
"""Rotary position embedding, in place."""

import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    x_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    n_heads,
    rotary_dim,
    stride_token,
    stride_head,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate the first `rotary_dim` elements of every head of q or k: BLOCK_H heads of one token a program.

    x is [tokens, heads, head_dim] with the strides given, so it may be a slice of a fused qkv; the tables are fp32,
    [positions, rotary_dim // 2]. NeoX order: element i pairs with element i + rotary_dim // 2 <= i + BLOCK.
    """
    token = tl.program_id(0).to(tl.int64)  # token * stride_token may pass 2**31
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half = rotary_dim // 2
    offsets = tl.arange(0, BLOCK)
    angle = tl.load(positions_ptr + token).to(tl.int64) * half + offsets
    cos = tl.load(cos_ptr + angle, mask=offsets < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=offsets < half, other=0.0)[None, :]
    low_ptr = x_ptr + token * stride_token + heads[:, None].to(tl.int64) * stride_head + offsets[None, :]
    high_ptr = low_ptr + half
    keep = (heads[:, None] < n_heads) & (offsets[None, :] < half)
    low = tl.load(low_ptr, mask=keep, other=0.0).to(tl.float32)
    high = tl.load(high_ptr, mask=keep, other=0.0).to(tl.float32)
    tl.store(low_ptr, (low * cos - high * sin).to(x_ptr.dtype.element_ty), mask=keep)
    tl.store(high_ptr, (high * cos + low * sin).to(x_ptr.dtype.element_ty), mask=keep)
