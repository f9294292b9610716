"""A bundle as one file for transport: a stored zip that unpacks once to a place named by its digest.

Members are checked by name, kind and size before anything is written; the folder appears in one rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from aotpack_runtime.errors import BundleError, MalformedBundle
from aotpack_runtime.format import layout
from aotpack_runtime.format.index_json import parse
from aotpack_runtime.machine import cache_dir, private_dir, untrusted

log = logging.getLogger("aotpack.bundle")

_PARTIAL = ".partial-"
_FORGED = "do not use this file"
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)


def pack_archive(folder: Path, out: Path) -> Path:
    """Write the bundle `folder` as one stored zip: sorted members, fixed dates and modes, so same bytes each time."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    info = zipfile.ZipInfo(path.relative_to(folder).as_posix(), date_time=_FIXED_DATE)
                    info.external_attr = (stat.S_IFREG | 0o644) << 16
                    with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as target:
                        shutil.copyfileobj(source, target, 1 << 22)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return out


def unpack(path: Path) -> Path:
    """The folder that the archive at `path` unpacks to, unpacked now if it is not there yet.

    Refuses a file that is empty, truncated, no zip, or a zip that is no bundle; members that would leave the folder,
    repeat a name, are no plain stored files or are not in the index. Nothing is left behind when it refuses.
    """
    with path.open("rb") as file, _open_zip(file, path) as archive:
        if layout.INDEX not in archive.NameToInfo:
            raise BundleError(f"{path}: is a zip without {layout.INDEX}, not a bundle")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        place = _place(digest)
        if _is_whole(place):
            return place
        members = _checked_members(archive, path)
        try:
            with _alone(place.parent) as staging:
                if not _is_whole(place):  # another process may have been first
                    shutil.rmtree(place, ignore_errors=True)
                    for info in members:
                        _write(archive, info, staging / info.filename)
                    staging.rename(place)
        except (OSError, zipfile.BadZipFile) as error:
            if not _is_whole(place):
                raise BundleError(f"{path}: cannot be unpacked to {place.parent}: {error}") from None
    return place


def _open_zip(file: BinaryIO, path: Path) -> zipfile.ZipFile:
    head = file.read(512)
    if not head:
        raise BundleError(f"{path}: is empty (0 bytes)", hint="the download or copy did not finish; fetch it again")
    if not head.startswith(b"PK"):
        what = "an HTML page" if b"<html" in head.lower() or head.lower().startswith(b"<!doctype") else "another format"
        raise BundleError(f"{path}: is not a bundle: it looks like {what}", hint="check the address it came from")
    try:
        return zipfile.ZipFile(file)
    except Exception as error:  # zipfile lets out what struct, codecs and seeks raise on damaged directories
        if str(error) == "File is not a zip file":
            size = os.fstat(file.fileno()).st_size
            problem = f"is truncated: {size} bytes and no end of archive"
        else:
            problem = f"is damaged: {error}"
        raise BundleError(f"{path}: {problem}", hint="fetch the bundle again") from None


def _checked_members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    infos = archive.infolist()
    seen: set[str] = set()
    for info in infos:
        problem = "is in the archive twice" if info.filename in seen else _forged(info)
        if problem:
            raise MalformedBundle(info.filename, problem, hint=_FORGED)
        seen.add(info.filename)
    if sum(info.file_size for info in infos) > path.stat().st_size:
        raise BundleError(f"{path}: would unpack to more bytes than it has", hint=_FORGED)
    try:
        data = archive.read(layout.INDEX)
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        raise MalformedBundle(layout.INDEX, f"cannot be read from the archive: {error}") from None
    known = parse(data).members()
    for info in infos:
        if info.filename == layout.INDEX:
            continue
        wanted = known.pop(info.filename, None)
        if wanted is None:
            raise MalformedBundle(info.filename, "is not in the index", hint=_FORGED)
        if info.file_size != wanted.size_bytes:
            raise MalformedBundle(
                info.filename, f"unpacks to {info.file_size} bytes, the index says {wanted.size_bytes}"
            )
    if known:
        raise MalformedBundle(next(iter(known)), "is in the index and not in the archive")
    return infos


def _forged(info: zipfile.ZipInfo) -> str:
    """What no archive of ours holds, "" for a member like ours."""
    mode = info.external_attr >> 16
    if info.is_dir() or stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return "is not a plain file"
    parts = info.filename.split("/")
    if info.filename.startswith("/") or "\\" in info.filename or not all(p not in ("", ".", "..") for p in parts):
        return "would be written outside of its folder"
    if info.flag_bits & 1:
        return "is encrypted"
    return "" if info.compress_type == zipfile.ZIP_STORED else "is compressed, and members of a bundle are not"


def _is_whole(place: Path) -> bool:
    """Is there an unpacked bundle? One that was found to lack members has lost its index."""
    return (place / layout.INDEX).exists()


def _write(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(info) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 22)


def _place(digest: str) -> Path:
    """Where the archive with this digest is, or will be, unpacked: in the cache, or in a private folder where that
    cannot be used."""
    place = cache_dir() / "unpacked" / digest
    problem = _problem(place.parent, place)
    if not problem:
        return place
    private = private_dir() / "unpacked" / digest
    if further := _problem(private.parent.parent, private) or _problem(private.parent, private):
        raise BundleError(f"{problem}; {further}", hint="set AOTPACK_CACHE_DIR, or unpack the archive yourself")
    log.warning("%s; %s is used instead, and AOTPACK_CACHE_DIR names another", problem, private.parent)
    return private


def _problem(folder: Path, place: Path) -> str:
    """Why `folder`, made if it is not there, cannot hold what this process will run at `place`; "" when it can."""
    if problem := untrusted(folder):
        return problem
    return "" if _is_whole(place) or os.access(folder, os.W_OK) else f"{folder}: cannot be written"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder` for one process at a time, gone afterwards unless it was renamed; others wait.

    The lock is the kernel's and ends with its process: what lies there when it is taken is a killed process's.
    """
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: two processes may both unpack, and the first rename stays
            pass
        else:
            for orphan in folder.glob(_PARTIAL + "*"):
                shutil.rmtree(orphan, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
