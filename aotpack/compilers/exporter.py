"""A model -> its exported programs, and which of them each variant is compiled from.

A program is exported once for all variants it can serve: every dim as open as the model allows. A variant that no
program reaches (a batch of 1 where the trace took another branch, a size that a shape guard turns down) gets a program
of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.export._trace  # what torch imports as it exports: here it is done before a process is forked for it

from aotpack.compilers.failures import SPLIT, export_error, first_line, quiet_export, require_tensors
from aotpack.compilers.flat import Flat, Shape, outputs_of
from aotpack.compilers.model import Model
from aotpack.compilers.modules import default_tree, drop_detach
from aotpack.compilers.probing import Probe, kept_state
from aotpack.compilers.programs import Program, output_nodes, reaches, with_written
from aotpack.compilers.shapes import IntLeaf, LeafSpec, Symbols, TensorLeaf, ValueLeaf, guards_of
from aotpack.compilers.sizes import (
    DIVISIBLE,
    Dims,
    auto_dims,
    distinct,
    example_of,
    example_sizes,
    inside,
    named_sizes,
    trace_inputs,
    traced,
)
from aotpack_runtime.errors import CompileError, SourceError
from aotpack_runtime.format.expression import variable
from aotpack_runtime.format.guard import Guards, Range
from aotpack_runtime.format.tree import Tree, paths

Json = Any
log = logging.getLogger("aotpack.export")


class Exporter:
    """Exports one model for all variants of an entry at one precision."""

    def __init__(self, job: Mapping[str, Json], model: Model, folder: Path) -> None:
        self._job, self._name, self._folder, self._model = job, job["entry"], folder, model
        self._probe = Probe(model.module, model.everything, outputs=job["outputs"], fills=job["fills"])

    def run(self) -> tuple[list[Program], dict[str, int]]:
        """All programs, widest first, and for each variant the number of the program it is compiled from."""
        programs: list[Program] = []
        of_variant: dict[str, int] = {}
        for present in distinct(tuple(variant["absent"]) for variant in self._job["variants"]):
            variants = [variant for variant in self._job["variants"] if tuple(variant["absent"]) == present]
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
        self._model.check_state(programs)
        return programs, of_variant

    def shape(self, absent: tuple[str, ...]) -> Shape:
        """How the model is called when the optional inputs in `absent` are left out."""
        described = self._job["inputs"]
        unknown = described.keys() - {parameter.name for parameter in self._model.parameters}
        if unknown:
            names = ", ".join(parameter.name for parameter in self._model.parameters)
            raise SourceError(
                self._job["source"], f"forward() has no argument {min(unknown)!r}; it has: {names}",
                hint="name the arguments of forward() under `inputs`",
            )  # fmt: skip
        trees: list[Tree] = []
        leaves: list[LeafSpec] = []
        for parameter in self._model.parameters:
            if parameter.name in described and parameter.name not in absent:
                trees.append(_input(described[parameter.name], parameter.name, leaves, self._model.device))
            else:
                tree, values = default_tree(parameter, self._job["source"])
                trees.append(tree)
                leaves += [
                    ValueLeaf(path, value) for path, value in zip(paths(tree, parameter.name), values, strict=True)
                ]
        return Shape(self._model.parameters, tuple(trees), tuple(leaves))

    def _wide(self, absent: tuple[str, ...], variants: Sequence[Json]) -> Program | None:
        """The program with every dim as open as the model allows; None when only fixed forms can be exported."""
        shape = self.shape(absent)
        sizes = example_sizes(shape, variants)
        failure: Exception | None = None
        for open_fixed in (True, False):
            try:
                program = self._export(shape, sizes, auto_dims(shape, open_fixed=open_fixed))
                return self._probe.relaxed(program)
            except CompileError:
                raise
            except Exception as error:
                log.info("%s: not exportable with every dim open: %s", self._name, first_line(error))
                failure = error
        if all(low == high for variant in variants for low, high, _ in variant["dims"].values()):
            return None
        log.info("%s: each range is exported by itself: %s", self._name, failure)
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
            raise export_error(variant, error, self._folder, shape.leaves) from error
        self._require_open(program.guards, shape, dims, variant)
        return self._probe.relaxed(program)

    def _small_sizes(
        self, absent: tuple[str, ...], variants: Sequence[Json], family: Sequence[Program]
    ) -> Iterator[Program]:
        """Programs for small declared sizes that no program of the family reaches, where the model takes them: torch
        tells 0 and 1 apart, of every size that it computes from others too (2, where a model goes on with one less)."""
        known = list(family)
        for variant in variants:
            yield from self._small(
                absent, {name: tuple(b) for name, b in variant["dims"].items()}, variant["id"], known
            )

    def _small(self, absent: tuple[str, ...], dims: Dims, variant: str, known: list[Program]) -> Iterator[Program]:
        """Those of one variant: of each dim alone, and then of others beside it. They are added to `known`."""
        for name in dims:
            for size in _small_unreached(known, self.shape(absent), dims, name):
                fixed: Dims = {**dims, name: (size, size, size)}
                beside = f"{variant}, {name} = {size}" if " with " in variant else f"{variant} with {name} = {size}"
                try:
                    program = self._exact(absent, fixed, beside)
                except CompileError as error:
                    log.info("%s", error)
                    continue
                known.append(program)
                yield program
                yield from self._small(absent, fixed, beside, known)

    def _export(self, shape: Shape, sizes: Mapping[str, int], dynamic: Sequence[Any]) -> Program:
        flat = Flat(self._model.module, shape, self._job["outputs"])
        tensors = trace_inputs(shape, sizes, self._job["fills"])
        with torch.no_grad(), quiet_export(), kept_state(self._model.module):
            exported = torch.export.export(flat, tuple(tensors), dynamic_shapes={"leaves": tuple(dynamic)})
        require_tensors(self._name, exported)
        drop_detach(exported.graph_module)
        self._model.adopt_literals(exported)
        symbols = Symbols(exported, shape.leaves)
        values = [node.meta["val"] for node in output_nodes(exported)]
        outputs, compiled = outputs_of(flat, symbols, values, self._name)
        leaves, where = guards_of(exported, shape.leaves, name=self._name)
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


SMALL, MOST_BESIDE = 10, 2
"""Sizes from 2 on that are looked at, and how many may be left out: more are steps, or parts of the model."""


def _small_unreached(family: Sequence[Program], shape: Shape, dims: Dims, name: str) -> list[int]:
    """Small sizes of a range that no program of the family reaches: 0, 1, and a few beside."""
    low, high, _ = dims[name]
    if low == high:
        return []
    last = SMALL if high is None else min(SMALL, high)
    sizes = [
        size
        for size in range(low, last + 1)
        if not any(reaches(program, shape, {**dims, name: (size, size, size)}) for program in family)
    ]
    beside = [size for size in sizes if size > 1]
    return [size for size in sizes if size <= 1 or len(beside) <= MOST_BESIDE]


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
