"""A call that missed -> what to compile for it: its exact shape, or a range where a dim keeps changing. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from aotpack_runtime.format.codec import dump_scalar
from aotpack_runtime.format.expression import Expression, parse, variable
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.guard import (
    LARGEST_INT,
    Guards,
    IntGuard,
    LeafGuard,
    Range,
    TensorGuard,
    ValueGuard,
    identity,
)
from aotpack_runtime.format.index import RecipeTarget, Variant
from aotpack_runtime.format.tensor import (
    Call,
    Other,
    TensorMeta,
    channels_last_strides,
    contiguous_strides,
    same_layout,
)
from aotpack_runtime.format.variant_json import dump_recipe

Json = Any
KEEPS_CHANGING = 3
"""A dim of which this many sizes were seen is compiled as a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a child is asked to compile. `leaves` and `dims` are as jobs of the builder have them (dim name -> min, max,
    opt); `label` is what people see in the variant's id."""

    entry: str
    program: Variant
    target: RecipeTarget
    leaves: tuple[Json, ...]
    dims: Mapping[str, tuple[int, int | None, int]]
    label: str

    def parts(self, bundle: str, device: str) -> dict[str, Json]:
        """Everything that decides what comes out, the toolchain aside: that is a fact of the host."""
        return {
            "bundle": bundle,
            "entry": self.entry,
            "device": device.partition(":")[0],
            "program": self.program.artifact.digest,
            "recipe": dump_recipe(replace(self.recipe, targets=(self.target,))),
            "leaves": list(self.leaves),
            "dims": {name: list(bounds) for name, bounds in self.dims.items()},
        }

    def key(self, bundle: str, device: str) -> str:
        return fingerprint(self.parts(bundle, device))

    def job(self) -> dict[str, Json]:
        """What the job of the builder says of it."""
        return {
            "kind": "miss", "program": self.program.id, "leaves": list(self.leaves), "target": dict(self.target.job),
            "dims": {name: list(bounds) for name, bounds in self.dims.items()},
        }  # fmt: skip

    @property
    def recipe(self) -> Any:
        assert self.program.recipe is not None
        return self.program.recipe


def shape_key(program: Variant, call: Call) -> tuple[Hashable, Hashable, dict[str, int]]:
    """(what names the shape of a call, what names its family, its open sizes). The family is the same with the open
    sizes left out; it has all that `why_not` looks at."""
    tied = _tied(program.guards.where)
    exact: list[Hashable] = [program.id]
    loose: list[Hashable] = [program.id]
    sizes: dict[str, int] = {}
    for guard, leaf in zip(program.guards.leaves, call.leaves, strict=True):
        if isinstance(leaf, TensorMeta) and isinstance(guard, TensorGuard):
            written = (leaf.shared, leaf.locked) if guard.written else None
            askew = guard.device == "cuda" and bool(leaf.offset)
            kind = (leaf.dtype, _layout(leaf), bool(leaf.odd), leaf.needs_grad, written, askew)
            exact.append((kind, leaf.shape))
            fixed: list[int | None] = []
            for axis, (dim, size) in enumerate(zip(guard.dims, leaf.shape, strict=True)):
                is_open = isinstance(dim, Range)
                fixed.append(None if is_open else size)
                if is_open and (name := variable(guard.path, axis)) not in tied:
                    sizes[name] = size
            loose.append((kind, tuple(fixed)))
        else:
            value = leaf if isinstance(leaf, Other | TensorMeta) else identity(leaf)
            exact.append(value)
            loose.append(None if isinstance(guard, IntGuard) else value)
    state = call.state
    return (*exact, state), (*loose, state), sizes


def why_not(program: Variant, call: Call) -> str:
    """Why no variant that is compiled from `program` would take `call`, "" when one would."""
    if program.recipe is None:
        return "the bundle says nothing of how to compile it: it is of an older format, or for another device"
    leaves: list[LeafGuard] = []
    for guard, leaf in zip(program.guards.leaves, call.leaves, strict=True):
        if isinstance(guard, TensorGuard) and isinstance(leaf, TensorMeta):
            layout = _layout(leaf)
            if layout is None and not leaf.odd:
                return f"{guard.path}: strides {list(leaf.strides)} are neither contiguous nor channels-last"
            leaves.append(replace(guard, layout=layout or "any", aligned=guard.device == "cuda"))
        else:
            leaves.append(guard)
    return Guards(program.guards.trees, tuple(leaves), program.guards.where).reject(call, ("",) * len(call.trees)) or ""


def exact(entry: str, program: Variant, target: RecipeTarget, call: Call) -> Request:
    """One variant for the sizes of `call`, and no others."""
    return _request(entry, program, target, call, {})


