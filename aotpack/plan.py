"""Manifest -> the jobs it takes, in order. Pure: nothing is imported, opened or compiled here.

An entry is exported once for each precision, and each of its variants is compiled from what that export gave. Variants
are in the order in which a call tries them: all-static before ranged, then the smallest product of range widths, then
the order of the manifest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aotpack.devices import Device
from aotpack.kernel_plan import KernelPlan, plan_kernel
from aotpack.manifest_devices import find_device
from aotpack.manifest_inputs import (
    ClassInput,
    DictInput,
    Input,
    IntInput,
    ListInput,
    RandintFill,
    TensorInput,
    TupleInput,
    ValueInput,
)
from aotpack.manifest_model import CpuTarget, CudaTarget, Manifest, TorchExportEntry
from aotpack.manifest_values import Range
from aotpack_runtime.errors import ManifestError, Problem
from aotpack_runtime.format.gpu import parse_arch

Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantPlan:
    """One variant to compile: its sizes by dim name, and the optional inputs that it leaves out."""

    id: str
    point: str
    tier: str
    dims: Mapping[str, Range]
    absent: tuple[str, ...] = ()

    @property
    def static(self) -> bool:
        return all(size.min == size.max for size in self.dims.values())

    @property
    def width(self) -> float:
        """Product of range widths; infinite for a range without an end."""
        return math.prod(math.inf if size.max is None else size.max - size.min + 1 for size in self.dims.values())

    def record(self) -> Json:
        dims = {name: [size.min, size.max, size.opt] for name, size in self.dims.items()}
        return {"id": self.id, "absent": list(self.absent), "dims": dims}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPlan:
    """One entry at one precision for one target: what to export, and what to compile from it.

    On CUDA for one architecture, `arch` ("" on a CPU), and for the device `gpu` where the manifest names one: that can
    be built for without one. `twin` is the export of the same model for a CPU, which such a build shares; `across` is
    set where it is one (`ways.py`).
    """

    entry: str
    target: str
    device: str
    precision: str
    arch: str
    variants: tuple[VariantPlan, ...]
    export: Mapping[str, Json]
    compile: Mapping[str, Json]
    gpu: Device | None = None
    twin: Mapping[str, Json] | None = None
    across: bool = False

    @property
    def weights(self) -> str:
        """Name of its weight set."""
        return f"{self.entry}/{self.precision}" if self.precision else self.entry


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a manifest asks for."""

    manifest: Manifest
    entries: tuple[EntryPlan | KernelPlan, ...]


def make_plan(manifest: Manifest, *, only: str = "*", target: str | None = None) -> Plan:
    """The jobs of `manifest`, of variants whose id matches the glob `only` and of one target if it is named.

    ManifestError when two variants would have equal guards, or nothing is left to build.
    """
    from fnmatch import fnmatch

    if target is not None and target not in manifest.targets:
        names = ", ".join(manifest.targets)
        raise ManifestError([Problem("--target", 1, 1, "", f"no target {target!r}; the manifest has: {names}")])
    plans: list[EntryPlan | KernelPlan] = []
    for name, entry in manifest.entries.items():
        if isinstance(entry, TorchExportEntry):
            plans += _with_twins(list(_entry_plans(manifest, name, entry)))
        else:
            plans += plan_kernel(manifest, name, entry)
    chosen: list[EntryPlan | KernelPlan] = []
    for plan in plans:
        if target is not None and plan.target != target:
            continue
        kept = [fnmatch(variant.id, only) or fnmatch(plan.entry, only) for variant in plan.variants]
        if isinstance(plan, KernelPlan):
            chosen += [replace(plan, variants=tuple(itertools.compress(plan.variants, kept)))] if any(kept) else []
        elif any(kept):
            chosen.append(_only(plan, kept))
    if not chosen:
        raise ManifestError([Problem("--only", 1, 1, "", f"{only!r} matches no variant; `aotpack plan` lists them")])
    return Plan(manifest, tuple(chosen))


def _only(plan: EntryPlan, kept: list[bool]) -> EntryPlan:
    """The plan of the variants that are `kept`; a twin has the same ones in the same order."""
    twin, variants = plan.twin, tuple(itertools.compress(plan.variants, kept))
    if twin is not None:
        twin = {**twin, "variants": list(itertools.compress(twin["variants"], kept))}
    export = {**plan.export, "variants": [variant.record() for variant in variants]}
    return replace(plan, variants=variants, export=export, twin=twin)


