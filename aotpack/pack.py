"""Index + stored files -> a bundle on disk, written beside its place and put there in one step."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aotpack_runtime.archive import pack_archive
from aotpack_runtime.errors import BundleError
from aotpack_runtime.format import layout
from aotpack_runtime.format.fingerprint import digest
from aotpack_runtime.format.index import Index, dump
from aotpack_runtime.store import Store

Json = Any
ARCHIVE_SUFFIXES = (".aotpack", ".zip")


def stage(index: Index, store: Store, out: Path) -> Path:
    """Write the whole bundle to a new folder beside `out`; the caller publishes or discards it."""
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.{os.getpid()}.", dir=parent))
    folder.chmod(0o755)
    for member, file in sorted(index.members().items()):
        target = folder / member
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store.object(file.digest), target)
        target.chmod(0o644)
    (folder / layout.INDEX).write_bytes(dump(index))
    return folder


def publish(staged: Path, out: Path) -> Path:
    """Put a staged bundle in the place of `out` in one step, as a folder or, by its suffix, as an archive.

    A reader sees the old bundle or the new one, whole. BundleError when `out` is something that is no bundle.
    """
    if out.suffix in ARCHIVE_SUFFIXES:
        pack_archive(staged, out)
        shutil.rmtree(staged)
        return out
    check_replaceable(out)
    if not out.exists():
        os.rename(staged, out)
    elif _exchange(staged, out):
        shutil.rmtree(staged)
    else:
        retired = staged.with_name(staged.name + "old")
        os.rename(out, retired)
        os.rename(staged, out)
        shutil.rmtree(retired)
    return out


def check_replaceable(out: Path) -> None:
    """BundleError when `out` exists and replacing it would destroy something that is not a bundle."""
    if out.suffix in ARCHIVE_SUFFIXES:
        if out.is_dir():
            raise BundleError(f"{out}: is a directory, and {out.suffix} asks for an archive", hint="name another place")
        return
    if out.exists() and not out.is_dir():
        raise BundleError(f"{out}: exists and is a file, not a bundle", hint="name another place with -o")
    if out.is_dir() and not (out / layout.INDEX).exists() and any(out.iterdir()):
        raise BundleError(f"{out}: exists and is not a bundle", hint="name another place with -o, or remove it")


def is_current(index: Index, out: Path) -> bool:
    """Is the bundle at `out` this one already, every member in place with its size?"""
    try:
        if (out / layout.INDEX).read_bytes() != dump(index):
            return False
        return all((out / member).stat().st_size == file.size_bytes for member, file in index.members().items())
    except OSError:
        return False


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


def _sweep(out: Path) -> None:
    """Remove staged folders that killed builds left beside `out`."""
    for path in out.absolute().parent.glob(f".{out.name}.*.*"):
        process = path.name.removeprefix(f".{out.name}.").partition(".")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            shutil.rmtree(path, ignore_errors=True)
