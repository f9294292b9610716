"""The user's source -> exported programs without weights, their guards, and the weights.

A program is exported once for all variants it can serve: every dim as open as the model allows. A variant that no
program reaches (a batch of 1 where the trace took another branch, a size that a shape guard turns down) gets a program
of its own. Programs are the fallback of the entry and what `compilers/aoti.py` compiles, here and behind a miss.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from aotpack.compilers.compare import difference
from aotpack.compilers.dependencies import dependencies, recording, source_modules
from aotpack.compilers.flat import PREFIX, Flat, Shape, kept_results, outputs_of
from aotpack.compilers.modules import (
    default_tree,
    drop_detach,
    import_modules,
    is_training,
    load_source,
    named_tensors,
    overlapping,
    own_dense_weights,
    parameters_of,
    storage_order,
    tied_names,
    user_place,
)
from aotpack.compilers.shapes import IntLeaf, LeafSpec, Symbols, TensorLeaf, ValueLeaf, guards_of
from aotpack_runtime.errors import CompileError, SourceError
from aotpack_runtime.format.codec import dump_guards, dump_outputs, dump_scalar
from aotpack_runtime.format.expression import parse, variable
from aotpack_runtime.format.guard import Guards, IntGuard, LeafGuard, Range, TensorGuard
from aotpack_runtime.format.index import dump_parameter
from aotpack_runtime.format.output import Outputs, Size, Value
from aotpack_runtime.format.tree import Tree, paths
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.store import Store

Json = Any
Dims = Mapping[str, tuple[int, int | None, int]]
"""Dim name -> (min, max, opt)."""

T = TypeVar("T")

log = logging.getLogger("aotpack.export")


@dataclass(frozen=True, slots=True)
class Program:
    """One exported program with what was derived from it."""

    exported: ExportedProgram
    guards: Guards
    outputs: Outputs
    compiled_outputs: Outputs
    shape: Shape
    example: tuple[tuple[int, ...] | int | None, ...]


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Export `job` and put programs and weights in `store`; the record says what is where.

    SourceError and CompileError name the entry, the user's line, and the next step.
    """
    folder = Path(job["folder"])
    with recording() as recorder:
        import_modules(job["imports"], folder)
        module = load_source(job["source"], job["args"], folder)
        session = _Session(job, module, folder)
        programs, of_variant = session.run()
        depends = dependencies(recorder, folder)
    weights = session.store_weights(store)
    return {
        "programs": [_store_program(program, session, store) for program in programs],
        "program_of_variant": of_variant,
        "parameters": [dump_parameter(parameter) for parameter in session.parameters],
        "weights": weights,
        "operators": session.custom_operators(programs),
        "random": session.is_random(programs),
        "training": bool(session.training),
        "source_files": source_modules(folder),
        "depends": depends,
    }


