"""Where things sit in a bundle. The only place that joins member paths.

index.json            the one file read at load
artifacts/<sha256>/   the files of one compiled artifact
programs/<sha256>.pt2 exported programs without weights
weights/<sha256>.safetensors
sources/<sha256>.py|.cu  the text that kernels are compiled from
"""

from __future__ import annotations

import re
from functools import lru_cache

INDEX = "index.json"
EXPORTED = "exported"
"""The kind of artifact that is one program file; every other kind is a folder of files."""

KERNELS = ("cubin", "ptx")
"""Kinds of artifact that are launched through the CUDA driver."""
SOURCE_SUFFIXES = (".py", ".cu", ".h")

_is_digest = re.compile(r"[0-9a-f]{64}").fullmatch


def checked_digest(digest: str) -> str:
    """`digest` itself; ValueError when it is no sha256."""
    if not _is_digest(digest):
        raise ValueError(f"{digest[:80]!r} is not a sha256")
    return digest


def artifact(kind: str, digest: str, name: str) -> str:
    """Member path of a file of an artifact; ValueError for a digest or name that could leave its folder."""
    checked_digest(digest)
    _check_name(name)
    return f"programs/{digest}.pt2" if kind == EXPORTED else f"artifacts/{digest}/{name}"


@lru_cache(maxsize=256)
def _check_name(name: str) -> None:
    """Thousands of artifacts have files of a few names."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", name) or ".." in name:
        raise ValueError(f"{name[:80]!r} is not a plain file name")


def weights(digest: str) -> str:
    return f"weights/{checked_digest(digest)}.safetensors"


def source(digest: str, suffix: str) -> str:
    checked_digest(digest)
    if suffix not in SOURCE_SUFFIXES:
        raise ValueError(f"{suffix[:20]!r} is no suffix of a source: {', '.join(SOURCE_SUFFIXES)}")
    return f"sources/{digest}{suffix}"


def source_suffix(path: str) -> str:
    """The suffix under which a file of a kernel's source is kept; what is neither Python nor CUDA C++ is a header."""
    return next((suffix for suffix in SOURCE_SUFFIXES if path.endswith(suffix)), ".h")
