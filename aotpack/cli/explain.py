"""`aotpack explain BUNDLE ENTRY --shape x=8x128:float32`: which variant a call hits, or why each was turned down."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aotpack.cli.output import (
    DEBUG_OPTION,
    DEVICE_OPTION,
    JSON_OPTION,
    MACHINE_OPTION,
    device_of,
    machine_of,
    result,
)

if TYPE_CHECKING:
    from aotpack_runtime.dispatch import Dispatcher
    from aotpack_runtime.format.index import Entry
    from aotpack_runtime.format.tensor import Call, Leaf
    from aotpack_runtime.format.tree import Tree

_SHAPE = re.compile(
    r"(?P<path>[^=]+)=(?P<shape>scalar|\d+(x\d+)*):(?P<dtype>\w+)(:(?P<layout>channels_last))?(:offset=(?P<offset>\d+))?"
)


def command(
    bundle: Path = typer.Argument(help="A bundle folder or archive."),
    entry: str = typer.Argument(help="The entry that is called."),
    shape: list[str] = typer.Option(
        [],
        "--shape",
        metavar="ARG=8x128:float32",
        help="A tensor argument; `scalar` for no dims; `:offset=4` for an address 4 bytes past a multiple of 16.",
    ),
    value: list[str] = typer.Option(
        [], "--value", metavar="ARG=JSON", help="Another argument, such as k=3 or flag=true."
    ),
    device: str | None = DEVICE_OPTION,
    machine: str | None = MACHINE_OPTION,
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> None:
    """Show which variant a call would hit, or the reason against each. Runs nothing and needs no torch."""
    from aotpack_runtime.bundle import open_bundle
    from aotpack_runtime.dispatch import Dispatcher, Hit
    from aotpack_runtime.errors import UnknownEntry

    opened = open_bundle(bundle)
    opened.close()
    record = opened.index.entries.get(entry)
    if record is None:
        raise UnknownEntry(entry, list(opened.index.entries))
    on = device_of(device, machine) if record.kernel is None else "cuda"
    call = _call(record, shape, value, on)
    decision = _dispatcher(record, on, machine).choose(call)
    if isinstance(decision, Hit):
        result({"ok": True, "hit": decision.variant.id}, as_json=as_json, text=f"hit: {decision.variant.id}")
        return
    served = Dispatcher(record.parameter_names, record.programs).choose(call)
    fallback = served.variant.id if isinstance(served, Hit) else None
    lines = ["miss", *[f"  {name}: {reason}" for name, reason in decision.reasons.items()]]
    if record.on_miss.get("policy") == "error":
        lines.append("an error: the manifest says `on_miss: {policy: error}`")
    elif record.kernel is None:
        lines.append(f"served by: {fallback or 'the source, where it can be imported'}")
    result({"ok": True, "miss": decision.reasons, "fallback": fallback}, as_json=as_json, text="\n".join(lines))


def _dispatcher(record: Entry, device: str, machine: str | None) -> Dispatcher:
    """Over the variants of a model for a kind of device; over those of a kernel that fit the GPU. The others are
    named with their reason."""
    from aotpack_runtime.dispatch import Dispatcher, KernelDispatcher
    from aotpack_runtime.verdict import elsewhere, reject_variant

    if record.kernel is None:
        kind = device.partition(":")[0]
        ours = [variant for variant in record.variants if variant.target.device == kind]
        others = [variant for variant in record.variants if variant.target.device != kind]
        return Dispatcher(record.parameter_names, ours, [(each.id, elsewhere(each, device)) for each in others])
    host = machine_of(machine)
    reasons = {variant.id: reject_variant(variant, device, host) for variant in record.variants}
    return KernelDispatcher(
        record.parameter_names,
        [variant for variant in record.variants if not reasons[variant.id]],
        [(name, reason) for name, reason in reasons.items() if reason],
        choice=record.kernel.choice,
        capability=host.gpu.capability if host.gpu else None,
    )


def _call(record: Entry, shapes: list[str], values: list[str], device: str) -> Call:
    """The call that the options describe; arguments that are left out have their defaults."""
    from aotpack_runtime.format.tensor import Call, TensorMeta
    from aotpack_runtime.format.tree import LEAF, flatten, paths

    given: dict[str, Any] = {**dict(_tensor(text, device) for text in shapes), **dict(_scalar(text) for text in values)}
    names = ", ".join(record.parameter_names)
    for path in given:
        if not any(_belongs(path, name) for name in record.parameter_names):
            raise typer.BadParameter(f"{record.name} has no argument {path!r}; it has: {names}")
    trees: list[Tree] = []
    leaves: list[Any] = []
    missing: list[str] = []
    for position, parameter in enumerate(record.parameters):
        own = {path: leaf for path, leaf in given.items() if _belongs(path, parameter.name)}
        whole = own.get(parameter.name) if len(own) == 1 else None
        if isinstance(whole, TensorMeta):
            trees.append(LEAF)
            leaves.append(whole)
        elif parameter.name in own and len(own) == 1:
            trees.append(flatten(whole, leaves))
        elif own:
            tree = _tree_of(record, position, own.keys())
            trees.append(tree)
            leaves += [own[path] for path in paths(tree, parameter.name)]
        elif parameter.default is not None:
            trees.append(parameter.default.tree)
            leaves += parameter.default.leaves
        elif parameter.kind == "var_positional":
            trees.append(("tuple",))
        elif parameter.kind == "var_keyword":
            trees.append(("dict", ()))
        else:
            missing.append(parameter.name)
    if missing:
        raise typer.BadParameter(
            f"{record.name} also needs {', '.join(missing)}: --shape {missing[0]}=8x128:float32 says a tensor, "
            f"--value {missing[0]}=8 anything else"
        )
    return Call(tuple(trees), tuple(leaves))


def _belongs(path: str, parameter: str) -> bool:
    """Is `path` the parameter or a leaf inside of it: `x`, `x[0]`, `x.mask`?"""
    return re.fullmatch(re.escape(parameter) + r"(\W.*)?", path) is not None


def _tree_of(record: Entry, position: int, given: Collection[str]) -> Tree:
    """The containers around the leaves `given` of a parameter, as a variant or program has them."""
    from aotpack_runtime.format.tree import paths

    name = record.parameters[position].name
    trees = [variant.guards.trees[position] for variant in (*record.variants, *record.programs)]
    for tree in trees:
        if set(paths(tree, name)) == set(given):
            return tree
    known = ", ".join(paths(trees[0], name)) if trees else "none"
    raise typer.BadParameter(f"{name!r} has the leaves {known}; given: {', '.join(given)}")


def _tensor(text: str, device: str) -> tuple[str, Leaf]:
    from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, TensorMeta, channels_last_strides, contiguous_strides

    match = _SHAPE.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not ARG=8x128:float32")
    if match["dtype"] not in ITEMSIZE_BYTES:
        raise typer.BadParameter(f"{text!r}: unknown dtype {match['dtype']!r}; one of {', '.join(ITEMSIZE_BYTES)}")
    shape = () if match["shape"] == "scalar" else tuple(int(size) for size in match["shape"].split("x"))
    strides = channels_last_strides(shape) if match["layout"] else contiguous_strides(shape)
    return match["path"], TensorMeta(match["dtype"], device, shape, strides, int(match["offset"] or 0) % 16)


def _scalar(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not ARG=JSON")
    try:
        return path, json.loads(value)
    except ValueError:
        return path, value
