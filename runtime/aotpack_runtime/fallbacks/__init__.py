"""What serves a miss now, one way a file, and which ways each policy tries in which order.

A way is a class `Fallback(context)` with a `tier` and `prepare(miss, values) -> Prepared | str`: what serves the call,
or the reason why this way cannot. The table holds dotted names: listing ways imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from aotpack_runtime.record import Record

if TYPE_CHECKING:
    from aotpack_runtime.dispatch import Miss
    from aotpack_runtime.format.index import Entry, Variant

FALLBACKS: Mapping[str, str] = {
    "program": "aotpack_runtime.fallbacks.program",
    "source": "aotpack_runtime.fallbacks.source",
    "pad": "aotpack_runtime.fallbacks.pad",
    "reference": "aotpack_runtime.fallbacks.reference",
}

POLICIES: Mapping[str, tuple[str, ...]] = {
    "jit": ("program", "source"),
    "eager": ("program", "source"),
    "pad": ("pad", "program", "source"),
    "error": (),
}
KERNEL_POLICIES: Mapping[str, tuple[str, ...]] = {"jit": ("reference",), "eager": ("reference",), "error": ()}
"""The same of kernels: a reference serves where the manifest says that it may."""


class Prepared(Record):
    """A miss that can be served: `serve` takes the leaves of the call. `remember` when the same holds for every call
    that guards judge alike; `program` is the one that serves, if one does."""

    serve: Callable[..., object]
    remember: bool = True
    program: Variant | None = None


class Context(Protocol):
    """What a way may use of the entry it serves."""

    record: Entry
    device: str
    variants: tuple[Variant, ...]
    programs: tuple[Variant, ...]
    source_policy: str

    def serve_for(self, variant: Variant, *, counted: bool = True) -> Callable[..., object]: ...
    def counter(self, name: str) -> Callable[[], object]: ...
    def weights(self, name: str) -> Any: ...


class Fallback(Protocol):
    """One way to serve a miss."""

    tier: str

    def prepare(self, miss: Miss, values: tuple[object, ...]) -> Prepared | str: ...
