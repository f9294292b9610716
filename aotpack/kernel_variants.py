"""A compiled kernel -> a variant of the index: guards from the parameters' words, and how it is launched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aotpack.kernel_plan import KernelPlan, KernelVariant, folded
from aotpack.manifest_kernel_rules import SHARED_LIMIT
from aotpack.manifest_kernels import NvrtcEntry
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.expression import Expression, parse
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.gpu import SHARED_EVERYWHERE, parse_arch
from aotpack_runtime.format.guard import (
    DescriptorGuard,
    Guards,
    IntGuard,
    LeafGuard,
    NumberGuard,
    PointerGuard,
    Range,
    ValueGuard,
)
from aotpack_runtime.format.index import ArtifactRef, File, Variant
from aotpack_runtime.format.launch import (
    BLOCK_LIMIT,
    CODE_BYTES,
    GRID_LIMITS,
    Descriptor,
    Extent,
    Launch,
    Parameter,
    Slot,
)
from aotpack_runtime.format.output import Outputs, Value
from aotpack_runtime.format.target import Target
from aotpack_runtime.format.tree import LEAF
from aotpack_runtime.format.words import Word

Json = Any


def kernel_variant(plan: KernelPlan, variant: KernelVariant, names: tuple[str, ...], record: Json) -> Variant:
    """The variant of one compiled kernel, whose entry has the arguments `names`; CompileError when it cannot be
    launched as the manifest says."""
    is_ptx = record["format"] == "ptx"
    file = File(record["file"]["sha256"], record["file"]["bytes"])
    kind = "ptx" if is_ptx else "cubin"
    files = {f"kernel.{kind}": file}
    needs = {"ptx": f"{variant.arch} {record['ptx_version']}"} if is_ptx else {"cubin": record["arch"]}
    kernel = record if plan.kind == "triton" else record["kernels"][variant.expression]
    launch = _launch(plan, variant, names, kernel)
    if launch.cluster != (1, 1, 1) and parse_arch(variant.arch).capability < (9, 0):
        raise CompileError(variant.id, f"clusters need sm_90 or newer, this is {variant.arch}")
    shared = kernel.get("static_shared_bytes") or 0
    shared += 0 if launch.shared.names else launch.shared({})
    if shared > SHARED_EVERYWHERE:
        needs["shared"] = str(shared)
    return Variant(
        id=variant.id,
        point="",
        tier="hot",
        target=Target("cuda", needs),
        artifact=ArtifactRef(kind, fingerprint({name: one.digest for name, one in files.items()}), files),
        guards=_guards(plan, variant, names, launch, kernel.get("max_threads")),
        outputs=Outputs(LEAF, (Value(None),)),
        weights="",
        constants=(),
        examples=(),
        axes=dict(variant.axes),
        launch=launch,
    )


def _guards(
    plan: KernelPlan, variant: KernelVariant, names: tuple[str, ...], launch: Launch, most_threads: int | None
) -> Guards:
    leaves, where = [], []
    for name in names:
        word = variant.words.get(name, Word("int", low=0, high=2**31 - 1))
        leaves.append(_leaf_guard(name, word))
        if word.kind == "int" and word.divisor > 1:
            where.append(parse(f"{name} % {word.divisor} == 0"))
    where += [parse(folded(text, _constants(variant))) for text in plan.record.guards]
    limits = [*zip(launch.grid, (0, 0, 0), GRID_LIMITS, strict=True)]
    limits += [(extent, 1, BLOCK_LIMIT) for extent in launch.block] + [(launch.shared, 0, SHARED_LIMIT)]
    extras = set(plan.record.extra_names())
    for expression, low, high in limits:
        known = expression.text in extras and high == GRID_LIMITS[0]
        if expression.names and not known:
            where.append(parse(f"{low} <= {expression} <= {high}"))
    if any(extent.names for extent in launch.block):
        x, y, z = launch.block
        where.append(parse(f"({x}) * ({y}) * ({z}) <= {min(BLOCK_LIMIT, most_threads or BLOCK_LIMIT)}"))
    return Guards((LEAF,) * len(names), tuple(leaves), tuple(where))


def _constants(variant: KernelVariant) -> dict[str, Any]:
    """What a name in an expression stands for in this variant: its axes, and arguments folded to a value."""
    return dict(variant.axes) | {name: word.value for name, word in variant.words.items() if word.kind == "literal"}


def _leaf_guard(name: str, word: Word) -> LeafGuard:
    match word.kind:
        case "pointer":
            return PointerGuard(path=name, dtype=word.dtype, device="cuda", aligned=word.divisor > 1)
        case "descriptor":
            return DescriptorGuard(path=name, dtype=word.dtype, device="cuda", rank=len(word.block))
        case "int":
            return IntGuard(path=name, dim=Range(word.low, word.high))
        case "literal":
            return ValueGuard(path=name, value=word.value)
        case _:
            return NumberGuard(path=name, kind=word.kind)


def _launch(plan: KernelPlan, variant: KernelVariant, names: tuple[str, ...], kernel: Json) -> Launch:
    record = plan.record
    grid = _three([folded(text, _constants(variant)) for text in record.grid])
    if isinstance(record, NvrtcEntry):
        block = _three([folded(text, _constants(variant)) for text in record.block])
        shared = parse(folded(record.smem, _constants(variant)))
        cluster = (*(record.cluster or ()), 1, 1, 1)[:3]
        _check_threads(variant, block, kernel["max_threads"])
        _check_limits(variant, record, kernel)
        parameters: list[Parameter] = [*_cxx_parameters(variant, names, kernel["params"])]
        cooperative, overlap = record.cooperative, False
    else:
        x, y, z = kernel["block"]
        block, shared = (parse(str(x)), parse(str(y)), parse(str(z))), parse(str(kernel["shared_bytes"]))
        cluster = tuple(kernel["cluster"])
        if cluster[0] > 1:  # a program of Triton's grid is a whole cluster
            grid = (parse(f"({grid[0]}) * {cluster[0]}"), *grid[1:])
        parameters = list(_triton_parameters(variant, names, kernel))
        cooperative, overlap = kernel["cooperative"], kernel["pdl"]
    last = kernel["params"][-1] if kernel["params"] else {"offset": 0, "bytes": 0}
    return Launch(
        symbol=kernel["symbol"],
        parameters=tuple(parameters),
        bytes=last["offset"] + last["bytes"],
        grid=grid,
        block=block,
        shared=shared,
        cluster=(int(cluster[0]), int(cluster[1]), int(cluster[2])),
        cooperative=bool(cooperative),
        overlap=bool(overlap),
    )


def _triton_parameters(variant: KernelVariant, names: tuple[str, ...], kernel: Json) -> Iterator[Parameter]:
    for item in kernel["params"]:
        offset = item["offset"]
        match item["type"]:
            case "scratch":
                yield Slot(offset, "Q", None)
            case {"descriptor": {"block": block, "swizzle": swizzle, "element": element}}:
                yield Descriptor(offset, names.index(item["name"]), tuple(block), swizzle, element)
            case {"sizes": int(axis)}:
                yield Extent(offset, "i", names.index(item["name"]), "sizes", axis)
            case {"strides": int(axis)}:
                yield Extent(offset, "q", names.index(item["name"]), "strides", axis)
            case _:
                word = variant.words[item["name"]]
                yield Slot(offset, _code(variant, item["name"], word, item["bytes"]), names.index(item["name"]))


def _cxx_parameters(variant: KernelVariant, names: tuple[str, ...], params: Sequence[Json]) -> Iterator[Slot]:
    """The manifest's parameters laid over the table in the cubin: as many, each as large."""
    given = [name for name in names if name in variant.words]
    if len(given) != len(params):
        raise CompileError(
            variant.id,
            f"the kernel takes {len(params)} parameters, the manifest gives {len(given)}: {', '.join(given)}",
        )
    for name, item in zip(given, params, strict=True):
        yield Slot(item["offset"], _code(variant, name, variant.words[name], item["bytes"]), names.index(name))


