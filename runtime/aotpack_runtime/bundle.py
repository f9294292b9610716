"""Open a bundle: find its index, read it, hand out members whose bytes were checked.

Files are opened when the bundle is opened and kept, so that a build which replaces the folder never changes what a
running process sees. Nothing is written beside a bundle.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from aotpack_runtime.errors import BundleError, DigestMismatch, MalformedBundle
from aotpack_runtime.format import layout
from aotpack_runtime.format.fingerprint import digest
from aotpack_runtime.format.index import File, Index, Variant
from aotpack_runtime.format.index_json import parse
from aotpack_runtime.weights import Gone, WeightsFile, map_weights

if TYPE_CHECKING:
    from pathlib import Path

Check = Literal["full", "index", "off"]
MAX_OPEN_FILES = 512
"""Members kept open from the start; of a bundle with more, the rest are opened when they are used."""
MAX_INDEX_BYTES = 1 << 30
HASHED_BYTES = 4 << 20
"""Read and hashed at a time, 2 ms: the GIL is asked for twice each time, and another thread may keep it for 5 ms."""
WORTH_A_THREAD_BYTES = 16 << 20
"""Of weights: ten milliseconds of hashing; a choice."""


class Opened:
    """An open file, closed with the last who holds it. Whoever reads it while its bundle is closed would find another
    file under a number that was given back, and run it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)


class Bundle:
    """An opened bundle. `check`: `full` hashes every member before its first use, `index` compares sizes only,
    `off` trusts the disk."""

    def __init__(
        self,
        folder: str,
        index: Index,
        digest: str,
        members: Mapping[str, File],
        opened: dict[str, Opened],
        check: Check,
    ) -> None:
        self.folder, self.index, self.digest, self.check = os.path.abspath(folder), index, digest, check
        self._opened, self._checked = opened, set[str]()
        self._members = members
        self._ahead: threading.Thread | None = None

    @property
    def root(self) -> Path:
        """The folder that it was opened from."""
        from pathlib import Path  # 4 ms, which a server need not pay

        return Path(self.folder)

    def files(self, variant: Variant) -> dict[str, str]:
        """Paths of a variant's files by name, each checked against its digest."""
        artifact = variant.artifact
        return {name: self.path(layout.artifact(artifact.kind, artifact.digest, name)) for name in artifact.files}

    def path(self, member: str) -> str:
        """A path that opens `member` as it was when the bundle was opened, its bytes checked."""
        opened = self._open(member)
        self._verify(member, opened)
        path = os.path.join(self.folder, member)
        try:
            now, then = os.stat(path), os.fstat(opened.number)
            if (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino):
                return path
        except OSError:
            pass
        # The folder was replaced meanwhile. The dynamic loader knows libraries by path, so this descriptor is never
        # given back: its number must not come to mean another file.
        return f"/proc/self/fd/{os.dup(opened.number)}"

    def check_weights_ahead(self) -> None:
        """Begin to hash the weights beside what the caller does next, such as importing torch. Who needs them waits,
        and says what is wrong with them."""
        file = self.index.weights_file
        if file is None or file.size_bytes < WORTH_A_THREAD_BYTES or self.check != "full":
            return
        member = layout.weights(file.digest)
        opened = self._open(member)

        def check() -> None:
            with contextlib.suppress(BundleError, OSError):
                self._verify(member, opened)

        self._ahead = threading.Thread(target=check, name="aotpack-weights", daemon=True)
        self._ahead.start()

    def weights(self, *, keep: bool = True, check: bool = True) -> WeightsFile:
        """The weights file; mapped once in this process, or (to be read from one time, not `keep`) for as long as
        somebody holds what is returned. Without `check` no more than its header was looked at: `check_weights` before
        anything of it is used."""
        if self.index.weights_file is None:
            raise MalformedBundle(layout.INDEX, "names no weights file")
        if check:
            self.check_weights()
        member = layout.weights(self.index.weights_file.digest)
        opened = self._open(member)
        return map_weights(opened.number, member) if keep else WeightsFile(opened.number, member)

    def check_weights(self) -> None:
        """Raises what is wrong with the weights file; hashed once."""
        if self.index.weights_file is None:
            return
        if self._ahead is not None:
            self._ahead.join()
        member = layout.weights(self.index.weights_file.digest)
        self._verify(member, self._open(member))

    def verify(self, progress: Callable[[str], None] = lambda member: None) -> None:
        """Hash every member; the first that differs raises."""
        for member in sorted(self._members):
            self._verify(member, self._open(member), full=True)
            progress(member)

    def close(self) -> None:
        """Give back the file descriptors, those that a thread reads when it has; what is mapped stays mapped."""
        self._opened = Gone()

    def __del__(self) -> None:
        self.close()

    def _open(self, member: str) -> Opened:
        known = self._opened
        try:
            return known[member]
        except KeyError:
            return known.setdefault(member, _open_member(self.folder, member))

    def _verify(self, member: str, opened: Opened, *, full: bool = False) -> None:
        if (member in self._checked and not full) or (self.check == "off" and not full):
            return
        wanted = self._members[member]
        size = os.fstat(opened.number).st_size
        if size != wanted.size_bytes:
            raise MalformedBundle(member, f"has {size} bytes, the index says {wanted.size_bytes}")
        if self.check == "full" or full:
            actual = _hash(opened.number)
            if actual != wanted.digest:
                raise DigestMismatch(member, expected=wanted.digest, actual=actual)
        self._checked.add(member)


