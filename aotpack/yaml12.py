"""YAML 1.2 text -> a tree of values that remember where they were written.

PyYAML reads YAML 1.1: `no` is False, `1e-4` is text, `012` is ten, `12:30:00` is 45000, and of two equal keys the last
one wins. So only its parser is used, and the core schema of YAML 1.2 decides here what a plain word means. Nodes are
built from parser events and not by `yaml.compose`: `compose` recurses as deep as the text asks, and stops at the first
undefined alias.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from aotpack.suggest import describe, did_you_mean, on_one_line
from aotpack_runtime.errors import ManifestError, Problem

__all__ = ["Document", "Mark", "Node", "Scalar", "Steps", "dotted", "plain", "read_document", "read_value"]

Scalar = str | int | float | bool | None
Steps = tuple[str | int, ...]

MAX_DEPTH = 64
"""Nesting that is read; the deepest example manifest has 7. Keeps a walk of a tree far from Python's stack limit."""

MAX_VALUES = 100_000
"""Values of a document with its aliases expanded. Nine lines of aliases can ask for a billion."""

_NULL = re.compile(r"|~|null|Null|NULL")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_TAGS = "tag:yaml.org,2002:"
_START = "`aotpack init` writes a manifest to start from"
_NEXT_STEPS = (
    ("'\\t'", "that is a tab: indent with spaces"),
    ("mapping values are not allowed", "put a value that contains ': ' in quotes, and check the indentation"),
    ("scanning an alias", "put a value that starts with * in quotes"),
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a text, counted from 1."""

    file: str
    line: int
    col: int


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place; `key` is the place of its key when it is a member of a mapping.

    `text` is a scalar as it was written. `size` counts the values in it, aliases expanded; `height` is its nesting.
    Aliases share nodes, so a change makes new nodes along its path.
    """

    value: Scalar | tuple[Node, ...] | dict[str, Node]
    mark: Mark
    key: Mark | None = None
    text: str = ""
    size: int = 1
    height: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """A text that could be read. `problems` are the mistakes that did not stop the reading: report them all."""

    root: Node
    problems: tuple[Problem, ...]


def read_document(data: bytes, file: str) -> Document:
    """Read one document whose top level is a mapping; ManifestError when there is none. `file` is for messages."""
    text = _decode(data, file)
    if not text.strip():
        raise ManifestError([Problem(file, 1, 1, "", f"the file is empty; {_START}")])
    reader = _Reader(text, file)
    root = reader.read()
    if root is None:
        reader.fail(Mark(file, 1, 1), f"there is nothing but comments; {_START}")
    if not isinstance(root.value, dict):
        reader.fail(root.mark, f"the top level is {describe(root.value)}; expected a mapping (lines of `key: value`)")
    return Document(root, tuple(reader.problems))


def read_value(text: str, at: Mark) -> Document:
    """Read a value of any kind that was given on one line and starts at `at`; no text is null."""
    reader = _Reader(" " * (at.col - 1) + text, at.file, line=at.line)
    return Document(reader.read() or Node(None, at), tuple(reader.problems))


def plain(node: Node) -> Any:
    """The value as new dicts and lists of its own: no two places share one, whatever aliases there were."""
    match node.value:
        case dict():
            return {key: plain(member) for key, member in node.value.items()}
        case tuple():
            return [plain(item) for item in node.value]
        case _:
            return node.value


def dotted(steps: Steps) -> str:
    """`("entries", "e", "points", 0)` -> `entries.e.points[0]`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return on_one_line(text.removeprefix("."))


def _decode(data: bytes, file: str) -> str:
    """UTF-8 text without its byte order mark; ManifestError at the first byte that is not UTF-8."""
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line, col = _place(data.decode(errors="replace"), len(data[: error.start].decode()))
        found = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise ManifestError([Problem(file, line, col, "", found)]) from None


def _place(text: str, index: int) -> tuple[int, int]:
    """Line and column of a character, counted from 1."""
    before = text[:index]
    return before.count("\n") + 1, index - before.rfind("\n")


class _Reader:
    """Turns the parser's events into nodes. `problems` are mistakes it could step over."""

    def __init__(self, text: str, file: str, *, line: int = 1) -> None:
        self.text, self.file, self.line = text, file, line
        self.events: Iterator[Event] = iter(())
        self.anchors: dict[str, Node | None] = {}  # None while its own value is being read
        self.problems: list[Problem] = []

    def read(self) -> Node | None:
        """The only document's value, None when there is no document; ManifestError when the text is not YAML."""
        bad = yaml.reader.Reader.NON_PRINTABLE.search(self.text)
        if bad is not None:
            line, col = _place(self.text, bad.start())
            code = f"U+{ord(bad.group()):04X}{' (a NUL byte)' if bad.group() == chr(0) else ''}"
            mark = Mark(self.file, self.line + line - 1, col)
            self.fail(mark, f"character {code} is not allowed in YAML; remove it")
        self.events = iter(yaml.parse(self.text, Loader=yaml.SafeLoader))
        root = None
        try:
            for event in self.events:
                if isinstance(event, DocumentStartEvent):
                    if root is not None:
                        mark = self.mark(event.start_mark)
                        self.fail(mark, "a second document starts here; a manifest is one document")
                    root = self.node(next(self.events), (), 0)
                elif isinstance(event, StreamEndEvent):
                    break
        except yaml.MarkedYAMLError as error:
            mark = self.mark(error.problem_mark or error.context_mark)
            said = ", ".join(part for part in (error.context, error.problem) if part)
            self.fail(mark, "; ".join([said, *(step for sign, step in _NEXT_STEPS if sign in said)]))
        return root

    def mark(self, place: Any) -> Mark:
        """Where `place` is in the text that the caller gave."""
        if place is None:
            return Mark(self.file, self.line, 1)
        return Mark(self.file, self.line + place.line, place.column + 1)

    def note(self, mark: Mark, steps: Steps, message: str) -> None:
        self.problems.append(Problem(mark.file, mark.line, mark.col, dotted(steps), message))

    def fail(self, mark: Mark, message: str) -> NoReturn:
        """Stop here, with everything found so far."""
        self.note(mark, (), message)
        raise ManifestError(self.problems)

    def node(self, event: Event, steps: Steps, depth: int) -> Node:
        """The value that starts with `event`, at path `steps`."""
        mark = self.mark(event.start_mark)
        if isinstance(event, AliasEvent):
            return self.alias(event.anchor or "", mark, steps)
        assert isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent)  # all that a value starts with
        if event.tag not in (None, "!", f"{_TAGS}str"):
            self.note(mark, steps, f"tag {event.tag.replace(_TAGS, '!!')} is not allowed; write a plain value")
        if depth == MAX_DEPTH:
            self.fail(mark, f"nested more than {MAX_DEPTH} levels deep")
        if event.anchor:
            self.anchors[event.anchor] = None
        match event:
            case ScalarEvent():
                node = Node(self.scalar(event, mark, steps), mark, text=event.value)
            case SequenceStartEvent():
                node = _collection(self.sequence(steps, depth + 1), mark)
            case _:
                node = _collection(self.mapping(steps, depth + 1), mark)
        if depth + node.height > MAX_DEPTH:
            self.fail(mark, f"nested more than {MAX_DEPTH} levels deep")
        if node.size > MAX_VALUES:
            self.fail(mark, f"more than {MAX_VALUES} values with its aliases expanded; use fewer aliases")
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def alias(self, name: str, mark: Mark, steps: Steps) -> Node:
        node = self.anchors.get(name)
        if node is not None:
            return node
        if name in self.anchors:
            self.note(mark, steps, f"alias *{name} stands inside the value it names")
        else:
            self.note(mark, steps, f"alias *{name} has no anchor &{name} above it{did_you_mean(name, self.anchors)}")
        return Node(None, mark)

    def sequence(self, steps: Steps, depth: int) -> tuple[Node, ...]:
        items: list[Node] = []
        while not isinstance(inner := next(self.events), SequenceEndEvent):
            items.append(self.node(inner, (*steps, len(items)), depth))
        return tuple(items)

    def mapping(self, steps: Steps, depth: int) -> dict[str, Node]:
        """Members in order; what `<<` brings in stands first, and never replaces a key of the mapping itself."""
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        while not isinstance(inner := next(self.events), MappingEndEvent):
            if isinstance(inner, ScalarEvent) and inner.value == "<<" and inner.implicit[0]:
                merged = {**self.merge(self.node(next(self.events), (*steps, "<<"), depth), steps), **merged}
                continue
            mark = self.mark(inner.start_mark)
            key = self.name(self.node(inner, steps, depth), steps)
            value = replace(self.node(next(self.events), (*steps, key), depth), key=mark)
            first = own.setdefault(key, value).key
            if first is not None and first != mark:
                where = f"on line {mark.line}, first on line {first.line}"
                self.note(mark, steps, f"duplicate key {key!r} {where}; remove one")
        return {**merged, **own}

    def merge(self, source: Node, steps: Steps) -> dict[str, Node]:
        """What `<<: source` brings in; of a list, the first mapping that has a key gives it."""
        members: dict[str, Node] = {}
        for node in source.value if isinstance(source.value, tuple) else (source,):
            if isinstance(node.value, dict):
                members = {**node.value, **members}
            elif node.value is not None:  # null is also what stands for an undefined alias, already a problem
                self.note(node.mark, steps, f"<< is {describe(node.value)}, expected a mapping or a list of mappings")
        return members

    def name(self, node: Node, steps: Steps) -> str:
        """A key. Keys are text: anything else is a problem and goes on as the text that was written."""
        if isinstance(node.value, str):
            return node.value
        hint = f'; if it is a name, put it in quotes: "{node.text}"' if node.text else ""
        self.note(node.mark, steps, f"a key is {describe(node.value)}, expected text{hint}")
        return node.text

    def scalar(self, event: ScalarEvent, mark: Mark, steps: Steps) -> Scalar:
        """What a plain word means by the core schema; quoted and block text is always text."""
        text = event.value
        if event.tag is not None or not event.implicit[0]:
            return text
        value = _resolve(text)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            self.note(mark, steps, f"the number {text[:30]} does not fit 64 bits; if it is text, put it in quotes")
            return 2**63 - 1 if value > 0 else -(2**63)
        if value in (float("inf"), float("-inf")) and not _SPECIAL.fullmatch(text):
            self.note(mark, steps, f"the number {text[:30]} is too large")
        return value


def _collection(value: tuple[Node, ...] | dict[str, Node], mark: Mark) -> Node:
    inner = value.values() if isinstance(value, dict) else value
    size = 1 + sum(node.size for node in inner)
    height = 1 + max((node.height for node in inner), default=0)
    return Node(value, mark, size=size, height=height)


def _resolve(text: str) -> Scalar:
    """YAML 1.2 core schema: null, booleans, decimal, 0o and 0x integers, floats; everything else is text."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base) if len(text) < 100 else 2**64  # too large anyway; int() refuses 4300 digits
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text
