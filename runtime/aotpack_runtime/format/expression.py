"""A small integer language over dims: `x.shape[0] % 100 == 0`, `2*n + 1`, `ceil_div(rows, 4)`."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from aotpack_runtime.record import Record

Env = Mapping[str, int]
Evaluate = Callable[[Env], int]

_NUMBER_OR_SIZE = r"(?P<number>0|[1-9][0-9]{0,17})|(?P<name>[A-Za-z_][A-Za-z0-9_]*)(\.shape\[(0|[1-9][0-9]?)\])?"


class Expression(Record):
    """A parsed expression; equal when their canonical texts are."""

    text: str
    names: frozenset[str]
    _evaluate: Evaluate

    def __call__(self, env: Env) -> int:
        """Value in `env`; comparisons give 0 or 1. ZeroDivisionError when a divisor is 0 there."""
        return self._evaluate(env)

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def parse(text: str) -> Expression:
    """Read an expression; ValueError with the part that is not allowed."""
    # Numbers, sizes and their equality are nearly all that models have: they are read without importing `ast`.
    left, equals, right = text.partition(" == ")
    first, second = _term(left), _term(right) if equals else None
    if first is not None and not equals:
        return first
    if first is not None and second is not None:
        a, b = first._evaluate, second._evaluate
        return Expression(text, first.names | second.names, lambda env: int(a(env) == b(env)))
    from aotpack_runtime.format.expression_tree import read

    return Expression(*read(text))


def _term(text: str) -> Expression | None:
    """A number or a size in its canonical form, None for anything else."""
    match = re.fullmatch(_NUMBER_OR_SIZE, text)
    if match is None or keyword.iskeyword(match["name"] or ""):
        return None
    if match["number"]:
        value = int(text)
        return Expression(text, frozenset(), lambda env: value)
    return Expression(text, frozenset((text,)), lambda env: env[text])


def variable(path: str, axis: int | None = None) -> str:
    """The name that expressions use for a size of the tensor at `path`, or for an int argument."""
    return path if axis is None else f"{path}.shape[{axis}]"