class _Session:
    """One model being exported for all variants of an entry at one precision."""

    def __init__(self, job: Mapping[str, Json], module: torch.nn.Module, folder: Path) -> None:
        self.job, self.name, self.folder = job, job["entry"], folder
        if job["precision"]:
            module.to(getattr(torch, job["precision"]))
        self.training = [name or "the model itself" for name in is_training(module)]
        if self.training and not job["training"]:
            raise SourceError(
                job["source"],
                f"is in train mode ({self.training[0]}): dropout would drop and batch norm would learn in the server",
                hint="call .eval() before returning it, or set `training: true`",
            )
        self.overlapping = overlapping(named_tensors(module))
        own_dense_weights(module)
        self.module = module
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        self.tensors = named_tensors(module)
        self.tied = tied_names(self.tensors)
        self.literals: dict[str, torch.Tensor] = {}
        self.parameters = parameters_of(module, job["source"])
        self.state: list[str] = []

    # ---------------------------------------------------------------------------------------------- programs

    def run(self) -> tuple[list[Program], dict[str, int]]:
        """All programs, widest first, and for each variant the number of the program it is compiled from."""
        programs: list[Program] = []
        of_variant: dict[str, int] = {}
        for present in _distinct(tuple(variant["absent"]) for variant in self.job["variants"]):
            variants = [variant for variant in self.job["variants"] if tuple(variant["absent"]) == present]
            wide = self._wide(present, variants)
            family = [wide] if wide else []
            for variant in variants:
                dims = {name: tuple(bounds) for name, bounds in variant["dims"].items()}
                number = next((n for n, item in enumerate(family) if _reaches(item, self._shape(present), dims)), None)
                if number is None:
                    number = len(family)
                    steps = wide.guards if wide else None
                    family.append(self._exact(present, dims, variant["id"], steps))
                of_variant[variant["id"]] = len(programs) + number
            family += self._small_sizes(present, variants, family)
            programs += family
        self._check_state(programs)
        return programs, of_variant

    def _shape(self, absent: tuple[str, ...]) -> Shape:
        """How the model is called when the optional inputs in `absent` are left out."""
        described = self.job["inputs"]
        unknown = described.keys() - {parameter.name for parameter in self.parameters}
        if unknown:
            names = ", ".join(parameter.name for parameter in self.parameters)
            raise SourceError(
                self.job["source"], f"forward() has no argument {sorted(unknown)[0]!r}; it has: {names}",
                hint="name the arguments of forward() under `inputs`",
            )  # fmt: skip
        trees: list[Tree] = []
        leaves: list[LeafSpec] = []
        for parameter in self.parameters:
            if parameter.name in described and parameter.name not in absent:
                trees.append(_input(described[parameter.name], parameter.name, leaves))
            else:
                tree, values = default_tree(parameter, self.job["source"])
                trees.append(tree)
                leaves += [
                    ValueLeaf(path, value) for path, value in zip(paths(tree, parameter.name), values, strict=True)
                ]
        return Shape(self.parameters, tuple(trees), tuple(leaves))

    def _wide(self, absent: tuple[str, ...], variants: Sequence[Json]) -> Program | None:
        """The program with every dim as open as the model allows; None when only fixed forms can be exported."""
        shape = self._shape(absent)
        sizes = _example_sizes(shape, variants)
        failure: Exception | None = None
        for open_fixed in (True, False):
            try:
                program = self._export(shape, sizes, _auto_dims(shape, open_fixed=open_fixed))
                return self._relaxed(program)
            except CompileError:
                raise
            except Exception as error:
                log.info("%s: not exportable with every dim open: %s", self.name, _first_line(error))
                failure = error
        if all(low == high for variant in variants for low, high, _ in variant["dims"].values()):
            return None
        log.info("%s: each range is exported by itself: %s", self.name, failure)
        return None

    def _exact(self, absent: tuple[str, ...], dims: Dims, variant: str, steps: Guards | None = None) -> Program:
        """The program of one variant: its fixed sizes fixed, its ranges named dims, of every n-th size where `steps`
        say so."""
        shape = self._shape(absent)
        sizes = {name: _inside(bounds) for name, bounds in dims.items()}
        try:
            program = traced(lambda specs: self._export(shape, sizes, specs), shape, dims, steps)
        except CompileError:
            raise
        except Exception as error:
            raise export_error(variant, error, self.folder, shape.leaves) from error
        self._require_open(program.guards, shape, dims, variant)
        return self._relaxed(program, dims)

    def _small_sizes(
        self, absent: tuple[str, ...], variants: Sequence[Json], family: Sequence[Program]
    ) -> Iterator[Program]:
        """Programs for declared sizes 0 and 1 that no program of the family reaches, where the model takes them."""
        shape = self._shape(absent)
        for variant in variants:
            dims = {name: tuple(bounds) for name, bounds in variant["dims"].items()}
            for name, size in itertools.product(dims, (1, 0)):
                low, high, _ = dims[name]
                fixed: Dims = {**dims, name: (size, size, size)}
                inside = low <= size and (high is None or size <= high) and low != high
                if not inside or any(_reaches(program, shape, fixed) for program in family):
                    continue
                try:
                    yield self._exact(absent, fixed, f"{variant['id']} with {name} = {size}")
                except CompileError as error:
                    log.info("%s", error)

    def _export(self, shape: Shape, sizes: Mapping[str, int], dynamic: Sequence[Any]) -> Program:
        flat = Flat(self.module, shape, self.job["outputs"])
        tensors = _examples(shape, sizes, self.job["fills"])
        with torch.no_grad(), _quiet_export(), self._kept_state():
            exported = torch.export.export(flat, tuple(tensors), dynamic_shapes={"leaves": tuple(dynamic)})
        drop_detach(exported.graph_module)
        self._adopt_literals(exported)
        symbols = Symbols(exported, shape.leaves)
        values = [node.meta["val"] for node in _output_nodes(exported)]
        outputs, compiled = outputs_of(flat, symbols, values, self.name)
        leaves, where = guards_of(exported, shape.leaves, name=self.name)
        leaves = _with_written(leaves, shape.leaves, exported)
        example = tuple(_example(leaf, sizes) for leaf in shape.leaves)
        return Program(exported, Guards(shape.trees, leaves, where), outputs, compiled, shape, example)

    def _require_open(self, guards: Guards, shape: Shape, dims: Dims, variant: str) -> None:
        """A dim that the manifest declares as a range, and that came out fixed or narrower than from 2 on, is an error;
        one that came out in steps is not."""
        declared: dict[str, str] = {
            variable(leaf.path, axis): size
            for leaf in shape.leaves
            if isinstance(leaf, TensorLeaf)
            for axis, size in enumerate(leaf.shape)
            if isinstance(size, str) and size in dims and dims[size][0] != dims[size][1]
        }
        in_steps = {match["size"] for text in guards.where if (match := _DIVISIBLE.fullmatch(text.text))}
        for place, found in _named_sizes(guards):
            if place not in declared:
                continue
            low, high, _ = dims[declared[place]]
            if isinstance(found, int):
                raise CompileError(
                    variant,
                    f"dim {declared[place]!r} is declared {Range(low, high)}, but the model fixes {place} to {found}",
                    hint="give it one size, or a list of sizes, in the manifest",
                )
            whole = max(low, 2) in found and (found.high is None or (high is not None and high in found))
            if not whole and place not in in_steps:
                raise CompileError(
                    variant,
                    f"the model treats the sizes of {declared[place]!r} apart: this part of it needs {place} {found}",
                    hint=_SPLIT,
                )

    # --------------------------------------------------------------------------------------- sizes 0 and 1

    def _relaxed(self, program: Program, dims: Dims | None = None) -> Program:
        """`program` with its guards let down to sizes 1 and 0 where it computes what eager does there.

        A trace takes every open size to be 2 or more and leaves no sign of where that mattered (`squeeze` of a dim of
        1 is the plainest case), so it is tried against eager: each size alone, then all of them together. Sizes that
        the trace itself allows (a named dim from 1) are tried as well, and taken out where eager disagrees.
        """
        guards = program.guards
        for size in (1, 0):
            lowered = [name for name in _open_sizes(guards) if self._agrees(program, {name: size})]
            if lowered and len(lowered) > 1 and not self._agrees(program, dict.fromkeys(lowered, size)):
                lowered = []
            guards = _with_low(guards, lowered, size)
        return replace(program, guards=self._with_any_layout(program, guards))

    def _with_any_layout(self, program: Program, guards: Guards) -> Guards:
        """`guards` that take arguments in any layout where the program computes what eager does with them: it does
        not where the model asks for strides, or made nothing of `x.contiguous()` when it was traced."""
        few = {name: max(2, dim.low) for name, dim in _named_sizes(guards) if isinstance(dim, Range)}
        sizes = few if _resized(program, few) else {}
        if not all(self._agrees(program, sizes, arrange) for arrange in (_reversed, _apart, _channels_last)):
            return guards
        leaves = [replace(leaf, layout="any") if isinstance(leaf, TensorGuard) else leaf for leaf in guards.leaves]
        return replace(guards, leaves=tuple(leaves))

    def _agrees(
        self,
        program: Program,
        sizes: Mapping[str, int],
        arrange: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> bool:
        """Does the program give eager's result with these sizes, and arguments in memory as `arrange` copies them?
        False too where eager refuses."""
        example = _resized(program, sizes)
        if example is None:
            return False
        leaves = make_leaves(program.guards, example, self.job["fills"])
        tensors = _flat_tensors(program.guards, leaves)
        flat = Flat(self.module, program.shape, self.job["outputs"])
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self._kept_state() as restore:
            try:
                torch.manual_seed(0)
                wanted = flat(*map(arrange, tensors))
                restore()
                torch.manual_seed(0)
                bound = [self._everything()[name] for name in program_weights(program.exported)]
                found = program.exported.graph_module(*bound, *map(arrange, tensors))
            except Exception:
                return False
        numbers = _numbers(program.outputs, _env(program.guards, example))
        told = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.capture.leaves]
        return difference((flat.capture.tree, told), (program.outputs.tree, numbers)) is None and (
            difference(tuple(wanted), tuple(found)) is None
        )

    # ------------------------------------------------------------------------------------------- weights, state

    @contextmanager
    def _kept_state(self) -> Iterator[Any]:
        """Buffers are what they were before, however often and whatever is run inside."""
        saved = {name: tensor.clone() for name, tensor in self.module.named_buffers()}
        owners = {name: self.module.get_submodule(name.rpartition(".")[0]) for name in saved}
        tensors = dict(self.module.named_buffers())

        def restore() -> None:
            for name, value in saved.items():
                tensors[name].copy_(value)
                owners[name]._buffers[name.rpartition(".")[2]] = tensors[name]

        try:
            yield restore
        finally:
            with torch.no_grad():
                restore()

    def _everything(self) -> dict[str, torch.Tensor]:
        return {**self.tensors, **self.literals}

    def _adopt_literals(self, exported: ExportedProgram) -> None:
        """Tensors that are neither parameters nor buffers (`torch.tensor([1.0])` in forward(), a plain attribute)
        become buffers named by their content: bound from outside like all weights, never baked into code."""
        for spec in exported.graph_signature.input_specs:
            if spec.kind != InputKind.CONSTANT_TENSOR:
                continue
            tensor = exported.constants[spec.target].detach().clone()
            content = hashlib.sha256(_bytes(tensor)).hexdigest()
            name = f"literal_{content[:16]}"
            self.literals[name] = tensor
            del exported.constants[spec.target]
            exported.constants[name] = tensor
            spec.kind, spec.target, spec.persistent = InputKind.BUFFER, name, False

    def _check_state(self, programs: Sequence[Program]) -> None:
        written = {name for program in programs for name in _written(program.exported) | self._changed(program)}
        plain = sorted(written - self.tensors.keys())
        if plain:
            raise SourceError(
                self.job["source"],
                "forward() writes a tensor that is neither a parameter nor a buffer, so its state cannot be shared",
                hint="register it with register_buffer()",
            )
        views = sorted(self.overlapping.keys() & written)
        if views:
            raise SourceError(
                self.job["source"],
                f"forward() writes {views[0]!r}, which shares memory with {self.overlapping[views[0]]!r}; "
                "a bundle keeps the two apart",
                hint="keep one of them as a buffer and take the other from it in forward()",
            )
        self.state = sorted({other for name in written for other in self.tied if self.tied[other] == self.tied[name]})

    def _changed(self, program: Program) -> set[str]:
        """Buffers that a run leaves with other values: batch norm's operator writes its own without saying so."""
        leaves = make_leaves(program.guards, program.example, self.job["fills"])
        flat = Flat(self.module, program.shape, self.job["outputs"])
        before = {name: _bytes(tensor) for name, tensor in self.module.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self._kept_state():
            flat(*_flat_tensors(program.guards, leaves))
            return {name for name, tensor in self.module.named_buffers() if _bytes(tensor) != before[name]}

    def store_weights(self, store: Store) -> Json:
        """Write all weights as one safetensors file; the record of the weight set."""
        everything = self._everything()
        tied = {**self.tied, **{name: name for name in self.literals}}
        refs: dict[str, Json] = {}
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in everything.items():
            key = tied[name]
            order = storage_order(tensor)
            refs[name] = {"tensor": key} | ({} if order == sorted(order) else {"order": order})
            if key == name:
                stored[key] = tensor.permute(order).detach().contiguous()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "weights.safetensors")
            save_file(stored, path)
            file = store.put_file(path)
        return {"file": file, "weights": refs, "state": self.state, "dtype": self.job["precision"]}

    # ------------------------------------------------------------------------------------------------- facts

    def custom_operators(self, programs: Sequence[Program]) -> dict[str, str]:
        """Operators that are not torch's own -> their schemas."""
        found: dict[str, str] = {}
        for program in programs:
            for target in _operators(program.exported):
                namespace = target.namespace
                if namespace not in _TORCH_NAMESPACES:
                    name = target.name()
                    found[name] = str(target._schema)
        return dict(sorted(found.items()))

    def is_random(self, programs: Sequence[Program]) -> bool:
        """Do results follow the random seed? Only asked where an operator says that it may draw numbers."""
        for program in programs:
            if not any(torch.Tag.nondeterministic_seeded in target.tags for target in _operators(program.exported)):
                continue
            leaves = make_leaves(program.guards, program.example, self.job["fills"])
            tensors = _flat_tensors(program.guards, leaves)
            flat = Flat(self.module, program.shape, self.job["outputs"])
            runs = []
            for seed in (1, 2):
                with torch.no_grad(), torch.random.fork_rng(devices=[]), self._kept_state():
                    torch.manual_seed(seed)
                    runs.append(tuple(flat(*[tensor.clone() for tensor in tensors])))
            if difference(runs[0], runs[1], rtol=0, atol=0) is not None:
                return True
        return False


