"""A job in a child of this process, which begins with what is imported here and leaves nothing of its own behind.

An export imports a user's model, so each has a process for itself. Of the five CPU seconds that a small one took, four
went into importing torch and its exporter (torch 2.13, Python 3.11): done once here, they are every child's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Json = Any
Run = Callable[[], Mapping[str, Json]]

_PR_SET_PDEATHSIG = 1


def run_forked(room: str, run: Run) -> Mapping[str, Json]:
    """What `run` gives in a child, once the module `room` is imported here; {"died": exit code or negative signal} when
    the child ended before it gave anything."""
    with contextlib.suppress(Exception):  # the job says it better
        importlib.import_module(room)
    answer = os.memfd_create("answer")
    parent = os.getpid()
    with warnings.catch_warnings():
        # The one other thread waits for a line of stdin, which no job reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _work(run, answer, parent)
    _, status = os.waitpid(child, 0)
    with os.fdopen(answer, "rb") as file:
        file.seek(0)
        given = file.read()
    return json.loads(given) if given else {"died": os.waitstatus_to_exitcode(status)}


def _work(run: Run, answer: int, parent: int) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        given = json.dumps(run()).encode()
        os.pwrite(answer, given, 0)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
