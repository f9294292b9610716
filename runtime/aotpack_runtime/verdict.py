"""Does a bundle fit a host? Looked up in the index alone: no library is opened, nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from aotpack_runtime.errors import TargetMismatch
from aotpack_runtime.format import index
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.target import Machine
from aotpack_runtime.loaders import LOADERS


def reject_variant(variant: Variant, device: str, machine: Machine, allow: frozenset[str] = frozenset()) -> str | None:
    """Why `variant` cannot run in a session for `device` on `machine`, None when it can."""
    kind, wanted = device.partition(":")[0], variant.target.device
    if variant.artifact.kind not in LOADERS:
        return f"is a {variant.artifact.kind!r} artifact, which this aotpack-runtime cannot load"
    if wanted != kind and wanted in machine.devices:
        return f"is for {wanted}, this session is for {device}"
    return variant.target.reject(machine, allow) or (
        None if wanted == kind else f"is for {wanted}, this session is for {device}"
    )


def _only_ptx(entry: index.Entry, skipped: Mapping[str, str]) -> bool:
    kinds = {variant.artifact.kind for variant in entry.variants if variant.id not in skipped}
    return kinds == {"ptx"}


def judge(
    bundle: index.Index, device: str, machine: Machine, allow: frozenset[str] = frozenset(), *, strict: bool = False
) -> tuple[str, dict[str, str], dict[str, dict[str, str]]]:
    """("fits" or "fits with fallback", reason by variant that cannot run, and by entry that is for another kind of
    device the reasons of its variants); TargetMismatch when an entry for this kind, or every entry, has nothing.

    Looks at the index only: no library is opened. With `strict`, a program does not count, as a miss is an error.
    """
    kind = device.partition(":")[0]
    if kind not in machine.devices:
        raise TargetMismatch(f"device {device!r}", {device: f"no {kind.upper()} device on this host"})
    skipped: dict[str, str] = {}
    elsewhere: dict[str, dict[str, str]] = {}
    verdict = "fits"
    for entry in bundle.entries.values():
        everything = (*entry.variants, *entry.programs)
        for variant in everything:
            reason = reject_variant(variant, device, machine, allow)
            if reason:
                skipped[variant.id] = reason
                if variant.target.device == kind and variant in entry.variants and entry.kernel is None:
                    verdict = "fits with fallback"
        if entry.kernel is not None and verdict == "fits" and _only_ptx(entry, skipped):
            verdict = "fits through PTX, which the driver compiles"
        usable = entry.variants if strict else everything
        if usable and all(variant.id in skipped for variant in usable):
            elsewhere[entry.name] = {variant.id: skipped[variant.id] for variant in usable}
            if any(variant.target.device == kind for variant in everything):
                raise TargetMismatch(f"entry {entry.name!r}", elsewhere[entry.name])
    if elsewhere and len(elsewhere) == len(bundle.entries):
        name = next(iter(elsewhere))
        raise TargetMismatch(f"entry {name!r}", elsewhere[name])
    return verdict, skipped, elsewhere
