"""`--set K=V`: one value of a manifest replaced by its path, before anything is checked.

`entries.encoder.points[0].dims.batch=4`; an item of a list also goes by its name: `entries.encoder.points.online.tier`.
A key that is not there yet is added, so the model judges its name like one in the file, at the place `--set`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from aotpack.suggest import describe, did_you_mean, nearest, on_one_line
from aotpack.yaml12 import Mark, Node, read_value
from aotpack_runtime.errors import ManifestError, Problem

__all__ = ["OVERRIDE_FILE", "override"]

OVERRIDE_FILE = "--set"
"""Stands for the file name in the places of overrides; the line says which override, the column where in its text."""

SECTIONS = frozenset({"args", "build", "dims", "inductor", "labels", "on_miss", "pad", "requires", "runtime", "verify"})
"""Mappings that a manifest may leave out: a path may lead through them all the same."""


class _NoSuchPathError(Exception):
    """Nothing is at the path; the message says where it ends and what there is."""


def override(root: Node, overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """`root` with each `K=V` put in, in order; V is YAML 1.2. Those that cannot be are problems and change nothing."""
    problems: list[Problem] = []
    for number, text in enumerate(overrides, start=1):
        key, equals, value = text.partition("=")
        if not equals or not key:
            message = f"expected K=V such as bundle.version=1.2.3, found {describe(text)}"
            problems.append(Problem(OVERRIDE_FILE, number, 1, "", message))
            continue
        at = Mark(OVERRIDE_FILE, number, len(key) + 2)
        try:
            document = read_value(value, at)
            root = _put(root, key, replace(document.root, key=Mark(OVERRIDE_FILE, number, 1)))
            problems += document.problems
        except _NoSuchPathError as error:
            problems.append(Problem(OVERRIDE_FILE, number, 1, "", f"{on_one_line(text)}: {error}"))
        except ManifestError as error:
            problems += error.problems
    return root, problems


def _put(node: Node, path: str, new: Node) -> Node:
    """`node` with `new` at `path`. Nodes may be shared by aliases, so those on the way are copied."""
    if not path:
        return new
    match node.value:
        case dict() as members:
            key, rest = _key(members, path)
            inner = members.get(key, Node({}, new.mark, key=new.key))
            return replace(node, value={**members, key: _put(inner, rest, new)})
        case tuple() as items:
            index, rest = _item(items, path)
            return replace(node, value=(*items[:index], _put(items[index], rest, new), *items[index + 1 :]))
        case None:
            return _put(replace(node, value={}), path, new)
        case _:
            raise _NoSuchPathError(f"{path!r} leads into {describe(node.value)}, expected a mapping or a list")


def _key(members: dict[str, Node], path: str) -> tuple[str, str]:
    """First key of `path` and the path behind it. Names may contain dots, so the longest key there is wins."""
    for key in sorted(members, key=len, reverse=True):
        if path == key or path.startswith((f"{key}.", f"{key}[")):
            return key, path[len(key) :].removeprefix(".")
    key, _, rest = path.partition(".")
    if (rest and key not in SECTIONS) or "[" in key or not key:
        known = [*members, *(SECTIONS if nearest(key, SECTIONS) else ())]
        raise _NoSuchPathError(f"nothing is at {key!r}{did_you_mean(key, known, otherwise='there is')}")
    return key, rest


def _item(items: tuple[Node, ...], path: str) -> tuple[int, str]:
    """Index of the item that `path` starts with, as `[0]` or by its name, and the path behind it."""
    match = re.match(r"\[([0-9]{1,9})\](?:\.|(?=\[)|$)", path)
    if match:
        if int(match[1]) >= len(items):
            raise _NoSuchPathError(f"no item [{match[1]}] in a list of {len(items)}")
        return int(match[1]), path[match.end() :]
    names = {_name(item) or f"p{index}": index for index, item in enumerate(items) if isinstance(item.value, dict)}
    for name in sorted(names, key=len, reverse=True):
        if path == name or path.startswith((f"{name}.", f"{name}[")):
            return names[name], path[len(name) :].removeprefix(".")
    raise _NoSuchPathError(
        f"no item {path.partition('.')[0]!r} in the list{did_you_mean(path.partition('.')[0], names)}"
    )


def _name(item: Node) -> str:
    """The name that an item of a list gives itself, else ""."""
    name = item.value.get("name") if isinstance(item.value, dict) else None
    return name.value if name is not None and isinstance(name.value, str) else ""
