"""What was seen of the calls that missed: by shape, and by family of shapes that differ in open sizes only. Bounded."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aotpack_runtime.format.guard import describe
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.tensor import Call, Leaf, TensorMeta

SHAPES = 512
"""Shapes remembered for an entry; the one that missed longest ago is forgotten first."""
VALUES = 64
"""Distinct sizes remembered of one dim; beyond them only the least and the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A call that missed: what names its shape, what names its family, the sizes that differ within the family, and why
    it has none, so that nothing is compiled for it. `request` is what, where that is known already."""

    key: Hashable
    family: Hashable = ()
    program: Variant | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    why: str = ""
    request: Any = None


@dataclass(slots=True)
class Family:
    """Calls of one program, one layout and the same scalars: what a range may cover. `seconds` counts those of the
    fallback since a variant for the family came last; `why` is why nothing is compiled for any of them, "" when
    something may be."""

    program: Variant | None
    why: str = ""
    seconds: float = 0.0
    due: float = math.inf
    sizes: dict[str, set[int]] = field(default_factory=dict)

    def note(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            seen = self.sizes.setdefault(name, set())
            seen.add(size)
            if len(seen) > VALUES:
                seen -= {sorted(seen)[len(seen) // 2]}


@dataclass(slots=True, eq=False)
class Shape:
    """One shape of calls: how often the fallback served it and how long that took. `state` is what became of it:
    "" (being watched), "asked", "compiled", or why there will be no variant for it; `why` is why there is none yet."""

    call: Call
    family: Family
    request: Any = None
    calls: int = 0
    seconds: float = 0.0
    due: float = math.inf
    state: str = ""
    why: str = ""
    first_seen: float = field(default_factory=time.monotonic)
    hits: Any = None
    """The counter of the variant that serves it now."""

    @property
    def text(self) -> str:
        return words(self.call)

    @property
    def mean_s(self) -> float:
        return self.seconds / self.calls if self.calls else 0.0

    @property
    def demand_s(self) -> float:
        """Seconds that the fallback took, or would have taken for the calls that a variant served."""
        served = self.hits.value if self.hits is not None else 0
        return self.seconds + served * self.mean_s


class Shapes:
    """The shapes of an entry, the latest first to stay."""

    def __init__(self, limit: int = SHAPES) -> None:
        self._limit = limit
        self._shapes: OrderedDict[Hashable, Shape] = OrderedDict()
        self._families: OrderedDict[Hashable, Family] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shapes)

    def find(self, key: Hashable) -> Shape | None:
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
        return shape

    def family(self, key: Hashable, made: Callable[[], Family]) -> Family:
        found = self._families.get(key)
        if found is None:
            found = self._families[key] = made()
            if len(self._families) > self._limit:
                self._families.popitem(last=False)
        return found

    def add(self, key: Hashable, shape: Shape) -> None:
        self._shapes[key] = shape
        if len(self._shapes) > self._limit:
            self._shapes.popitem(last=False)

    def all(self) -> list[Shape]:
        return list(self._shapes.values())


def words(call: Call) -> str:
    """The shape of a call in a few words: `float32[8,70], True`."""
    return ", ".join(_word(leaf) for leaf in call.leaves)


def _word(leaf: Leaf) -> str:
    if isinstance(leaf, TensorMeta):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return describe(leaf)[:48]
