"""Index + stored files -> a bundle on disk, written beside its place and put there in one step."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aotpack_runtime.archive import pack_archive
from aotpack_runtime.errors import AotpackError, OutputError
from aotpack_runtime.format import layout
from aotpack_runtime.format.fingerprint import digest
from aotpack_runtime.format.index import Index
from aotpack_runtime.format.index_json import dump

Json = Any
ARCHIVE_SUFFIXES = (".aotpack", ".zip")
OTHER_ARCHIVES = (".7z", ".bz2", ".gz", ".pt2", ".tar", ".tgz", ".whl", ".xz", ".zst")
"""Names of files: no folder is meant by them."""


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A place beside `out` to stage a bundle at. It, and what `publish` took away, is gone afterwards.

    It is locked while this process lives, by the kernel: that is how the next build knows what a killed one left.
    """
    parent, prefix = out.parent, f".{out.name}.building-"
    with _writing(out):
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(glob.escape(prefix) + "*"):
            with _locked(left, wait=False) as free:
                if free and any(left.iterdir()):  # it is empty before its owner has locked it
                    shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with _locked(folder, wait=True):
        try:
            yield folder / "bundle"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Files(Protocol):
    """Where files are, by their digest."""

    def object(self, digest: str) -> Path: ...


def stage(index: Index, store: Files, out: Path, folder: Path) -> None:
    """Write the whole bundle to `folder`, anew if something is there; it is to become `out`."""
    with _writing(out):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=0o755)
        for member, file in sorted(index.members().items()):
            target = folder / member
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(store.object(file.digest), target)
            target.chmod(0o644)
        (folder / layout.INDEX).write_bytes(dump(index))


def publish(staged: Path, out: Path) -> None:
    """Put a staged bundle in the place of `out` in one step, as a folder or, by its suffix, as an archive.

    A reader sees the old bundle or the new one, whole. OutputError when `out` is something that is no bundle.
    """
    check_replaceable(out)
    with _writing(out):
        if out.suffix in ARCHIVE_SUFFIXES:
            os.replace(pack_archive(staged, staged.with_name("archive")), out)
        elif not out.exists():
            os.rename(staged, out)
        elif not _exchange(staged, out):
            os.rename(out, staged.with_name("replaced"))
            os.rename(staged, out)


def check_replaceable(out: Path) -> None:
    """OutputError when `out` exists and replacing it would destroy something that is not a bundle, or is called like a
    file of another kind."""
    if out.suffix in ARCHIVE_SUFFIXES:
        if out.is_dir():
            raise OutputError(f"{out}: is a directory, and {out.suffix} asks for an archive", hint="name another place")
        if out.exists() and not (out.stat().st_size == 0 or _is_archive(out)):
            raise OutputError(f"{out}: exists and is not a bundle", hint="name another place with -o, or remove it")
        return
    if out.suffix in OTHER_ARCHIVES:
        raise OutputError(
            f"{out}: {out.suffix} is no form of a bundle", hint=f"an archive is FILE{' or FILE'.join(ARCHIVE_SUFFIXES)}"
        )
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out}: exists and is a file, not a bundle", hint="name another place with -o")
    if out.is_dir() and any(out.iterdir()) and not _is_bundle(out):
        raise OutputError(f"{out}: exists and is not a bundle", hint="name another place with -o, or remove it")


def _is_bundle(folder: Path) -> bool:
    """Is `folder` one of ours, of whatever format version? Other programs have an index.json too."""
    try:
        return _is_index((folder / layout.INDEX).read_bytes())
    except OSError:
        return False


def _is_archive(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return _is_index(archive.read(layout.INDEX))
    except (OSError, KeyError, zipfile.BadZipFile):
        return False


def _is_index(data: bytes) -> bool:
    try:
        index = json.loads(data)
    except ValueError:
        return False
    return isinstance(index, dict) and {"format", "bundle", "entries"} <= index.keys()


def is_current(index: Index, out: Path) -> bool:
    """Is the bundle at `out` this one already, with every member's bytes in place?

    Members are written before the index: one that was not changed since, as the kernel's clock says, is not hashed.
    """
    try:
        if (out / layout.INDEX).read_bytes() != dump(index):
            return False
        written = (out / layout.INDEX).stat().st_ctime_ns
        for member, file in index.members().items():
            status = (out / member).stat()
            if status.st_size != file.size_bytes or (
                status.st_ctime_ns > written and _digest(out / member) != file.digest
            ):
                return False
    except OSError:
        return False
    return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """What the file system refuses is not a fault of ours: it becomes a sentence about `out`."""
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in (errno.EBUSY, errno.EXDEV):
            hint = f"it is a mount point, which cannot be replaced: name a folder inside it, such as {out / 'bundle'}"
        place = f" ({error.filename})" if error.filename else ""
        raise AotpackError(f"{out}: cannot be written: {error.strerror or error}{place}", hint=hint) from error


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of `folder`, until the block or this process ends; False when it cannot be had."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            free = True
        except OSError:  # another process has it, or the file system has no locks
            free = False
        yield free
    finally:
        os.close(descriptor)


def index_digest(index: Index) -> str:
    """The digest that names a bundle: sha256 of its index.json."""
    return digest(dump(index))


def merge_weights(files: Sequence[tuple[str, Path]], target: Path) -> None:
    """One safetensors file of several, each tensor's name behind its set's name: `set/name`.

    The header is padded so that data begins at a multiple of 64 bytes; tensors keep their order, largest alignment
    first within each file, as safetensors writes them.
    """
    header: dict[str, Json] = {}
    parts: list[tuple[Path, int, int]] = []
    offset = 0
    for name, path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors: Mapping[str, Json] = json.loads(file.read(length))
        size = path.stat().st_size - 8 - length
        for tensor, record in tensors.items():
            if tensor != "__metadata__":
                begin, end = record["data_offsets"]
                header[f"{name}/{tensor}"] = {**record, "data_offsets": [begin + offset, end + offset]}
        parts.append((path, 8 + length, size))
        offset += size
    text = json.dumps(dict(sorted(header.items())), separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for path, start, _ in parts:
            with path.open("rb") as file:
                file.seek(start)
                shutil.copyfileobj(file, out, 1 << 22)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two folders in one step (renameat2 with RENAME_EXCHANGE, Linux 3.15); False where that is not possible."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.renameat2(-100, os.fsencode(left), -100, os.fsencode(right), 2)
    except (OSError, AttributeError):
        return False
    if result == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(right))
