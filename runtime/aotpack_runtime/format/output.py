"""How a result is put together: from tensors the artifact returned, the caller's own arguments, numbers and views.

An artifact returns a flat list of tensors. Everything else that eager returns is said here: containers and their
types, constants, sizes (`x.shape[0]`, computed from the call), an argument handed back as the same object, and
tensors that share memory with another output or an argument.
"""

from __future__ import annotations

from aotpack_runtime.format.expression import Expression
from aotpack_runtime.format.tensor import Scalar
from aotpack_runtime.format.tree import Tree
from aotpack_runtime.record import Record


class Result(Record):
    """Tensor number `index` of those the artifact returned; `shape` None where it depends on data."""

    index: int
    dtype: str = ""
    shape: tuple[Expression, ...] | None = ()


class Argument(Record):
    """Leaf number `index` of the call, the same object."""

    index: int


class Value(Record):
    """A scalar that does not depend on the call."""

    value: Scalar


class Size(Record):
    """An int computed from the sizes of the call."""

    size: Expression


class View(Record):
    """A tensor over the memory of a result or an argument; `conj` when it shows that memory conjugated."""

    of: Result | Argument
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    offset: Expression
    conj: bool = False


OutputLeaf = Result | Argument | Value | Size | View


class Outputs(Record):
    """The tree of the result and what stands at each of its leaves."""

    tree: Tree
    leaves: tuple[OutputLeaf, ...]
