"""Records of jobs -> the index of a bundle."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aotpack.compilers.cross.gate import proof_of
from aotpack.compilers.toolchain import missing_for_gpu
from aotpack.kernel_assembly import in_order, kernel_entry
from aotpack.manifest_model import TorchExportEntry
from aotpack.plan import EntryPlan, Plan
from aotpack.torch_assembly import torch_entry, weight_set
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.index import Entry, File, Index, Variant, WeightSet

Json = Any


@dataclass(frozen=True, slots=True)
class Draft:
    """An index whose weights are still one file a set; `parts` names those files."""

    index: Index
    parts: Mapping[str, Mapping[str, Json]]

    def finish(self, file: Mapping[str, Json] | None, *, merged: bool) -> Index:
        """The index over one weights file; in a merged one each tensor is named behind its set."""
        sets = self.index.weight_sets
        if merged:
            sets = {
                name: replace(
                    item, weights={k: replace(ref, tensor=f"{name}/{ref.tensor}") for k, ref in item.weights.items()}
                )
                for name, item in sets.items()
            }
        weights = None if file is None else File(file["sha256"], file["bytes"])
        return replace(self.index, weights_file=weights, weight_sets=sets)


def make_index(
    plan: Plan,
    sources: Mapping[int, Json],
    compiled: Mapping[str, Json],
    tools: Mapping[str, str],
    *,
    tables: bool = True,
    failures: dict[str, str] | None = None,
) -> Draft:
    """The index of everything that was exported and compiled; entries of which nothing was are left out.

    `sources` holds, by place in the plan, what each entry's export (or the look at a kernel's source) gave. What cannot
    be put together raises CompileError, or is left out and noted in `failures`.
    """

    def failed(variant: str, error: CompileError) -> None:
        if failures is None:
            raise error
        failures[variant] = str(error)

    manifest = plan.manifest
    entries: dict[str, Entry] = {}
    sets: dict[str, WeightSet] = {}
    parts: dict[str, Mapping[str, Json]] = {}
    for number, entry_plan in enumerate(plan.entries):
        source = sources.get(number)
        if source is None:
            continue
        if isinstance(entry_plan, EntryPlan):
            record = manifest.entries[entry_plan.entry]
            assert isinstance(record, TorchExportEntry)
            found, name = weight_set(source), entry_plan.weights
            if sets.get(name, found) != found:  # forward() makes other literals on a GPU
                name = f"{name}/{entry_plan.target}"
            sets[name], parts[name] = found, source["weights"]["file"]
            made = torch_entry(entry_plan, record, source, compiled, name)
        else:
            root = manifest.path.absolute().parent
            try:
                made = kernel_entry(entry_plan, source, compiled, root if tables else None, failed, root=root)
            except CompileError as error:  # of the entry as a whole, such as its table
                for variant in entry_plan.variants:
                    failed(variant.id, error)
                continue
        known = entries.get(entry_plan.entry)
        entries[entry_plan.entry] = made if known is None else _joined(known, made)
    index = Index(
        name=manifest.bundle.name,
        version=manifest.bundle.version,
        labels=dict(manifest.bundle.labels),
        requires=dict(manifest.requires),
        entries={name: entry for name, entry in entries.items() if entry.variants},
        weights_file=None,
        weight_sets=sets,
        provenance={
            "aotpack": importlib.metadata.version("aotpack"),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "tools": dict(tools),
            **_across(plan, compiled),
            **_attention(plan, compiled),
        },
        settings={"cache_max_bytes": manifest.runtime.cache_max_size},
    )
    return Draft(index, parts)


def _across(plan: Plan, compiled: Mapping[str, Json]) -> dict[str, Json]:
    """What is to be said of variants that were built without their GPU: for which, what was chosen where a build on one
    would have timed, and that nobody has run them."""
    said: dict[str, Json] = {}
    for entry in plan.entries:
        if not isinstance(entry, EntryPlan) or not entry.across:
            continue
        for variant in entry.variants:
            cross = compiled.get(variant.id, {}).get("cross")
            if cross:
                why = [kernel["why"] for kernel in cross["kernels"]]
                said[variant.id] = {
                    "device": cross["device"],
                    "attention": cross["attention"],
                    "kernels": {word: why.count(word) for word in sorted(set(why))},
                    "proof": proof_of(entry.arch),
                    "verified": "not on this machine" if missing_for_gpu(entry.arch) else "when it was built",
                }
    return {"cross": said} if said else {}


def _attention(plan: Plan, compiled: Mapping[str, Json]) -> dict[str, Json]:
    """Of variants whose manifest names operators of attention: those, and which were taken."""
    said = {
        variant.id: {"named": entry.compile["attention"], "taken": compiled[variant.id]["attention"]}
        for entry in plan.entries
        if isinstance(entry, EntryPlan) and entry.compile["attention"]
        for variant in entry.variants
        if variant.id in compiled
    }
    return {"attention": said} if said else {}


def _joined(known: Entry, more: Entry) -> Entry:
    """One entry built for another target or precision as well; programs that are the same are kept once."""
    added = {_identity(program): program for program in more.programs}
    programs = [_with_targets(program, added.pop(_identity(program), None)) for program in known.programs]
    variants = (*known.variants, *more.variants)
    kernel = known.kernel
    if kernel is not None:
        variants = in_order(variants)
        if kernel.recipe is not None and more.kernel is not None and more.kernel.recipe is not None:
            archs = tuple(dict.fromkeys((*kernel.recipe.archs, *more.kernel.recipe.archs)))
            kernel = replace(kernel, recipe=replace(kernel.recipe, archs=archs))
    tried = {**known.verify.get("tried", {}), **more.verify.get("tried", {})}
    verify = {**known.verify, **({"tried": tried} if tried else {})}
    return replace(known, variants=variants, programs=(*programs, *added.values()), verify=verify, kernel=kernel)


def _identity(program: Variant) -> tuple[str, str, str]:
    return program.artifact.digest, program.weights, program.target.device


def _with_targets(program: Variant, same: Variant | None) -> Variant:
    """`program`, of which variants are compiled for the targets of the other plan as well."""
    if program.recipe is None or same is None or same.recipe is None:
        return program
    targets = (*program.recipe.targets, *same.recipe.targets)
    return replace(program, recipe=replace(program.recipe, targets=targets))
