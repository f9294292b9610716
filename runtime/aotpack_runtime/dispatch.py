"""Which variant a call hits, or why none fits. Pure: no tensor is touched, nothing is loaded.

Rule: all-static before ranged, then the smallest product of range widths, then file order. The builder writes
variants in that order; here exact shapes are found by hash and ranged variants are tried in turn among those whose
dtypes and ranks fit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

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
from aotpack_runtime.record import Record

if TYPE_CHECKING:
    from aotpack_runtime.format.choice import Choice, Preference

FEW = 16
"""Variants of one dtype and rank that are tried in turn; of more, a table of their ranges is made."""


class Hit(Record):
    """The variant that serves this call."""

    variant: Variant

    def __str__(self) -> str:
        return f"hit: {self.variant.id}"


class Miss:
    """No variant fits; `reasons` are computed when asked, one line a variant."""

    def __init__(
        self,
        call: Call,
        parameters: tuple[str, ...],
        variants: tuple[Variant, ...],
        skipped: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.call, self.parameters, self.variants, self.skipped = call, parameters, variants, skipped

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Variant id -> the first thing that turned it down; variants that do not fit the host included."""
        judged = {variant.id: variant.guards.reject(self.call, self.parameters) or "fits" for variant in self.variants}
        return judged | dict(self.skipped)

    def last_reason(self) -> str | None:
        """What turned down the variant that is tried last, the widest; None when there is none. The others are not
        judged again: with thousands of variants a miss must not cost thousands of reasons."""
        return self.variants[-1].guards.reject(self.call, self.parameters) if self.variants else None

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
        ranged: dict[Hashable, list[Variant]] = {}
        for variant in self.variants:
            guards = variant.guards
            table, key = (self._exact, _guard_sizes) if guards.static else (ranged, _guard_kind)
            table.setdefault((guards.trees, tuple(map(key, guards.leaves))), []).append(variant)
        self._ranged = {key: _Ranges(variants) for key, variants in ranged.items()}

    def choose(self, call: Call) -> Hit | Miss:
        """The first variant, in the order of the rule, whose guards all hold."""
        for variant in self._exact.get((call.trees, tuple(map(_call_sizes, call.leaves))), ()):
            if variant.guards.reject(call, self.parameters) is None:
                return Hit(variant)
        ranges = self._ranged.get((call.trees, tuple(map(_call_kind, call.leaves))))
        for variant in ranges.candidates(call) if ranges is not None else ():
            if variant.guards.reject(call, self.parameters) is None:
                return Hit(variant)
        return Miss(call, self.parameters, self.variants, self.skipped)


class _Ranges:
    """Ranged variants of one dtype and rank, found by the dim that tells most of them apart.

    The sizes of that dim are cut where a range begins or ends; between two cuts the same variants are possible. Ranges
    that lie in each other all over would make the table long, and are tried in turn instead.
    """

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._all = variants
        self._place: tuple[int, int] | None = None
        self._starts: list[int] = []
        self._found: list[list[Variant]] = []
        if len(variants) > FEW:
            self._cut(variants)

    def candidates(self, call: Call) -> Sequence[Variant]:
        """Those of the variants, in order, that the call's size of that dim does not rule out."""
        if self._place is None:
            return self._all
        leaf = call.leaves[self._place[0]]
        if not isinstance(leaf, TensorMeta):
            return self._all
        return self._found[bisect_right(self._starts, leaf.shape[self._place[1]])]

    def _cut(self, variants: Sequence[Variant]) -> None:
        ranges = {
            (leaf, axis): [_range(variant, leaf, axis) for variant in variants]
            for leaf, guard in enumerate(variants[0].guards.leaves)
            if isinstance(guard, TensorGuard)
            for axis in range(len(guard.dims))
        }
        place = max(ranges, key=lambda key: len(set(ranges[key])), default=None)
        if place is None:
            return
        chosen = ranges[place]
        ends = {low for low, _ in chosen} | {high + 1 for _, high in chosen if high is not None}
        starts = sorted(ends)
        at = {start: number for number, start in enumerate(starts)}
        found: list[list[Variant]] = [[] for _ in range(len(starts) + 1)]
        budget = FEW * len(variants)
        for variant, (low, high) in zip(variants, chosen, strict=True):
            first, last = at[low] + 1, len(starts) if high is None else at[high + 1]
            budget -= last - first + 1
            if budget < 0:
                return
            for number in range(first, last + 1):
                found[number].append(variant)
        self._place, self._starts, self._found = place, starts, found


def _range(variant: Variant, leaf: int, axis: int) -> tuple[int, int | None]:
    guard = variant.guards.leaves[leaf]
    assert isinstance(guard, TensorGuard)
    dim = guard.dims[axis]
    return (dim, dim) if isinstance(dim, int) else (dim.low, dim.high)


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
        self._dtypes = [tuple(map(_guard_dtype, variant.guards.leaves)) for variant in self.variants]
        self._groups: dict[Hashable, tuple[list[Variant], Preference]] = {}

    def choose(self, call: Call, refused: Mapping[str, str] = {}) -> Hit | Miss:
        """The best variant of those whose guards all hold and that are not `refused` (with a reason each)."""
        group, preference = self._group(call)
        fits = [
            place
            for place, variant in enumerate(group)
            if variant.id not in refused and variant.guards.reject(call, self.parameters) is None
        ]
        if not fits:
            return Miss(call, self.parameters, self.variants, (*refused.items(), *self.skipped))
        return Hit(group[preference.best(fits, self._numbers(call))])

    def alike(self, call: Call) -> tuple[list[Variant], Preference]:
        """The variants that calls may hit which differ from `call` in their ints alone, and what chooses among them."""
        group, _ = self._group(call)
        found = [variant for variant in group if all(map(_takes_but_for_ints, variant.guards.leaves, call.leaves))]
        return found, self._choice.among(found, self._capability)

    def _group(self, call: Call) -> tuple[list[Variant], Preference]:
        """The variants for the dtypes of `call`."""
        seen = tuple(leaf.dtype if isinstance(leaf, TensorMeta) else None for leaf in call.leaves)
        found = self._groups.get(seen)
        if found is None:
            pairs = zip(self.variants, self._dtypes, strict=True)
            group = [variant for variant, wanted in pairs if _covers(wanted, seen)]
            found = self._groups[seen] = (group, self._choice.among(group, self._capability))
        return found

    def _numbers(self, call: Call) -> dict[str, int]:
        pairs = zip(self.parameters, call.leaves, strict=True)
        return {name: leaf for name, leaf in pairs if isinstance(leaf, int)}


def _takes_but_for_ints(guard: LeafGuard, leaf: Leaf) -> bool:
    return isinstance(guard, IntGuard | ValueGuard) or guard.reject(leaf, {}) is None


def _guard_dtype(guard: LeafGuard) -> str | None:
    return guard.dtype if isinstance(guard, PointerGuard | DescriptorGuard) else None


def _covers(wanted: Sequence[str | None], seen: Sequence[str | None]) -> bool:
    """May guards of these dtypes take a call of those? "any" takes all; of what is no tensor the guards judge."""
    return all(one in (None, "any", dtype) for one, dtype in zip(wanted, seen, strict=True))


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
