"""Containers of arguments and results: how leaves sit in tuples, lists, dicts and classes.

A tree is nested tuples, so that two trees compare and hash as values:

    "*"                                        a leaf (tensor, number, string, None)
    ("tuple", child, ...)  ("list", child, ...)
    ("dict", (key, ...), child, ...)           keys in their order; str, int, bool or None
    ("class", "pkg.mod:Name", (field, ...), child, ...)   a dataclass or named tuple, known by name only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Tree = str | tuple[Any, ...]
LEAF = "*"
MAX_DEPTH = 64


def flatten(value: Any, leaves: list[Any], depth: int = 0) -> Tree:
    """The tree of `value`; its leaves are appended to `leaves`. Subclasses of containers are leaves."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise ValueError(f"arguments are nested more than {MAX_DEPTH} deep")
    if kind is tuple or kind is list:
        return (kind.__name__, *[flatten(child, leaves, depth + 1) for child in value])
    if kind is dict:
        children = [flatten(child, leaves, depth + 1) for child in value.values()]
        return ("dict", tuple(value), *children)
    names = class_fields(kind)
    if names is not None:
        children = [flatten(getattr(value, name), leaves, depth + 1) for name in names]
        return ("class", class_name(kind), names, *children)
    leaves.append(value)
    return LEAF


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` made to every leaf; containers in which nothing changes stay the same objects."""
    kind = type(value)
    if kind is tuple or kind is list:
        children = [map_leaves(child, change) for child in value]
        return value if all(a is b for a, b in zip(children, value, strict=True)) else kind(children)
    if kind is dict:
        pairs = {key: map_leaves(child, change) for key, child in value.items()}
        return value if all(pairs[key] is child for key, child in value.items()) else pairs
    names = class_fields(kind)
    if names is None:
        return change(value)
    fields = {name: map_leaves(getattr(value, name), change) for name in names}
    if all(fields[name] is getattr(value, name) for name in names):
        return value
    if issubclass(kind, tuple):
        return kind(**fields)
    import copy

    changed = copy.copy(value)
    for name, child in fields.items():
        object.__setattr__(changed, name, child)
    return changed


def class_fields(kind: type) -> tuple[str, ...] | None:
    """Field names of a dataclass or named tuple, in order; None for anything else."""
    if hasattr(kind, "__dataclass_fields__"):
        import dataclasses  # who has such a class has imported it

        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    return None


def class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def children(tree: Tree) -> Sequence[tuple[str, Tree]]:
    """(suffix of the path, child) of a container; () for a leaf."""
    match tree:
        case ("tuple" | "list", *items):
            return [(f"[{position}]", item) for position, item in enumerate(items)]
        case ("dict", keys, *items):
            return [(f"[{key!r}]", item) for key, item in zip(keys, items, strict=True)]
        case ("class", _, names, *items):
            return [(f".{name}", item) for name, item in zip(names, items, strict=True)]
        case _:
            return ()


def paths(tree: Tree, prefix: str) -> Iterator[str]:
    """Where each leaf sits, in Python's own notation: `q.a`, `q['k'][0]`."""
    if tree == LEAF:
        yield prefix
    for suffix, child in children(tree):
        yield from paths(child, prefix + suffix)


def describe_difference(wanted: Tree, found: Tree, path: str) -> str | None:
    """The first place where two trees differ, as "q['a']: expected list of 2, got tuple of 2"; None when equal."""
    if wanted == found:
        return None
    left, right = children(wanted), children(found)
    if _head(wanted) == _head(found) and len(left) == len(right):
        for (suffix, a), (_, b) in zip(left, right, strict=True):
            difference = describe_difference(a, b, path + suffix)
            if difference:
                return difference
    return f"{path}: expected {_words(wanted)}, got {_words(found)}"


def parse(value: object, depth: int = 0) -> Tree:
    """A tree from its JSON form (lists for tuples); ValueError when it is none."""
    if value == LEAF:
        return LEAF
    if depth > MAX_DEPTH or not isinstance(value, list) or not value:
        raise ValueError(f"not a tree: {str(value)[:80]!r}")
    kind, *rest = value
    head: tuple[Any, ...] = (kind,)
    if kind in ("dict", "class"):
        names = tuple(rest.pop(1 if kind == "class" else 0)) if len(rest) > (kind == "class") else None
        if names is None or len(rest) - (kind == "class") != len(names):
            raise ValueError(f"not a tree: {kind} whose names and children do not match")
        if not all(isinstance(name, str) or (kind == "dict" and isinstance(name, int | None)) for name in names):
            raise ValueError(f"not a tree: {kind} with the names {str(list(names))[:80]}")
        head = ("class", str(rest.pop(0)), names) if kind == "class" else ("dict", names)
    elif kind not in ("tuple", "list"):
        raise ValueError(f"not a tree: unknown container {kind!r}")
    return (*head, *[parse(child, depth + 1) for child in rest])


def _head(tree: Tree) -> object:
    match tree:
        case ("dict", keys, *_):
            return "dict", keys
        case ("class", name, names, *_):
            return "class", name, names
        case (kind, *_):
            return kind
        case _:
            return tree


def _words(tree: Tree) -> str:
    match tree:
        case ("dict", keys, *_):
            return f"dict with keys {list(keys)}"
        case ("class", name, *_):
            return f"an instance of {name}"
        case (kind, *items):
            return f"{kind} of {len(items)}"
        case _:
            return "one value"
