"""Is a kernel variant what its reference in torch is? Run on a GPU, on inputs made as its manifest says.

Outputs are poisoned before each run, so that an element that is not written shows. The reference is given tensors of
float64 and returns what the written ones must hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aotpack_runtime.errors import CompileError, SourceError
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.guard import DescriptorGuard, Guards, PointerGuard, ValueGuard
from aotpack_runtime.format.index import Entry, Variant
from aotpack_runtime.kernel_entry import KernelEntry
from aotpack_runtime.loaders.reference import import_reference, widened

Json = Any
Values = dict[str, Any]

RELATIVE_NORM = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Bound on ||out - ref|| / ||ref|| by dtype of the output: float32 sums of thousands of terms stay far under the first,
the others are a few units of rounding to that dtype (2**-11 and 2**-8)."""


def verify_kernel(entry: KernelEntry, variant_id: str, folder: Path) -> tuple[int, float, bool, str]:
    """(cases run, largest relative norm, True, the reference's name); CompileError with the first difference.

    A variant that no case of the manifest fits cannot be verified, which is an error of the manifest.
    """
    record = entry.record
    against = record.verify.get("against")
    if not against:
        raise CompileError(variant_id, "the manifest gives no `verify.against` to compare it with")
    reference = reference_of(str(against), folder)
    variant = next(variant for variant in record.variants if variant.id == variant_id)
    cases, worst = compare(entry, variant, record.verify["cases"], reference)
    if not cases:
        raise CompileError(
            variant_id, "no case of `points` fits its guards, so it cannot be verified", hint="add a point that does"
        )
    return cases, worst, True, str(against)


def compare(
    entry: KernelEntry, variant: Variant, cases: Sequence[Mapping[str, Any]], reference: Any
) -> tuple[int, float]:
    """(how many of the cases it takes, the largest relative norm); CompileError with the first difference."""
    record = entry.record
    worst, count = 0.0, 0
    for seed, case in enumerate(cases):
        for sample in range(int(record.verify.get("samples", 1))):
            values = make_arguments(record, variant, case, seed=1000 * sample + seed)
            if entry.reject(variant, values) is not None:
                continue
            before = {name: _copy(value) for name, value in values.items()}
            entry.run_variant(variant, values)
            torch.cuda.synchronize()
            worst = max(worst, _compare(record, variant, values, before, reference, case))
            count += 1
    return count, worst


def make_arguments(record: Entry, variant: Variant, case: Mapping[str, Any], *, seed: int) -> Values:
    """Arguments of one call by name: numbers of `case`, tensors of the shapes and fills of the manifest, on the GPU.

    Tensors that are written and have no fill hold NaN, or the smallest int. Those of a variant that does not ask for
    alignment begin one element past an aligned address where its dtype allows.
    """
    guards = {guard.path: guard for guard in variant.guards.leaves}
    assert record.kernel is not None
    any_aligned = any(isinstance(guard, PointerGuard) and guard.aligned for guard in guards.values())
    may_shift = not any_aligned and any(
        isinstance(guard, PointerGuard) and guard.aligned for other in record.variants for guard in other.guards.leaves
    )
    values: Values = {}
    for name in record.parameter_names:
        guard = guards[name]
        if isinstance(guard, PointerGuard | DescriptorGuard):
            shape = [parse(text)(_numbers(case, variant.guards)) for text in record.verify["shapes"][name]]
            generator = torch.Generator("cuda").manual_seed(zlib.crc32(f"{name} {seed}".encode()))
            dtype = getattr(torch, "uint8" if guard.dtype == "any" else guard.dtype)
            fill = record.fills.get(name, "poison" if name in record.kernel.writes else None)
            values[name] = _placed(_filled(shape, dtype, fill, generator), shift=may_shift)
        elif isinstance(guard, ValueGuard):
            values[name] = case.get(name, guard.value)
        else:
            values[name] = case[name]
    return values


def _numbers(case: Mapping[str, Any], guards: Guards) -> dict[str, int]:
    folded = {guard.path: guard.value for guard in guards.leaves if isinstance(guard, ValueGuard)}
    return {name: value for name, value in (folded | dict(case)).items() if isinstance(value, int)}