def open_bundle(path: str | os.PathLike[str], *, check: Check | None = None) -> Bundle:
    """Open a bundle folder, or an archive of one (unpacked once into the cache)."""
    mode = check or os.environ.get("AOTPACK_CHECK") or "full"
    if mode not in ("full", "index", "off"):
        raise BundleError(f"{'check' if check else 'AOTPACK_CHECK'} is {mode!r}; expected full, index or off")
    place = os.fspath(path)
    for attempt in range(5):
        root = _locate(place)
        try:
            return _open_folder(root, mode)  # type: ignore[arg-type]
        except MalformedBundle as error:
            # A build may have replaced the folder between two opens: what is gone then is there at the next try.
            # Of an unpacked archive a cleaner of old files may have taken some: it is unpacked again.
            index = os.path.join(root, layout.INDEX)
            if attempt == 4 or not isinstance(error.__cause__, FileNotFoundError) or not os.path.exists(index):
                raise
            if root != place:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(index)
    raise AssertionError("unreachable")


def _locate(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise BundleError(f"{path}: no such file or directory") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: {getattr(error, 'strerror', error)}") from None
    if stat.S_ISDIR(mode):
        return path
    if not stat.S_ISREG(mode):
        raise BundleError(f"{path}: is not a file or folder, so not a bundle")
    from pathlib import Path

    from aotpack_runtime.archive import unpack  # a folder need not pay for importing zipfile

    return str(unpack(Path(path)))


def _open_folder(root: str, check: Check) -> Bundle:
    try:
        file = _open_member(root, layout.INDEX)
    except MalformedBundle as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise BundleError(f"{root}: is a directory without {layout.INDEX}, not a bundle") from None
        raise
    with os.fdopen(file.number, "rb", closefd=False) as reader:
        data = reader.read(MAX_INDEX_BYTES)
    index = parse(data)
    members = index.members()
    opened = {member: _open_member(root, member) for member in members} if len(members) <= MAX_OPEN_FILES else {}
    return Bundle(root, index, digest(data), members, opened, check)


def _open_member(root: str, member: str) -> Opened:
    """A plain file; anything else is refused rather than waited for (a pipe) or read without end."""
    try:
        opened = Opened(os.open(os.path.join(root, member), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        raise MalformedBundle(member, f"cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(opened.number).st_mode):
        raise MalformedBundle(member, "is not a plain file")
    return opened


def _hash(descriptor: int) -> str:
    hasher, offset = hashlib.sha256(), 0
    # One buffer of its own mapping: blocks from malloc stay in the arena of the thread that hashes, 8 MB of them.
    with mmap.mmap(-1, min(HASHED_BYTES, os.fstat(descriptor).st_size) or 1) as buffer, memoryview(buffer) as view:
        while count := os.preadv(descriptor, [buffer], offset):
            hasher.update(view[:count])
            offset += count
    return hasher.hexdigest()


def file_of(path: Path) -> File:
    """Digest and size of a file on disk, as the index records them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return File(_hash(descriptor), os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
