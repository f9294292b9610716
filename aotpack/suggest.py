"""Words for error messages: the nearest known name, and a value as its writer would call it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["describe", "did_you_mean", "nearest", "on_one_line"]

SHOWN = 40
"""Characters of a text value that a message quotes; the place says where the rest is."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `word` is probably a slip of, or None."""
    by_lower = {name.lower(): name for name in names}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str], *, otherwise: str = "known") -> str:
    """The tail of a message: `; did you mean 'dynamic'?`, else the names there are, else ""."""
    names = sorted(names)
    guess = nearest(word, names)
    if guess is not None:
        return f"; did you mean {guess!r}?"
    return f"; {otherwise}: {', '.join(names)}" if names else ""


def on_one_line(text: str) -> str:
    """`text` with line ends and control characters as escapes: a message is one line, and moves no cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def describe(value: object) -> str:
    """`true (a boolean)`, `the number 8.0`, `the text "8"`, `a list`: a value in the words of YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return f"{str(value).lower()} (a boolean)"
        case int() | float():
            return f"the number {value}"
        case str():
            return f'the text "{on_one_line(value if len(value) <= SHOWN else value[:SHOWN] + "...")}"'
        case list() | tuple():
            return "a list"
        case _:
            return "a mapping"
