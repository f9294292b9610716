"""How the text of a C++ kernel is compiled, as its manifest says: a bundle holds the text and no options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aotpack.kernel_jobs import nvrtc_payload
from aotpack.kernel_plan import KernelPlan
from aotpack.manifest import read_manifest
from aotpack.manifest_kernels import NvrtcEntry
from aotpack.plan import make_plan
from aotpack_runtime.errors import UsageError
from aotpack_runtime.format.index import Entry

Json = Any


def nvrtc_jobs(manifest: Path, entry: Entry, variants: Sequence[str]) -> dict[str, Json]:
    """The job that compiles each of `variants`, and no other instantiation, by variant.

    UsageError when the manifest is not the one that the bundle was built from.
    """
    found = {}
    for plan in make_plan(read_manifest(manifest)).entries:
        if isinstance(plan, KernelPlan) and plan.entry == entry.name and isinstance(plan.record, NvrtcEntry):
            for variant in plan.variants:
                if variant.id in variants:
                    folder = manifest.absolute().parent
                    found[variant.id] = nvrtc_payload(plan, plan.record, folder, variant.arch, [variant], variant.id)
    missing = [name for name in variants if name not in found]
    if missing:
        raise UsageError(f"{manifest} does not build {missing[0]}", hint="name the manifest of this bundle")
    return found
