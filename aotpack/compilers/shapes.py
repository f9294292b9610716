"""From an exported program's symbols to guards over the caller's own sizes.

Sizes of the placeholders are sympy expressions over symbols (`s0`, `2*s0`); here each symbol gets the name of the
dim it stands for (`x.shape[0]`), and every range, relation and output size is written over those names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.export import ExportedProgram
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.expression import Expression, parse, variable
from aotpack_runtime.format.guard import Dim, IntGuard, Layout, LeafGuard, Range, TensorGuard, ValueGuard
from aotpack_runtime.format.tensor import Scalar, contiguous_strides

UNBOUNDED = 2**48
"""Sizes above this are taken as unbounded; torch's own "infinity" is 2**63 - 1."""


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor argument as the manifest describes it; each size is an int or the text of an expression over dims."""

    path: str
    dtype: str
    shape: tuple[int | str, ...]
    layout: str = "contiguous"
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class IntLeaf:
    """An int that stays symbolic; it travels as the first dim of a tensor without elements."""

    path: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class ValueLeaf:
    """A frozen scalar."""

    path: str
    value: Scalar


LeafSpec = TensorLeaf | IntLeaf | ValueLeaf


class Symbols:
    """The symbols of one exported program, by the sizes they stand for."""

    def __init__(self, program: ExportedProgram, leaves: Sequence[LeafSpec]) -> None:
        inputs = set(program.graph_signature.user_inputs)
        placeholders: list[Any] = [
            n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in inputs
        ]
        self.sizes: dict[str, tuple[Any, ...]] = {}
        self.strides: dict[str, tuple[Any, ...]] = {}
        self.texts: dict[sympy.Symbol, str] = {}
        self.shape_env = next(
            (value.fake_mode.shape_env for value in placeholders if hasattr(value, "fake_mode")), None
        )
        derived: list[tuple[str, sympy.Expr]] = []
        for leaf, value in zip((leaf for leaf in leaves if not isinstance(leaf, ValueLeaf)), placeholders, strict=True):
            sizes = [self.expr(size) for size in value.shape]
            self.sizes[leaf.path] = tuple(sizes)
            self.strides[leaf.path] = tuple(self.expr(stride) for stride in value.stride())
            for axis, size in enumerate(sizes):
                if isinstance(leaf, IntLeaf) and axis:
                    continue
                name = variable(leaf.path, None if isinstance(leaf, IntLeaf) else axis)
                if isinstance(size, sympy.Symbol):
                    self.texts.setdefault(size, name)
                elif size.free_symbols:
                    derived.append((name, size))
        self.divisible: list[str] = []
        self.solved: list[sympy.Expr] = []
        for name, size in derived:
            self._solve(name, size)

    def expr(self, size: Any) -> Any:
        """The sympy form of an int or SymInt, simplified by what the trace found to be equal."""
        if isinstance(size, int):
            return sympy.Integer(size)
        expr = size.node.expr
        return self.shape_env.replace(expr) if self.shape_env is not None else expr

    def text(self, expr: Any) -> str:
        """`expr` over the caller's names."""
        return _write(expr, self.texts)

    def expression(self, size: Any) -> Expression:
        return parse(self.text(self.expr(size)))

    def ranges(self, program: ExportedProgram) -> dict[sympy.Expr, Range]:
        """The range of each symbol that stands for a size, and of each size that a symbol was solved from."""
        limits = program.range_constraints
        found = {symbol: _range(bounds) for symbol, bounds in limits.items() if symbol in self.texts}
        for size in self.solved:
            found[size] = _range(bound_sympy(size, limits) & limits.get(size, ValueRanges.unknown_int()))
        return found

    def _solve(self, name: str, size: Any) -> None:
        """`100*s0` at `name`: s0 is `name // 100`, and `name` is divisible by 100."""
        free = size.free_symbols - self.texts.keys()
        if len(free) != 1:
            return
        (symbol,) = free
        poly = sympy.Poly(size, symbol) if size.is_polynomial(symbol) else None
        if poly is None or poly.degree() != 1:
            return
        factor, rest = poly.all_coeffs()
        if not (factor.is_Integer and rest.is_Integer and factor > 0):
            return
        shifted = f"({name} - {int(rest)})" if rest else name
        self.divisible.append(f"{shifted} % {int(factor)} == 0")
        self.texts[symbol] = f"{shifted} // {int(factor)}"
        self.solved.append(size)


