"""The plainest parts of records: texts, and files by digest and size. Readers raise on anything else."""

from __future__ import annotations

from typing import Any

from aotpack_runtime.format import layout
from aotpack_runtime.format.index import File

Json = Any


def text(value: Json) -> str:
    """`value` itself; TypeError when it is no text."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {str(value)[:80]!r}")
    return value


def texts(value: Json) -> dict[str, str]:
    """A mapping of texts to texts."""
    return {name: text(item) for name, item in value.items()}


def dump_file(file: File) -> Json:
    return {"sha256": file.digest, "bytes": file.size_bytes}


def parse_file(value: Json) -> File:
    size = value["bytes"]
    if type(size) is not int or size < 0:
        raise ValueError(f"bytes: expected a size, got {size!r}")
    return File(layout.checked_digest(text(value["sha256"])), size)
