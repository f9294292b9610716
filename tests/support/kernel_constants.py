"""A constant that kernel_cases reads through its module."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

OFFSET = tl.constexpr(1)