def _code(variant: KernelVariant, name: str, word: Word, size_bytes: int) -> str:
    """How a value is packed. A bool may be passed in four bytes."""
    code = "i" if word.kind == "bool" and size_bytes == 4 else word.code
    if CODE_BYTES[code] != size_bytes:
        raise CompileError(
            variant.id,
            f"parameter {name!r}: {word.type} ({CODE_BYTES[code]} bytes) in the manifest, it takes {size_bytes} bytes",
            hint="write the type that the kernel declares",
        )
    return code


def _check_threads(variant: KernelVariant, block: Sequence[Expression], most: int | None) -> None:
    if any(extent.names for extent in block):
        return
    threads = block[0]({}) * block[1]({}) * block[2]({})
    limit = min(BLOCK_LIMIT, most or BLOCK_LIMIT)
    if not 1 <= threads <= limit:
        raise CompileError(variant.id, f"block has {threads} threads; this kernel is launched with 1 to {limit}")


def _check_limits(variant: KernelVariant, record: NvrtcEntry, kernel: Json) -> None:
    """PTX has no registers yet: the driver decides them."""
    for name, limit in (("registers", record.limits.registers), ("spill_bytes", record.limits.spill_bytes)):
        found = kernel.get(name)
        if limit is not None and found is not None and found > limit:
            raise CompileError(
                variant.id, f"{variant.expression} takes {found} {name.replace('_', ' ')}, limits say at most {limit}",
                hint="use smaller template values, or __launch_bounds__",
            )  # fmt: skip


def _three(texts: Sequence[str]) -> tuple[Expression, Expression, Expression]:
    x, y, z = (*map(parse, texts), *map(parse, ["1"] * (3 - len(texts))))
    return x, y, z
