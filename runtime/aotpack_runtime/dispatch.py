"""Which variant a call hits, or why none fits. Pure: no tensor is touched, nothing is loaded.

Rule: all-static before ranged, then the smallest product of range widths, then file order. The builder writes
variants in that order; here exact shapes are found by hash and ranged variants are tried in turn among those whose
dtypes and ranks fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from aotpack_runtime.format.choice import Choice
from aotpack_runtime.format.guard import (
    DescriptorGuard,
    IntGuard,
    LeafGuard,
    PointerGuard,
    TensorGuard,
    ValueGuard,
    identity,
)
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
        judged = {variant.id: variant.guards.reject(self.call, self.parameters) or "fits" for variant in self.variants}
        return judged | dict(self.skipped)

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


class KernelDispatcher(Dispatcher):
    """Chooses among kernels: of all that fit a call, the entry's `choice` takes one for a GPU of `capability`."""

    def __init__(
        self,
        parameters: tuple[str, ...],
        variants: Sequence[Variant],
        skipped: Sequence[tuple[str, str]] = (),
        *,
        choice: Choice,
        capability: tuple[int, int] | None,
    ) -> None:
        super().__init__(parameters, (), skipped)
        self.variants, self._choice, self._capability = tuple(variants), choice, capability
        self._groups: dict[Hashable, list[Variant]] = {}
        for variant in self.variants:
            self._groups.setdefault(tuple(map(_guard_dtype, variant.guards.leaves)), []).append(variant)

    def choose(self, call: Call) -> Hit | Miss:
        """The best variant of those whose guards all hold."""
        seen = tuple(leaf.dtype if isinstance(leaf, TensorMeta) else None for leaf in call.leaves)
        group = self._groups.get(seen)
        if group is None:  # another dtype, a pointer to anything, or a call that nothing fits
            group = [variant for key, variants in self._groups.items() if _covers(key, seen) for variant in variants]
            self._groups[seen] = group
        fits = [variant for variant in group if variant.guards.reject(call, self.parameters) is None]
        if not fits:
            return Miss(call, self.parameters, self.variants, self.skipped)
        return Hit(self._choice.pick(fits, self._numbers(call), self._capability))

    def _numbers(self, call: Call) -> dict[str, int]:
        pairs = zip(self.parameters, call.leaves, strict=True)
        return {name: leaf for name, leaf in pairs if isinstance(leaf, int)}


def _guard_dtype(guard: LeafGuard) -> str | None:
    return guard.dtype if isinstance(guard, PointerGuard | DescriptorGuard) else None


def _covers(key: Hashable, seen: Sequence[str | None]) -> bool:
    """Do guards of these dtypes take a call of those? "any" takes all; what is no tensor is for the guards to judge."""
    assert isinstance(key, tuple)
    return all(wanted in (None, "any", dtype) for wanted, dtype in zip(key, seen, strict=True))


def _guard_sizes(guard: LeafGuard) -> Hashable:
    match guard:
        case TensorGuard():
            return guard.dtype, guard.dims
        case ValueGuard():
            return identity(guard.value)
        case _:
            return None


def _call_sizes(leaf: Leaf) -> Hashable:
    if isinstance(leaf, TensorMeta):
        return leaf.dtype, leaf.shape
    return None if isinstance(leaf, Other) else identity(leaf)


def _guard_kind(guard: LeafGuard) -> Hashable:
    match guard:
        case TensorGuard():
            return guard.dtype, len(guard.dims)
        case ValueGuard():
            return type(guard.value).__name__
        case IntGuard():
            return int.__name__
        case _:
            return None


def _call_kind(leaf: Leaf) -> Hashable:
    if isinstance(leaf, TensorMeta):
        return leaf.dtype, len(leaf.shape)
    return None if isinstance(leaf, Other) else type(leaf).__name__
