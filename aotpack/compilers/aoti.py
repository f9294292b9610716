"""An exported program -> an AOTInductor package for one variant: one shared library, weights outside.

The program is traced again with the sizes and ranges of the variant, so the same path compiles in a release pipeline
(from the user's model) and behind a miss (from the bundle alone). No weight value is read: weights are zeros of the
right shapes here, and every Inductor pass that would look at them is off, so `update_weights` can never be ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from aotpack.compilers.attention import Attentions, attention_for
from aotpack.compilers.cubin import archs_inside
from aotpack.compilers.failures import export_error, quiet_export
from aotpack.compilers.flat import PREFIX, Shape
from aotpack.compilers.inductor import ALONE, build_folder, package, precompile_headers
from aotpack.compilers.modules import import_modules
from aotpack.compilers.shapes import IntLeaf, LeafSpec, TensorLeaf, ValueLeaf, guards_of
from aotpack.compilers.sizes import Dims, inside, trace_inputs, traced
from aotpack.compilers.toolchain import needs_of_library
from aotpack.compilers.trying import Example, sample_sizes, tried_out, views_of
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.codec import dump_guards, parse_guards, parse_outputs, parse_scalar
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.guard import Guards, IntGuard, LeafGuard, Range, TensorGuard
from aotpack_runtime.format.target import version
from aotpack_runtime.loaders.aoti import open_runner
from aotpack_runtime.loaders.programs import read_program
from aotpack_runtime.store import Store

Json = Any


def compile(job: Mapping[str, Json], store: Store, *, kept: Store | None = None) -> Json:
    """Compile `job` and put the files in `store`; the record has files, guards, examples, constants and needs. What all
    libraries share comes from `kept`, where `store` ends with the job.

    CompileError says what the toolchain said.
    """
    variant, program = job["variant"], job["program"]
    import_modules(job["imports"], Path(job["folder"]))
    leaves = [parse_leaf(item) for item in program["leaves"]]
    dims: Dims = {name: tuple(bounds) for name, bounds in job["dims"].items()}
    guards = parse_guards(program["guards"])
    module, exported = specialise(job, store, leaves, dims, guards)
    narrowed_guards(exported, leaves, guards, dims, variant)
    attentions = Attentions(named=tuple(job.get("attention", ())))
    named = (
        attention_for(torch.cuda.get_device_properties(), attentions, variant) if attentions.named else nullcontext()
    )
    among = job.get("among")  # a miss has none: its store ends with it
    shared = kept if among is None else store
    headers = among is not None and among > ALONE
    with build_folder(store, job["key"]) as folder:
        with named:
            library, others = package(
                exported, variant, job["inductor"], job["cpu"], folder, shared=shared, headers=headers
            )
        facts, archs = needs_of_library(library), archs_inside(library)
        if "libstdc++.so.6" not in facts["needed"].split():
            raise CompileError(
                variant,
                "its library links libstdc++ statically (no NEEDED libstdc++.so.6), which crashes when it is loaded",
                hint=f"set CXX to a compiler that does not; it is {os.environ.get('CXX', 'g++')}",
            )
        runner = open_runner(str(library), 1, torch.device(job["device"]))
        names = runner.get_constant_names_to_original_fqns()
        # The compiler adds guards of its own to the symbols of the program, and says so nowhere (torch 2.13).
        narrowed = aligned_guards(narrowed_guards(exported, leaves, guards, dims, variant))
        _bind_zeros(runner, names, module)
        views = views_of(parse_outputs(program["outputs"]), parse_outputs(program["compiled_outputs"]))
        narrowed = tried_out(runner, module, narrowed, leaves, dims, job["fills"], views)
        examples = sample_sizes(leaves, dims, narrowed)
        if not examples:
            raise CompileError(
                variant,
                "no size that it is declared for is served by one piece of code: the model treats 0 and 1 apart",
                hint="give 0 and 1 as sizes of their own in the manifest",
            )
        files = {"model.so": store.put_file(library)} | {f"model{p.suffix}": store.put_file(p) for p in others}
    gpu = {"cubin": max({job["arch"], *archs}), "cuda": torch.version.cuda} if job["device"] == "cuda" else {}
    needs = {
        "arch": os.uname().machine,
        "cpu": job["cpu"]["needs"],
        "torch": ".".join(map(str, version(torch.__version__)[:2])),
        **gpu,
        **{name: facts[name] for name in ("glibc", "libstdcxx") if name in facts},
    }
    return {
        "files": files,
        "guards": dump_guards(narrowed),
        "examples": [dump_example(item) for item in examples],
        "constants": [[name, weight_name(fqn)] for name, fqn in sorted(names.items())],
        "needs": needs,
        **({"attention": attentions.taken} if attentions.named else {}),
    }


def warm_up(job: Mapping[str, Json], store: Store) -> Json:
    """Import what compiling imports, and where there is enough to compile have that made which all compiles share: some
    ten seconds of CPU that the first variants need not wait for (torch 2.13)."""
    tiny = torch.export.export(torch.nn.Softmax(-1), (torch.zeros(2, 8),))
    if job["device"] == "cpu" and job["among"] > ALONE:
        with build_folder(store, f"warm-up-{os.getpid()}") as folder, torch.no_grad():
            precompile_headers(tiny, job["inductor"], job["cpu"], folder, store)
    return {}


# -------------------------------------------------------------------------------------------------- the program


class _Kept(torch.nn.Module):
    """The program, returning only the results that a compiled variant makes itself."""

    def __init__(self, program: torch.nn.Module, kept: Sequence[int]) -> None:
        super().__init__()
        self.program, self._kept = program, tuple(kept)

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = self.program(*leaves)
        # A package needs an output: a program that only writes its arguments gets one without elements.
        return tuple(results[index] for index in self._kept) or (torch.empty(0, device=leaves[0].device),)

    def run(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """As a compiled variant takes its inputs."""
        results: tuple[torch.Tensor, ...] = self(*inputs)
        return results

    def program_results(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """All results of the program."""
        results: tuple[torch.Tensor, ...] = self.program(*inputs)
        return results


def specialise(
    job: Mapping[str, Json], store: Store, leaves: Sequence[LeafSpec], dims: Dims, wide: Guards
) -> tuple[_Kept, ExportedProgram]:
    """The program with zeros for weights, and traced again with the variant's sizes fixed and its ranges open."""
    program = read_program(store.object(job["program"]["file"]["sha256"]))
    if job["device"] != "cpu":
        _drop_places(program.graph_module)
    tied = job["program"]["tied"]
    zeros: dict[str, torch.Tensor] = {}
    tables: tuple[dict[str, Any], ...] = (program._state_dict, program._constants)
    for table in tables:
        for name, tensor in table.items():
            own = name.removeprefix(PREFIX)
            made = zeros.setdefault(tied.get(own, own), _zeros(tensor, torch.device(job["device"])))
            # What is tied may be turned: a decoder's weight is its encoder's, transposed.
            made = made.as_strided(tensor.shape, tensor.stride())
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            table[name] = torch.nn.Parameter(made, requires_grad=False) if is_parameter else made
    shape = Shape((), tuple("*" for _ in leaves), tuple(leaves))
    sizes = {name: inside(bounds) for name, bounds in dims.items()}
    module = _Kept(program.module(check_guards=False), job["program"]["kept_results"])
    try:
        with torch.no_grad(), quiet_export():
            tensors = tuple(trace_inputs(shape, sizes, job["fills"]))
            return module, traced(
                lambda specs: torch.export.export(module, tensors, dynamic_shapes={"leaves": tuple(specs)}),
                shape, dims, wide,
            )  # fmt: skip
    except Exception as error:
        raise export_error(job["variant"], error, Path(job["folder"]), leaves) from error


