"""An entry, its parameters and what makes it a kernel, as JSON: each record's writer and reader."""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Callable
from typing import Any

from aotpack_runtime.format import layout, tree
from aotpack_runtime.format.choice import dump_choice, parse_choice
from aotpack_runtime.format.codec import dump_scalar, parse_scalar
from aotpack_runtime.format.index import Default, Entry, Kernel, Parameter, Source, Variant
from aotpack_runtime.format.kernel_recipe import dump_kernel_recipe, parse_kernel_recipe
from aotpack_runtime.format.plain import dump_file, parse_file, text, texts
from aotpack_runtime.format.variant_json import dump_variant

Json = Any

PARAMETER_KINDS = ("positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword")


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
    return record | ({"kernel": _dump_kernel(entry.kernel)} if entry.kernel else {})


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


def _dump_kernel(kernel: Kernel) -> Json:
    recipe = {} if kernel.recipe is None else {"recipe": dump_kernel_recipe(kernel.recipe)}
    return {
        "text": dump_file(kernel.text),
        "suffix": kernel.suffix,
        "writes": list(kernel.writes),
        "types": list(kernel.types),
        "operator": kernel.operator,
        "choice": dump_choice(kernel.choice),
        **recipe,
    }


def _parse_kernel(value: Json) -> Kernel:
    kernel = Kernel(
        text=parse_file(value["text"]),
        suffix=text(value["suffix"]),
        writes=tuple(text(name) for name in value["writes"]),
        types=tuple(text(item) for item in value["types"]),
        operator=text(value["operator"]),
        choice=parse_choice(value["choice"]),
        recipe=parse_kernel_recipe(value["recipe"]) if "recipe" in value else None,
    )
    layout.source(kernel.text.digest, kernel.suffix)
    return kernel


def dump_parameter(parameter: Parameter) -> Json:
    record: dict[str, Json] = {"name": parameter.name, "kind": parameter.kind}
    if parameter.default is not None:
        leaves = [dump_scalar(leaf) for leaf in parameter.default.leaves]
        record["default"] = {"tree": parameter.default.tree, "leaves": leaves}
    return record


def parse_parameter(value: Json) -> Parameter:
    name, kind = text(value["name"]), value["kind"]
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
