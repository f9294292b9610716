"""What a session will need, begun beside what its caller does next: on a GPU the driver and its context, without torch
the libraries. Whoever needs one of them waits for it, and is told what is wrong with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from aotpack_runtime import forks
from aotpack_runtime.drivers.probe import retain_context
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.loaders import LIBTORCH, loader

_threads: list[threading.Thread] = []


def begin(work: Callable[[], object]) -> None:
    """Do `work` in a thread; what it raises, whoever needs its result raises again."""

    def quietly() -> None:
        with contextlib.suppress(AotpackError, OSError):
            work()

    # No daemon: a process that ends while libraries are being opened would run their ends beside their beginnings.
    thread = threading.Thread(target=quietly, name="aotpack-ahead")
    _threads[:] = [*(other for other in _threads if other.is_alive()), thread]
    thread.start()


def open_device(device: str, *, libraries: bool) -> None:
    """Begin to make the context of a GPU, and to open torch's `libraries` for a device."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        begin(lambda: retain_context(int(index or 0)))
    if libraries:
        begin(lambda: _open_libraries(kind))


def _open_libraries(kind: str) -> None:
    library = loader(LIBTORCH).open_libtorch()
    if kind == "cuda":
        library.open_cuda()


def _wait() -> None:
    for thread in _threads:
        if thread is not threading.current_thread():
            thread.join()


forks.before(_wait)
"""A child would have half-opened libraries."""
