"""A manifest's text -> `Manifest`, or every mistake in it at once, each with its line and column.

The steps: YAML 1.2 into nodes (`yaml12`), `--set` (`manifest_override`), the models (`manifest_model`), whose errors
become problems (`manifest_report`), and the rules here, which span mappings: names that must exist elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from aotpack.manifest_inputs import Linear, parse_axis
from aotpack.manifest_model import Manifest
from aotpack.manifest_override import OVERRIDE_FILE, override
from aotpack.manifest_report import problem_at, report
from aotpack.suggest import describe, did_you_mean, nearest
from aotpack.yaml12 import Node, Steps, dotted, plain, read_document
from aotpack_runtime.errors import ManifestError, Problem

KERNEL_KINDS = ("triton", "nvrtc")

__all__ = ["Manifest", "manifest_schema", "read_manifest"]


def read_manifest(path: Path, overrides: Sequence[str] = ()) -> Manifest:
    """Read the manifest at `path`; ManifestError holds all its problems.

    Each of `overrides` is `K=V`, a path and a YAML value such as `entries.encoder.points[0].dims.batch=4`; the later
    of two wins. Their problems have "--set" for a file, and for a line their place in `overrides`.
    """
    data = _read(path)
    document = read_document(data, str(path))
    root, refused = override(document.root, overrides)
    manifest, mistaken = _validate(root)
    unread = [*document.problems, *refused]
    places = {(problem.file, problem.line, problem.col) for problem in unread}
    # A value that could not be read is a stand-in here: what the models say of that place only follows from it.
    problems = unread + [each for each in mistaken if (each.file, each.line, each.col) not in places]
    if manifest is None or problems:
        raise ManifestError(sorted(problems, key=lambda each: (each.file == OVERRIDE_FILE, each.line, each.col)))
    manifest._path = path
    return manifest


def manifest_schema() -> dict[str, Any]:
    """JSON Schema of a manifest, for editors. It cannot say the rules that span keys: min <= max, names that exist."""
    schema = Manifest.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "aotpack manifest"}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ManifestError([Problem(str(path), 1, 1, "", f"cannot be read: {reason}")]) from error


def _validate(root: Node) -> tuple[Manifest | None, list[Problem]]:
    """The manifest that `root` says, or None; and what is wrong with it."""
    tree = plain(root)
    models: dict[int, type[BaseModel]] = {}
    manifest, problems = None, []
    try:
        manifest = Manifest.model_validate(tree, context=models)
    except ValidationError as error:
        problems = list(report(error, root, tree, models))
    mistaken = frozenset(problem.path for problem in problems)
    return manifest, [*problems, *_endless(root, (), mistaken), *_unmatched(root, mistaken)]


def _endless(node: Node, steps: Steps, mistaken: Collection[str]) -> Iterator[Problem]:
    """Numbers that the JSON of a bundle has no word for, where no model has refused them."""
    if isinstance(node.value, float) and not math.isfinite(node.value) and dotted(steps) not in mistaken:
        hint = "; a source that needs it makes it itself" if "args" in steps else ""
        yield problem_at(node.mark, steps, f"expected a finite number, found {describe(node.value)}{hint}")
    for key, member in _mapping(node).items():
        yield from _endless(member, (*steps, key), mistaken)
    for index, item in enumerate(node.value if isinstance(node.value, tuple) else ()):
        yield from _endless(item, (*steps, index), mistaken)


def _unmatched(root: Node, mistaken: Collection[str]) -> Iterator[Problem]:
    """Names that have to exist in another mapping and do not; on nodes, so that other mistakes do not hide them.

    `mistaken` are the paths of those others: where the inputs could not be read, their dims are not known.
    """
    targets = _members(root, "targets")
    for name, entry in _members(root, "entries").items():
        steps: Steps = ("entries", name)
        if _kind(entry) not in ("torch_export", *KERNEL_KINDS):
            continue
        listed = _items(entry, "targets")
        for index, target in enumerate(listed):
            yield from _unknown("target", target, (*steps, "targets", index), targets)
        if _kind(entry) in KERNEL_KINDS:
            yield from _no_gpu(entry, listed, targets, steps)
            continue
        built = {str(target.value) for target in listed} or set(targets)
        for index, precision in enumerate(_items(entry, "precisions")):
            if "target" in (members := _mapping(precision)):
                at = (*steps, "precisions", index, "target")
                yield from _unknown("target", members["target"], at, built & set(targets))
        yield from _no_attention(entry, built & set(targets), targets, steps)
        inputs = dotted((*steps, "inputs"))
        if not any(path == inputs or path.startswith((f"{inputs}.", f"{inputs}[")) for path in mistaken):
            yield from _unmatched_dims(entry, steps)


def _no_gpu(entry: Node, listed: Sequence[Node], targets: dict[str, Node], steps: Steps) -> Iterator[Problem]:
    """Kernels are built for CUDA targets; there must be one."""
    kinds = {name: _kind(target) for name, target in targets.items()}
    for index, target in enumerate(listed):
        if kinds.get(str(target.value)) == "cpu":
            yield problem_at(target.mark, (*steps, "targets", index), "a kernel needs a target of kind cuda")
    if not listed and targets and "cuda" not in kinds.values():
        yield problem_at(entry.mark, steps, "a kernel needs a target of kind cuda; the manifest has none")


def _no_attention(entry: Node, built: Collection[str], targets: dict[str, Node], steps: Steps) -> Iterator[Problem]:
    """Attention is chosen on a GPU; there must be a target of one."""
    named = _mapping(entry).get("attention")
    if named is not None and named.value is not None and built and not any(_kind(targets[t]) == "cuda" for t in built):
        message = "is chosen for targets of kind cuda, and the entry has none; leave it out"
        yield problem_at(named.mark, (*steps, "attention"), message)


def _kind(node: Node) -> object:
    kind = _mapping(node).get("kind")
    return kind.value if kind is not None else None


def _unknown(noun: str, node: Node, steps: Steps, known: Collection[str]) -> Iterator[Problem]:
    """A problem when the text at `node` is none of `known`; what is not text is the models' to judge."""
    if isinstance(node.value, str) and known and node.value not in known:
        yield problem_at(node.mark, steps, f"unknown {noun} {node.value!r}{did_you_mean(node.value, known)}")


