"""An Index as the one JSON that it is written to and read from.

FORMAT_VERSION ledger
    1  2026-11  first version: kinds aoti and exported
    2  2026-11  adds entries of kernels: kinds cubin and ptx, Variant.axes and .launch, Entry.kernel; what many variants
                have in common stands once, under `shared`; reads 1
    3  2026-11  adds torch entries on CUDA: WeightRef.host, and the need `cuda`; Variant.recipe of programs: what a miss
                compiles from a bundle alone; reads 1 and 2, without it
"""

from __future__ import annotations

import contextlib
import gc
import json
import keyword
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

from aotpack_runtime.errors import MalformedBundle, UnsupportedFormat
from aotpack_runtime.format import layout, tree
from aotpack_runtime.format.choice import dump_choice, parse_axes, parse_choice
from aotpack_runtime.format.codec import (
    dump_guards,
    dump_outputs,
    dump_scalar,
    no_duplicates,
    parse_guards,
    parse_outputs,
    parse_scalar,
)
from aotpack_runtime.format.fingerprint import canonical
from aotpack_runtime.format.gpu import check_need
from aotpack_runtime.format.index import (
    ArtifactRef,
    Default,
    Entry,
    Example,
    File,
    Index,
    Kernel,
    Parameter,
    Recipe,
    RecipeTarget,
    Source,
    Variant,
    WeightRef,
    WeightSet,
)
from aotpack_runtime.format.launch import dump_launch, parse_launch
from aotpack_runtime.format.sound import check_kernel, check_members, check_parameters, check_variant, check_weights
from aotpack_runtime.format.target import Target

FORMAT_VERSION = 3
READS = (1, 2, 3)

SHARED = ("target", "outputs", "constants")
"""Fields of a variant that are written as a number, of the place under `shared` where their value stands."""

PARAMETER_KINDS = ("positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword")

Json = Any


# ------------------------------------------------------------------------------------------------------- writing


def dump(index: Index) -> bytes:
    """The bytes of index.json: one line, sorted keys, the same index gives the same bytes."""
    shared: dict[bytes, int] = {}
    entries = {name: _dump_entry(entry) for name, entry in sorted(index.entries.items())}
    for entry in entries.values():
        for record in (*entry["variants"], *entry["programs"]):
            for field_name in SHARED:
                record[field_name] = shared.setdefault(canonical(record[field_name]), len(shared))
    return canonical(
        {
            "format": FORMAT_VERSION,
            "bundle": {"name": index.name, "version": index.version, "labels": dict(index.labels)},
            "requires": dict(index.requires),
            "shared": [json.loads(text) for text in shared],
            "entries": entries,
            "weights": {
                "file": _dump_file(index.weights_file) if index.weights_file else None,
                "sets": {name: _dump_set(item) for name, item in index.weight_sets.items()},
            },
            "provenance": dict(index.provenance),
            "settings": dict(index.settings),
        }
    ) + b"\n"  # fmt: skip


def _dump_entry(entry: Entry) -> Json:
    record = {
        "parameters": [dump_parameter(parameter) for parameter in entry.parameters],
        "variants": [dump_variant(variant) for variant in entry.variants],
        "programs": [dump_variant(variant) for variant in entry.programs],
        "source": {"text": entry.source.text, "args": dict(entry.source.args), "files": dict(entry.source.files)},
        "fills": dict(entry.fills),
        "on_miss": dict(entry.on_miss),
        "verify": dict(entry.verify),
        "imports": list(entry.imports),
        "operators": dict(entry.operators),
        "output_names": None if entry.output_names is None else list(entry.output_names),
        "training": entry.training,
    }
    return record | ({"kernel": _dump_kernel(entry.kernel)} if entry.kernel else {})


def _dump_kernel(kernel: Kernel) -> Json:
    return {
        "text": _dump_file(kernel.text),
        "suffix": kernel.suffix,
        "writes": list(kernel.writes),
        "types": list(kernel.types),
        "operator": kernel.operator,
        "choice": dump_choice(kernel.choice),
    }


def dump_parameter(parameter: Parameter) -> Json:
    record: dict[str, Json] = {"name": parameter.name, "kind": parameter.kind}
    if parameter.default is not None:
        leaves = [dump_scalar(leaf) for leaf in parameter.default.leaves]
        record["default"] = {"tree": parameter.default.tree, "leaves": leaves}
    return record


