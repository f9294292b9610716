"""Does a bundle fit a host? Looked up in the index alone: no library is opened, nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from aotpack_runtime.errors import TargetMismatch
from aotpack_runtime.format import index
from aotpack_runtime.format.guard import Guards, ValueGuard, identity
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.target import Machine
from aotpack_runtime.loaders import LOADERS


def reject_variant(variant: Variant, device: str, machine: Machine, allow: frozenset[str] = frozenset()) -> str | None:
    """Why `variant` cannot run in a session for `device` on `machine`, None when it can."""
    kind, wanted = device.partition(":")[0], variant.target.device
    if variant.artifact.kind not in LOADERS:
        return f"is a {variant.artifact.kind!r} artifact, which this aotpack-runtime cannot load"
    if wanted != kind and wanted in machine.devices:
        return elsewhere(variant, device)
    return variant.target.reject(machine, allow) or (None if wanted == kind else elsewhere(variant, device))


def elsewhere(variant: Variant, device: str) -> str:
    """The reason against a variant for another kind of device than the session's."""
    return f"is for {variant.target.device}, this session is for {device}"


def _only_ptx(entry: index.Entry, skipped: Mapping[str, str]) -> bool:
    kinds = {variant.artifact.kind for variant in entry.variants if variant.id not in skipped}
    return kinds == {"ptx"}


def _falls_back(entry: index.Entry, kind: str, skipped: Mapping[str, str]) -> bool:
    """Was a variant for this kind of device lost that has no twin: another one of the same guards, for a CPU level or
    an architecture that the host has?"""
    lost = [variant for variant in entry.variants if variant.id in skipped and variant.target.device == kind]
    if not lost:
        return False
    served = {_same(variant.guards) for variant in entry.variants if variant.id not in skipped}
    return any(_same(variant.guards) not in served for variant in lost)


def _same(guards: Guards) -> Hashable:
    """Equal for guards that take the same calls; True and 1 are not the same value."""
    return guards, tuple(identity(leaf.value) for leaf in guards.leaves if isinstance(leaf, ValueGuard))


def judge(
    bundle: index.Index,
    device: str,
    machine: Machine,
    allow: frozenset[str] = frozenset(),
    *,
    strict: bool = False,
    compiles: Callable[[index.Entry], bool] = lambda entry: False,
) -> tuple[str, dict[str, str], dict[str, dict[str, str]]]:
    """(the verdict, reason by variant that cannot run, and by entry that is for another kind of device the reasons of
    its variants); TargetMismatch when an entry for this kind, or every entry, has nothing.

    The verdict is "fits" where each call that a variant was built for has a variant that can run, else "fits with
    fallback". Looks at the index only: no library is opened. With `strict`, a program does not count, as a miss is an
    error. Of a kernel that `compiles` here a call that nothing fits is a miss like any other.
    """
    kind = device.partition(":")[0]
    if kind not in machine.devices:
        raise TargetMismatch(f"device {device!r}", {device: f"no {kind.upper()} device on this host"})
    skipped: dict[str, str] = {}
    other_kind: dict[str, dict[str, str]] = {}
    verdict = "fits"
    known: dict[tuple[int, str], str | None] = {}
    for entry in bundle.entries.values():
        everything = (*entry.variants, *entry.programs)
        for variant in everything:
            asked = (id(variant.target), variant.artifact.kind)  # variants share the record of a target
            if asked not in known:
                known[asked] = reject_variant(variant, device, machine, allow)
            reason = known[asked]
            if reason:
                skipped[variant.id] = reason
        if entry.kernel is None and _falls_back(entry, kind, skipped):
            verdict = "fits with fallback"
        if entry.kernel is not None and verdict == "fits" and _only_ptx(entry, skipped):
            verdict = "fits through PTX, which the driver compiles"
        usable = entry.variants if strict else everything
        nothing = all(variant.id in skipped for variant in usable)
        if nothing and kind == "cuda" and entry.kernel is not None and compiles(entry):
            verdict = "fits once its kernels are compiled here"
            continue
        if usable and nothing:
            other_kind[entry.name] = {variant.id: skipped[variant.id] for variant in usable}
            if any(variant.target.device == kind for variant in everything):
                raise TargetMismatch(f"entry {entry.name!r}", other_kind[entry.name])
    if other_kind and len(other_kind) == len(bundle.entries):
        name = next(iter(other_kind))
        raise TargetMismatch(f"entry {name!r}", other_kind[name])
    return verdict, skipped, other_kind
