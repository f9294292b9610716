"""Threads behind misses end before the interpreter does.

A thread that comes back from C++ code, where torch copies or loads, while Python is being finalized is ended inside of
it, and C++ ends the process for that (std::terminate): a server that was done would exit with a crash.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable

from aotpack_runtime import forks

WAIT_SECONDS = 10.0
"""The most that the end of a process is held up."""

_running: dict[threading.Thread, Callable[[], None]] = {}
forks.in_child(_running.clear)


def start(work: Callable[[], object], name: str, stop: Callable[[], None]) -> None:
    """Do `work` in a thread; `stop` is called when the process ends, and has it come to its end soon. RuntimeError when
    there may be no further thread."""

    def until_done() -> None:
        with contextlib.suppress(OSError):  # else it would take the core of the call that wakes it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            work()
        finally:
            _running.pop(threading.current_thread(), None)

    # A daemon: Python waits for others before it runs what is registered for its end, `stop` among it.
    thread = threading.Thread(target=until_done, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except RuntimeError:
        del _running[thread]
        raise


@atexit.register
def _end() -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    running = dict(_running)
    for stop in running.values():
        stop()
    for thread in running:
        thread.join(max(deadline - time.monotonic(), 0))
