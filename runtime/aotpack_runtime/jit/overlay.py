"""Variants compiled on this host: the records and files of a bundle, in a folder that all processes of the host share.

    <cache>/overlay/<digest of the bundle>/<digest of the host's facts>/
        variants/<key>.json     one variant with a digest of its own; appears in one rename, after its files
        artifacts/<digest>/     its files, each hashed before it is opened
        failures/<key>.json     what did not compile, how often, and until when it is not tried again
        locks/  build/<key>/    of compiles; what a killed one left is removed by the next

Nothing here is believed for being here: a record that is not whole, or not of this format, or whose files are not what
it says, is removed and counts as never compiled.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aotpack_runtime.bundle import file_of
from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format import layout
from aotpack_runtime.format.codec import no_duplicates
from aotpack_runtime.format.fingerprint import canonical, digest
from aotpack_runtime.format.index import Index, Variant
from aotpack_runtime.format.index_json import FORMAT_VERSION
from aotpack_runtime.format.sound import check_kernel, check_variant
from aotpack_runtime.format.variant_json import dump_variant, parse_variant
from aotpack_runtime.jit.flight import held
from aotpack_runtime.machine import make_private

Json = Any
ORPHAN_S = 3600.0
"""Files of the overlay that no record names are removed after this."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """What a compile took, and one call of the fallback and of the variant afterwards, in the same process."""

    compile: float
    fallback: float
    variant: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A variant of the overlay. `parts` are what its key was made of, `checked` what it was held against."""

    key: str
    entry: str
    variant: Variant
    seconds: Seconds
    parts: Mapping[str, Json]
    checked: str = ""


