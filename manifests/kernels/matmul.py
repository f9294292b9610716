# ruff: noqa: ANN001, ANN201, N803, N806, PLR0917 (Triton parameters: the manifest types them)
"""c = a @ b, accumulated in fp32."""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    sam,
    sak,
    sbk,
    sbn,
    scm,
    scn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write a [M, K] @ b [K, N] to c [M, N], a BLOCK_M x BLOCK_N tile a program; any M, N, K >= 1 and any strides.

    BLOCK_K is for 16-bit elements: fp32 goes half as far at a time, for the same bytes of shared memory.
    At the full 64, the ptxas of Triton 3.9.0 gives fp32 a stack of 1.5 kB on sm_80; at 32 none.
    Programs walk GROUP_M rows of tiles at a time, so that those running together share tiles of b in L2.
    """
    STEP_K: tl.constexpr = BLOCK_K * 16 // a_ptr.dtype.element_ty.primitive_bitwidth
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = program // in_group * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)  # the last group may be shorter
    tile_m = first_m + program % in_group % rows
    tile_n = program % in_group // rows

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, STEP_K)
    step = tl.full((), STEP_K, tl.int64)
    # Offsets are in 64 bits: a row times its stride may pass 2**31.
    a_ptrs = a_ptr + m[:, None].to(tl.int64) * sam + k[None, :].to(tl.int64) * sak
    b_ptrs = b_ptr + k[:, None].to(tl.int64) * sbk + n[None, :].to(tl.int64) * sbn
    in_m = m[:, None] < M
    in_n = n[None, :] < N

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, K, STEP_K):
        a = tl.load(a_ptrs, mask=in_m & (k[None, :] < K - done), other=0.0)
        b = tl.load(b_ptrs, mask=in_n & (k[:, None] < K - done), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")  # fp32 as fp32, not as TF32; no meaning for fp16 and bf16
        a_ptrs += step * sak
        b_ptrs += step * sbk

    c_ptrs = c_ptr + m[:, None].to(tl.int64) * scm + n[None, :].to(tl.int64) * scn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=in_m & in_n)
