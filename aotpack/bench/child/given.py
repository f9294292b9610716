"""What a job is about: the entry's record, the model as a server without aotpack has it, the arguments of a case."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

Json = Any


def entry_of(job: Json) -> Any:
    """The entry's record. Read from the index itself: no session is opened for modes that do without one."""
    return _index(job["bundle"]).entries[job["entry"]]


def variants_of(job: Json) -> dict[str, Any]:
    """Variants and programs of the entry by id."""
    entry = entry_of(job)
    return {variant.id: variant for variant in (*entry.variants, *entry.programs)}


@cache
def _index(path: str) -> Any:
    from aotpack_runtime.bundle import open_bundle

    bundle = open_bundle(path)
    bundle.close()
    return bundle.index


def module_of(job: Json) -> Any:
    """The model as a server without aotpack has it, with only the outputs that the manifest names."""
    import torch

    from aotpack_runtime.loaders.source import build_module, select_outputs

    sys.path.insert(0, job["folder"])
    entry = entry_of(job)
    module = build_module(entry.source.text, entry.source.args).train(entry.training)
    if job["dtype"]:
        module = module.to(getattr(torch, job["dtype"]))
    module = module.to(job["device"])
    if entry.output_names:
        names = entry.output_names
        module.register_forward_hook(lambda module, args, result: select_outputs(result, names))
    return module


def arguments_of(job: Json, case: Json) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a case, as tensors of torch."""
    from aotpack_runtime.fallbacks.source import split_arguments
    from aotpack_runtime.loaders.inputs import make_leaves, unflatten

    entry, variant = entry_of(job), variants_of(job)[case["like"]]
    example = tuple(tuple(one) if isinstance(one, list) else one for one in case["example"])
    leaves = make_leaves(variant.guards, example, entry.fills, device=job["device"])
    values = [unflatten(tree, leaves) for tree in variant.guards.trees]
    return split_arguments(entry.parameters, values)


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Such as `8x128-8x128`: what names the file of a call's shapes."""
    given = [one for one in (*args, *kwargs.values()) if hasattr(one, "shape")]
    return "-".join("x".join(map(str, one.shape)) for one in given)
