"""One exported program: what it takes, what it writes, and its file: no weights, no host paths, no pickles."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from aotpack.compilers.flat import PREFIX, Shape, kept_results
from aotpack.compilers.shapes import IntLeaf, LeafSpec, TensorLeaf, ValueLeaf
from aotpack.compilers.sizes import Dims, covers, size_at, sizes_of, tied_sizes
from aotpack_runtime.format.codec import dump_guards, dump_outputs, dump_scalar
from aotpack_runtime.format.guard import Guards, IntGuard, LeafGuard, TensorGuard
from aotpack_runtime.format.output import Outputs
from aotpack_runtime.store import Store

Json = Any
Example = tuple[tuple[int, ...] | int | None, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One exported program with what was derived from it. `examples` are calls that eager takes, the one it was traced
    with first."""

    exported: ExportedProgram
    guards: Guards
    outputs: Outputs
    compiled_outputs: Outputs
    shape: Shape
    examples: tuple[Example, ...]

    @property
    def example(self) -> Example:
        """The sizes that it was traced with."""
        return self.examples[0]


def program_weights(exported: ExportedProgram) -> list[str]:
    """The weights a program's graph takes before its inputs, by the model's own names."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    return [
        str(spec.target).removeprefix(PREFIX) for spec in exported.graph_signature.input_specs if spec.kind in kinds
    ]


def output_nodes(exported: ExportedProgram) -> list[Any]:
    (output,) = [node for node in exported.graph.nodes if node.op == "output"]
    return list(output.args[0])


def operators_of(exported: ExportedProgram) -> Iterator[Any]:
    for module in exported.graph_module.modules():
        graph = getattr(module, "graph", None)
        for node in graph.nodes if graph is not None else ():
            if isinstance(node.target, torch._ops.OpOverload):
                yield node.target


_TORCH_NAMESPACES = frozenset({"aten", "prims", "prim", "higher_order", "_operator", "symm_mem", "quantized", "mkldnn"})


def custom_operators_of(exported: ExportedProgram) -> Iterator[Any]:
    """The operators that are not torch's own. What they do on one device says nothing of another: each has a kernel of
    its own there, which may count on strides."""
    return (target for target in operators_of(exported) if target.namespace not in _TORCH_NAMESPACES)


def written_weights(exported: ExportedProgram) -> dict[str, str]:
    """Weights that the program writes in place, and where: operators say of each argument whether they write it."""
    names = program_weights(exported)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"][: len(names)]
    owners: dict[int, str] = {}
    for node, name in zip(placeholders, names, strict=True):
        value = node.meta["val"]
        # A literal is copied before its use, which a trace does not show in its memory.
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if isinstance(value, torch.Tensor) and value.numel() and not literal:
            owners.setdefault(_memory(value), name)
    found: dict[str, str] = {}
    for memory, place in _writes(exported):
        if memory in owners:
            found.setdefault(owners[memory], place)
    return found


def with_written(
    guards: Sequence[LeafGuard], leaves: Sequence[LeafSpec], exported: ExportedProgram
) -> tuple[LeafGuard, ...]:
    """`guards`, those of arguments that the program writes in place marked so."""
    inputs = set(exported.graph_signature.user_inputs)
    nodes = iter([node for node in exported.graph.nodes if node.op == "placeholder" and node.name in inputs])
    written = {memory for memory, _ in _writes(exported)}
    marked: list[LeafGuard] = []
    for guard, leaf in zip(guards, leaves, strict=True):
        value = None if isinstance(leaf, ValueLeaf) else next(nodes).meta["val"]
        if isinstance(guard, TensorGuard) and value is not None and _memory(value) in written:
            marked.append(replace(guard, written=True))
        else:
            marked.append(guard)
    return tuple(marked)


def _writes(exported: ExportedProgram) -> Iterator[tuple[int, str]]:
    """The memory of every tensor that an operator writes in place, in regions (autocast, no_grad) as well, and where
    in the model's files that is, such as " at model.py:12"."""
    for module in exported.graph_module.modules():
        graph = getattr(module, "graph", None)
        for node in graph.nodes if graph is not None else ():
            if not isinstance(node.target, torch._ops.OpOverload):
                continue
            given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False))
            for argument in node.target._schema.arguments:
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                found = {**given, **node.kwargs}.get(argument.name)
                for item in found if isinstance(found, list | tuple) else [found]:
                    value = getattr(item, "meta", {}).get("val")
                    if isinstance(value, torch.Tensor):
                        yield _memory(value), _place(node)


def _place(node: torch.fx.Node) -> str:
    """The innermost line of Python that a trace remembers of a node; "" where it does not."""
    lines = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" at {Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""