_TORCH_NAMESPACES = frozenset({"aten", "prims", "prim", "higher_order", "_operator", "symm_mem", "quantized", "mkldnn"})


def export_error(variant: str, error: Exception, folder: Path, leaves: Sequence[LeafSpec]) -> CompileError:
    """An exporter's pages in one line, with the user's own line where there is one, and what to do about it."""
    text = _caller_names(str(error), leaves)
    place = user_place(error, folder)
    if "data-dependent" in text:
        problem = f"a branch or size depends on the values of a tensor{place}"
        hint = "use torch.cond or torch.where, or torch._check to say what holds"
    elif match := re.search(r"You marked (\w+) as dynamic but .* constant \((\d+)\)", text):
        problem = f"{match[1]!r} is declared as a range, but the model works for {match[2]} only{place}"
        hint = "give it one size, or a list of sizes, in the manifest"
    elif match := re.search(r"- (The values of .* must always be equal)", text):
        problem, hint = f"the model does not take these dims as they are declared: {match[1]}{place}", _ONE_NAME
    elif match := re.search(r"- Not all values of (\w+) = .* satisfy the generated guard (.+)", text):
        problem = f"the model treats the sizes of {match[1]!r} apart: this part of it needs {match[2]}{place}"
        hint = _SPLIT
    else:
        problem = f"cannot be exported{place}: {type(error).__name__}: {_first_line(error)}"
        hint = _ONE_NAME if "must match the size" in text else ""
    return CompileError(variant, problem, hint=hint)


