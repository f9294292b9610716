"""An entry, its parameters and what makes it a kernel, as JSON: each record's writer and reader."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import Any

from aotpack_runtime.format import tree
from aotpack_runtime.format.codec import dump_scalar, parse_scalar
from aotpack_runtime.format.index import Default, Entry, Kernel, Parameter, Source, Variant
from aotpack_runtime.format.plain import text, texts
from aotpack_runtime.format.sound import PARAMETER_KINDS
from aotpack_runtime.format.variant_json import dump_variant

Json = Any


def dump_entry(entry: Entry) -> Json:
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
    if entry.kernel is None:
        return record
    from aotpack_runtime.format.kernel_json import dump_kernel

    return record | {"kernel": dump_kernel(entry.kernel)}


def parse_entry(name: str, value: Json, variants: Callable[[str], tuple[Variant, ...]]) -> Entry:
    source, names = value["source"], value["output_names"]
    return Entry(
        name=name,
        parameters=tuple(parse_parameter(item) for item in value["parameters"]),
        variants=variants("variants"),
        programs=variants("programs"),
        source=Source(text(source["text"]), dict(source["args"]), texts(source["files"])),
        fills=dict(value["fills"]),
        on_miss={**value["on_miss"], "policy": text(value["on_miss"]["policy"])},
        verify=dict(value["verify"]),
        imports=tuple(text(item) for item in value["imports"]),
        operators=texts(value["operators"]),
        output_names=None if names is None else tuple(text(item) for item in names),
        training=bool(value["training"]),
        kernel=_parse_kernel(value["kernel"]) if "kernel" in value else None,
    )


def _parse_kernel(value: Json) -> Kernel:
    from aotpack_runtime.format.kernel_json import parse_kernel  # models do without

    return parse_kernel(value)


def dump_parameter(parameter: Parameter) -> Json:
    record: dict[str, Json] = {"name": parameter.name, "kind": parameter.kind}
    if parameter.default is not None:
        leaves = [dump_scalar(leaf) for leaf in parameter.default.leaves]
        record["default"] = {"tree": parameter.default.tree, "leaves": leaves}
    return record


def parse_parameter(value: Json) -> Parameter:
    name, kind = text(value["name"]), value["kind"]
    # Python reads names in their NFKC form: two that differ may be one, and one may become `__memo`.
    stable = name.isascii() or _is_normalized(name)
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__") or not stable:
        raise ValueError(f"parameter {name!r} is not a Python name")
    if kind not in PARAMETER_KINDS:
        raise ValueError(f"parameter {name!r} has unknown kind {kind!r}")
    default = None
    if "default" in value:
        record = value["default"]
        default = Default(tree.parse(record["tree"]), tuple(parse_scalar(leaf) for leaf in record["leaves"]))
    return Parameter(name, kind, default)


def _is_normalized(name: str) -> bool:
    import unicodedata

    return unicodedata.is_normalized("NFKC", name)