def _entry_plans(manifest: Manifest, name: str, entry: TorchExportEntry) -> Iterator[EntryPlan]:
    targets = entry.targets or tuple(manifest.targets)
    precisions: list[tuple[str, str]] = [(p.params, p.target) for p in entry.precisions or ()]
    precisions = precisions or [("", target) for target in targets]
    seen: dict[str, str] = {}
    for precision, target_name in precisions:
        if target_name in seen:
            message = (
                f"precisions {seen[target_name]} and {precision} of target {target_name!r} would have equal guards"
            )
            raise ManifestError([Problem(str(manifest.path), 1, 1, f"entries.{name}.precisions", message)])
        seen[target_name] = precision
        target = manifest.targets[target_name]
        fills: dict[str, Json] = {}
        inputs = {argument: _input(item, argument, fills) for argument, item in entry.inputs.items()}
        host = target if isinstance(target, CpuTarget) else HOST_OF_GPU
        for arch in _archs(target):
            several = isinstance(target, CudaTarget) and len(target.arch) > 1
            suffix = "/".join(part for part in (precision, target_name, arch if several else "") if part)
            variants = tuple(_variants(manifest, name, entry, suffix))
            yield EntryPlan(
                entry=name,
                target=target_name,
                device=target.kind,
                precision=precision,
                arch=arch,
                variants=variants,
                export={
                    "entry": name,
                    "source": entry.source,
                    "args": dict(entry.args),
                    "precision": precision,
                    "training": entry.training,
                    "outputs": list(entry.outputs) if entry.outputs else None,
                    "imports": list(entry.imports),
                    "inputs": inputs,
                    "fills": fills,
                    "variants": [variant.record() for variant in variants],
                    **({"device": target.kind} if target.kind != "cpu" else {}),
                },
                compile={
                    "inductor": dict(entry.inductor),
                    "cpu": {"march": host.march, "simd": host.simd},
                    "tuning": entry.tuning,
                    "attention": list(entry.attention or ()) if target.kind == "cuda" else [],
                },
                gpu=find_device(target.devices, arch, manifest.devices) if isinstance(target, CudaTarget) else None,
            )


def _with_twins(plans: list[EntryPlan]) -> list[EntryPlan]:
    """Plans of one entry, those for a GPU with the export for a CPU that is of the same precision: that of a CPU target
    if there is one, else one for all of them."""
    on_cpu: dict[str, Mapping[str, Json]] = {}
    for plan in sorted(plans, key=lambda plan: plan.device != "cpu"):
        if plan.device == "cpu" or plan.gpu:
            export = {name: value for name, value in plan.export.items() if name != "device"}
            on_cpu.setdefault(plan.precision, export)
    return [replace(plan, twin=on_cpu[plan.precision]) if plan.gpu else plan for plan in plans]


HOST_OF_GPU = CpuTarget(kind="cpu")
"""The level of the code beside a GPU that launches its kernels."""


def _archs(target: CpuTarget | CudaTarget) -> list[str]:
    """One plan each: newest first, since a GPU takes machine code of the nearest capability below its own."""
    if isinstance(target, CpuTarget):
        return [""]
    return sorted(target.arch, key=lambda arch: parse_arch(arch).capability, reverse=True)


def _variants(manifest: Manifest, name: str, entry: TorchExportEntry, suffix: str) -> list[VariantPlan]:
    """All variants of an entry, in the order in which calls try them."""
    optional = [argument for argument, item in entry.inputs.items() if isinstance(item, TensorInput) and item.optional]
    found: list[VariantPlan] = []
    owner: dict[object, str] = {}
    for point in entry.points:
        axes = [[(dim, size) for size in sizes] for dim, sizes in point.dims.items()]
        for chosen, absent in itertools.product(itertools.product(*axes), _subsets(optional)):
            dims = dict(chosen)
            label = "-".join([f"{dim}{_size_text(size)}" for dim, size in dims.items()] + [f"no_{a}" for a in absent])
            identity = (tuple((dim, size.min, size.max) for dim, size in sorted(dims.items())), absent)
            if identity in owner:
                message = (
                    f"points {owner[identity]!r} and {point.name!r} both ask for {label}: their guards would be equal"
                )
                raise ManifestError([Problem(str(manifest.path), 1, 1, f"entries.{name}.points", message)])
            owner[identity] = point.name
            variant_id = "/".join(part for part in (name, label or "fixed", suffix) if part)
            found.append(VariantPlan(id=variant_id, point=point.name, tier=point.tier, dims=dims, absent=absent))
    return sorted(found, key=lambda variant: (not variant.static, variant.width))


def _subsets(optional: list[str]) -> list[tuple[str, ...]]:
    """Which optional inputs are left out: none, then every other choice."""
    return [chosen for count in range(len(optional) + 1) for chosen in itertools.combinations(optional, count)]


def _size_text(size: Range) -> str:
    if size.min == size.max:
        return str(size.min)
    return f"{size.min}_{'inf' if size.max is None else size.max}"


def _input(item: Input, path: str, fills: dict[str, Json]) -> Json:
    """An input as a job carries it; the fill of each tensor is noted under its path."""
    match item:
        case TensorInput():
            fills[path] = {"randint": list(item.fill.randint)} if isinstance(item.fill, RandintFill) else item.fill
            shape = [size if isinstance(size, int) else str(size) for size in item.shape]
            return {"tensor": {"dtype": item.dtype, "shape": shape, "layout": item.layout}}
        case IntInput():
            return {"int": list(item.range)}
        case ValueInput():
            return {"value": item.value}
        case ListInput() | TupleInput():
            kind = "list" if isinstance(item, ListInput) else "tuple"
            return {kind: [_input(part, f"{path}[{n}]", fills) for n, part in enumerate(item.items)]}
        case DictInput():
            return {"dict": {key: _input(part, f"{path}[{key!r}]", fills) for key, part in item.items.items()}}
        case ClassInput():
            fields = {key: _input(part, f"{path}.{key}", fills) for key, part in item.fields.items()}
            return {"class": item.class_path, "fields": fields}
    raise AssertionError(f"unknown input {item}")