_ONE_NAME = "dims that must be equal take one name in the manifest"
_SPLIT = "split the dim there: `ranges: [{min, max}, ...]` in the manifest"


def _caller_names(text: str, leaves: Sequence[LeafSpec]) -> str:
    """torch's `L['leaves'][0].size()[1]` as `x.shape[1]`."""
    paths = [leaf.path for leaf in leaves if not isinstance(leaf, ValueLeaf)]
    return re.sub(
        r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]",
        lambda match: f"{paths[int(match[1])]}.shape[{match[2]}]",
        text,
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


# ------------------------------------------------------------------------------------------- inputs and sizes


def _input(record: Json, path: str, leaves: list[LeafSpec]) -> Tree:
    """One argument of the manifest as a tree; its leaves are appended."""
    match record:
        case {"tensor": spec}:
            leaves.append(TensorLeaf(path, spec["dtype"], tuple(spec["shape"]), spec["layout"]))
        case {"int": [low, high]}:
            leaves.append(IntLeaf(path, low, high))
        case {"list": items} | {"tuple": items}:
            kind = "list" if "list" in record else "tuple"
            return (kind, *[_input(item, f"{path}[{position}]", leaves) for position, item in enumerate(items)])
        case {"dict": items}:
            children = [_input(item, f"{path}[{key!r}]", leaves) for key, item in items.items()]
            return ("dict", tuple(items), *children)
        case {"class": name, "fields": items}:
            children = [_input(item, f"{path}.{key}", leaves) for key, item in items.items()]
            return ("class", name, tuple(items), *children)
        case {"value": value}:
            leaves.append(ValueLeaf(path, value))
        case _:
            raise AssertionError(f"unknown input {record}")
    return "*"


