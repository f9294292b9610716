"""The stream a kernel is launched on: torch's current one for torch's tensors, else the one that was said, else the one
that an array names itself, else the default stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_local = threading.local()


@contextmanager
def use_stream(handle: int) -> Iterator[None]:
    """Kernels called inside, with arrays that are not torch's, go to the CUDA stream with this handle (a number)."""
    check_stream(handle)
    before = getattr(_local, "handle", None)
    _local.handle = int(handle)
    try:
        yield
    finally:
        _local.handle = before


def check_stream(handle: object) -> None:
    """ValueError for what is no handle of a CUDA stream: a number of 64 bits."""
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise ValueError(f"{str(handle)[:40]!r} is no handle of a CUDA stream")


def said_stream() -> int | None:
    """The handle that `use_stream` says in this thread, None outside of it."""
    handle: int | None = getattr(_local, "handle", None)
    return handle
