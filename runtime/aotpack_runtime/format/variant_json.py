"""A variant or program as JSON, which may stand by itself: each record's writer and reader."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aotpack_runtime.format.codec import dump_guards, dump_outputs, parse_guards, parse_outputs
from aotpack_runtime.format.gpu import check_need
from aotpack_runtime.format.index import ArtifactRef, Example, Recipe, RecipeTarget, Variant
from aotpack_runtime.format.plain import dump_file, parse_file, text, texts
from aotpack_runtime.format.target import Target
from aotpack_runtime.record import EMPTY

if TYPE_CHECKING:
    from aotpack_runtime.format.choice import Axes
    from aotpack_runtime.format.launch import Launch

Json = Any

SHARED = ("target", "outputs", "constants")
"""Fields of a variant that an index writes as a number, of the place under `shared` where their value stands."""

SHARED_BY_KERNELS = (*SHARED, "guards", "launch")
"""The same of a variant of a kernel: those of several architectures and configs are called and launched alike."""


class Shared:
    """What variants have in common, each value read once for each field that it stands for."""

    def __init__(self, values: Json) -> None:
        self._values: list[Json] = list(values) if isinstance(values, list) else []
        self._read: dict[tuple[str, int], Any] = {}
        self._once: dict[tuple[Callable[[Json], Any], bytes], Any] = {}

    def read(self, record: Json, name: str, parse_field: Callable[[Json], Any]) -> Any:
        """The field `name` of a variant's record, which holds the value or the number of its place."""
        value = record[name]
        if type(value) is not int:
            return self.once(value, parse_field) if name in ("guards", "launch") else parse_field(value)
        known = self._read.get((name, value))
        if known is None:
            if not 0 <= value < len(self._values):
                raise ValueError(f"{name}: there is no shared value {value}, only {len(self._values)}")
            known = self._read[name, value] = parse_field(self._values[value])
        return known

    def once(self, value: Json, parse_value: Callable[[Json], Any]) -> Any:
        """What `parse_value` makes of `value`, the same object for each value that is exactly equal."""
        key = (parse_value, marshal.dumps(value, 2))  # of one value one text, in which true is not 1
        known = self._once.get(key)
        if known is None:
            known = self._once[key] = parse_value(value)
        return known


def dump_variant(variant: Variant) -> Json:
    record = {
        "id": variant.id,
        "point": variant.point,
        "tier": variant.tier,
        "target": _dump_target(variant.target),
        "artifact": {
            "kind": variant.artifact.kind,
            "digest": variant.artifact.digest,
            "files": {name: dump_file(file) for name, file in variant.artifact.files.items()},
        },
        "guards": dump_guards(variant.guards),
        "outputs": dump_outputs(variant.outputs),
        "weights": variant.weights,
        "constants": [list(pair) for pair in variant.constants],
        "examples": [list(example) for example in variant.examples],
    }
    if variant.recipe is not None:
        record["recipe"] = dump_recipe(variant.recipe)
    if variant.launch is None:
        return record
    from aotpack_runtime.format.launch import dump_launch

    return record | {"axes": dict(variant.axes), "launch": dump_launch(variant.launch)}


def parse_variant(value: Json, shared: Shared | None = None) -> Variant:
    """A variant from its record, which may stand by itself; ValueError, TypeError or KeyError for what is none."""
    shared = shared or Shared([])
    artifact = value["artifact"]
    if value["tier"] not in ("hot", "warm", "rare"):
        raise ValueError(f"unknown tier {value['tier']!r}")
    ref = ArtifactRef(
        kind=text(artifact["kind"]),
        digest=text(artifact["digest"]),
        files={name: parse_file(file) for name, file in artifact["files"].items()},
    )
    ref.members()
    is_kernel = "launch" in value
    axes, launch = _parse_launched(value, shared) if is_kernel else (EMPTY, None)
    return Variant(
        id=text(value["id"]),
        point=text(value["point"]),
        tier=value["tier"],
        target=shared.read(value, "target", _parse_target),
        artifact=ref,
        # Each variant of a model has sizes of its own.
        guards=shared.read(value, "guards", parse_guards) if is_kernel else parse_guards(value["guards"]),
        outputs=shared.read(value, "outputs", parse_outputs),
        weights=text(value["weights"]),
        constants=shared.read(value, "constants", _parse_constants),
        examples=tuple(_parse_example(item) for item in value["examples"]),
        axes=axes,
        launch=launch,
        recipe=_parse_recipe(value["recipe"]) if "recipe" in value else None,
    )


def _parse_launched(value: Json, shared: Shared) -> tuple[Axes, Launch]:
    """What only a variant of a kernel has."""
    from aotpack_runtime.format.choice import parse_axes
    from aotpack_runtime.format.launch import parse_launch

    return parse_axes(value["axes"]), shared.read(value, "launch", parse_launch)


def dump_recipe(recipe: Recipe) -> Json:
    return {
        "outputs": dump_outputs(recipe.outputs),
        "options": dict(recipe.options),
        "targets": [{"target": _dump_target(item.target), "job": dict(item.job)} for item in recipe.targets],
    }


def _parse_recipe(value: Json) -> Recipe:
    return Recipe(
        outputs=parse_outputs(value["outputs"]),
        options=dict(value["options"]),
        targets=tuple(
            RecipeTarget(target=_parse_target(item["target"]), job=dict(item["job"])) for item in value["targets"]
        ),
    )


def _dump_target(target: Target) -> Json:
    return {"device": target.device, "needs": dict(target.needs)}


def _parse_target(value: Json) -> Target:
    target = Target(text(value["device"]), texts(value["needs"]))
    for name, need in target.needs.items():
        check_need(name, need)
    return target


def _parse_constants(value: Json) -> tuple[tuple[str, str], ...]:
    return tuple((text(name), text(weight)) for name, weight in value)


def _parse_example(value: Json) -> Example:
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)
