"""The order in which a call tries variants: all-static, then the smallest product of range widths."""

from __future__ import annotations

import math
from collections.abc import Iterable

from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard
from aotpack_runtime.format.index import Variant


def width(guards: Guards) -> float:
    """Product of range widths: among ranges that fit, the narrowest is tried first."""
    widths = 1.0
    for guard in guards.leaves:
        dims = guard.dims if isinstance(guard, TensorGuard) else (guard.dim,) if isinstance(guard, IntGuard) else ()
        for dim in dims:
            if isinstance(dim, Range):
                widths *= math.inf if dim.high is None else max(dim.high - dim.low + 1, 1)
    return widths


def in_order(variants: Iterable[Variant]) -> list[Variant]:
    """Variants in the order in which calls try them."""
    return sorted(variants, key=lambda variant: (not variant.guards.static, width(variant.guards)))
