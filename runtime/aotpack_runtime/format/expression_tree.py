"""The text of an expression -> what it computes. `ast` parses it, every node is checked against a whitelist, and the
tree is turned into closures: nothing from a bundle is ever handed to `eval`.

Apart from `expression`, since a bundle whose expressions are all numbers and sizes need not import `ast`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

Env = Mapping[str, int]
Evaluate = Callable[[Env], int]

MAX_TEXT = 4096
"""Longest expression read; the longest guard seen in an exported program had 120 characters."""

MAX_DEPTH = 128
"""Deepest expression read: evaluating one takes a Python frame a level, on top of the caller's."""

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
_FUNCTIONS: dict[str, tuple[Callable[..., int], int]] = {
    "min": (min, MAX_TEXT),
    "max": (max, MAX_TEXT),
    "ceil_div": (lambda a, b: -(-a // b), 2),
}
"""Name -> what it computes, and of how many terms at most; of two at least."""


def read(text: str) -> tuple[str, frozenset[str], Evaluate]:
    """The canonical text of an expression, the variables it names, and what computes it; ValueError with the part that
    is not allowed."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"expression of {len(text)} characters; at most {MAX_TEXT}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"{text[:200]!r} is not an expression: {getattr(error, 'msg', error)}") from None
    if _depth(tree) > MAX_DEPTH:
        raise ValueError(f"{text[:40]!r}... is nested too deeply")
    names: set[str] = set()
    evaluate = _compile(tree, names)
    return ast.unparse(tree), frozenset(names), evaluate


def _depth(node: ast.AST) -> int:
    level, depth = [node], 0
    while level:
        level, depth = [child for parent in level for child in ast.iter_child_nodes(parent)], depth + 1
    return depth


def _compile(node: ast.expr, names: set[str]) -> Evaluate:
    """A closure for `node`; adds the variables it reads to `names`."""
    match node:
        case ast.Constant(value=bool() | int() as given):
            value = int(given)
            return lambda env: value
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return _variable(node, names)
        case ast.BinOp(op=operator) if type(operator) in _BINARY:
            apply, left, right = _BINARY[type(operator)], _compile(node.left, names), _compile(node.right, names)
            return lambda env: apply(left(env), right(env))
        case ast.UnaryOp(op=ast.USub()):
            inner = _compile(node.operand, names)
            return lambda env: -inner(env)
        case ast.UnaryOp(op=ast.Not()):
            inner = _compile(node.operand, names)
            return lambda env: int(not inner(env))
        case ast.BoolOp():
            terms = tuple(_compile(value, names) for value in node.values)
            if isinstance(node.op, ast.And):
                return lambda env: int(all(term(env) for term in terms))
            return lambda env: int(any(term(env) for term in terms))
        case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
            operands = tuple(_compile(value, names) for value in (node.left, *node.comparators))
            tests = tuple(_COMPARE[type(op)] for op in node.ops)
            return lambda env: _chain(tests, operands, env)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if 2 <= len(node.args) <= _FUNCTIONS.get(name, (None, 0))[1]:
            function, arguments = _FUNCTIONS[name][0], tuple(_compile(value, names) for value in node.args)
            return lambda env: function(*(argument(env) for argument in arguments))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not allowed in an expression")


def _chain(tests: Sequence[Callable[[int, int], bool]], operands: Sequence[Evaluate], env: Env) -> int:
    """`a < b < c` as Python reads it: what comes after the first that does not hold is not computed."""
    left = operands[0](env)
    for test, operand in zip(tests, operands[1:], strict=True):
        right = operand(env)
        if not test(left, right):
            return 0
        left = right
    return 1


def _variable(node: ast.expr, names: set[str]) -> Evaluate:
    name = variable_of(node)
    names.add(name)
    return lambda env: env[name]


def variable_of(node: ast.expr) -> str:
    """`n`, `x.shape[0]`, `q['a'][1].shape[0]`: one variable, named as `variable` and `tree.paths` name it."""
    name = ""
    step: ast.expr = node
    while not isinstance(step, ast.Name):
        match step:
            case ast.Attribute(value=value, attr=attribute):
                step, name = value, f".{attribute}{name}"
            case ast.Subscript(value=value, slice=ast.Constant(value=key)):
                step, name = value, f"[{key!r}]{name}"
            case ast.Subscript(value=value, slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(key)))):
                step, name = value, f"[{-key!r}]{name}"
            case _:
                raise ValueError(f"{ast.unparse(node)!r} is not allowed in an expression")
    return step.id + name
