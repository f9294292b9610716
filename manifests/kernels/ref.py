"""What each kernel must compute, in torch: one function an entry, under the entry's name.

A function takes the kernel's arguments by keyword, floating tensors as float64, and returns what the tensors that the
kernel writes hold afterwards: new tensors of their full size, with whatever the kernel leaves alone as it was given.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)


def rmsnorm(*, x_ptr: Tensor, w_ptr: Tensor, y_ptr: Tensor, n_cols: int, eps: float, **_: int) -> Tensor:
    return replaced(y_ptr, F.rms_norm(x_ptr[:, :n_cols], (n_cols,), w_ptr[:n_cols], eps))


def add_rmsnorm(
    *, x_ptr: Tensor, residual_ptr: Tensor, w_ptr: Tensor, y_ptr: Tensor, n_cols: int, eps: float, **_: int
) -> tuple[Tensor, Tensor]:
    total = residual_ptr[:, :n_cols] + x_ptr[:, :n_cols]
    y = F.rms_norm(total, (n_cols,), w_ptr[:n_cols], eps)
    return replaced(residual_ptr, total), replaced(y_ptr, y)


def rope(
    *,
    x_ptr: Tensor,
    positions_ptr: Tensor,
    cos_ptr: Tensor,
    sin_ptr: Tensor,
    n_heads: int,
    rotary_dim: int,
    stride_token: int,
    stride_head: int,
    **_: int,
) -> Tensor:
    result = x_ptr.clone(memory_format=torch.contiguous_format)
    tokens = x_ptr.shape[0]
    heads = result.as_strided((tokens, n_heads, rotary_dim), (stride_token, stride_head, 1))
    low, high = heads.clone().chunk(2, dim=-1)
    cos, sin = (table[positions_ptr.long()][:, None, :] for table in (cos_ptr, sin_ptr))
    heads.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
    return result


def silu_and_mul(*, x_ptr: Tensor, y_ptr: Tensor, d: int, **_: int) -> Tensor:
    return replaced(y_ptr, F.silu(x_ptr[:, :d]) * x_ptr[:, d : 2 * d])


def matmul(*, a_ptr: Tensor, b_ptr: Tensor, c_ptr: Tensor, M: int, N: int, K: int, **_: int) -> Tensor:  # noqa: N803
    """For a, b and c in row-major order, rows as long as their strides say."""
    return replaced(c_ptr, a_ptr[:M, :K] @ b_ptr[:K, :N])


def softmax(*, x_ptr: Tensor, y_ptr: Tensor, n_cols: int, **_: int) -> Tensor:
    return replaced(y_ptr, x_ptr[:, :n_cols].softmax(dim=1))


def topk_softmax(*, logits: Tensor, out: Tensor, idx: Tensor, n: int, k: int, **_: int) -> tuple[Tensor, Tensor]:
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :k]  # stable: ties by the smaller index
    return logits.softmax(dim=1).gather(1, order).to(out.dtype), order.to(idx.dtype)


def sample(*, logits: Tensor, noise: Tensor, token: Tensor, temperature: float, n: int, **_: int) -> Tensor:
    return (logits / temperature + noise).argmax(dim=1).to(token.dtype)


def replaced(whole: Tensor, part: Tensor) -> Tensor:
    """A copy of `whole` with its first rows and columns replaced by `part`."""
    result = whole.clone()
    result[: part.shape[0], : part.shape[1]] = part
    return result