class Overlay:
    """The variants under `root`. Reading makes nothing; every write is whole or not there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._variants = str(root / "variants")
        self._files: dict[str, dict[str, str]] = {}
        self.damaged: set[str] = set()
        """Keys of variants that were found to be damaged and removed."""

    # -------------------------------------------------------------------------------------------------- reading

    def stamp(self) -> int:
        """Another number whenever a variant was added or removed; 0 when there is none."""
        try:
            return os.stat(self._variants).st_mtime_ns
        except OSError:
            return 0

    def names(self) -> list[str]:
        """Keys of the variants that are there."""
        return [name.removesuffix(".json") for name in _listed(self.root / "variants") if name.endswith(".json")]

    def get(self, key: str, index: Index) -> Compiled | None:
        """The variant with this key, of an entry of `index`; None when there is none that can be used. One that is
        damaged is removed, so that it is compiled again; one that this user may not read is left alone."""
        try:
            data = self.record(key).read_bytes()
        except OSError:
            return None
        try:
            made = read_record(key, data)
            _check(made, index)
            self._check_sizes(made.variant)
        except (KeyError, TypeError, ValueError, AttributeError, OSError):
            self.drop(key, damaged=True)
            return None
        return made

    def files(self, variant: Variant) -> dict[str, str]:
        """Paths of a variant's files by name, each hashed once in this process; ArtifactError for one that is not what
        its record says."""
        known = self._files.get(variant.artifact.digest)
        if known is None:
            known = {}
            for name, wanted in variant.artifact.files.items():
                path = self.root / layout.artifact(variant.artifact.kind, variant.artifact.digest, name)
                try:
                    found = file_of(path)
                except OSError as error:
                    raise ArtifactError(variant.id, f"{path}: {error.strerror}") from error
                if found != wanted:
                    raise ArtifactError(variant.id, f"{path}: is not what was compiled, and is compiled again")
                known[name] = str(path)
            self._files[variant.artifact.digest] = known
        return known

    # -------------------------------------------------------------------------------------------------- writing

    def put(self, made: Compiled, files: Mapping[str, Path]) -> None:
        """Keep a variant; `files` (by name, on the same file system) are moved in, then the record appears. OSError."""
        folder = self.root / layout.artifact(made.variant.artifact.kind, made.variant.artifact.digest, "x")
        make_private(folder.parent)
        for name, path in files.items():
            os.replace(path, folder.with_name(name))
        _write_whole(self.record(made.key), write_record(made), self.root / "build" / made.key)

    def drop(self, key: str, *, damaged: bool = False) -> None:
        """Remove a variant and its files; what cannot be removed stays."""
        if damaged:
            self.damaged.add(key)
        record = self.record(key)
        kind, name = _artifact_of(record)
        with contextlib.suppress(OSError):
            record.unlink()
        with contextlib.suppress(ValueError):
            folder = (self.root / layout.artifact(kind, name, "x")).parent
            if not self._is_named(name):
                _remove(folder)
        self._files.pop(name, None)

    def _is_named(self, artifact: str) -> bool:
        """Does a record name this artifact? Two keys may have been compiled to the same bytes."""
        for key in self.names():
            with contextlib.suppress(OSError):
                if artifact.encode() in self.record(key).read_bytes():
                    return True
        return False

    def used(self, key: str) -> None:
        """Note that the variant is in use: what was not used for longest goes first."""
        with contextlib.suppress(OSError):
            os.utime(self.record(key))

    def size_bytes(self) -> int:
        """What the variants take on disk."""
        return sum(kept.size_bytes for kept in _kept(self.root))

    def lock(self, key: str) -> Path:
        return self.root / "locks" / key

    @contextlib.contextmanager
    def building(self, key: str) -> Iterator[Path]:
        """The folder that the compile of `key` works in, whose lock the caller holds; gone afterwards, as is what
        killed ones left."""
        self._sweep(key)
        folder = self.root / "build" / key
        _remove(folder)
        make_private(folder)
        try:
            yield folder
        finally:
            _remove(folder)

    # ------------------------------------------------------------------------------------------------- failures

    def failure(self, key: str) -> tuple[int, float, str]:
        """How often in a row `key` failed, until when (time.time()) it is not tried again, and why the last time."""
        try:
            record = json.loads((self.root / "failures" / f"{key}.json").read_bytes())
            return int(record["count"]), float(record["until"]), str(record["why"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0.0, ""

    def put_failure(self, key: str, count: int, until: float, why: str) -> None:
        with contextlib.suppress(OSError):
            record = {"count": count, "until": until, "why": why[:2000]}
            _write_whole(self.root / "failures" / f"{key}.json", canonical(record), self.root / "build")

    def forgive(self, key: str) -> None:
        with contextlib.suppress(OSError):
            (self.root / "failures" / f"{key}.json").unlink()

    # ---------------------------------------------------------------------------------------------------- inside

    def record(self, key: str) -> Path:
        """Where the record of `key` is, or would be."""
        return self.root / "variants" / f"{key}.json"

    def _sweep(self, mine: str) -> None:
        """Remove what killed processes left: folders of compiles whose lock nobody holds, and, after a while in which a
        record may yet appear, files that no record names."""
        builds, artifacts = self.root / "build", self.root / "artifacts"
        for left in _listed(builds):
            if left != mine:
                with held(self.lock(left), wait=False) as got:
                    if got:
                        _remove(builds / left)
        old = [name for name in _listed(artifacts) if _age_s(artifacts / name) > ORPHAN_S]
        if old:
            named = {_artifact_of(self.record(key))[1] for key in self.names()}
            for name in set(old) - named:
                _remove(artifacts / name)

    def _check_sizes(self, variant: Variant) -> None:
        """ValueError for a member that is not there or has another size: a hash of all waits until it is loaded."""
        for member, file in variant.artifact.members().items():
            if (self.root / member).stat().st_size != file.size_bytes:
                raise ValueError(f"{member} has another size")


def write_record(made: Compiled) -> bytes:
    body = {
        "entry": made.entry,
        "variant": dump_variant(made.variant),
        "seconds": [made.seconds.compile, made.seconds.fallback, made.seconds.variant],
        "parts": dict(made.parts),
        "checked": made.checked,
    }
    record = {"format": FORMAT_VERSION, "key": made.key, "sha256": digest(canonical(body)), "body": body}
    return canonical(record)


def read_record(key: str, data: bytes) -> Compiled:
    """What `write_record` wrote; ValueError, TypeError or KeyError for anything else."""
    record = json.loads(data, object_pairs_hook=no_duplicates)
    body = record["body"]
    if record["format"] != FORMAT_VERSION or record["key"] != key or record["sha256"] != digest(canonical(body)):
        raise ValueError("of another format, of another key, or changed since it was written")
    compile_s, fallback_s, variant_s = (float(one) for one in body["seconds"])
    return Compiled(
        key=key, entry=str(body["entry"]), variant=parse_variant(body["variant"]),
        seconds=Seconds(compile_s, fallback_s, variant_s), parts=dict(body["parts"]),
        checked=str(body.get("checked", "")),
    )  # fmt: skip


def _check(made: Compiled, index: Index) -> None:
    """ValueError or KeyError when it is no variant of `index`: it takes its entry's arguments and its weights."""
    entry = index.entries[made.entry]
    check_variant(made.variant, entry.parameters, set())
    check_kernel(replace(entry, variants=(made.variant,)))
    weights = index.weight_sets[made.variant.weights].weights if made.variant.constants else {}
    if missing := {weight for _, weight in made.variant.constants} - weights.keys():
        raise ValueError(f"needs the weight {min(missing)!r}")


