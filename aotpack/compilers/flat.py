"""A model seen as flat tensors in, flat tensors out: what torch.export is given instead of the user's containers.

Arguments are rebuilt from their tree and results taken apart while the model is traced, so that containers, their
types, numbers among the outputs and dataclasses are ours to keep, and nothing needs a pytree registration, neither
here nor in the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotpack.compilers.shapes import IntLeaf, LeafSpec, Symbols, ValueLeaf
from aotpack_runtime.errors import ArtifactError, CompileError
from aotpack_runtime.fallbacks.source import split_arguments
from aotpack_runtime.format.expression import Expression, parse
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
        buffers = _buffers(self.model)
        result = self._selected(self.model(*args, **kwargs))
        out: list[Any] = []
        tree = flatten(result, out)
        out = _own_memory(self.model, out)
        _write_back(buffers)
        self.capture.tree, self.capture.leaves, self.capture.arguments = tree, tuple(out), tuple(whole)
        # torch cannot save a program without results: one without elements stands in.
        return tuple(leaf for leaf in out if isinstance(leaf, torch.Tensor)) or (torch.empty(0),)

    def _selected(self, result: object) -> object:
        try:
            return select_outputs(result, self._output_names)
        except ArtifactError as error:
            raise CompileError(type(self.model).__name__, f"outputs: {error.problem}") from error


def _buffers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """(owner, name, tensor) of every buffer."""
    return [
        (owner, name, tensor)
        for owner in model.modules()
        for name, tensor in owner._buffers.items()
        if tensor is not None
    ]


def _own_memory(model: torch.nn.Module, leaves: Sequence[Any]) -> list[Any]:
    """`leaves` with copies of those that lie in the memory of a weight: what a caller holds must not follow the next
    call or the next update, and what a caller writes must not reach the weights."""
    kept = [value for owner in model.modules() for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    weights = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers(), *kept)}
    return [leaf.clone() if isinstance(leaf, torch.Tensor) and _storage(leaf) in weights else leaf for leaf in leaves]


def _write_back(buffers: Sequence[tuple[torch.nn.Module, str, torch.Tensor]]) -> None:
    """Write what forward() put in the place of a buffer (`self.n = self.n + 1`) to the buffer itself: torch.export
    loses such an assignment in a submodule."""
    for owner, name, tensor in buffers:
        found = owner._buffers.get(name)
        if found is tensor:
            continue
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise CompileError(
                type(owner).__name__,
                f"forward() replaces its buffer {name!r} by something of another shape or dtype",
                hint="keep one shape and dtype; state that grows is an argument and a result",
            )
        tensor.copy_(found)
        owner._buffers[name] = tensor


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
    kept: dict[int, int] = {}
    for position in _bases(graph_outputs, owners, symbols):
        value = graph_outputs[position]
        own = kept.setdefault(position, len(kept))
        owners[_storage(value)] = Result(own, _dtype(value), _sizes(value, symbols)), value
    results = iter(enumerate(graph_outputs))
    for place, leaf in zip(places, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            constant = _constant(leaf, symbols, place, name)
            program.append(constant)
            compiled.append(constant)
            continue
        index, value = next(results)
        program.append(Result(index, _dtype(value), _sizes(value, symbols)))
        same = next((p for p, argument in enumerate(arguments) if argument is leaf), None)
        of, base = owners[_storage(value)]
        if same is not None:
            compiled.append(Argument(same))
        elif isinstance(of, Result) and _same_place(value, base, symbols):
            compiled.append(of)
        else:
            compiled.append(_view(of, base, value, symbols, place, name))
    return Outputs(tree, tuple(program)), Outputs(tree, tuple(compiled))


def kept_results(program: Outputs, compiled: Outputs) -> list[int]:
    """Which of the program's results a compiled variant returns, in order."""
    kept: dict[int, int] = {}
    for whole, own in zip(program.leaves, compiled.leaves, strict=True):
        if isinstance(whole, Result) and isinstance(own, Result):
            kept.setdefault(own.index, whole.index)
    return [kept[index] for index in range(len(kept))]


def _bases(values: Sequence[Any], owners: Mapping[int, Any], symbols: Symbols) -> list[int]:
    """Which results a compiled variant returns itself: of those that share memory the one that is all of it, else the
    first; none where an argument lies in it."""
    chosen: dict[int, int] = {}
    for position, value in enumerate(values):
        storage = _storage(value)
        if storage not in owners and (storage not in chosen or not _is_whole(values[chosen[storage]], symbols)):
            better = storage not in chosen or _is_whole(value, symbols)
            chosen[storage] = position if better else chosen[storage]
    return sorted(chosen.values())


def _view(
    of: Result | Argument, base: torch.Tensor, value: torch.Tensor, symbols: Symbols, place: str, name: str
) -> View:
    """`value` over the memory of `base`, which is the same memory when the artifact makes it if it is all of it."""
    if isinstance(of, Result) and not _is_whole(base, symbols):
        raise CompileError(
            name,
            f"{place} shares memory with another output, and both are parts of a larger tensor",
            hint="return a clone() of one of them",
        )
    if value.dtype != base.dtype or value.is_neg() != base.is_neg():
        raise CompileError(
            name,
            f"{place} is {value.dtype} in memory that it shares with {base.dtype}",
            hint="return a clone() of it",
        )
    offset = symbols.expr(value.storage_offset()) - symbols.expr(base.storage_offset())
    unknown = CompileError(
        name,
        f"{place} shares memory with another output or an argument, and its shape depends on data",
        hint="return a clone() of it",
    )
    shape = _sizes(value, symbols)
    if shape is None:
        raise unknown
    try:
        strides = tuple(symbols.expression(stride) for stride in value.stride())
        start = parse(symbols.text(offset))
    except (KeyError, NotImplementedError):
        raise unknown from None
    return View(of, shape, strides, start, conj=value.is_conj() != base.is_conj())


def _is_whole(value: torch.Tensor, symbols: Symbols) -> bool:
    """Is a traced tensor contiguous, and all of its memory?"""
    size_bytes = symbols.expr(value.untyped_storage().nbytes())
    return value.is_contiguous() and size_bytes == symbols.expr(value.numel() * value.itemsize)


def _same_place(value: torch.Tensor, base: torch.Tensor, symbols: Symbols) -> bool:
    """Do two traced tensors over one memory have the same elements in the same order?"""

    def place(tensor: torch.Tensor) -> tuple[Any, ...]:
        numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        return *bits, tensor.dim(), *[symbols.expr(number) for number in numbers]

    return value is base or place(value) == place(base)


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _sizes(value: torch.Tensor, symbols: Symbols) -> tuple[Expression, ...] | None:
    """The shape over the caller's sizes; None where it depends on data or cannot be said in them."""
    try:
        return tuple(symbols.expression(size) for size in value.shape)
    except (KeyError, NotImplementedError):
        return None


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