def _example_sizes(shape: Shape, variants: Sequence[Json]) -> dict[str, int]:
    """A size of 2 or more for each dim: the opt of its widest range, since a hot shape is one the model takes."""
    sizes: dict[str, int] = {}
    for name in _distinct(name for variant in variants for name in variant["dims"]):
        ranges = [variant["dims"][name] for variant in variants if name in variant["dims"]]
        widest = max(ranges, key=lambda bounds: math.inf if bounds[1] is None else bounds[1] - bounds[0])
        sizes[name] = max(
            2, max((_inside(bounds) for bounds in ranges), default=2) if widest[0] == widest[1] else _inside(widest)
        )
    return sizes


def _inside(bounds: Sequence[int | None]) -> int:
    """The opt of a range, or the size nearest to it that is not 0 or 1: a trace at those fixes the dim."""
    low, high, opt = bounds
    assert low is not None
    if low == high:
        return low
    wanted = max(opt or 0, 2)
    return wanted if high is None else min(wanted, high)


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else parse(size)(sizes)


def _example(leaf: LeafSpec, sizes: Mapping[str, int]) -> tuple[int, ...] | int | None:
    match leaf:
        case TensorLeaf():
            return tuple(_size(size, sizes) for size in leaf.shape)
        case IntLeaf():
            return min(max(2, (leaf.low + leaf.high) // 2), leaf.high)
        case _:
            return None


def _examples(shape: Shape, sizes: Mapping[str, int], fills: Mapping[str, Json]) -> list[torch.Tensor]:
    """Real tensors to trace with."""
    return example_tensors(shape.leaves, [_example(leaf, sizes) for leaf in shape.leaves], fills)


def example_tensors(
    specs: Sequence[LeafSpec], example: Sequence[tuple[int, ...] | int | None], fills: Mapping[str, Json]
) -> list[torch.Tensor]:
    """The tensors that a program takes, of the sizes of `example`."""
    leaves: list[Any] = []
    for leaf, size in zip(specs, example, strict=True):
        if isinstance(size, int):
            leaves.append(torch.empty(size, 0))
        elif isinstance(leaf, TensorLeaf):
            guard = TensorGuard(path=leaf.path, dtype=leaf.dtype, dims=size or (), device="cpu", layout=leaf.layout)
            guards = Guards(("*",), (guard,))
            leaves += make_leaves(guards, (size,), fills)
    return leaves


def _flat_tensors(guards: Guards, leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Leaves of a call -> the tensors a program takes."""
    tensors = []
    for guard, leaf in zip(guards.leaves, leaves, strict=True):
        if isinstance(guard, TensorGuard):
            tensors.append(leaf)
        elif isinstance(guard, IntGuard):
            tensors.append(torch.empty(leaf, 0))
    return tensors


def _auto_dims(shape: Shape, *, open_fixed: bool) -> list[Any]:
    """Every dim left to the exporter; with `open_fixed` also the sizes that the manifest fixes."""
    specs: list[Any] = []
    for leaf in shape.leaves:
        if isinstance(leaf, TensorLeaf):
            specs.append(
                tuple(
                    Dim.AUTO if isinstance(size, str) or (open_fixed and size > 1) else Dim.STATIC
                    for size in leaf.shape
                )
            )
        elif isinstance(leaf, IntLeaf):
            specs.append((Dim.AUTO, Dim.STATIC))
    return specs


def traced(export: Callable[[list[Any]], T], shape: Shape, dims: Dims, steps: Guards | None = None) -> T:
    """What `export` makes with named dims; where torch cannot follow a relation through them (`n // 2 <= n`), what it
    makes with dims left open between the same bounds."""
    try:
        return export(_named_dims(shape, dims, steps))
    except Exception as error:
        text = str(error)
        if "Constraints violated" not in text or re.search("must always be equal|specialized it to be", text):
            raise
        try:
            return export(_bounded_dims(shape, dims))
        except Exception:
            raise error from None


def _bounded_dims(shape: Shape, dims: Dims) -> list[Any]:
    specs: list[Any] = []
    for leaf in shape.leaves:
        if isinstance(leaf, TensorLeaf):
            specs.append(tuple(_bounded_dim(size, dims) for size in leaf.shape))
        elif isinstance(leaf, IntLeaf):
            specs.append((Dim.AUTO(min=max(leaf.low, 0), max=leaf.high), Dim.STATIC))
    return specs


def _bounded_dim(size: int | str, dims: Dims) -> Any:
    form = parse(str(size))
    low, high, _ = dims[next(iter(form.names))] if form.names else (0, 0, 0)
    if low == high:
        return Dim.STATIC
    (name,) = form.names
    return Dim.AUTO(min=form({name: low}), max=None if high is None else form({name: high}))


def _named_dims(shape: Shape, dims: Dims, guards: Guards | None = None) -> list[Any]:
    """torch.export's own named dims for ranges, fixed sizes fixed; multiples of k for a dim that `guards` want to be
    divisible by k, which torch would refuse otherwise."""
    factors = _factors(shape, guards) if guards else {}
    named = {
        name: _multiples(name, bounds, factors.get(name, 1)) for name, bounds in dims.items() if bounds[0] != bounds[1]
    }
    specs: list[Any] = []
    taken = set(dims)
    for leaf in shape.leaves:
        if isinstance(leaf, TensorLeaf):
            specs.append(tuple(_named_dim(size, named) for size in leaf.shape))
        elif isinstance(leaf, IntLeaf):
            identifier = re.sub(r"\W", "_", leaf.path)
            while identifier in taken:  # a dim of the same name has bounds of its own
                identifier += "_"
            taken.add(identifier)
            specs.append((Dim(identifier, min=max(leaf.low, 0), max=leaf.high), Dim.STATIC))
    return specs


_DIVISIBLE = re.compile(r"(?P<size>\S+) % (?P<by>\d+) == 0")


def _factors(shape: Shape, guards: Guards) -> dict[str, int]:
    """Dim name -> what it has to be divisible by; only dims that no shape scales or shifts."""
    uses = [
        (size, variable(leaf.path, axis))
        for leaf in shape.leaves
        if isinstance(leaf, TensorLeaf)
        for axis, size in enumerate(leaf.shape)
        if isinstance(size, str)
    ]
    plain = {text for text, _ in uses} - {name for text, _ in uses for name in parse(text).names if name != text}
    found: dict[str, int] = {}
    for match in filter(None, (_DIVISIBLE.fullmatch(relation.text) for relation in guards.where)):
        for text, place in uses:
            if place == match["size"] and text in plain:
                found[text] = math.lcm(found.get(text, 1), int(match["by"]))
    return found


def _multiples(name: str, bounds: tuple[int, int | None, int], factor: int) -> Any:
    low, high, _ = bounds
    if factor == 1:
        return Dim(name, min=low, max=high)
    return factor * Dim(f"_{name}", min=-(-low // factor), max=None if high is None else high // factor)


def _named_dim(size: int | str, named: Mapping[str, Any]) -> Any:
    if isinstance(size, int):
        return Dim.STATIC
    form = parse(size)
    (name,) = form.names
    if name not in named:
        return Dim.STATIC
    offset = form({name: 0})
    scale = form({name: 1}) - offset
    scaled = named[name] if scale == 1 else scale * named[name]
    return scaled if offset == 0 else scaled + offset


_EQUAL = re.compile(r"(?P<left>\S+) == (?P<right>.+)")


def _tied_sizes(guards: Guards) -> dict[str, Any]:
    """Size -> the expression it equals, for sizes that follow others."""
    tied = {}
    for relation in guards.where:
        match = _EQUAL.fullmatch(relation.text)
        if match and match["left"] in relation.names:
            tied[match["left"]] = parse(match["right"])
    return tied


def _open_sizes(guards: Guards) -> list[str]:
    """Names of the sizes that may vary by themselves."""
    tied = _tied_sizes(guards)
    names = [name for name, dim in _named_sizes(guards) if isinstance(dim, Range)]
    return [name for name in names if name not in tied]


def _named_sizes(guards: Guards) -> Iterator[tuple[str, Any]]:
    for guard in guards.leaves:
        if isinstance(guard, TensorGuard):
            for axis, dim in enumerate(guard.dims):
                yield f"{guard.path}.shape[{axis}]", dim
        elif isinstance(guard, IntGuard):
            yield guard.path, guard.dim


def _env(guards: Guards, example: Sequence[tuple[int, ...] | int | None]) -> dict[str, int]:
    """The sizes of `example` by name."""
    env: dict[str, int] = {}
    for guard, size in zip(guards.leaves, example, strict=True):
        if isinstance(guard, TensorGuard) and isinstance(size, tuple):
            env.update({f"{guard.path}.shape[{axis}]": value for axis, value in enumerate(size)})
        elif isinstance(guard, IntGuard) and isinstance(size, int):
            env[guard.path] = size
    return env


def _numbers(outputs: Outputs, env: Mapping[str, int]) -> list[Any]:
    """The results of a program that are no tensors, None in the place of those that are."""
    return [
        leaf.size(env) if isinstance(leaf, Size) else leaf.value if isinstance(leaf, Value) else None
        for leaf in outputs.leaves
    ]


def _resized(program: Program, sizes: Mapping[str, int]) -> tuple[tuple[int, ...] | int | None, ...] | None:
    """The program's example with these sizes, those that follow them adjusted; None where a relation forbids it."""
    env = _env(program.guards, program.example)
    env.update(sizes)
    try:
        for name, form in _tied_sizes(program.guards).items():
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


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose first dim is innermost in memory."""
    axes = tuple(reversed(range(tensor.dim())))
    return tensor.permute(axes).clone(memory_format=torch.contiguous_format).permute(axes)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with gaps between its rows."""
    if not tensor.dim():
        return tensor.clone()
    return torch.stack([tensor, tensor], dim=1).select(1, 0)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is channels-last where it has the dims for it, and contiguous if not."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.clone(memory_format=formats.get(tensor.dim(), torch.contiguous_format))


def _low_examples(program: Program) -> list[tuple[tuple[int, ...] | int | None, ...]]:
    """The sizes a program was traced with, and its smallest: each open size alone, where the others stay."""
    lows = {name: dim.low for name, dim in _named_sizes(program.guards) if isinstance(dim, Range)}
    found = [program.example]
    for name in _open_sizes(program.guards):
        example = _resized(program, {name: lows[name]})
        if example is not None and example not in found:
            found.append(example)
    return found


def _with_low(guards: Guards, agreed: Sequence[str], size: int) -> Guards:
    """Guards whose open sizes begin at `size` where eager was found to agree, and above it where it was not."""
    tied = {name: form.text for name, form in _tied_sizes(guards).items()}

    def lowered(name: str, dim: Any) -> Any:
        if not isinstance(dim, Range):
            return dim
        if tied.get(name, name) in agreed and dim.low == size + 1:
            return Range(size, dim.high)
        if tied.get(name, name) not in agreed and dim.low <= size:
            return Range(size + 1, dim.high)
        return dim

    leaves: list[Any] = []
    for guard in guards.leaves:
        if isinstance(guard, TensorGuard):
            dims = tuple(lowered(f"{guard.path}.shape[{axis}]", dim) for axis, dim in enumerate(guard.dims))
            leaves.append(replace(guard, dims=dims))
        elif isinstance(guard, IntGuard):
            leaves.append(replace(guard, dim=lowered(guard.path, guard.dim)))
        else:
            leaves.append(guard)
    return replace(guards, leaves=tuple(leaves))


def _reaches(program: Program, shape: Shape, dims: Dims) -> bool:
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
                env[f"{leaf.path}.shape[{axis}]"] = _size(size, opts)
                if not _covers(dim, size, dims):
                    return False
    try:
        return all(relation(env) for relation in program.guards.where)
    except ZeroDivisionError:
        return False


def _covers(dim: int | Range, size: int | str, dims: Dims) -> bool:
    if isinstance(size, int):
        return size == dim if isinstance(dim, int) else size in dim
    form = parse(size)
    (name,) = form.names
    low, high, _ = dims[name]
    if low == high:
        return form({name: low}) == dim if isinstance(dim, int) else form({name: low}) in dim
    if isinstance(dim, int) or form({name: low}) not in dim:
        return False
    return dim.high is None or (high is not None and form({name: high}) in dim)


# ------------------------------------------------------------------------------------------ exported programs


def program_weights(exported: ExportedProgram) -> list[str]:
    """The weights a program's graph takes before its inputs, by the model's own names."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    return [
        str(spec.target).removeprefix(PREFIX) for spec in exported.graph_signature.input_specs if spec.kind in kinds
    ]


def _output_nodes(exported: ExportedProgram) -> list[Any]:
    (output,) = [node for node in exported.graph.nodes if node.op == "output"]
    return list(output.args[0])


def _operators(exported: ExportedProgram) -> Iterator[Any]:
    for module in exported.graph_module.modules():
        graph = getattr(module, "graph", None)
        for node in graph.nodes if graph is not None else ():
            if isinstance(node.target, torch._ops.OpOverload):
                yield node.target


def _written(exported: ExportedProgram) -> set[str]:
    """Weights that the program writes in place: operators say of each argument whether they write it."""
    names = program_weights(exported)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"][: len(names)]
    owners: dict[int, str] = {}
    for node, name in zip(placeholders, names, strict=True):
        value = node.meta["val"]
        # A literal is copied before its use, which a trace does not show in its memory.
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if isinstance(value, torch.Tensor) and value.numel() and not literal:
            owners.setdefault(_memory(value), name)
    return {owners[memory] for memory in _writes(exported) if memory in owners}


def _with_written(
    guards: Sequence[LeafGuard], leaves: Sequence[LeafSpec], exported: ExportedProgram
) -> tuple[LeafGuard, ...]:
    """`guards`, those of arguments that the program writes in place marked so."""
    inputs = set(exported.graph_signature.user_inputs)
    nodes = iter([node for node in exported.graph.nodes if node.op == "placeholder" and node.name in inputs])
    written = set(_writes(exported))
    marked: list[LeafGuard] = []
    for guard, leaf in zip(guards, leaves, strict=True):
        value = None if isinstance(leaf, ValueLeaf) else next(nodes).meta["val"]
        if isinstance(guard, TensorGuard) and value is not None and _memory(value) in written:
            marked.append(replace(guard, written=True))
        else:
            marked.append(guard)
    return tuple(marked)


def _writes(exported: ExportedProgram) -> Iterator[int]:
    """The memory of every tensor that an operator writes in place, in regions (autocast, no_grad) as well."""
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
                        yield _memory(value)


def _memory(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


_KEPT_META = frozenset({"val", "tensor_meta", "unbacked_bindings"})


def _store_program(program: Program, session: _Session, store: Store) -> Json:
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
            [list(item) if isinstance(item, tuple) else item for item in example] for example in _low_examples(program)
        ],
        "torch": torch.__version__,
        "tied": session.tied,
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
            return {"path": leaf.path, "dtype": leaf.dtype, "shape": list(leaf.shape), "layout": leaf.layout}
        case IntLeaf():
            return {"path": leaf.path, "low": leaf.low, "high": leaf.high}
        case _:
            return {"path": leaf.path, "value": dump_scalar(leaf.value)}


def _bytes(tensor: torch.Tensor) -> bytes:
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return head + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else head


def _distinct(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))


@contextmanager
def _quiet_export() -> Iterator[None]:
    """torch warns about dims that come out fixed, which the guards say anyway."""
    loggers = [logging.getLogger(name) for name in ("torch._export", "torch.export", "torch.fx.experimental")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
