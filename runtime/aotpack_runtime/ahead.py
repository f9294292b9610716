"""What a session will need, begun beside what its caller does next: on a GPU the driver and its context, without torch
the libraries. Whoever needs one of them waits for it, and is told what is wrong with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from aotpack_runtime import forks
from aotpack_runtime.drivers.captures import beside_captures
from aotpack_runtime.drivers.probe import open_driver, retain_context
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.loaders import FIRST_CALLS, LIBTORCH, loader

if TYPE_CHECKING:
    from aotpack_runtime.bundle import Bundle
    from aotpack_runtime.format.index import Variant

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
        open_driver()  # a few milliseconds, for which everybody would wait until torch's libraries are open
        begin(lambda: retain_context(int(index or 0)))
    if libraries:
        begin(lambda: _open_libraries(kind))


def get_ready(device: str, bundle: Bundle, variants: Iterable[Variant]) -> None:
    """Begin to make a GPU's libraries ready for the first calls of these variants of models."""
    packages = [variant for variant in variants if variant.artifact.kind == "aoti"]

    def work() -> None:
        paths = [path for variant in packages for name, path in bundle.files(variant).items() if name.endswith(".so")]
        with beside_captures(device):
            loader(FIRST_CALLS).get_ready(device, paths)

    begin(work)


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
