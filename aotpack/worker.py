"""The builder as a child process: jobs come in as lines of JSON, results go out as lines of JSON.

A job that crashes its toolchain takes this process down and nothing else. `python -m aotpack.worker STORE` reads jobs
from stdin; when that is closed nobody waits for a result any more, and the job at hand ends with its compilers. Results
go to the file descriptor that stdout was, while everything that libraries print goes to stderr, which the parent keeps
as the log of the job.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from aotpack.forked import run_forked
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.store import Store

JOBS = {
    "export": "aotpack.compilers.exported:compile",
    "move": "aotpack.compilers.cross.moving:compile",
    "aoti": "aotpack.compilers.aoti:compile",
    "aoti_warm": "aotpack.compilers.aoti:warm_up",
    "cross": "aotpack.compilers.cross.compile:compile",
    "time": "aotpack.compilers.cross.timing:compile",
    "triton_source": "aotpack.compilers.triton_source:describe",
    "triton": "aotpack.compilers.triton:compile",
    "nvrtc_source": "aotpack.compilers.nvrtc_source:describe",
    "nvrtc": "aotpack.compilers.nvrtc:compile",
    "verify": "aotpack.verify:compile",
    "miss": "aotpack.miss:compile",
    "kernel_miss": "aotpack.kernel_miss:compile",
}
"""Kind of job -> `module:function`; it is called with the job and the store, and returns the job's record."""


def main(root: str) -> NoReturn:
    """Serve jobs until stdin ends, and the process with it."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = opened(root)
    jobs: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        answer = _forked(job, store) if job.get("forked") else run(job, store)
        last = "error" in answer and _gpu_is_lost()
        print(json.dumps({**answer, "last": last}), file=results, flush=True)
        if last:
            os._exit(1)


def _forked(job: dict[str, Any], store: Store) -> Mapping[str, Any]:
    return run_forked(JOBS[job["kind"]].partition(":")[0], lambda: run(job, store))


def opened(root: str) -> Store:
    """The store at `root`, which is there, for the jobs of this process. Torch writes paths into the command lines of
    compilers as they are, so one with spaces or quotes goes by another name, in the variables of this process too."""
    if re.fullmatch(r"[\w./+-]+", root, re.ASCII):
        return Store(Path(root))
    plain = f"/proc/{os.getpid()}/fd/{os.open(root, os.O_PATH | os.O_DIRECTORY)}"
    for name, value in os.environ.items():
        if value == root or value.startswith(f"{root}/"):
            os.environ[name] = plain + value.removeprefix(root)
    return Store(Path(plain))


def _gpu_is_lost() -> bool:
    """After an error on a GPU (an assertion of a kernel, an address that is none) its context serves nobody in this
    process any more; the next job needs another process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _read(jobs: SimpleQueue[str]) -> None:
    """Hand on the lines of stdin; at its end, that of a killed parent too, end this process and its children."""
    for line in sys.stdin:
        jobs.put(line)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def run(job: dict[str, Any], store: Store) -> dict[str, Any]:
    """{"result": the record of the job} or {"error": its type, message and hint}."""
    try:
        sys.path[:] = [path for path in sys.path if path != job.get("folder")]
        module, _, function = JOBS[job["kind"]].partition(":")
        return {"result": getattr(importlib.import_module(module), function)(job, store)}
    except AotpackError as error:
        return {"error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}}
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        message = f"{job.get('variant') or job.get('entry')}: {type(error).__name__}: {text[0] if text else ''}"
        return {"error": {"type": "CompileError", "message": message, "hint": "run with --debug for the log"}}


if __name__ == "__main__":
    main(sys.argv[1])
