"""The stream a kernel is launched on: torch's current one for torch's tensors, else the one that was said, else the one
that an array names itself, else the default stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from aotpack_runtime.drivers.probe import wait_for
from aotpack_runtime.imported import imported

_said: ContextVar[int | None] = ContextVar("aotpack_stream", default=None)
"""Of a context, not of a thread: tasks of an event loop take turns in one."""


@contextmanager
def use_stream(handle: int) -> Iterator[None]:
    """Kernels called inside, with arrays that are not torch's, go to the CUDA stream with this handle (a number). It is
    said for this thread, or this task of an event loop, and for what they start with a copy of their context."""
    check_stream(handle)
    before = _said.get()
    _said.set(int(handle))
    try:
        yield
    finally:
        _said.set(before)


def check_stream(handle: object) -> None:
    """ValueError for what is no handle of a CUDA stream: a number of 64 bits."""
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise ValueError(f"{str(handle)[:40]!r} is no handle of a CUDA stream")


def said_stream() -> int | None:
    """The handle that `use_stream` says here, None outside of it."""
    return _said.get()


def ready_on(stream: int, device: str) -> None:
    """Return when work on `stream` of a GPU may read what this thread has queued there: at once where it goes to that
    stream itself, else when it is done. BufferError when the work has failed."""
    check_stream(stream)
    ordinal = int(device.partition(":")[2] or 0)
    own, torch = said_stream(), imported("torch")
    if own is None:
        own = torch._C._cuda_getCurrentRawStream(ordinal) if torch is not None and torch.cuda.is_available() else 0
    if (own or 1) == (stream or 1):  # 1 is the default stream too (cudaStreamLegacy)
        return
    if status := wait_for(own, ordinal):
        raise BufferError(f"what was queued on the stream {own} of {device} has failed (CUDA error {status})")
