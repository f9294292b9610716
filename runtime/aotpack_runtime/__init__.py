"""Load an aotpack bundle in an inference server and call its entries.

    import aotpack_runtime as apr

    session = apr.load("dist/minilm-1.0.0")
    out = session["encoder"](input_ids=ids, attention_mask=mask)

Importing this module imports next to nothing: each name is fetched when it is first used (PEP 562). The runtime itself
stands on the standard library only; torch is imported when a call needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aotpack_runtime.array import Array as Array
    from aotpack_runtime.dispatch import Hit as Hit
    from aotpack_runtime.dispatch import Miss as Miss
    from aotpack_runtime.entry import Entry as Entry
    from aotpack_runtime.errors import AotpackError as AotpackError
    from aotpack_runtime.errors import ArtifactError as ArtifactError
    from aotpack_runtime.errors import BundleError as BundleError
    from aotpack_runtime.errors import CallError as CallError
    from aotpack_runtime.errors import DigestMismatch as DigestMismatch
    from aotpack_runtime.errors import GuardMiss as GuardMiss
    from aotpack_runtime.errors import MalformedBundle as MalformedBundle
    from aotpack_runtime.errors import MissingDependency as MissingDependency
    from aotpack_runtime.errors import SessionClosed as SessionClosed
    from aotpack_runtime.errors import TargetMismatch as TargetMismatch
    from aotpack_runtime.errors import UnknownEntry as UnknownEntry
    from aotpack_runtime.errors import UnsupportedFormat as UnsupportedFormat
    from aotpack_runtime.errors import WeightsError as WeightsError
    from aotpack_runtime.session import Session as Session
    from aotpack_runtime.session import load as load
    from aotpack_runtime.streams import use_stream as use_stream

__version__ = "0.1.0"

_ELSEWHERE = {"Array": "array", "Entry": "entry", "Hit": "dispatch", "Miss": "dispatch", "Session": "session",
              "load": "session", "use_stream": "streams"}  # fmt: skip
"""Public name -> its module; the names that are not here are exceptions."""

__all__ = [
    "AotpackError",
    "Array",
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
    "use_stream",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