def _filled(shape: list[int], dtype: torch.dtype, fill: Json, generator: torch.Generator) -> torch.Tensor:
    on: Any = {"device": "cuda"}
    match fill:
        case {"randint": [low, high]}:
            return torch.randint(int(low), int(high), shape, generator=generator, **on).to(dtype)
        case "ones" | "zeros":
            return torch.full(shape, float(fill == "ones"), dtype=dtype, **on)
        case "rand":
            return torch.rand(shape, generator=generator, **on).to(dtype)
        case "poison":
            poison = torch.nan if dtype.is_floating_point else (torch.iinfo(dtype).min if dtype != torch.bool else True)
            return torch.full(shape, poison, dtype=dtype, **on)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, **on).to(dtype)
    return torch.randint(0, 2, shape, generator=generator, **on).to(dtype)


def _placed(tensor: torch.Tensor, *, shift: bool) -> torch.Tensor:
    """On the GPU, at an address that is divisible by 16, or (with `shift`) is not."""
    memory = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device="cuda")
    start = 1 if shift and tensor.itemsize < 16 else 0
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def reference_of(name: str, folder: Path) -> Any:
    """The function that `name` is, looked up in `folder` first; CompileError says why there is none."""
    import sys

    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return import_reference(name, {})
    except SourceError as error:
        raise CompileError(name, f"the reference {error.problem}") from error


def _compare(
    record: Entry, variant: Variant, after: Values, before: Values, reference: Any, case: Mapping[str, Any]
) -> float:
    """The largest relative norm of what was written; CompileError when it is too large, or an input was changed."""
    wanted = expected_of(record, variant.id, reference, before)
    for name, value in after.items():
        if name not in wanted and isinstance(value, torch.Tensor) and not _same_bytes(value, before[name]):
            raise CompileError(variant.id, f"{name} was written at {dict(case)}, and is not in `writes`")
    worst = 0.0
    for name, expected in wanted.items():
        for problem, norm in differences(after[name], expected.to(after[name].device), record):
            if problem:
                raise CompileError(
                    variant.id, f"{name} disagrees with {record.verify['against']} at {dict(case)}: {problem}"
                )
            worst = max(worst, norm)
    return worst


def expected_of(record: Entry, variant_id: str, reference: Any, values: Values) -> dict[str, torch.Tensor]:
    """What each tensor that the kernel writes must hold after a call with `values`, as the reference says."""
    assert record.kernel is not None
    writes = record.kernel.writes
    wanted = reference(**{name: widened(value) for name, value in values.items()})
    wanted = (wanted,) if isinstance(wanted, torch.Tensor) else tuple(wanted)
    if len(wanted) != len(writes):
        raise CompileError(variant_id, f"the reference returns {len(wanted)} tensors for {', '.join(writes)}")
    return dict(zip(writes, wanted, strict=True))


def differences(found: torch.Tensor, wanted: torch.Tensor, record: Entry) -> Iterator[tuple[str, float]]:
    """One pair of (what is wrong with `found`, "" for nothing; its relative norm)."""
    if found.shape != wanted.shape:
        yield f"its shape is {list(found.shape)}, the reference gives {list(wanted.shape)}", 0.0
    elif not found.dtype.is_floating_point:
        wrong = int((found != wanted.to(found.dtype)).sum())
        yield (f"{wrong} of {found.numel()} elements differ" if wrong else ""), 0.0
    else:
        bound = record.verify.get("rtol")
        bound = RELATIVE_NORM[str(found.dtype).removeprefix("torch.")] if bound is None else float(bound)
        a, b = found.double(), wanted.double()
        strange = ~torch.isfinite(b)
        same = torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
            a[strange].nan_to_num(), b[strange].nan_to_num()
        )
        a, b = a[~strange], b[~strange]
        norm = (
            float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-30)) if b.numel() else 0.0
        )
        if not same:
            yield "NaN or infinity in other places than the reference (an element that is not written is NaN)", norm
        elif not norm <= bound:
            yield f"||out - ref|| / ||ref|| is {norm:.2e}, expected at most {bound:.0e}", norm
        else:
            yield "", norm


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