def _unmatched_dims(entry: Node, steps: Steps) -> Iterator[Problem]:
    """Every point gives every dim that shapes name, and no other; padding is for dims that exist."""
    used = {dim: dotted(at) for dim, at in _dims(_mapping(entry).get("inputs"), ("inputs",))}
    for index, point in enumerate(_items(entry, "points")):
        place, at = _mapping(point).get("dims", point), (*steps, "points", index, "dims")
        if not isinstance(place.value, dict):
            continue
        given = _members(point, "dims")
        yield from _foreign(given, at, used)
        slips = {nearest(dim, used) for dim in given if dim not in used}
        for dim in sorted(used.keys() - given.keys() - slips):
            message = f"dim {dim!r} of {used[dim]} is not given; add a size, a list of sizes or a range"
            yield problem_at(place.mark, at, message)
    on_miss = _mapping(entry).get("on_miss")
    if on_miss is not None:
        yield from _foreign(_members(on_miss, "pad"), (*steps, "on_miss", "pad"), used)


def _foreign(given: dict[str, Node], steps: Steps, used: Collection[str]) -> Iterator[Problem]:
    for dim, node in given.items():
        if dim not in used:
            hint = did_you_mean(dim, used, otherwise="dims of the inputs")
            yield problem_at(node.key or node.mark, (*steps, dim), f"dim {dim!r} is in no shape of the inputs{hint}")


def _dims(node: Node | None, steps: Steps) -> Iterator[tuple[str, Steps]]:
    """Each dim that a shape in `node` names, with the path of one use."""
    value = node.value if node is not None else None
    if isinstance(value, dict):
        for key, member in value.items():
            if key != "shape" or not isinstance(member.value, tuple):
                yield from _dims(member, (*steps, key))
                continue
            for index, item in enumerate(member.value):
                try:
                    axis = parse_axis(item.value)
                except PydanticCustomError:
                    continue  # the models say so, at its place
                if isinstance(axis, Linear):
                    yield axis.dim, (*steps, key, index)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _dims(item, (*steps, index))


def _mapping(node: Node) -> dict[str, Node]:
    return node.value if isinstance(node.value, dict) else {}


def _members(node: Node, key: str) -> dict[str, Node]:
    """Members of the mapping under `key`, none when there is no mapping."""
    inner = _mapping(node).get(key)
    return _mapping(inner) if inner is not None else {}


def _items(node: Node, key: str) -> tuple[Node, ...]:
    """Items of the list under `key`, none when there is no list."""
    inner = _mapping(node).get(key)
    return inner.value if inner is not None and isinstance(inner.value, tuple) else ()