def dump_variant(variant: Variant) -> Json:
    record = {
        "id": variant.id,
        "point": variant.point,
        "tier": variant.tier,
        "target": _dump_target(variant.target),
        "artifact": {
            "kind": variant.artifact.kind,
            "digest": variant.artifact.digest,
            "files": {name: _dump_file(file) for name, file in variant.artifact.files.items()},
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
    return record | {"axes": dict(variant.axes), "launch": dump_launch(variant.launch)}


def _dump_target(target: Target) -> Json:
    return {"device": target.device, "needs": dict(target.needs)}


def dump_recipe(recipe: Recipe) -> Json:
    return {
        "outputs": dump_outputs(recipe.outputs),
        "options": dict(recipe.options),
        "targets": [{"target": _dump_target(item.target), "job": dict(item.job)} for item in recipe.targets],
    }


def _dump_file(file: File) -> Json:
    return {"sha256": file.digest, "bytes": file.size_bytes}


def _dump_set(item: WeightSet) -> Json:
    weights: dict[str, Json] = {}
    for name, ref in item.weights.items():
        order = {} if ref.order is None else {"order": list(ref.order)}
        weights[name] = {"tensor": ref.tensor} | order | ({"host": True} if ref.host else {})
    return {"weights": weights, "state": list(item.state), "dtype": item.dtype}


# ------------------------------------------------------------------------------------------------------- reading


def parse(data: bytes, member: str = layout.INDEX) -> Index:
    """Read index.json; MalformedBundle or UnsupportedFormat with the place and what was found."""
    with _collector_at_rest():
        return _parse(data, member)


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Thousands of variants are hundreds of thousands of objects, all of them kept: looking through them for garbage
    again and again takes a third of the time."""
    working = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if working:
            gc.enable()


def _parse(data: bytes, member: str) -> Index:
    try:
        root = json.loads(data, object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if not data.strip():
            raise MalformedBundle(member, "is empty") from None
        raise MalformedBundle(member, f"is not the JSON of an index: {error}") from None
    if not isinstance(root, dict) or "format" not in root:
        raise MalformedBundle(member, "has no 'format': this is not an aotpack index", hint="")
    if root["format"] not in READS or type(root["format"]) is not int:
        raise UnsupportedFormat(member, found=root["format"], reads=READS)

    def at(place: str, read: Callable[[Json], Any], value: Json) -> Any:
        try:
            return read(value)
        except MalformedBundle:
            raise
        except KeyError as error:
            raise MalformedBundle(member, f"{place}: missing key {error}") from None
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise MalformedBundle(member, " ".join(f"{place}: {error}".split())[:300]) from None

    shared = _Shared(root.get("shared", []))

    def entry(name: str, value: Json) -> Entry:
        def variants(key: str) -> tuple[Variant, ...]:
            items = at(f"entries.{name}", lambda record: list(record[key]), value)
            return tuple(
                at(f"entries.{name}.{key}[{position}]", lambda one: parse_variant(one, shared), item)
                for position, item in enumerate(items)
            )

        made: Entry = at(f"entries.{name}", lambda record: _parse_entry(name, record, variants), value)
        at(f"entries.{name}", check_parameters, made.parameters)
        at(f"entries.{name}.kernel", check_kernel, made)
        for key, items in (("variants", made.variants), ("programs", made.programs)):
            for position, item in enumerate(items):
                at(f"entries.{name}.{key}[{position}]", lambda variant: check_variant(variant, made.parameters), item)
        return made

    def whole(value: Json) -> Index:
        bundle, weights = value["bundle"], value["weights"]
        return Index(
            name=_text(bundle["name"]),
            version=_text(bundle["version"]),
            labels=_texts(bundle["labels"]),
            requires=_texts(value["requires"]),
            entries={name: entry(name, item) for name, item in value["entries"].items()},
            weights_file=None if weights["file"] is None else _parse_file(weights["file"]),
            weight_sets={name: at(f"weights.sets.{name}", _parse_set, item) for name, item in weights["sets"].items()},
            provenance=dict(value["provenance"]),
            settings=dict(value["settings"]),
        )

    index: Index = at("index", whole, root)
    at("entries", check_members, index)
    at("weights", check_weights, index)
    return index


def _parse_entry(name: str, value: Json, variants: Callable[[str], tuple[Variant, ...]]) -> Entry:
    source, names = value["source"], value["output_names"]
    return Entry(
        name=name,
        parameters=tuple(parse_parameter(item) for item in value["parameters"]),
        variants=variants("variants"),
        programs=variants("programs"),
        source=Source(_text(source["text"]), dict(source["args"]), _texts(source["files"])),
        fills=dict(value["fills"]),
        on_miss={**value["on_miss"], "policy": _text(value["on_miss"]["policy"])},
        verify=dict(value["verify"]),
        imports=tuple(_text(item) for item in value["imports"]),
        operators=_texts(value["operators"]),
        output_names=None if names is None else tuple(_text(item) for item in names),
        training=bool(value["training"]),
        kernel=_parse_kernel(value["kernel"]) if "kernel" in value else None,
    )


def _parse_kernel(value: Json) -> Kernel:
    kernel = Kernel(
        text=_parse_file(value["text"]),
        suffix=_text(value["suffix"]),
        writes=tuple(_text(name) for name in value["writes"]),
        types=tuple(_text(item) for item in value["types"]),
        operator=_text(value["operator"]),
        choice=parse_choice(value["choice"]),
    )
    layout.source(kernel.text.digest, kernel.suffix)
    return kernel


def parse_parameter(value: Json) -> Parameter:
    name, kind = _text(value["name"]), value["kind"]
    # Python reads names in their NFKC form: two that differ may be one, and one may become `__memo`.
    stable = unicodedata.is_normalized("NFKC", name)
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__") or not stable:
        raise ValueError(f"parameter {name!r} is not a Python name")
    if kind not in PARAMETER_KINDS:
        raise ValueError(f"parameter {name!r} has unknown kind {kind!r}")
    default = None
    if "default" in value:
        record = value["default"]
        default = Default(tree.parse(record["tree"]), tuple(parse_scalar(leaf) for leaf in record["leaves"]))
    return Parameter(name, kind, default)


class _Shared:
    """What variants have in common, each value read once for each field that it stands for."""

    def __init__(self, values: Json) -> None:
        self._values: list[Json] = list(values) if isinstance(values, list) else []
        self._read: dict[tuple[str, int], Any] = {}

    def read(self, record: Json, name: str, parse_field: Callable[[Json], Any]) -> Any:
        """The field `name` of a variant's record, which holds the value or the number of its place."""
        value = record[name]
        if type(value) is not int:
            return parse_field(value)
        known = self._read.get((name, value))
        if known is None:
            if not 0 <= value < len(self._values):
                raise ValueError(f"{name}: there is no shared value {value}, only {len(self._values)}")
            known = self._read[name, value] = parse_field(self._values[value])
        return known


def parse_variant(value: Json, shared: _Shared | None = None) -> Variant:
    """A variant from its record, which may stand by itself; ValueError, TypeError or KeyError for what is none."""
    shared = shared or _Shared([])
    artifact = value["artifact"]
    if value["tier"] not in ("hot", "warm", "rare"):
        raise ValueError(f"unknown tier {value['tier']!r}")
    ref = ArtifactRef(
        kind=_text(artifact["kind"]),
        digest=_text(artifact["digest"]),
        files={name: _parse_file(file) for name, file in artifact["files"].items()},
    )
    ref.members()
    return Variant(
        id=_text(value["id"]),
        point=_text(value["point"]),
        tier=value["tier"],
        target=shared.read(value, "target", _parse_target),
        artifact=ref,
        guards=parse_guards(value["guards"]),
        outputs=shared.read(value, "outputs", parse_outputs),
        weights=_text(value["weights"]),
        constants=shared.read(value, "constants", _parse_constants),
        examples=tuple(_parse_example(item) for item in value["examples"]),
        axes=parse_axes(value["axes"]) if "axes" in value else {},
        launch=parse_launch(value["launch"]) if "launch" in value else None,
        recipe=_parse_recipe(value["recipe"]) if "recipe" in value else None,
    )


def _parse_recipe(value: Json) -> Recipe:
    return Recipe(
        outputs=parse_outputs(value["outputs"]),
        options=dict(value["options"]),
        targets=tuple(
            RecipeTarget(target=_parse_target(item["target"]), job=dict(item["job"])) for item in value["targets"]
        ),
    )


def _parse_target(value: Json) -> Target:
    target = Target(_text(value["device"]), _texts(value["needs"]))
    for name, need in target.needs.items():
        check_need(name, need)
    return target


def _parse_constants(value: Json) -> tuple[tuple[str, str], ...]:
    return tuple((_text(name), _text(weight)) for name, weight in value)


def _parse_example(value: Json) -> Example:
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _parse_file(value: Json) -> File:
    size = value["bytes"]
    if type(size) is not int or size < 0:
        raise ValueError(f"bytes: expected a size, got {size!r}")
    layout.weights(_text(value["sha256"]))
    return File(value["sha256"], size)


def _parse_set(value: Json) -> WeightSet:
    refs = {
        name: WeightRef(_text(item["tensor"]), tuple(item["order"]) if "order" in item else None, _is_host(item))
        for name, item in value["weights"].items()
    }
    return WeightSet(refs, tuple(_text(name) for name in value["state"]), _text(value["dtype"]))


def _is_host(item: Json) -> bool:
    found = item.get("host", False)
    if not isinstance(found, bool):
        raise TypeError(f"host: expected true or false, got {str(found)[:80]!r}")
    return found


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {str(value)[:80]!r}")
    return value


def _texts(value: Json) -> dict[str, str]:
    return {name: _text(item) for name, item in value.items()}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
