"""A program -> an AOTInductor package for a GPU that is not here.

The program is traced again in host memory, as it would be for a CPU, moved to fake tensors of the device, and lowered
there. What a build on a GPU finds out by running the library (sizes 0 and 1, see `aoti.py`) is asked of the graph that
was lowered, run in host memory: a size 1 that the graph serves as the program does is let in, a size 0 never is.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.export import ExportedProgram

from aotpack.compilers.aoti import (
    aligned_guards,
    dump_example,
    narrowed_guards,
    parse_leaf,
    specialise,
    weight_name,
)
from aotpack.compilers.attention import Attentions, attention_for
from aotpack.compilers.cross.choices import Choices
from aotpack.compilers.cross.lowered import Lowered, noted_lowering
from aotpack.compilers.cross.moving import placed, placed_leaf
from aotpack.compilers.cross.pretend import pretended
from aotpack.compilers.cross.program import let_views_copy, on_fake_gpu
from aotpack.compilers.cubin import archs_inside
from aotpack.compilers.inductor import ALONE, build_folder, package
from aotpack.compilers.modules import import_modules
from aotpack.compilers.sizes import Dims
from aotpack.compilers.toolchain import needs_of_library
from aotpack.compilers.trying import sample_sizes, tried_out, views_of
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.codec import dump_guards, parse_guards, parse_outputs
from aotpack_runtime.format.fingerprint import canonical
from aotpack_runtime.format.gpu import parse_arch
from aotpack_runtime.format.guard import Guards, Range, TensorGuard
from aotpack_runtime.format.target import version
from aotpack_runtime.store import Store

Json = Any
log = logging.getLogger("aotpack.cross")


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """The record of a compile as `aoti.compile` gives it, and under `cross` what was chosen instead of timed.

    CompileError names what cannot be compiled without a GPU, and the way to build it on one.
    """
    variant, program = job["variant"], job["program"]
    import_modules(job["imports"], Path(job["folder"]))
    leaves = [placed_leaf(parse_leaf(item), "cpu") for item in program["leaves"]]
    dims: Dims = {name: tuple(bounds) for name, bounds in job["dims"].items()}
    guards = placed(parse_guards(program["guards"]), "cpu")
    here = {**job, "device": "cpu", "program": {**program, "file": program["origin"]}}
    module, exported = specialise(here, store, leaves, dims, guards)
    narrowed_guards(exported, leaves, guards, dims, variant)
    _require_dtypes(exported, job)
    properties, table = SimpleNamespace(**job["cross"]["properties"]), job["cross"]["table"]
    choices, attentions = Choices(table["kernels"]), Attentions(table["attention"], tuple(job.get("attention", ())))
    lowered: list[Lowered] = []
    with build_folder(store, job["key"]) as folder:
        with (
            torch.no_grad(),
            pretended(properties, choices),
            attention_for(properties, attentions, variant),
            noted_lowering(lowered),
        ):
            moved = on_fake_gpu(exported)
            headers = job.get("among", 0) > ALONE
            compiled = partial(
                package, moved, variant, job["inductor"], job["cpu"], folder, shared=store, headers=headers
            )
            try:
                library, others = compiled()
            except CompileError as error:
                if "Cannot view a tensor" not in error.problem:
                    raise
                let_views_copy(moved.graph_module)
                library, others = compiled()
        facts, archs = needs_of_library(library), archs_inside(library)
        _require_of(archs, job)
        narrowed = narrowed_guards(moved, leaves, guards, dims, variant)
        narrowed = _without_empty(narrowed)
        graph = lowered[-1] if lowered else None
        views = views_of(parse_outputs(program["outputs"]), parse_outputs(program["compiled_outputs"]))
        narrowed = tried_out(graph, module, narrowed, leaves, dims, job["fills"], views)
        examples = sample_sizes(leaves, dims, narrowed)
        if not examples:
            raise CompileError(
                variant, "no size that it is declared for is served by one piece of code without being tried on a GPU",
                hint="give 0 and 1 as sizes of their own in the manifest",
            )  # fmt: skip
        constants = constant_names((folder / f"{library.name.removesuffix('.so')}.cpp").read_text())
        made = store.put_file(library)
        # Beside the record, since it names folders of this build.
        store.put_record("to_time", made["sha256"], store.put_bytes(canonical(_to_time(choices, attentions))))
        files = {"model.so": made} | {f"model{p.suffix}": store.put_file(p) for p in others}
    needs = {
        "arch": os.uname().machine,
        "cpu": job["cpu"]["needs"],
        "torch": ".".join(map(str, version(torch.__version__)[:2])),
        "cubin": max({job["arch"], *archs}),
        "cuda": torch.version.cuda,
        **{name: facts[name] for name in ("glibc", "libstdcxx") if name in facts},
    }
    return {
        "files": files,
        "guards": dump_guards(aligned_guards(placed(narrowed, "cuda"))),
        "examples": [dump_example(item) for item in examples],
        "constants": [[name, weight_name(fqn)] for name, fqn in sorted(constants.items())],
        "needs": needs,
        **({"attention": attentions.taken} if attentions.named else {}),
        "cross": {
            "device": properties.name,
            "attention": attentions.taken,
            "kernels": [asdict(choice) for choice in choices.made],
        },
    }


EIGHT_BITS_FROM = (8, 9)


def _require_dtypes(exported: ExportedProgram, job: Mapping[str, Json]) -> None:
    """CompileError for numbers of eight bits that kernels of the architecture do not know."""
    if parse_arch(job["arch"]).capability >= EIGHT_BITS_FROM:
        return
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        new = isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn
        if new or node.target is torch.ops.aten._scaled_mm.default:
            raise CompileError(
                job["variant"], f"float8_e4m3fn takes sm_89 or newer, and this is for {job['arch']}",
                hint="list newer architectures alone under the entry's `targets`",
            )  # fmt: skip


def _to_time(choices: Choices, attentions: Attentions) -> Json:
    """What `aotpack tune` times on a GPU: code that calls every kernel, and calls of attention."""
    return {
        "code": "\n".join(choices.code),
        "attention": [asdict(attention) for attention in dict.fromkeys(attentions.made)],
    }


_CONSTANT = re.compile(r'constants_info_\[(\d+)\]\.(name|original_fqn) = "((?:[^"\\]|\\.)*)";')


def constant_names(wrapper: str) -> dict[str, str]:
    """The library's own name of each constant -> its name in the model, as the generated C++ says: the library itself
    could only be asked on a GPU."""
    found: dict[str, dict[str, str]] = {}
    for number, field, text in _CONSTANT.findall(wrapper):
        found.setdefault(number, {})[field] = text
    return {item["name"]: item["original_fqn"] for item in found.values()}


def _require_of(archs: set[str], job: Mapping[str, Json]) -> None:
    wanted = job["arch"]
    foreign = sorted(arch for arch in archs if arch.rstrip("af") != wanted)
    if foreign:
        raise CompileError(job["variant"], f"a kernel came out for {foreign[0]}, not for {wanted}")


def _without_empty(guards: Guards) -> Guards:
    """From 1 on: whether kernels take an empty tensor only a GPU can tell."""

    def whole(dim: int | Range) -> int | Range:
        return Range(max(dim.low, 1), dim.high) if isinstance(dim, Range) else dim

    leaves = [
        replace(leaf, dims=tuple(map(whole, leaf.dims))) if isinstance(leaf, TensorGuard) else leaf
        for leaf in guards.leaves
    ]
    return replace(guards, leaves=tuple(leaves))
