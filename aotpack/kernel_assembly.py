"""Records of kernel jobs -> an entry of the index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aotpack.kernel_jobs import job_name
from aotpack.kernel_plan import KernelPlan, candidates
from aotpack.kernel_variants import kernel_variant
from aotpack.manifest_kernels import KernelEntry
from aotpack.tuning import read_table
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.choice import Choice, Rule, Timed
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.gpu import parse_arch
from aotpack_runtime.format.index import (
    Entry,
    File,
    Kernel,
    KernelRecipe,
    Parameter,
    Source,
    Variant,
)

Json = Any

_SCHEMA_TYPES = {
    "pointer": "Tensor", "descriptor": "Tensor", "int": "int", "literal": "int", "float": "float", "bool": "bool",
}  # fmt: skip


def kernel_entry(
    plan: KernelPlan,
    source: Json,
    compiled: Mapping[str, Json],
    folder: Path | None,
    failed: Callable[[str, CompileError], None],
    *,
    root: Path,
) -> Entry:
    """The entry of one target, of the variants that were compiled; tuning tables are looked up in `folder`, a
    reference that may serve in `root`, the manifest's folder.

    `failed` is told of a variant that was compiled and cannot be launched as the manifest says; it may raise.
    """
    record = plan.record
    names, extras = _arguments(plan), record.extra_names()
    parameters = [Parameter(name, "positional_or_keyword") for name in names]
    parameters += [Parameter(name, "keyword_only") for name in extras]
    variants = []
    for variant in plan.variants:
        if job_name(plan, variant) in compiled:
            try:
                variants.append(kernel_variant(plan, variant, (*names, *extras), compiled[job_name(plan, variant)]))
            except CompileError as error:
                failed(variant.id, error)
    words = plan.variants[0].words
    writes = record.writes or tuple(n for n in names if words[n].kind == "pointer" and not words[n].const)
    return Entry(
        name=plan.entry,
        parameters=tuple(parameters),
        variants=tuple(variants),
        programs=(),
        source=Source(record.source, {}, _reference_files(record, root)),
        fills={name: _fill(fill) for name, fill in record.fill.items()},
        on_miss=record.on_miss.model_dump(mode="json"),
        verify=_verify(record),
        kernel=Kernel(
            text=File(source["file"]["sha256"], source["file"]["bytes"]),
            suffix=".py" if plan.kind == "triton" else ".cu",
            writes=writes,
            types=(*[_SCHEMA_TYPES[words[name].kind] for name in names], *["int"] * len(extras)),
            operator=record.op or "",
            choice=_choice(plan, folder),
            recipe=_recipe(plan, source),
        ),
    )


def _recipe(plan: KernelPlan, source: Json) -> KernelRecipe | None:
    """How a miss compiles variants that the manifest does not list; None where the source cannot be carried."""
    if not source["files"]:
        return None
    files = {path: File(file["sha256"], file["bytes"]) for path, file in source["files"].items()}
    archs = tuple(dict.fromkeys(variant.arch for variant in plan.variants))
    return KernelRecipe(manifest=plan.record.model_dump(mode="json"), files=files, archs=archs)


def in_order(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Variants of several targets in the order in which calls try them: machine code of the newest architecture first,
    PTX last, and otherwise as they are."""

    def place(variant: Variant) -> tuple[bool, tuple[int, ...]]:
        needs = variant.target.needs
        arch = parse_arch((needs.get("cubin") or needs["ptx"]).partition(" ")[0])
        return "ptx" in needs, tuple(-number for number in arch.capability)

    return tuple(sorted(variants, key=place))


def _arguments(plan: KernelPlan) -> tuple[str, ...]:
    """Parameters that a call gives."""
    words = plan.variants[0].words
    return tuple(name for name in plan.record.params if words[name].kind != "constexpr")


def _choice(plan: KernelPlan, folder: Path | None) -> Choice:
    record = plan.record
    picks = record.config_picks()
    rules = []
    for rule in record.rules:
        pick = {name: value for name, value in rule.items() if name not in ("when", "config")}
        if "config" in rule and picks:
            pick |= picks[int(str(rule["config"]))]
        rules.append(Rule(parse(str(rule["when"])) if "when" in rule else None, pick))  # type: ignore[arg-type]
    if record.choose == "smallest":
        return Choice()
    return Choice(tuple(rules), tuning_table(plan, folder) if folder else None)


def tuning_table(plan: KernelPlan, folder: Path) -> dict[str, tuple[Timed, ...]] | None:
    """What was measured for this entry, looked up in `folder`; None when nothing was, or it is not tuned. CompileError
    for a table of other candidates than the manifest has."""
    record = plan.record
    if record.choose != "tuned" or record.tuning is None:
        return None
    sizes = set(record.key) - record.axis_values().keys()
    return read_table(folder / record.tuning, plan.entry, candidates(record), key=record.key, sizes=sizes)


def _verify(record: KernelEntry) -> dict[str, Json]:
    return {
        **({} if record.verify is None else record.verify.model_dump(mode="json")),
        "cases": record.calls(),
        "shapes": {name: list(dims) for name, dims in record.shapes.items()},
    }


def _reference_files(record: KernelEntry, root: Path) -> dict[str, str]:
    """Module -> digest, of a reference that may serve and lies beside the manifest: a server takes no other one."""
    if not record.on_miss.reference or record.verify is None:
        return {}
    name = record.verify.against.partition(":")[0]
    paths = [root / f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    found = next((path for path in paths if path.is_file()), None)
    return {} if found is None else {name: hashlib.sha256(found.read_bytes()).hexdigest()}


def _fill(fill: Any) -> Json:
    return fill if isinstance(fill, str) else {"randint": list(fill.randint)}
