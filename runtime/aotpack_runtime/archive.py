"""A bundle as one file for transport: a stored zip that unpacks once to a place named by its digest.

Members are checked by name, kind and size before anything is written; the folder appears in one rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import zipfile
from pathlib import Path

from aotpack_runtime.errors import BundleError, MalformedBundle
from aotpack_runtime.format import layout
from aotpack_runtime.format.index import parse
from aotpack_runtime.machine import cache_dir

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
    repeat a name, are no plain files or are not in the index. Nothing is left behind when it refuses.
    """
    place = _made(_cache_root()) / _digest(path)
    if (place / layout.INDEX).exists():
        os.utime(place)
        return place
    with _open_zip(path) as archive:
        members = _checked_members(archive, path)
        _sweep(place.parent)
        staging = Path(tempfile.mkdtemp(prefix=f".{place.name[:16]}.{os.getpid()}.", dir=place.parent))
        try:
            for info in members:
                target = staging / info.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 22)
            try:
                staging.rename(place)
            except OSError:
                if not (place / layout.INDEX).exists():  # another process was first: its copy is as good
                    raise
        except (OSError, zipfile.BadZipFile) as error:
            raise BundleError(f"{path}: cannot be unpacked to {place.parent}: {error}") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return place


def _open_zip(path: Path) -> zipfile.ZipFile:
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise BundleError(f"{path}: is empty (0 bytes)", hint="the download or copy did not finish; fetch it again")
    if not head.startswith(b"PK"):
        what = "an HTML page" if b"<html" in head.lower() or head.lower().startswith(b"<!doctype") else "another format"
        raise BundleError(f"{path}: is not a bundle: it looks like {what}", hint="check the address it came from")
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        size = path.stat().st_size
        raise BundleError(
            f"{path}: is truncated: {size} bytes and no end of archive", hint="fetch the bundle again"
        ) from None


def _checked_members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    infos = archive.infolist()
    names = [info.filename for info in infos]
    if layout.INDEX not in names:
        raise BundleError(f"{path}: is a zip without {layout.INDEX}, not a bundle")
    for info in infos:
        mode = info.external_attr >> 16
        parts = info.filename.split("/")
        if info.filename.startswith("/") or "\\" in info.filename or not all(p not in ("", ".", "..") for p in parts):
            raise MalformedBundle(info.filename, "would be written outside of its folder", hint="do not use this file")
        if mode and not stat.S_ISREG(mode):
            raise MalformedBundle(info.filename, "is not a plain file", hint="do not use this file")
        if names.count(info.filename) > 1:
            raise MalformedBundle(info.filename, "is in the archive twice", hint="do not use this file")
    index = parse(archive.read(layout.INDEX))
    known = index.members()
    for info in infos:
        if info.filename == layout.INDEX:
            continue
        wanted = known.pop(info.filename, None)
        if wanted is None:
            raise MalformedBundle(info.filename, "is not in the index", hint="do not use this file")
        if info.file_size != wanted.size_bytes:
            raise MalformedBundle(info.filename, f"unpacks to {info.file_size} bytes, the index says {wanted.size_bytes}")
    if known:
        raise MalformedBundle(next(iter(known)), "is in the index and not in the archive")
    return infos


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_root() -> Path:
    return cache_dir() / "unpacked"


def _made(folder: Path) -> Path:
    """`folder`, private to this user; refused when another user can write it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BundleError(
            f"{folder}: cannot be created: {error.strerror}", hint="set AOTPACK_CACHE_DIR, or unpack the archive yourself"
        ) from None
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BundleError(f"{folder}: another user can write it", hint="chmod go-w it, or set AOTPACK_CACHE_DIR")
    return folder


def _sweep(folder: Path) -> None:
    """Remove half-unpacked folders whose process is gone."""
    for path in folder.glob(".*.*.*") if folder.exists() else ():
        process = path.name.split(".")[2]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(path, ignore_errors=True)
