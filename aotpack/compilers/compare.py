"""Is what we computed what eager computed? One answer for probing, verification and the bench."""

from __future__ import annotations

from typing import Any

import torch

from aotpack_runtime.format.guard import identity
from aotpack_runtime.format.tree import describe_difference, flatten, paths

TOLERANCES = {
    torch.float64: (1e-7, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (2e-2, 1e-2),
    torch.bfloat16: (2e-2, 1e-2),
    torch.complex64: (1e-4, 1e-5),
    torch.complex128: (1e-7, 1e-9),
}
"""(rtol, atol) where the manifest sets none; design/manifest.md. What is not here must be equal."""


def difference(
    expected: Any, actual: Any, *, rtol: float | None = None, atol: float | None = None, values: bool = True
) -> str | None:
    """The first difference of two results in one line, None when they agree.

    Compares containers, Python types, dtypes, shapes and values (NaN equals NaN). `values=False` leaves the values of
    tensors out, for models that draw random numbers.
    """
    left: list[Any] = []
    right: list[Any] = []
    tree, other = flatten(expected, left), flatten(actual, right)
    structure = describe_difference(tree, other, "output")
    if structure:
        return structure
    for place, a, b in zip(paths(tree, "output"), left, right, strict=True):
        found = _leaf_difference(a, b, rtol, atol, values=values)
        if found:
            return f"{place}: {found}"
    return None


def largest_error(expected: Any, actual: Any) -> float:
    """The largest absolute difference of two results that agree in structure, in their own units."""
    left: list[Any] = []
    right: list[Any] = []
    flatten(expected, left)
    flatten(actual, right)
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor) and a.numel():
            error = (a.detach().to(torch.complex128) - b.detach().to(torch.complex128)).abs()
            worst = max(worst, float(error.nan_to_num(0.0, posinf=0.0).max()))
    return worst


def _leaf_difference(a: Any, b: Any, rtol: float | None, atol: float | None, *, values: bool) -> str | None:
    if not isinstance(a, torch.Tensor):
        if isinstance(b, torch.Tensor):
            return f"expected {a!r}, got a tensor"
        return None if identity(a) == identity(b) else f"expected {a!r}, got {b!r}"
    if not isinstance(b, torch.Tensor):
        return f"expected a tensor, got {type(b).__name__}"
    if a.dtype != b.dtype:
        return f"expected {a.dtype}, got {b.dtype}"
    if a.device != b.device:
        return f"expected it on {a.device}, got it on {b.device}"
    if a.shape != b.shape:
        return f"expected shape {list(a.shape)}, got {list(b.shape)}"
    if not values or not a.numel():
        return None
    default = TOLERANCES.get(a.dtype)
    if default is None:
        return None if torch.equal(a, b) else "values differ, and this dtype must be equal"
    relative, absolute = rtol if rtol is not None else default[0], atol if atol is not None else default[1]
    a, b = a.detach(), b.detach()
    if torch.allclose(b, a, rtol=relative, atol=absolute, equal_nan=True):
        return None
    error = (a.to(torch.complex128) - b.to(torch.complex128)).abs()
    worst = float(error.nan_to_num(float("inf")).max())
    return f"differs by up to {worst:.3g}, allowed {absolute:g} + {relative:g} * |expected|"
