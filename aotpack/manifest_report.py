"""pydantic's errors -> problems in the user's words: the path as the manifest spells it, and the place in the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from aotpack.suggest import describe, did_you_mean, nearest
from aotpack.yaml12 import Mark, Node, Steps, dotted
from aotpack_runtime.errors import Problem

__all__ = ["problem_at", "report"]

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "model_type": "a mapping",
    "string_type": "text",
    "tuple_type": "a list",
}
_TAG = re.compile(r"<[A-Za-z]+>")
_YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def problem_at(mark: Mark, steps: Steps, message: str) -> Problem:
    """A problem with the value at path `steps`, written at `mark`."""
    return Problem(mark.file, mark.line, mark.col, dotted(steps), message)


def report(error: ValidationError, root: Node, tree: Any, models: Mapping[int, type[BaseModel]]) -> Iterator[Problem]:
    """All mistakes. `tree` is the plain value of `root` that was judged, `models` the model of each mapping by id.

    A key that is missing because it was misspelt is one mistake, reported at the misspelt key.
    """
    details = error.errors(include_url=False, include_input=False)
    meant: set[tuple[Steps, str]] = set()
    for one in details:
        if one["type"] == "extra_forbidden":
            steps, node, mapping = _follow(root, tree, one["loc"][:-1])
            key, known = str(one["loc"][-1]), _keys(models.get(id(mapping)))
            meant.add((steps, nearest(key, known) or ""))
            member = _members(node).get(key, node)
            yield problem_at(member.key or member.mark, steps, f"unknown key {key!r}{did_you_mean(key, known)}")
    for one in details:
        if one["type"] == "missing":
            steps, node, mapping = _follow(root, tree, one["loc"][:-1])
            if (steps, one["loc"][-1]) not in meant:
                yield problem_at(node.mark, steps, _missing(one["loc"][-1], models.get(id(mapping))))
        elif one["type"] not in ("extra_forbidden", "default_factory_not_called"):  # the latter only follows another
            yield _misused(one, root, tree)


def _follow(root: Node, tree: Any, loc: Iterable[str | int]) -> tuple[Steps, Node, Any]:
    """Path, node and plain value at `loc`, as far as it leads: what is missing has no place of its own.

    A union adds its tag to `loc`, `<TensorInput>`; a key that looks the same can only come after it.
    """
    steps: Steps = ()
    node, value = root, tree
    after_tag = False
    for part in loc:
        after_tag = not after_tag and isinstance(part, str) and _TAG.fullmatch(part) is not None
        if after_tag:
            continue
        if isinstance(value, dict) and part in value:
            inner = _members(node)[str(part)]
        elif isinstance(node.value, tuple) and isinstance(part, int) and part < len(node.value):
            inner = node.value[part]
        else:
            break
        steps, node, value = (*steps, part), inner, value[part]
    return steps, node, value


def _members(node: Node) -> dict[str, Node]:
    return node.value if isinstance(node.value, dict) else {}


def _keys(model: type[BaseModel] | None) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _missing(key: str | int, model: type[BaseModel] | None) -> str:
    if isinstance(key, int):
        return f"item [{key}] is missing"
    fields = model.model_fields if model else {}
    said = next((field.description for name, field in fields.items() if key in (name, field.alias)), None)
    return f"missing key {key!r}" + (f": {said}" if said else "")


def _misused(one: ErrorDetails, root: Node, tree: Any) -> Problem:
    """The problem of a key or value that is there and is not what it should be."""
    context = one.get("ctx", {})
    loc = (*one["loc"], *context.get("at", ()))
    of_key = loc[-1:] == ("[key]",)
    steps, node, _ = _follow(root, tree, loc[:-1] if of_key else loc)
    mark = node.key if of_key and node.key else node.mark
    return problem_at(mark, steps, _message(one["type"], one["msg"], context, node))


def _message(kind: str, said: str, context: Mapping[str, Any], node: Node) -> str:
    match kind:
        case "aotpack":
            return said
        case "too_short":
            return "is empty; expected at least one key"
        case "too_long":
            return f"expected {context['max_length']} items, found {context['actual_length']}"
        case "greater_than_equal":
            expected = f"expected {context['ge']:g} or more"
        case "less_than_equal":
            expected = f"expected {context['le']:g} or less"
        case "literal_error":
            options = re.findall(r"'([^']*)'", context["expected"])
            guess = nearest(node.value, options) if isinstance(node.value, str) and len(options) > 1 else None
            hint = f"; did you mean {guess!r}?" if guess else ""
            expected = " or ".join(options) if len(options) < 4 else f"one of {', '.join(options)}"
            return f"expected {expected}, found {describe(node.value)}{hint}"
        case _:
            expected = f"expected {_EXPECTED[kind]}" if kind in _EXPECTED else said
    return f"{expected}, found {describe(node.value)}{_next_step(kind, node)}"


def _next_step(kind: str, node: Node) -> str:
    """What to write instead, when that can be known."""
    match kind, node.value:
        case "string_type", bool() | int() | float():
            return f'; put it in quotes: "{node.text}"'
        case "int_type" | "float_type", str(text) if re.fullmatch(r"[-+]?[0-9.]+", text):
            return "; remove the quotes"
        case "int_type", float(number) if number.is_integer():
            return f"; write {int(number)}"
        case "bool_type", str(text) if text.lower() in _YAML_1_1:
            return f"; write {_YAML_1_1[text.lower()]}"
        case "tuple_type", str() | int() if node.text.isprintable():
            return f"; write [{node.text}]"
    return ""
