"""The user's source -> exported programs without weights, their guards, and the weights.

A program is exported once for all variants it can serve: every dim as open as the model allows. A variant that no
program reaches (a batch of 1 where the trace took another branch, a size that a shape guard turns down) gets a program
of its own. Programs are the fallback of the entry and what `compilers/aoti.py` compiles, here and behind a miss.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from aotpack.compilers.compare import difference
from aotpack.compilers.dependencies import dependencies, recording, source_modules
from aotpack.compilers.failures import SPLIT, export_error, first_line, quiet_export
from aotpack.compilers.flat import Flat, Shape, outputs_of
from aotpack.compilers.modules import (
    default_tree,
    drop_detach,
    import_modules,
    is_training,
    load_source,
    move_module,
    named_tensors,
    overlapping,
    own_dense_weights,
    parameters_of,
    storage_order,
    tied_names,
)
from aotpack.compilers.probing import Probe, kept_state
from aotpack.compilers.programs import (
    Program,
    operators_of,
    output_nodes,
    reaches,
    store_program,
    with_written,
    written_weights,
)
from aotpack.compilers.shapes import IntLeaf, LeafSpec, Symbols, TensorLeaf, ValueLeaf, guards_of
from aotpack.compilers.sizes import (
    DIVISIBLE,
    Dims,
    auto_dims,
    distinct,
    example_of,
    example_sizes,
    flat_tensors,
    inside,
    named_sizes,
    trace_inputs,
    traced,
)
from aotpack_runtime.errors import CompileError, SourceError
from aotpack_runtime.format.entry_json import dump_parameter
from aotpack_runtime.format.expression import variable
from aotpack_runtime.format.guard import Guards, Range
from aotpack_runtime.format.tree import Tree, paths
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.store import Store

Json = Any


log = logging.getLogger("aotpack.export")


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Export `job` and put programs and weights in `store`; the record says what is where.

    SourceError and CompileError name the entry, the user's line, and the next step.
    """
    folder = Path(job["folder"])
    with recording() as recorder:
        import_modules(job["imports"], folder)
        known = frozenset(torch._C._dispatch_get_all_op_names())
        module = load_source(job["source"], job["args"], folder)
        session = ExportSession(job, module, folder)
        programs, of_variant = session.run()
        depends = dependencies(recorder, folder)
    operators = session.custom_operators(programs)
    _require_imported(job, operators, known)
    weights = session.store_weights(store)
    return {
        "programs": [store_program(program, session.tied, store) for program in programs],
        "program_of_variant": of_variant,
        "parameters": [dump_parameter(parameter) for parameter in session.parameters],
        "weights": weights,
        "operators": operators,
        "random": session.is_random(programs),
        "training": bool(session.training),
        "source_files": source_modules(folder),
        "depends": depends,
    }


def _require_imported(job: Mapping[str, Json], operators: Iterable[str], known: Collection[str]) -> None:
    """SourceError for an operator that only the source registers: whoever reads the program back does not import it."""
    for name in operators:
        if name not in known:
            raise SourceError(
                job["source"],
                f"uses the operator {name}, which no module of `imports` registers",
                hint=f"name the module that defines it under `entries.{job['entry']}.imports` in the manifest",
            )


