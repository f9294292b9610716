"""Which examples of an exported program are of sizes that its manifest declares, and which were only tried. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotpack.manifest_values import Range
from aotpack.plan import EntryPlan
from aotpack_runtime.format.expression import parse

Json = Any


def only_tried(plan: EntryPlan, program: Json) -> list[Json]:
    """The examples of `program` (the record of an export) at sizes that no variant of the manifest is for: probing let
    the program take them. The first is what it was traced with, and never one of them."""
    return [
        example
        for example in program["examples"][1:]
        if not any(_takes(variant.dims, program["leaves"], example) for variant in plan.variants)
    ]


def _takes(dims: Mapping[str, Range], leaves: Sequence[Json], example: Sequence[Json]) -> bool:
    """Are the sizes of `example` those of a variant of `dims`?"""
    found: dict[str, int] = {}
    for leaf, sizes in zip(leaves, example, strict=True):
        if isinstance(sizes, int) and not leaf["low"] <= sizes <= leaf["high"]:
            return False
        for text, size in zip(leaf["shape"], sizes, strict=True) if isinstance(sizes, list) else ():
            form = parse(str(text))
            if not form.names:
                if form({}) != size:
                    return False
                continue
            (name,) = form.names
            offset = form({name: 0})
            value, rest = divmod(size - offset, form({name: 1}) - offset)
            if rest or found.setdefault(name, value) != value or not _is_inside(value, dims[name]):
                return False
    return True


def _is_inside(size: int, bounds: Range) -> bool:
    return bounds.min <= size and (bounds.max is None or size <= bounds.max)
