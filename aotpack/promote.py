"""Variants that misses compiled on this host -> a new bundle that has them as its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from aotpack.kernel_assembly import in_order as kernels_in_order
from aotpack.pack import check_replaceable, index_digest, publish, stage, staging
from aotpack_runtime.bundle import Bundle, open_bundle
from aotpack_runtime.errors import AotpackError, OutputError
from aotpack_runtime.format.index import Entry, Index, Variant
from aotpack_runtime.format.index_json import dump, parse
from aotpack_runtime.format.order import in_order
from aotpack_runtime.jit.overlay import Overlay
from aotpack_runtime.jit.place import distrusted, overlay_root
from aotpack_runtime.machine import cache_dir, this_machine


@dataclass(frozen=True, slots=True)
class Promoted:
    """What the new bundle has more: ids of variants; `skipped` says of others why it has not."""

    digest: str
    variants: list[str]
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Members:
    """Files of the bundle and of the overlay by digest, as `stage` asks for them."""

    paths: Mapping[str, Path]

    def object(self, digest: str) -> Path:
        return self.paths[digest]


def promote(path: Path, out: Path, *, version: str | None = None) -> Promoted:
    """Write the bundle at `path` with what its misses compiled on this host to `out`, in one step.

    Every byte of both is hashed first: BundleError for the bundle's own, and a variant of the overlay that is not what
    its record says is left out. OutputError when `out` is the bundle itself, which a server may have open.
    """
    check_replaceable(out)
    bundle = open_bundle(path)
    try:
        if out.resolve() == bundle.root.resolve():
            raise OutputError(f"{out}: is the bundle itself", hint="name another place with -o")
        bundle.verify()
        root = overlay_root(bundle.digest, this_machine(), cache_dir())
        if problem := distrusted(root):
            raise AotpackError(f"the overlay is not used: {problem}")
        return _write(bundle, Overlay(root), out, version)
    finally:
        bundle.close()


def _write(bundle: Bundle, overlay: Overlay, out: Path, version: str | None) -> Promoted:
    paths = {file.digest: bundle.root / member for member, file in bundle.index.members().items()}
    entries, skipped = dict(bundle.index.entries), dict[str, str]()
    added: list[str] = []
    for made in filter(None, (overlay.get(key, bundle.index) for key in overlay.names())):
        entry = entries[made.entry]
        problem = _problem(entry, made.variant)
        try:
            files = {} if problem else overlay.files(made.variant)
        except AotpackError as error:
            problem, files = str(error), {}
        if problem:
            skipped[made.variant.id] = problem
            continue
        paths |= {made.variant.artifact.files[file].digest: Path(place) for file, place in files.items()}
        order = in_order if entry.kernel is None else kernels_in_order
        entries[made.entry] = replace(entry, variants=tuple(order([*entry.variants, made.variant])))
        added.append(made.variant.id)
    if not added:
        raise AotpackError(
            f"{bundle.root}: misses have compiled nothing for it on this host",
            hint="`aotpack cache ls` shows what there is",
        )
    index: Index = replace(bundle.index, entries=entries, version=version or bundle.index.version)
    parse(dump(index))
    with staging(out) as staged:
        stage(index, _Members(paths), out, staged)
        publish(staged, out)
    return Promoted(index_digest(index), added, skipped)


def _problem(entry: Entry, variant: Variant) -> str:
    """Why it cannot be one of the entry's own, "" when it can."""
    for known in entry.variants:
        if (known.guards, known.target, known.axes) == (variant.guards, variant.target, variant.axes):
            return f"{known.id} has the same guards"
    return ""