class ExportSession:
    """One model being exported for all variants of an entry at one precision."""

    def __init__(self, job: Mapping[str, Json], module: torch.nn.Module, folder: Path) -> None:
        self.job, self.name, self.folder = job, job["entry"], folder
        self.device = job.get("device", "cpu")
        if job["precision"]:
            module.to(getattr(torch, job["precision"]))
        move_module(module, self.device)
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
        self.probe = Probe(module, self._everything, outputs=job["outputs"], fills=job["fills"])

    # ---------------------------------------------------------------------------------------------- programs

    def run(self) -> tuple[list[Program], dict[str, int]]:
        """All programs, widest first, and for each variant the number of the program it is compiled from."""
        programs: list[Program] = []
        of_variant: dict[str, int] = {}
        for present in distinct(tuple(variant["absent"]) for variant in self.job["variants"]):
            variants = [variant for variant in self.job["variants"] if tuple(variant["absent"]) == present]
            wide = self._wide(present, variants)
            family = [wide] if wide else []
            for variant in variants:
                dims = {name: tuple(bounds) for name, bounds in variant["dims"].items()}
                number = next((n for n, item in enumerate(family) if reaches(item, self.shape(present), dims)), None)
                if number is None:
                    number = len(family)
                    steps = wide.guards if wide else None
                    family.append(self._exact(present, dims, variant["id"], steps))
                of_variant[variant["id"]] = len(programs) + number
            family += self._small_sizes(present, variants, family)
            programs += family
        self._check_state(programs)
        return programs, of_variant

    def shape(self, absent: tuple[str, ...]) -> Shape:
        """How the model is called when the optional inputs in `absent` are left out."""
        described = self.job["inputs"]
        unknown = described.keys() - {parameter.name for parameter in self.parameters}
        if unknown:
            names = ", ".join(parameter.name for parameter in self.parameters)
            raise SourceError(
                self.job["source"], f"forward() has no argument {min(unknown)!r}; it has: {names}",
                hint="name the arguments of forward() under `inputs`",
            )  # fmt: skip
        trees: list[Tree] = []
        leaves: list[LeafSpec] = []
        for parameter in self.parameters:
            if parameter.name in described and parameter.name not in absent:
                trees.append(_input(described[parameter.name], parameter.name, leaves, self.device))
            else:
                tree, values = default_tree(parameter, self.job["source"])
                trees.append(tree)
                leaves += [
                    ValueLeaf(path, value) for path, value in zip(paths(tree, parameter.name), values, strict=True)
                ]
        return Shape(self.parameters, tuple(trees), tuple(leaves))

    def _wide(self, absent: tuple[str, ...], variants: Sequence[Json]) -> Program | None:
        """The program with every dim as open as the model allows; None when only fixed forms can be exported."""
        shape = self.shape(absent)
        sizes = example_sizes(shape, variants)
        failure: Exception | None = None
        for open_fixed in (True, False):
            try:
                program = self._export(shape, sizes, auto_dims(shape, open_fixed=open_fixed))
                return self.probe.relaxed(program)
            except CompileError:
                raise
            except Exception as error:
                log.info("%s: not exportable with every dim open: %s", self.name, first_line(error))
                failure = error
        if all(low == high for variant in variants for low, high, _ in variant["dims"].values()):
            return None
        log.info("%s: each range is exported by itself: %s", self.name, failure)
        return None

    def _exact(self, absent: tuple[str, ...], dims: Dims, variant: str, steps: Guards | None = None) -> Program:
        """The program of one variant: its fixed sizes fixed, its ranges named dims, of every n-th size where `steps`
        say so."""
        shape = self.shape(absent)
        sizes = {name: inside(bounds) for name, bounds in dims.items()}
        try:
            program = traced(lambda specs: self._export(shape, sizes, specs), shape, dims, steps)
        except CompileError:
            raise
        except Exception as error:
            raise export_error(variant, error, self.folder, shape.leaves) from error
        self._require_open(program.guards, shape, dims, variant)
        return self.probe.relaxed(program)

    def _small_sizes(
        self, absent: tuple[str, ...], variants: Sequence[Json], family: Sequence[Program]
    ) -> Iterator[Program]:
        """Programs for declared sizes 0 and 1 that no program of the family reaches, where the model takes them."""
        shape = self.shape(absent)
        for variant in variants:
            dims = {name: tuple(bounds) for name, bounds in variant["dims"].items()}
            for name, size in itertools.product(dims, (1, 0)):
                low, high, _ = dims[name]
                fixed: Dims = {**dims, name: (size, size, size)}
                inside = low <= size and (high is None or size <= high) and low != high
                if not inside or any(reaches(program, shape, fixed) for program in family):
                    continue
                try:
                    yield self._exact(absent, fixed, f"{variant['id']} with {name} = {size}")
                except CompileError as error:
                    log.info("%s", error)

    def _export(self, shape: Shape, sizes: Mapping[str, int], dynamic: Sequence[Any]) -> Program:
        flat = Flat(self.module, shape, self.job["outputs"])
        tensors = trace_inputs(shape, sizes, self.job["fills"])
        with torch.no_grad(), quiet_export(), kept_state(self.module):
            exported = torch.export.export(flat, tuple(tensors), dynamic_shapes={"leaves": tuple(dynamic)})
        drop_detach(exported.graph_module)
        self._adopt_literals(exported)
        symbols = Symbols(exported, shape.leaves)
        values = [node.meta["val"] for node in output_nodes(exported)]
        outputs, compiled = outputs_of(flat, symbols, values, self.name)
        leaves, where = guards_of(exported, shape.leaves, name=self.name)
        leaves = with_written(leaves, shape.leaves, exported)
        example = tuple(example_of(leaf, sizes) for leaf in shape.leaves)
        return Program(exported, Guards(shape.trees, leaves, where), outputs, compiled, shape, (example,))

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
        in_steps = {match["size"] for text in guards.where if (match := DIVISIBLE.fullmatch(text.text))}
        for place, found in named_sizes(guards):
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
                    hint=SPLIT,
                )

    # ------------------------------------------------------------------------------------------- weights, state

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
        written = {name for program in programs for name in written_weights(program.exported) | self._changed(program)}
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
        with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_state(self.module):
            flat(*flat_tensors(program.guards, leaves))
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
            on_host = {"host": True} if self.device != "cpu" and tensor.device.type == "cpu" else {}
            refs[name] = {"tensor": key} | ({} if order == sorted(order) else {"order": order}) | on_host
            if key == name:
                stored[key] = tensor.permute(order).detach().cpu().contiguous()
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
            for target in operators_of(program.exported):
                namespace = target.namespace
                if namespace not in _TORCH_NAMESPACES:
                    name = target.name()
                    found[name] = str(target._schema)
        return dict(sorted(found.items()))

    def is_random(self, programs: Sequence[Program]) -> bool:
        """Do results follow the random seed? Only asked where an operator says that it may draw numbers."""
        for program in programs:
            if not any(torch.Tag.nondeterministic_seeded in target.tags for target in operators_of(program.exported)):
                continue
            leaves = make_leaves(program.guards, program.example, self.job["fills"])
            tensors = flat_tensors(program.guards, leaves)
            flat = Flat(self.module, program.shape, self.job["outputs"])
            runs = []
            for seed in (1, 2):
                with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_state(self.module):
                    torch.manual_seed(seed)
                    runs.append(tuple(flat(*[tensor.clone() for tensor in tensors])))
            if difference(runs[0], runs[1], rtol=0, atol=0) is not None:
                return True
        return False