def _write_whole(path: Path, data: bytes, scratch: Path) -> None:
    """`data` at `path`, in one step by way of the folder `scratch`; OSError when it cannot be."""
    make_private(path.parent)
    make_private(scratch)
    descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=scratch)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        _remove(Path(temporary))
        raise


def _remove(path: Path) -> None:
    """Remove a file or a folder, as far as that is allowed."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _artifact_of(record: Path) -> tuple[str, str]:
    """Kind and digest of the artifact that a record names, whatever else is wrong with it."""
    try:
        artifact = json.loads(record.read_bytes())["body"]["variant"]["artifact"]
        return str(artifact["kind"]), str(artifact["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


# ------------------------------------------------------------------------------------------------ of all bundles


@dataclass(frozen=True, slots=True)
class Kept:
    """One variant on disk, of whatever bundle: `root` is its overlay, `used` when it was last loaded (time.time)."""

    root: Path
    key: str
    size_bytes: int
    used: float


def everything(cache: Path) -> list[Kept]:
    """All variants of all overlays under `cache`, those first that were not used for longest."""
    found = [kept for root in sorted((cache / "overlay").glob("*/*")) for kept in _kept(root)]
    return sorted(found, key=lambda kept: kept.used)


def _kept(root: Path) -> Iterator[Kept]:
    for record in sorted((root / "variants").glob("*.json")):
        with contextlib.suppress(OSError):
            status = record.stat()
            kind, name = _artifact_of(record)
            folder = root / layout.artifact(kind, name, "x").rpartition("/")[0] if name else None
            files = list(folder.iterdir()) if folder is not None and folder.is_dir() else []
            size = status.st_size + sum(file.stat().st_size for file in files)
            yield Kept(root, record.stem, size, status.st_mtime)


def clear(cache: Path) -> list[Kept]:
    """Remove all variants of all overlays under `cache`, and what is remembered of failures; those removed."""
    gone = evict(cache, -1)
    for root in sorted((cache / "overlay").glob("*/*")):
        _remove(root / "failures")
    return gone


def evict(cache: Path, max_bytes: int, *, keep: str = "") -> list[Kept]:
    """Remove variants until all of them take at most `max_bytes`, the least recently used first and the one with the
    key `keep` never; those removed. A process that has one loaded keeps it: its file lives until it is let go."""
    found = everything(cache)
    over = sum(kept.size_bytes for kept in found) - max_bytes
    gone: list[Kept] = []
    for kept in found:
        if over <= 0:
            break
        if kept.key != keep:
            Overlay(kept.root).drop(kept.key)
            over -= kept.size_bytes
            gone.append(kept)
    return gone
