"""Load an aotpack bundle in an inference server and call its entries.

    import aotpack_runtime as apr

    session = apr.load("dist/minilm-1.0.0")
    out = session["encoder"](input_ids=ids, attention_mask=mask)

Importing this module imports the standard library only; torch is imported when the first variant is loaded.
"""

from __future__ import annotations

from aotpack_runtime.dispatch import Hit, Miss
from aotpack_runtime.entry import Entry
from aotpack_runtime.errors import (
    AotpackError,
    ArtifactError,
    BundleError,
    CallError,
    DigestMismatch,
    GuardMiss,
    MalformedBundle,
    MissingDependency,
    SessionClosed,
    TargetMismatch,
    UnknownEntry,
    UnsupportedFormat,
    WeightsError,
)
from aotpack_runtime.session import Session, load

__version__ = "0.1.0"

__all__ = [
    "AotpackError",
    "ArtifactError",
    "BundleError",
    "CallError",
    "DigestMismatch",
    "Entry",
    "GuardMiss",
    "Hit",
    "MalformedBundle",
    "Miss",
    "MissingDependency",
    "Session",
    "SessionClosed",
    "TargetMismatch",
    "UnknownEntry",
    "UnsupportedFormat",
    "WeightsError",
    "load",
]
