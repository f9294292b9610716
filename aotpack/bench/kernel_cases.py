"""The calls of a kernel that are timed: the points of its manifest, each as a call that a variant takes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aotpack.bench.cases import MOST_CASES, Case
from aotpack_runtime.dispatch import Hit, KernelDispatcher
from aotpack_runtime.errors import TargetMismatch, UsageError
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.guard import DescriptorGuard, PointerGuard, ValueGuard
from aotpack_runtime.format.index import Entry, Variant
from aotpack_runtime.format.target import Machine
from aotpack_runtime.format.tensor import Call, Leaf, TensorMeta, contiguous_strides
from aotpack_runtime.format.tree import LEAF
from aotpack_runtime.verdict import reject_variant

Json = Any
Numbers = Mapping[str, Json]


def make_kernel_cases(
    entry: Entry, machine: Machine, device: str, calls: Sequence[Mapping[str, tuple[int, ...]]] = ()
) -> list[Case]:
    """The first points of the manifest that the bundle hits on `machine`, in order; with `calls`, numbers by name, the
    first point that has those of each instead.

    UsageError for an entry without a reference or points, and for a call that no point is. TargetMismatch when no
    variant fits the machine.
    """
    if not entry.verify.get("against") or not entry.verify.get("cases"):
        raise UsageError(
            f"{entry.name!r} has nothing to compare answers with", hint="give it verify.against, shapes and points"
        )
    reasons = {variant.id: reject_variant(variant, device, machine) for variant in entry.variants}
    fits = [variant for variant in entry.variants if reasons[variant.id] is None]
    if not fits:
        raise TargetMismatch(f"entry {entry.name!r}", {name: reason for name, reason in reasons.items() if reason})
    points = list(_hits(entry, fits, machine))
    chosen = [_named(points, call, entry.name) for call in calls] if calls else points[:MOST_CASES]
    if not chosen:
        raise UsageError(
            f"the bundle hits at no point of {entry.name!r} on this machine", hint="aotpack explain says why"
        )
    names = _names(entry, [numbers for numbers, _ in chosen])
    return [Case(name, "hot", like.id, numbers=numbers) for name, (numbers, like) in zip(names, chosen, strict=True)]


def _hits(entry: Entry, fits: Sequence[Variant], machine: Machine) -> Iterator[tuple[Numbers, Variant]]:
    """(numbers of a point, the variant that its call hits), with the dtypes of the first variant that takes it."""
    assert entry.kernel is not None
    gpu = machine.gpu
    dispatcher = KernelDispatcher(
        entry.parameter_names, fits, choice=entry.kernel.choice, capability=gpu.capability if gpu else None
    )
    for numbers in entry.verify["cases"]:
        for variant in fits:
            call = _call(entry, variant, numbers)
            if variant.guards.reject(call, entry.parameter_names) is None:
                decision = dispatcher.choose(call)
                assert isinstance(decision, Hit)
                yield numbers, decision.variant
                break


def _call(entry: Entry, variant: Variant, numbers: Numbers) -> Call:
    """Row-major tensors at aligned addresses, of the dtypes of `variant`."""
    folded = {guard.path: guard.value for guard in variant.guards.leaves if isinstance(guard, ValueGuard)}
    known = folded | dict(numbers)
    ints = {name: value for name, value in known.items() if isinstance(value, int)}
    leaves: list[Leaf] = []
    for guard in variant.guards.leaves:
        if isinstance(guard, PointerGuard | DescriptorGuard):
            shape = tuple(parse(text)(ints) for text in entry.verify["shapes"][guard.path])
            dtype = "uint8" if guard.dtype == "any" else guard.dtype
            leaves.append(TensorMeta(dtype, "cuda", shape, contiguous_strides(shape)))
        else:
            leaves.append(known[guard.path])
    return Call((LEAF,) * len(leaves), tuple(leaves))


def _named(
    points: Sequence[tuple[Numbers, Variant]], call: Mapping[str, tuple[int, ...]], entry: str
) -> tuple[Numbers, Variant]:
    wanted = {name: sizes[0] if len(sizes) == 1 else None for name, sizes in call.items()}
    for numbers, variant in points:
        if all(numbers.get(name) == value for name, value in wanted.items()):
            return numbers, variant
    words = " ".join(f"{name}={value}" for name, value in wanted.items())
    known = "; ".join(" ".join(f"{name}={value}" for name, value in numbers.items()) for numbers, _ in points)
    raise UsageError(f"no point of {entry!r} has {words}; there are: {known}"[:2000])


def _names(entry: Entry, points: Sequence[Numbers]) -> list[str]:
    """The numbers that differ between the points, without those that follow another: `rows=1 n=4096`."""
    columns: dict[tuple[Json, ...], str] = {}
    for name in entry.parameter_names:
        column = tuple(numbers.get(name) for numbers in points)
        if any(value is not None for value in column) and (len(points) == 1 or len(set(column)) > 1):
            columns.setdefault(column, name)
    return [" ".join(f"{name}={column[place]}" for column, name in columns.items()) for place in range(len(points))]
