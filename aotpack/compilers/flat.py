"""A model seen as flat tensors in, flat tensors out: what torch.export is given instead of the user's containers.

Arguments are rebuilt from their tree and results taken apart while the model is traced, so that containers, their
types, numbers among the outputs and dataclasses are ours to keep, and nothing needs a pytree registration, neither
here nor in the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotpack.compilers.shapes import IntLeaf, LeafSpec, Symbols, ValueLeaf
from aotpack_runtime.errors import CompileError
from aotpack_runtime.fallbacks.source import split_arguments
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.index import Parameter
from aotpack_runtime.format.output import Argument, OutputLeaf, Outputs, Result, Size, Value, View
from aotpack_runtime.format.tree import LEAF, Tree, flatten, paths
from aotpack_runtime.loaders.inputs import unflatten
from aotpack_runtime.loaders.source import select_outputs

PREFIX = "model."
"""What the wrapper puts before the model's own names."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the model is called: its parameters, a tree for each, and a leaf spec for each leaf in order."""

    parameters: tuple[Parameter, ...]
    trees: tuple[Tree, ...]
    leaves: tuple[LeafSpec, ...]

    def values(self, leaves: Sequence[Any]) -> list[Any]:
        """The value of each parameter, from leaves in order."""
        rest = list(leaves)
        return [unflatten(tree, rest) for tree in self.trees]


class Capture:
    """What the last run of a `Flat` returned: the tree, its leaves, and the leaves of the arguments. An object of its
    own, since torch.export resets the attributes of a module it traced."""

    tree: Tree = LEAF
    leaves: tuple[Any, ...] = ()
    arguments: tuple[Any, ...] = ()


class Flat(torch.nn.Module):
    """`forward(*tensors)` for a model."""

    def __init__(self, model: torch.nn.Module, shape: Shape, output_names: Sequence[str] | None) -> None:
        super().__init__()
        self.model = model
        self._shape, self._output_names = shape, output_names
        self.capture = Capture()

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(leaves)
        whole: list[Any] = []
        for spec in self._shape.leaves:
            if isinstance(spec, ValueLeaf):
                whole.append(spec.value)
            else:
                tensor = next(given)
                whole.append(tensor.shape[0] if isinstance(spec, IntLeaf) else tensor)
        args, kwargs = split_arguments(self._shape.parameters, self._shape.values(whole))
        result = select_outputs(self.model(*args, **kwargs), self._output_names)
        out: list[Any] = []
        tree = flatten(result, out)
        self.capture.tree, self.capture.leaves, self.capture.arguments = tree, tuple(out), tuple(whole)
        return tuple(leaf for leaf in out if isinstance(leaf, torch.Tensor))


def outputs_of(flat: Flat, symbols: Symbols, graph_outputs: Sequence[Any], name: str) -> tuple[Outputs, Outputs]:
    """How the results are put together, twice: for the exported program, which returns every tensor itself, and for
    compiled variants, which return only tensors with memory of their own (arguments and views are added back).

    `graph_outputs` are the traced values of the program's results. CompileError names an output that cannot be kept.
    """
    tree, leaves, arguments = flat.capture.tree, flat.capture.leaves, flat.capture.arguments
    places = list(paths(tree, "output"))
    _check_containers(tree, name)
    program: list[OutputLeaf] = []
    compiled: list[OutputLeaf] = []
    owners: dict[int, tuple[Result | Argument, torch.Tensor]] = {}
    for position, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            owners.setdefault(_storage(argument), (Argument(position), argument))
    results = iter(enumerate(graph_outputs))
    kept = 0
    for place, leaf in zip(places, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            constant = _constant(leaf, symbols, place, name)
            program.append(constant)
            compiled.append(constant)
            continue
        index, value = next(results)
        shape = tuple(symbols.expression(size) for size in value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        program.append(Result(index, dtype, shape))
        same = next((p for p, argument in enumerate(arguments) if argument is leaf), None)
        owner = owners.get(_storage(value))
        if same is not None:
            compiled.append(Argument(same))
        elif owner is not None:
            compiled.append(_view(*owner, value, symbols, place, name))
        else:
            compiled.append(Result(kept, dtype, shape))
            owners[_storage(value)] = Result(kept, dtype, shape), value
            kept += 1
    return Outputs(tree, tuple(program)), Outputs(tree, tuple(compiled))


def kept_results(program: Outputs, compiled: Outputs) -> list[int]:
    """Which of the program's results a compiled variant returns, in order."""
    return [
        whole.index
        for whole, own in zip(program.leaves, compiled.leaves, strict=True)
        if isinstance(whole, Result) and isinstance(own, Result)
    ]


def _view(
    of: Result | Argument, base: torch.Tensor, value: torch.Tensor, symbols: Symbols, place: str, name: str
) -> View:
    """`value` over the memory of `base`. The base must begin its memory and be dense, so that it is the same memory
    when the artifact makes it."""
    if isinstance(of, Result):
        dense = symbols.expr(base.storage_offset()) == 0 and base.is_contiguous()
        if not dense:
            raise CompileError(
                name,
                f"{place} shares memory with another output that is itself a part of a larger tensor",
                hint="return a clone() of one of them",
            )
    offset = symbols.expr(value.storage_offset()) - symbols.expr(base.storage_offset())
    return View(
        of,
        tuple(symbols.expression(size) for size in value.shape),
        tuple(symbols.expression(stride) for stride in value.stride()),
        parse(symbols.text(offset)),
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _constant(leaf: Any, symbols: Symbols, place: str, name: str) -> OutputLeaf:
    match leaf:
        case torch.SymInt():
            try:
                return Size(symbols.expression(leaf))
            except (KeyError, NotImplementedError):
                raise CompileError(
                    name, f"{place} is an int that depends on data", hint="return it as a tensor"
                ) from None
        case None | bool() | int() | float() | str() | complex():
            return Value(leaf)
    raise CompileError(
        name,
        f"{place} is {type(leaf).__module__}.{type(leaf).__qualname__}, which a bundle cannot return",
        hint="return tensors, numbers, strings and None in tuples, lists and dicts, or name the fields under `outputs`",
    )


def _check_containers(tree: Tree, name: str) -> None:
    match tree:
        case ("class", class_name, *_):
            raise CompileError(
                name,
                f"the model returns an instance of {class_name}, which the server would have to import",
                hint="name the fields to return under `outputs`; the entry then returns a dict",
            )
        case ("dict", keys, *items):
            for key in keys:
                if type(key) not in (str, int, bool, type(None)):
                    raise CompileError(name, f"an output dict has the key {key!r}; keys are strings or ints")
            for item in items:
                _check_containers(item, name)
        case (_, *items):
            for item in items:
                _check_containers(item, name)
