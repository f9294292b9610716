"""From a loaded artifact to the function a judged call runs: leaves in, eager's result out.

An executable takes a flat list of tensors and returns a flat list of tensors. What stands between it and the caller
is data in the index (`Outputs`): containers, constants, sizes, arguments handed back, views. It is compiled once per
variant into one function; its text holds positions and generated names only, never text from a bundle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aotpack_runtime.format.expression import Expression, variable
from aotpack_runtime.format.guard import IntGuard, TensorGuard
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.output import Argument, OutputLeaf, Result, Size, Value, View
from aotpack_runtime.format.tree import LEAF, Tree

Serve = Callable[..., object]


class Executable(Protocol):
    """A loaded artifact: `run` takes and returns flat lists of tensors, `size_tensor(n)` stands for a symbolic int.

    `run` is looked up at each call: an executable may replace it by another way to run.
    """

    @property
    def run(self) -> Callable[[list[Any]], Any]: ...

    def size_tensor(self, size: int) -> Any:
        """A tensor of shape (size, 0): how programs take an int that stays symbolic."""
        ...


def assemble(variant: Variant, executable: Executable, *, tick: Callable[[], object], lock: Any = None) -> Serve:
    """The function that serves calls judged to hit `variant`; it takes the leaves of the call in order.

    `tick` counts a served call. `lock` is held while the artifact runs, where calls write shared state.
    """
    return Assembly(variant, tick=tick, lock=lock).serve(executable, _view)


class Assembly:
    """What stands between a variant's executables and its callers, compiled once."""

    def __init__(self, variant: Variant, *, tick: Callable[[], object], lock: Any = None) -> None:
        writer = _Writer(variant)
        text = _text(variant, writer, locked=lock is not None)
        self._code = compile(text, f"<aotpack variant {variant.artifact.digest[:12]}>", "exec")
        self._scope: dict[str, Any] = {**writer.scope, "_tick": tick, "_lock": lock}

    def serve(self, executable: Executable, view: Callable[..., Any]) -> Serve:
        """The function that serves calls by `executable`; `view` gives an array over another's memory."""
        scope = {
            **self._scope, "_executable": executable, "_size_tensor": executable.size_tensor, "_view": view,
        }  # fmt: skip
        exec(self._code, scope)  # noqa: S102 - see above
        function: Serve = scope["serve"]
        return function


def _text(variant: Variant, writer: _Writer, *, locked: bool) -> str:
    lines = [f"    r = {writer.run_text()}"]
    if locked:
        lines = ["    with _lock:", f"        r = {writer.run_text()}"]
    lines += ["    _tick()", f"    return {writer.result_text()}"]
    arguments = ", ".join(f"a{position}" for position in range(len(variant.guards.leaves)))
    return "\n".join([f"def serve({arguments}):", *lines])


def _view(base: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
    """A tensor over the memory of `base`, `offset` elements after its first."""
    return base.as_strided(shape, strides, base.storage_offset() + offset)


class _Writer:
    """Writes the body of one serve function; `scope` holds the values its names stand for."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.scope: dict[str, Any] = {}
        self._sizes: dict[str, str] = {}
        for position, guard in enumerate(variant.guards.leaves):
            match guard:
                case TensorGuard():
                    for axis in range(len(guard.dims)):
                        self._sizes[variable(guard.path, axis)] = f"a{position}.shape[{axis}]"
                case IntGuard():
                    self._sizes[variable(guard.path)] = f"a{position}"

    def run_text(self) -> str:
        inputs: list[str] = []
        for position, guard in enumerate(self.variant.guards.leaves):
            if isinstance(guard, TensorGuard):
                inputs.append(f"a{position}")
            elif isinstance(guard, IntGuard):
                inputs.append(f"_size_tensor(a{position})")
        return f"_executable.run([{', '.join(inputs)}])"

    def result_text(self) -> str:
        leaves = iter(self.variant.outputs.leaves)
        return self._container(self.variant.outputs.tree, lambda: self._leaf(next(leaves)))

    def _container(self, tree: Tree, leaf: Callable[[], str]) -> str:
        match tree:
            case ("tuple", *items):
                return "(" + "".join(self._container(item, leaf) + ", " for item in items) + ")"
            case ("list", *items):
                return "[" + ", ".join(self._container(item, leaf) for item in items) + "]"
            case ("dict", keys, *items):
                pairs = [
                    f"{self._name(key)}: {self._container(item, leaf)}" for key, item in zip(keys, items, strict=True)
                ]
                return "{" + ", ".join(pairs) + "}"
            case _ if tree == LEAF:
                return leaf()
        raise ValueError(f"{self.variant.id}: an output cannot be {tree!r}")

    def _leaf(self, leaf: OutputLeaf) -> str:
        match leaf:
            case Result(index):
                return f"r[{int(index)}]"
            case Argument(index):
                return f"a{int(index)}"
            case Value(value):
                return self._name(value)
            case Size(size):
                return self._size(size)
            case View(of, shape, strides, offset, conj):
                sizes = "".join(self._size(size) + ", " for size in shape)
                steps = "".join(self._size(stride) + ", " for stride in strides)
                view = f"_view({self._leaf(of)}, ({sizes}), ({steps}), {self._size(offset)})"
                return f"{view}.conj()" if conj else view

    def _size(self, size: Expression) -> str:
        if size.text in self._sizes:
            return self._sizes[size.text]
        if not size.names:
            return str(size({}))
        pairs = ", ".join(f"{self._name(name)}: {self._sizes[name]}" for name in sorted(size.names))
        return f"{self._name(size)}({{{pairs}}})"

    def _name(self, value: object) -> str:
        """A fresh name that stands for `value` in the text."""
        name = f"_c{len(self.scope)}"
        self.scope[name] = value
        return name
