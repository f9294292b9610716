"""Records of torch jobs -> an entry of the index, and its set of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotpack.compilers.toolchain import cpu_level
from aotpack.declared import only_tried
from aotpack.manifest_model import TorchExportEntry
from aotpack.plan import EntryPlan, VariantPlan
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.codec import parse_guards, parse_outputs
from aotpack_runtime.format.entry_json import parse_parameter
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.index import (
    ArtifactRef,
    Entry,
    File,
    Recipe,
    RecipeTarget,
    Source,
    Variant,
    WeightRef,
    WeightSet,
)
from aotpack_runtime.format.output import Result
from aotpack_runtime.format.target import Target, version

Json = Any


def weight_set(export: Json) -> WeightSet:
    """What the export says of the model's parameters and buffers."""
    weights = export["weights"]
    refs = {
        name: WeightRef(ref["tensor"], tuple(ref["order"]) if "order" in ref else None, ref.get("host", False))
        for name, ref in weights["weights"].items()
    }
    return WeightSet(refs, tuple(weights["state"]), weights["dtype"])


def torch_entry(
    plan: EntryPlan, manifest: TorchExportEntry, export: Json, compiled: Mapping[str, Json], weights: str
) -> Entry:
    """The entry at one precision for one target, of the variants that were compiled, over the set named `weights`."""
    programs = [_program(plan, number, record, weights) for number, record in enumerate(export["programs"])]
    variants = [
        _variant(plan, variant, export, compiled[variant.id], weights)
        for variant in plan.variants
        if variant.id in compiled
    ]
    return Entry(
        name=plan.entry,
        parameters=tuple(parse_parameter(record) for record in export["parameters"]),
        variants=tuple(variants),
        programs=tuple(programs),
        source=Source(manifest.source, dict(manifest.args), export["source_files"]),
        fills=plan.export["fills"],
        on_miss=_on_miss(plan, manifest, variants, export),
        verify={
            **manifest.verify.model_dump(mode="json"),
            "random": export["random"],
            **_tried(plan, export, programs),
        },
        imports=tuple(manifest.imports),
        operators=export["operators"],
        output_names=manifest.outputs,
        training=export["training"],
    )


def _tried(plan: EntryPlan, export: Json, programs: Sequence[Variant]) -> dict[str, Json]:
    """By program the sizes that eager need not take: on a GPU it may refuse what was tried in host memory."""
    if plan.device == "cpu":
        return {}
    pairs = zip(programs, export["programs"], strict=True)
    found = {program.id: only_tried(plan, record) for program, record in pairs}
    return {"tried": {name: examples for name, examples in found.items() if examples}} if any(found.values()) else {}


def _on_miss(plan: EntryPlan, manifest: TorchExportEntry, variants: Sequence[Variant], export: Json) -> dict[str, Json]:
    """The manifest's policy, its padded dims written as (axis, sizes) of each argument.

    CompileError for an entry whose padded results could not be cut back.
    """
    record: dict[str, Json] = manifest.on_miss.model_dump(mode="json")
    dims = record["pad"] or {}
    axes: dict[str, list[Json]] = {}
    for path, item in plan.export["inputs"].items():
        for axis, size in enumerate(item.get("tensor", {}).get("shape", ())):
            if size in dims:
                axes.setdefault(path, []).append([axis, dims[size]])
    record["pad"] = axes
    if manifest.on_miss.policy != "pad":
        return record
    results = [leaf for variant in variants for leaf in variant.outputs.leaves]
    own = all(isinstance(leaf, Result) and leaf.shape is not None for leaf in results)
    if not axes or not own or export["weights"]["state"]:
        raise CompileError(
            plan.entry,
            "on_miss: pad needs `pad` dims, results that are tensors of their own in shapes that follow from the call, "
            "and a model that writes no state",
            hint="use policy jit or eager",
        )
    return record


def _variant(plan: EntryPlan, variant: VariantPlan, export: Json, record: Json, weights: str) -> Variant:
    program = export["programs"][export["program_of_variant"][variant.id]]
    return Variant(
        id=variant.id,
        point=variant.point,
        tier=variant.tier,  # type: ignore[arg-type]
        target=Target(plan.device, record["needs"]),
        artifact=_artifact("aoti", record["files"]),
        guards=parse_guards(record["guards"]),
        outputs=parse_outputs(program["compiled_outputs"]),
        weights=weights,
        constants=tuple((name, weight) for name, weight in record["constants"]),
        examples=tuple(_example(item) for item in record["examples"]),
    )


def _program(plan: EntryPlan, number: int, record: Json, weights: str) -> Variant:
    name = "/".join(part for part in (plan.entry, f"program{number}", plan.precision) if part)
    return Variant(
        id=name if plan.target == "cpu" else f"{name}/{plan.target}",
        point="",
        tier="rare",
        target=Target(plan.device, {"torch_min": ".".join(map(str, version(record["torch"])[:2]))}),
        artifact=_artifact("exported", {"program.pt2": record["file"]}),
        guards=parse_guards(record["guards"]),
        outputs=parse_outputs(record["outputs"]),
        weights=weights,
        constants=tuple((name, weight) for name, weight in record["constants"]),
        examples=tuple(_example(item) for item in record["examples"]),
        recipe=_recipe(plan, record),
    )


def _recipe(plan: EntryPlan, record: Json) -> Recipe:
    """How a miss compiles from the program what the manifest's own points were compiled to. On a GPU that is for the
    one at hand, whichever the target names."""
    level = cpu_level(plan.compile["cpu"]["march"], plan.compile["cpu"]["simd"])
    host = {"march": level.march, "simd_bits": level.simd_bits, "needs": level.needs}
    job = {"cpu": host, "device": plan.device, "arch": plan.arch}
    if plan.compile["attention"]:
        job["attention"] = plan.compile["attention"]
    target = RecipeTarget(target=Target(plan.device, {"cpu": level.needs}), job=job)
    return Recipe(
        outputs=parse_outputs(record["compiled_outputs"]),
        options=dict(plan.compile["inductor"]),
        targets=(target,),
    )


def _artifact(kind: str, files: Mapping[str, Mapping[str, Json]]) -> ArtifactRef:
    found = {name: _file(record) for name, record in files.items()}
    if kind == "exported":
        (file,) = found.values()
        return ArtifactRef(kind, file.digest, found)
    return ArtifactRef(kind, fingerprint({name: file.digest for name, file in found.items()}), found)


def _file(record: Mapping[str, Json]) -> File:
    return File(record["sha256"], record["bytes"])


def _example(record: Json) -> tuple[tuple[int, ...] | int | None, ...]:
    return tuple(tuple(item) if isinstance(item, list) else item for item in record)
