"""The calls that are timed: the hot shapes of an entry in order, and one that no variant was built for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aotpack_runtime.dispatch import Dispatcher, Hit
from aotpack_runtime.errors import UsageError
from aotpack_runtime.format.guard import TensorGuard, ValueGuard
from aotpack_runtime.format.index import Entry, Example, Variant
from aotpack_runtime.format.tensor import Call, Leaf, TensorMeta, contiguous_strides

Json = Any
MOST_CASES = 4
"""Hot shapes that are called one after another; each costs a JIT compiler seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call: the variant or program whose guards say what its arguments are, and the sizes of this call; of a
    kernel, its numbers by name."""

    name: str
    kind: Literal["hot", "unseen"]
    like: str
    example: Example = ()
    numbers: Mapping[str, Json] = field(default_factory=dict)

    def record(self) -> Json:
        return {
            "name": self.name,
            "kind": self.kind,
            "like": self.like,
            "example": [_json(one) for one in self.example],
            "numbers": dict(self.numbers),
        }


def make_cases(entry: Entry, calls: Sequence[Mapping[str, tuple[int, ...]]] = ()) -> list[Case]:
    """The opt sizes of each hot variant, those of one point's first; then one unseen shape that a program serves.

    With `calls`, shapes by argument, those instead. UsageError for one that neither a variant nor a program takes.
    """
    if calls:
        return [_case_of(entry, shapes) for shapes in calls]
    cases: list[Case] = []
    seen: set[Example] = set()
    hot = [variant for variant in entry.variants if variant.tier == "hot"] or list(entry.variants)
    for variant in hot:
        example = variant.examples[0]
        if example not in seen and len(cases) < MOST_CASES:
            seen.add(example)
            cases.append(Case(_name(variant, example), "hot", variant.id, example))
    unseen = next(_unseen(entry, cases), None)
    return cases + ([unseen] if unseen else [])


def _case_of(entry: Entry, shapes: Mapping[str, tuple[int, ...]]) -> Case:
    """The call with these shapes, of the first variant or program that takes it."""
    for variant in (*entry.variants, *entry.programs):
        guards = variant.guards
        if shapes.keys() != {guard.path for guard in guards.leaves if isinstance(guard, TensorGuard)}:
            continue
        pairs = zip(guards.leaves, variant.examples[0], strict=True)
        example = tuple(shapes.get(guard.path, one) for guard, one in pairs)
        if guards.reject(_call(variant, example), entry.parameter_names) is None:
            return Case(_name(variant, example), "hot" if variant in entry.variants else "unseen", variant.id, example)
    words = " ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items())
    raise UsageError(f"no variant and no program of {entry.name!r} takes {words}", hint="aotpack inspect lists them")


def _unseen(entry: Entry, cases: Sequence[Case]) -> Iterator[Case]:
    """Calls a little larger or smaller than a hot one in all dims of one size, which no variant takes."""
    variants = Dispatcher(entry.parameter_names, entry.variants)
    programs = Dispatcher(entry.parameter_names, entry.programs)
    for case in cases:
        sizes = sorted({size for one in case.example if isinstance(one, tuple) for size in one}, reverse=True)
        for size in sizes:
            for other in (size + 1, size + 3, 2 * size + 1, size - 1):
                example = tuple(
                    tuple(other if each == size else each for each in one) if isinstance(one, tuple) else one
                    for one in case.example
                )
                like = next(variant for variant in entry.variants if variant.id == case.like)
                call = _call(like, example)
                found = programs.choose(call)
                if other > 1 and not isinstance(variants.choose(call), Hit) and isinstance(found, Hit):
                    yield Case(f"unseen {_name(like, example)}", "unseen", found.variant.id, example)


def _call(variant: Variant, example: Example) -> Call:
    leaves: list[Leaf] = []
    for guard, size in zip(variant.guards.leaves, example, strict=True):
        if isinstance(guard, TensorGuard) and isinstance(size, tuple):
            leaves.append(TensorMeta(guard.dtype, guard.device, size, contiguous_strides(size)))
        else:
            leaves.append(guard.value if isinstance(guard, ValueGuard) else size)  # type: ignore[arg-type]
    return Call(variant.guards.trees, tuple(leaves))


def _name(variant: Variant, example: Example) -> str:
    """The sizes of the tensors, each different one once: `8x128`."""
    shapes = ["x".join(map(str, size)) or "scalar" for size in example if isinstance(size, tuple)]
    return " ".join(dict.fromkeys(shapes)) or variant.id


def _json(one: tuple[int, ...] | int | None) -> Json:
    return list(one) if isinstance(one, tuple) else one