def guards_of(
    program: ExportedProgram, leaves: Sequence[LeafSpec], *, name: str
) -> tuple[tuple[LeafGuard, ...], tuple[Expression, ...]]:
    """One guard a leaf, and the relations between sizes, that `program` relies on. CompileError when one of them
    cannot be said in our expressions."""
    symbols = Symbols(program, leaves)
    ranges = symbols.ranges(program)
    guards: list[LeafGuard] = []
    where: list[str] = list(symbols.divisible)
    for leaf in leaves:
        if isinstance(leaf, ValueLeaf):
            guards.append(ValueGuard(path=leaf.path, value=leaf.value))
            continue
        sizes = symbols.sizes[leaf.path]
        if isinstance(leaf, IntLeaf):
            dim = _dim(sizes[0], ranges)
            guards.append(
                IntGuard(path=leaf.path, dim=dim) if isinstance(dim, Range) else ValueGuard(path=leaf.path, value=dim)
            )
            continue
        layout = _layout(symbols, leaf)
        dims = tuple(_dim(size, ranges) for size in sizes)
        guards.append(TensorGuard(path=leaf.path, dtype=leaf.dtype, dims=dims, device=leaf.device, layout=layout))
        for axis, size in enumerate(sizes):
            own = variable(leaf.path, axis)
            if size.free_symbols and not (isinstance(size, sympy.Symbol) and symbols.texts[size] == own):
                text = _try_text(symbols, size, name)
                if parse(text).text != own and not _restates(own, text):
                    where.append(f"{own} == {text}")
    for guard in symbols.shape_env.guards if symbols.shape_env is not None else ():
        relation = symbols.shape_env.simplify(guard.expr)  # type: ignore[union-attr]
        if relation is sympy.true or _implied(relation, ranges) or _is_conv_backend(guard):
            continue
        where.append(_try_text(symbols, relation, name))
    for keys, values in _attended(program):
        where += _equal(symbols, symbols.expr(keys), symbols.expr(values), name)
    unique = {parse(text).text: parse(text) for text in where}
    return tuple(guards), tuple(unique[text] for text in sorted(unique))


def _attended(program: ExportedProgram) -> Iterator[tuple[Any, Any]]:
    """How many keys and how many values each attention is given. Nothing in torch compares them (2.13): its kernels for
    a CPU read past the shorter, and cuDNN's ends the process."""
    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            if node.op == "call_function" and re.match(r"aten\._?scaled_dot_product_", str(node.target)):
                keys, values = (argument.meta["val"] for argument in node.args[1:3])
                yield keys.shape[-2], values.shape[-2]


def _equal(symbols: Symbols, left: Any, right: Any, name: str) -> Iterator[str]:
    """The relation that makes two sizes equal, `y.shape[1] == x.shape[1]` where it ties a size to one before it. None
    where they are equal, never can be, or hang on values, which no guard sees."""
    terms = sympy.Add.make_args(sympy.expand(left - right))
    less = [term for term in terms if term.could_extract_minus_sign()]
    sides = [sympy.Add(*(term for term in terms if term not in less)), -sympy.Add(*less)]
    free = (sides[0] - sides[1]).free_symbols
    if not free or not free <= symbols.texts.keys():
        return
    places = list(symbols.texts)
    sides.sort(key=lambda side: places.index(side) if side in symbols.texts else -1)
    yield f"{_try_text(symbols, sides[1], name)} == {_try_text(symbols, sides[0], name)}"


def _is_conv_backend(guard: Any) -> bool:
    """Is it the batch of 16 from which torch's CPU picks another convolution backend (`fake_impls.conv`, torch 2.13)?

    The trace asks only for the memory format of the result, which both backends take from the input and the weight, and
    the library picks its backend anew at each call. Kept, it would turn down the small batches of a declared range;
    dropped, they are among the sizes at which every variant is compared with eager before it is packed.
    """
    place = guard.sloc.framework_loc
    return place is not None and place.name == "conv" and place.filename.endswith("_subclasses/fake_impls.py")


def _dim(size: Any, ranges: dict[sympy.Expr, Range]) -> Dim:
    """A size by itself; one that follows others is open, since its relation to them says more."""
    return int(size) if size.is_Integer else ranges.get(size, Range(0, None))