_TORCH_NAMESPACES = frozenset({"aten", "prims", "prim", "higher_order", "_operator", "symm_mem", "quantized", "mkldnn"})


def _input(record: Json, path: str, leaves: list[LeafSpec], device: str) -> Tree:
    """One argument of the manifest as a tree; its leaves are appended, tensors as on `device`."""
    match record:
        case {"tensor": spec}:
            leaves.append(TensorLeaf(path, spec["dtype"], tuple(spec["shape"]), spec["layout"], device))
        case {"int": [low, high]}:
            leaves.append(IntLeaf(path, low, high))
        case {"list": items} | {"tuple": items}:
            kind = "list" if "list" in record else "tuple"
            return (kind, *[_input(item, f"{path}[{position}]", leaves, device) for position, item in enumerate(items)])
        case {"dict": items}:
            children = [_input(item, f"{path}[{key!r}]", leaves, device) for key, item in items.items()]
            return ("dict", tuple(items), *children)
        case {"class": name, "fields": items}:
            children = [_input(item, f"{path}.{key}", leaves, device) for key, item in items.items()]
            return ("class", name, tuple(items), *children)
        case {"value": value}:
            leaves.append(ValueLeaf(path, value))
        case _:
            raise AssertionError(f"unknown input {record}")
    return "*"


def _bytes(tensor: torch.Tensor) -> bytes:
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return head + tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else head