def _memory(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


_KEPT_META = frozenset({"val", "tensor_meta", "unbacked_bindings"})


def store_program(program: Program, tied: Mapping[str, str], store: Store) -> Json:
    """Save a program without weights, host paths or pickles; the same program gives the same bytes."""
    exported = program.exported
    names = program_weights(exported)
    placeholders = [node.name for node in exported.graph.nodes if node.op == "placeholder"][: len(names)]
    for module in exported.graph_module.modules():
        graph = getattr(module, "graph", None)
        for node in graph.nodes if graph is not None else ():
            node.meta = {key: value for key, value in node.meta.items() if key in _KEPT_META}
    exported._state_dict = {key: _as_meta(value) for key, value in exported.state_dict.items()}
    exported._constants = {key: _as_meta(value) for key, value in exported.constants.items()}
    exported._example_inputs = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.pt2")
        torch.export.save(exported, path)
        _canonical_zip(path)
        file = store.put_file(path)
        content = _content(path)
    return {
        "file": file,
        "content": content,
        "guards": dump_guards(program.guards),
        "outputs": dump_outputs(program.outputs),
        "compiled_outputs": dump_outputs(program.compiled_outputs),
        "kept_results": kept_results(program.outputs, program.compiled_outputs),
        "constants": [list(pair) for pair in zip(placeholders, names, strict=True)],
        "examples": [
            [list(item) if isinstance(item, tuple) else item for item in example] for example in program.examples
        ],
        "torch": torch.__version__,
        "tied": tied,
        "leaves": [_dump_leaf(leaf) for leaf in program.shape.leaves],
    }


def _content(path: Path) -> str:
    """Digest of what a program says, whichever sizes it was traced with: those are in it as hints, and no variant that
    is compiled from it depends on them."""

    def without_hint(record: dict[str, Json]) -> dict[str, Json]:
        return {key: None if key == "hint" else value for key, value in record.items()}

    with zipfile.ZipFile(path) as archive:
        text = archive.read(next(name for name in archive.namelist() if name.endswith("models/model.json")))
    return hashlib.sha256(json.dumps(json.loads(text, object_hook=without_hint), sort_keys=True).encode()).hexdigest()


def _canonical_zip(path: Path) -> None:
    """The same members with sorted names and one date, so that equal programs are equal files."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if not name.endswith("serialization_id")}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0)), members[name])


def _as_meta(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.nn.Parameter(meta, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else meta


def _dump_leaf(leaf: LeafSpec) -> Json:
    match leaf:
        case TensorLeaf():
            device = {} if leaf.device == "cpu" else {"device": leaf.device}
            return {"path": leaf.path, "dtype": leaf.dtype, "shape": list(leaf.shape), "layout": leaf.layout, **device}
        case IntLeaf():
            return {"path": leaf.path, "low": leaf.low, "high": leaf.high}
        case _:
            return {"path": leaf.path, "value": dump_scalar(leaf.value)}


def reaches(program: Program, shape: Shape, dims: Dims) -> bool:
    """Do the program's guards take in all sizes of `dims`, and its relations at least their opt?"""
    env: dict[str, int] = {}
    opts = {name: opt for name, (_, _, opt) in dims.items()}
    for guard, leaf in zip(program.guards.leaves, shape.leaves, strict=True):
        if isinstance(leaf, IntLeaf):
            if not isinstance(guard, IntGuard) or leaf.low not in guard.dim or leaf.high not in guard.dim:
                return False
            env[guard.path] = (leaf.low + leaf.high) // 2
        elif isinstance(leaf, TensorLeaf) and isinstance(guard, TensorGuard):
            for axis, (size, dim) in enumerate(zip(leaf.shape, guard.dims, strict=True)):
                env[f"{leaf.path}.shape[{axis}]"] = size_at(size, opts)
                if not covers(dim, size, dims):
                    return False
    try:
        return all(relation(env) for relation in program.guards.where)
    except ZeroDivisionError:
        return False


def resized(program: Program, sizes: Mapping[str, int]) -> Example | None:
    """The program's example with these sizes, those that follow them adjusted; None where a relation forbids it."""
    env = sizes_of(program.guards, program.example)
    env.update(sizes)
    try:
        for name, form in tied_sizes(program.guards).items():
            env[name] = form(env)
        if not all(relation(env) for relation in program.guards.where) or min(env.values(), default=0) < 0:
            return None
    except ZeroDivisionError:
        return None
    return tuple(
        tuple(env[f"{guard.path}.shape[{axis}]"] for axis in range(len(guard.dims)))
        if isinstance(guard, TensorGuard)
        else env[guard.path]
        if isinstance(guard, IntGuard)
        else None
        for guard in program.guards.leaves
    )
