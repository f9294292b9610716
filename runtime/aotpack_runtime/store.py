"""Content-addressed files and small records on disk, safe for many processes at once.

    objects/<aa>/<sha256>        bytes, named by their digest
    records/<kind>/<key>.json    what a job with that key gave

Everything is written beside its place and renamed, so a reader sees a whole file or none. A record that cannot be read
or names objects that are gone is a miss, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

Json = Any


class Store:
    """A store under `root`, created with private permissions when it is first written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put_file(self, path: Path) -> dict[str, Json]:
        """Keep a copy of the file at `path`; {"sha256", "bytes"} as the index records a file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        target = self.object(digest)
        if not target.exists():
            with self._replacing(target) as temporary:
                shutil.copyfile(path, temporary)
        return {"sha256": digest, "bytes": path.stat().st_size}

    def put_bytes(self, data: bytes) -> dict[str, Json]:
        """Keep `data`; the same as for a file of it."""
        digest = hashlib.sha256(data).hexdigest()
        target = self.object(digest)
        if not target.exists():
            with self._replacing(target) as temporary:
                temporary.write_bytes(data)
        return {"sha256": digest, "bytes": len(data)}

    def object(self, digest: str) -> Path:
        """Where the bytes with this digest are, or would be."""
        return self.root / "objects" / digest[:2] / digest

    def checked(self, file: Json) -> Path | None:
        """Where the bytes of a file that a record names are, hashed now; None, and what is there is removed, where they
        are other bytes."""
        path = self.object(file["sha256"])
        try:
            with path.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() == file["sha256"]:
                    return path
            path.unlink()
        except OSError:
            pass
        return None

    def put_record(self, kind: str, key: str, value: Json) -> None:
        target = self._record(kind, key)
        with self._replacing(target) as temporary:
            temporary.write_text(json.dumps({"key": key, "value": value}, sort_keys=True))

    def get_record(self, kind: str, key: str) -> Json | None:
        """The record, None when there is none that can be used: its full key is compared, its objects must exist."""
        try:
            found = json.loads(self._record(kind, key).read_text())
            if found["key"] != key or not all(self.object(digest).exists() for digest in _digests(found["value"])):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found["value"]

    def count_records(self, kind: str) -> int:
        """How many records of this kind there are."""
        return sum(1 for _ in (self.root / "records" / kind).glob("*.json"))

    def _record(self, kind: str, key: str) -> Path:
        return self.root / "records" / kind / f"{key}.json"

    @contextlib.contextmanager
    def _replacing(self, target: Path) -> Any:
        """A temporary path beside `target` that takes its place when the block ends well."""
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=target.parent)
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def _digests(value: Json) -> list[str]:
    """Digests of every file that a record names."""
    if isinstance(value, dict):
        if value.keys() == {"sha256", "bytes"}:
            return [value["sha256"]]
        return [digest for item in value.values() for digest in _digests(item)]
    if isinstance(value, list):
        return [digest for item in value for digest in _digests(item)]
    return []