def _drop_places(graph_module: torch.fx.GraphModule) -> None:
    """Take out what a trace asserts of where tensors are: a literal is in host memory there, and on the GPU here."""
    check = torch.ops.aten._assert_tensor_metadata.default
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is check and "device" in node.kwargs:
                    module.graph.erase_node(node)
            module.recompile()


def _zeros(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()


def weight_name(fqn: str) -> str:
    return fqn.removeprefix("program.").removeprefix(PREFIX)


def narrowed_guards(
    exported: ExportedProgram, leaves: Sequence[LeafSpec], wide: Guards, dims: Dims, variant: str
) -> Guards:
    """Guards of the variant: those of its own trace and those of the program it was made from, both."""
    own, where = guards_of(exported, leaves, name=variant)
    own = tuple(_as_declared(guard, leaf, dims) for guard, leaf in zip(own, leaves, strict=True))
    merged = tuple(_meet(a, b, variant) for a, b in zip(own, wide.leaves, strict=True))
    relations = {relation.text: relation for relation in (*where, *wide.where)}
    guards = Guards(wide.trees, merged, tuple(relations[text] for text in sorted(relations)))
    for leaf, guard in zip(leaves, guards.leaves, strict=True):
        if isinstance(leaf, TensorLeaf) and isinstance(guard, TensorGuard):
            for axis, (size, dim) in enumerate(zip(leaf.shape, guard.dims, strict=True)):
                _require_declared(size, dim, dims, f"{leaf.path}.shape[{axis}]", variant)
    return guards


def _as_declared(guard: LeafGuard, leaf: LeafSpec, dims: Dims) -> LeafGuard:
    """The guard from 0 or 1 on, where it is so declared: a trace may take an open size to be 2 or more, and
    `tried_out` finds what is true of the others. An int ends where it is declared to, which is as far as it was
    verified: what is computed of it has 64 bits in compiled code, and no end in Python."""
    if isinstance(guard, IntGuard) and isinstance(leaf, IntLeaf):
        low = max(leaf.low, 0) if guard.dim.low == 2 > leaf.low else guard.dim.low
        return replace(guard, dim=Range(low, leaf.high if guard.dim.high is None else guard.dim.high))
    if not isinstance(guard, TensorGuard) or not isinstance(leaf, TensorLeaf):
        return guard

    def lowered(size: int | str, dim: int | Range) -> int | Range:
        if isinstance(dim, int) or isinstance(size, int):
            return dim
        form = parse(size)
        (name,) = form.names
        low = min(dims[name][0], 2)
        return Range(form({name: low}), dim.high) if dim.low == form({name: 2}) else dim

    return replace(guard, dims=tuple(map(lowered, leaf.shape, guard.dims)))


def aligned_guards(guards: Guards) -> Guards:
    """On a GPU kernels load 16 bytes at a time; what lies askew they would copy first, and not write back."""
    leaves = tuple(
        replace(leaf, aligned=leaf.device == "cuda") if isinstance(leaf, TensorGuard) else leaf
        for leaf in guards.leaves
    )
    return replace(guards, leaves=leaves)


def _require_declared(size: int | str, dim: int | Range, dims: Dims, place: str, variant: str) -> None:
    names = [name for name in dims if isinstance(size, str) and name in parse(size).names]
    if isinstance(dim, int) and any(dims[name][0] != dims[name][1] for name in names):
        low, high, _ = dims[names[0]]
        raise CompileError(
            variant, f"dim {names[0]!r} is declared {low}..{high}, but the model fixes {place} to {dim}",
            hint="give it one size, or a list of sizes, in the manifest",
        )  # fmt: skip


def _meet(a: LeafGuard, b: LeafGuard, variant: str) -> LeafGuard:
    if isinstance(a, TensorGuard) and isinstance(b, TensorGuard):
        dims = tuple(
            _meet_dim(x, y, f"{a.path}.shape[{axis}]", variant)
            for axis, (x, y) in enumerate(zip(a.dims, b.dims, strict=True))
        )
        return replace(b, dims=dims, layout=a.layout)
    if isinstance(a, IntGuard) and isinstance(b, IntGuard):
        return IntGuard(path=a.path, dim=a.dim.meet(b.dim))
    return a


def _meet_dim(a: int | Range, b: int | Range, place: str, variant: str) -> int | Range:
    if isinstance(a, Range) and isinstance(b, Range):
        return a.meet(b)
    fixed, other = (a, b) if isinstance(a, int) else (b, a)
    fits = fixed == other if isinstance(other, int) or isinstance(fixed, Range) else fixed in other
    if not fits:
        raise CompileError(variant, f"{place} is {fixed}, which the model does not take: it takes {other}")
    return fixed


# ----------------------------------------------------------------------------------------------- sizes 0 and 1


def _bind_zeros(runner: Any, names: Mapping[str, str], module: _Kept) -> None:
    """Give a library the zeros of the program that it was made from."""
    owned = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    zeros = {weight_name(name): tensor.detach() for name, tensor in owned}
    bound = {constant: zeros[weight_name(fqn)] for constant, fqn in names.items()}
    if bound:
        runner.update_constant_buffer(bound, False, True, False)


def parse_leaf(record: Json) -> LeafSpec:
    if "dtype" in record:
        return TensorLeaf(
            record["path"], record["dtype"], tuple(record["shape"]), record["layout"], record.get("device", "cpu")
        )
    if "low" in record:
        return IntLeaf(record["path"], record["low"], record["high"])
    return ValueLeaf(record["path"], parse_scalar(record["value"]))


def dump_example(example: Example) -> Json:
    return [list(item) if isinstance(item, tuple) else item for item in example]