def _range(bounds: Any) -> Range:
    low = int(bounds.lower) if bounds.lower.is_finite else 0
    high = int(bounds.upper) if bounds.upper.is_finite and bounds.upper < UNBOUNDED else None
    return Range(max(low, 0), high)


def _restates(own: str, text: str) -> bool:
    """`x.shape[0] == x.shape[0] // 100 * 100` says what the divisibility beside it says already."""
    return own in text


def _implied(relation: Any, ranges: dict[sympy.Expr, Range]) -> bool:
    """Is a relation of one symbol with a constant true in the whole range already?"""
    if (
        not isinstance(relation, sympy.Ge | sympy.Le | sympy.Gt | sympy.Lt | sympy.Ne)
        or len(relation.free_symbols) != 1
    ):
        return False
    (symbol,) = relation.free_symbols
    limits = ranges.get(symbol)
    if limits is None or not (relation.lhs == symbol and relation.rhs.is_Integer):
        return False
    bound = int(relation.rhs)
    match relation:
        case sympy.Ge():
            return limits.low >= bound
        case sympy.Gt():
            return limits.low > bound
        case sympy.Le():
            return limits.high is not None and limits.high <= bound
        case sympy.Lt():
            return limits.high is not None and limits.high < bound
        case _:
            return bound not in limits


def _layout(symbols: Symbols, leaf: TensorLeaf) -> Layout:
    strides, sizes = symbols.strides[leaf.path], symbols.sizes[leaf.path]
    if _same(strides, _contiguous(sizes)):
        return "contiguous"
    if len(sizes) in (4, 5):
        order = (0, *range(2, len(sizes)), 1)
        packed = _contiguous([sizes[axis] for axis in order])
        if _same(strides, [packed[order.index(axis)] for axis in range(len(sizes))]):
            return "channels_last"
    return tuple(parse(symbols.text(stride)) for stride in strides)


def _contiguous(sizes: Sequence[Any]) -> list[Any]:
    if all(size.is_Integer for size in sizes):
        return [sympy.Integer(s) for s in contiguous_strides(tuple(int(size) for size in sizes))]
    strides: list[Any] = [sympy.Integer(1)] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    return strides


def _same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return all(sympy.simplify(a - b) == 0 for a, b in zip(left, right, strict=True))


def _try_text(symbols: Symbols, expr: Any, name: str) -> str:
    try:
        return symbols.text(expr)
    except (KeyError, NotImplementedError) as error:
        raise CompileError(
            name,
            f"its program relies on {expr}, which cannot be written as a guard over the sizes of its inputs",
            hint="give the dims ranges in which this holds, or fix one of them",
        ) from error


_RELATIONS = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">="}


def _write(expr: Any, texts: dict[sympy.Symbol, str]) -> str:
    """A sympy expression as text of our language; KeyError for an unknown symbol, NotImplementedError otherwise."""

    def each(separator: str) -> str:
        return separator.join(f"({_write(arg, texts)})" for arg in expr.args)

    if expr is sympy.true or expr is sympy.false:
        return str(int(expr is sympy.true))
    if expr.is_Integer:
        return str(int(expr))
    if isinstance(expr, sympy.Symbol):
        return texts[expr]
    if type(expr) in _RELATIONS:
        return each(f" {_RELATIONS[type(expr)]} ")
    if isinstance(expr, sympy.Add):
        return each(" + ")
    if isinstance(expr, sympy.Mul):
        return each(" * ")
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and 0 < int(expr.exp) <= 8:
        return " * ".join([f"({_write(expr.base, texts)})"] * int(expr.exp))
    if isinstance(expr, FloorDiv):
        return each(" // ")
    if isinstance(expr, Mod | PythonMod | sympy.Mod):
        return each(" % ")
    if isinstance(expr, Max | sympy.Max):
        return f"max({each(', ')})"
    if isinstance(expr, Min | sympy.Min):
        return f"min({each(', ')})"
    if isinstance(expr, sympy.And):
        return each(" and ")
    if isinstance(expr, sympy.Or):
        return each(" or ")
    if isinstance(expr, sympy.Not):
        return f"not {each('')}"
    raise NotImplementedError(type(expr).__name__)
