"""Work on a GPU beside CUDA graphs that other threads of the process capture."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from aotpack_runtime.drivers.probe import open_driver

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


@contextlib.contextmanager
def beside_captures(device: str) -> Iterator[None]:
    """Load, allocate and wait for events inside while another thread may be capturing a graph, which by default forbids
    that to every thread, and loses what it has captured (CUDA driver API, cuThreadExchangeStreamCaptureMode)."""
    exchange = getattr(open_driver() if device != "cpu" else None, "cuThreadExchangeStreamCaptureMode", None)
    mode = ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)):
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