def ranged(
    entry: str, program: Variant, target: RecipeTarget, call: Call, seen: Mapping[str, set[int]]
) -> Request | None:
    """One variant for all sizes seen of the dims that keep changing, rounded out to powers of two inside of what the
    program takes; None where none keeps changing, or a size follows them in a way that a dim cannot be declared."""
    _, _, opened = shape_key(program, call)
    ranges = _ranges(program.guards)
    changing = [name for name in opened if len(seen.get(name, ())) >= KEEPS_CHANGING]
    dims: dict[str, tuple[str, tuple[int, int | None, int]]] = {}
    for number, name in enumerate(changing):
        allowed = ranges[name]
        low, high = min(seen[name]), max(seen[name])
        low = max(allowed.low, 1 << (low.bit_length() - 1) if low else 0)
        high = 1 << (high - 1).bit_length() if high > 1 else high
        high = high if allowed.high is None else min(high, allowed.high)
        if not low <= opened[name] <= high or low == high:
            return None
        dims[name] = (f"d{number}", (low, high, opened[name]))
    if not dims or not all(_is_linear(form, dims) for form in _tied(program.guards.where).values()):
        return None
    return _request(entry, program, target, call, dims)


def covers(guards: Guards, call: Call) -> bool:
    """Would a variant with these guards have taken `call`?"""
    return guards.reject(call, ("",) * len(call.trees)) is None


# ------------------------------------------------------------------------------------------------------------ inside


def _request(
    entry: str,
    program: Variant,
    target: RecipeTarget,
    call: Call,
    dims: Mapping[str, tuple[str, tuple[int, int | None, int]]],
) -> Request:
    tied = _tied(program.guards.where)
    leaves: list[Json] = []
    words: list[str] = []
    for guard, leaf in zip(program.guards.leaves, call.leaves, strict=True):
        if isinstance(guard, TensorGuard) and isinstance(leaf, TensorMeta):
            shape: list[int | str] = []
            for axis, size in enumerate(leaf.shape):
                name = variable(guard.path, axis)
                form = tied.get(name)
                if name in dims:
                    shape.append(dims[name][0])
                elif form is not None and form.names & dims.keys():
                    shape.append(_renamed(form, dims))
                else:
                    shape.append(size)
            layout = _layout(leaf) or "contiguous"
            place = {} if guard.device == "cpu" else {"device": guard.device}
            leaves.append({"path": guard.path, "dtype": leaf.dtype, "shape": shape, "layout": layout, **place})
            words.append("x".join(_span(size, dict(dims.values())) for size in shape) or "scalar")
        elif isinstance(guard, IntGuard) and type(leaf) is int:
            leaves.append(_int_leaf(guard, leaf))
        else:
            assert isinstance(guard, ValueGuard)
            leaves.append({"path": guard.path, "value": dump_scalar(guard.value)})
    label = re.sub(r"[^0-9a-z_]", "", "_".join(words))[:48]
    return Request(
        entry=entry, program=program, target=target, leaves=tuple(leaves), dims=dict(dims.values()), label=label
    )


def _span(size: int | str, dims: Mapping[str, tuple[int, int | None, int]]) -> str:
    """A size of a leaf for people: `8`, or `8_64` where it varies."""
    form = parse(str(size))
    ends = [form({name: bounds[end] or 0 for name, bounds in dims.items()}) for end in (0, 1)]
    return "_".join(map(str, ends if form.names else ends[:1]))


def _int_leaf(guard: IntGuard, value: int) -> Json:
    """An int stays symbolic, in a range whose middle, with which it is traced, is the value that was seen."""
    end = LARGEST_INT if guard.dim.high is None else guard.dim.high
    room = min(value - max(guard.dim.low, 0), end - value, 2**31)
    return {"path": guard.path, "low": value - room, "high": value + max(room, 1)}


def _layout(leaf: TensorMeta) -> str | None:
    """How a tensor lies in memory, of the two ways that are compiled for."""
    if same_layout(leaf.shape, leaf.strides, contiguous_strides(leaf.shape)):
        return "contiguous"
    if len(leaf.shape) in (4, 5) and same_layout(leaf.shape, leaf.strides, channels_last_strides(leaf.shape)):
        return "channels_last"
    return None


_EQUAL = re.compile(r"(?P<left>\S+) == (?P<right>.+)")


@lru_cache(maxsize=256)
def _tied(where: tuple[Expression, ...]) -> dict[str, Expression]:
    """Size -> the expression that it equals, of sizes that follow others."""
    found = {}
    for relation in where:
        match = _EQUAL.fullmatch(relation.text)
        if match and match["left"] in relation.names:
            found[match["left"]] = parse(match["right"])
    return found


def _ranges(guards: Guards) -> dict[str, Range]:
    return {
        variable(guard.path, axis): dim
        for guard in guards.leaves
        if isinstance(guard, TensorGuard)
        for axis, dim in enumerate(guard.dims)
        if isinstance(dim, Range)
    }


def _is_linear(form: Expression, dims: Mapping[str, Any]) -> bool:
    """Can a size that equals `form` be declared over `dims`: not at all dependent on them, or `a * n + b`?"""
    used = form.names & dims.keys()
    if not used:
        return True
    if len(form.names) != 1:
        return False
    (name,) = used
    at = [form({name: size}) for size in (2, 3, 4, 9)]
    step = at[1] - at[0]
    return step > 0 and at[2] - at[1] == step and at[3] - at[2] == 5 * step


def _renamed(form: Expression, dims: Mapping[str, tuple[str, Any]]) -> str:
    (name,) = form.names
    offset = form({name: 0})
    step = form({name: 1}) - offset
    scaled = dims[name][0] if step == 1 else f"{step} * {dims[name][0]}"
    return parse(f"{scaled} + {offset}" if offset else scaled).text
