"""An expression as Python's text, for a function that is compiled once and called often.

An expression is a tree of closures, which take 1 us for `0 <= ceil_div(n, 1024) <= 65535`; its text in a function takes
0.1 (one EPYC core). What is written comes from a whitelist of nodes: numbers, operators of ours, and the names that the
caller gives for the variables. The text of the expression itself is never handed to `eval`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from aotpack_runtime.format.expression import Expression
from aotpack_runtime.format.expression_tree import variable_of

SCOPE = {"__builtins__": {}, "min": min, "max": max}
"""What the text of an expression may name besides its variables."""

_BINARY: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def source(expression: Expression, names: Mapping[str, str]) -> str:
    """Text of the value of `expression`, in which each variable has the name that `names` gives it."""
    return _write(ast.parse(expression.text, mode="eval").body, names)


def _write(node: ast.expr, names: Mapping[str, str]) -> str:
    match node:
        case ast.Constant(value=bool() | int() as given):
            return str(int(given))
        case ast.BinOp(left=left, op=operator, right=right):
            return f"({_write(left, names)} {_BINARY[type(operator)]} {_write(right, names)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"(-{_write(operand, names)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"(not {_write(operand, names)})"
        case ast.BoolOp(op=operator, values=values):
            word = " and " if isinstance(operator, ast.And) else " or "
            return f"(1 if {word.join(_write(value, names) for value in values)} else 0)"
        case ast.Compare(left=left, ops=operators, comparators=others):
            pairs = zip(operators, others, strict=True)
            rest = "".join(f" {_COMPARE[type(operator)]} {_write(other, names)}" for operator, other in pairs)
            return f"({_write(left, names)}{rest})"
        case ast.Call(func=ast.Name(id="ceil_div"), args=[a, b]):
            return f"(-(-{_write(a, names)} // {_write(b, names)}))"
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments):
            return f"{name}({', '.join(_write(argument, names) for argument in arguments)})"
        case _:
            return names[variable_of(node)]
