"""Which variant a call hits, or why none fits. Pure: no tensor is touched, nothing is loaded.

Rule: all-static before ranged, then the smallest product of range widths, then file order. The builder writes
variants in that order; here exact shapes are found by hash and ranged variants are tried in turn among those whose
dtypes and ranks fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from aotpack_runtime.format.guard import IntGuard, LeafGuard, TensorGuard, identity
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.tensor import Call, Leaf, Other, TensorMeta


@dataclass(frozen=True, slots=True)
class Hit:
    """The variant that serves this call."""

    variant: Variant

    def __str__(self) -> str:
        return f"hit: {self.variant.id}"


@dataclass(frozen=True)
class Miss:
    """No variant fits; `reasons` are computed when asked, one line a variant."""

    call: Call
    parameters: tuple[str, ...]
    variants: tuple[Variant, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Variant id -> the first thing that turned it down; variants that do not fit the host included."""
        reasons = dict(self.skipped)
        for variant in self.variants:
            reasons[variant.id] = variant.guards.reject(self.call, self.parameters) or "fits"
        return reasons

    def __str__(self) -> str:
        return "miss: " + ("; ".join(f"{name}: {reason}" for name, reason in self.reasons.items()) or "no variants")


class Dispatcher:
    """Chooses among `variants`, which are in the order in which they are to be tried.

    `skipped` names variants that this host cannot run, with the reason; they only appear in a miss.
    """

    def __init__(
        self, parameters: tuple[str, ...], variants: Sequence[Variant], skipped: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.parameters, self.variants, self.skipped = parameters, tuple(variants), tuple(skipped)
        self._exact: dict[Hashable, list[Variant]] = {}
        self._ranged: dict[Hashable, list[Variant]] = {}
        for variant in self.variants:
            guards = variant.guards
            table, key = (self._exact, _guard_sizes) if guards.static else (self._ranged, _guard_kind)
            table.setdefault((guards.trees, tuple(map(key, guards.leaves))), []).append(variant)

    def choose(self, call: Call) -> Hit | Miss:
        """The first variant, in the order of the rule, whose guards all hold."""
        for variant in self._exact.get((call.trees, tuple(map(_call_sizes, call.leaves))), ()):
            if variant.guards.reject(call, self.parameters) is None:
                return Hit(variant)
        for variant in self._ranged.get((call.trees, tuple(map(_call_kind, call.leaves))), ()):
            if variant.guards.reject(call, self.parameters) is None:
                return Hit(variant)
        return Miss(call, self.parameters, self.variants, self.skipped)


def _guard_sizes(guard: LeafGuard) -> Hashable:
    match guard:
        case TensorGuard():
            return guard.dtype, guard.dims
        case IntGuard():
            return None
        case _:
            return identity(guard.value)


def _call_sizes(leaf: Leaf) -> Hashable:
    if isinstance(leaf, TensorMeta):
        return leaf.dtype, leaf.shape
    return None if isinstance(leaf, Other) else identity(leaf)


def _guard_kind(guard: LeafGuard) -> Hashable:
    match guard:
        case TensorGuard():
            return guard.dtype, len(guard.dims)
        case IntGuard():
            return int.__name__
        case _:
            return type(guard.value).__name__


def _call_kind(leaf: Leaf) -> Hashable:
    if isinstance(leaf, TensorMeta):
        return leaf.dtype, len(leaf.shape)
    return None if isinstance(leaf, Other) else type(leaf).__name__
