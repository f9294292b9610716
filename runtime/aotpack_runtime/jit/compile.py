"""The builder as a child process: its memory, its crashes and its imports are not the server's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aotpack_runtime import forks
from aotpack_runtime.errors import CompileError

Json = Any
LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one child: wall seconds, and bytes of private memory for each of its processes."""

    seconds: float = 600.0
    memory_bytes: int = 8 << 30


def unavailable() -> str:
    """Why nothing can be compiled here, "" when it can. Looks for the builder without importing it."""
    if not sys.executable:
        return "this Python does not know its own executable (sys.executable is empty)"
    if find_spec("aotpack") is None:
        return "the builder is not installed: pip install 'aotpack-runtime[jit]'"
    return ""


class Child:
    """One compile. `run` may be called once; `stop` from any thread, at any time."""

    def __init__(self, folder: Path, limits: Limits, variables: Mapping[str, str] = {}) -> None:
        self._folder, self._limits, self._variables = folder, limits, variables
        self._lock = forks.lock(forks.LAST)  # a child forked beside `_start` would keep the end of a pipe
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, job: Mapping[str, Json], sample: int | None = None) -> tuple[Json, float]:
        """(the result of `job`, CPU seconds it took); `sample` is a descriptor that the job reads. CompileError says
        what the child said, or how it died."""
        name = str(job["variant"])
        log = os.memfd_create("aotpack-log")
        try:
            with self._lock:
                if self._stopped:
                    raise CompileError(name, "stopped: the session was closed")
                self._process = self._start(log, sample)
            output = self._talked(json.dumps(job).encode() + b"\n")
            return self._answer(name, output, log)
        except OSError as error:
            raise CompileError(name, f"no process can be started for it: {error}") from error
        finally:
            self._end()
            os.close(log)

    def stop(self) -> None:
        """End the child and the compilers that it started."""
        with self._lock:
            self._stopped = True
            self._kill()

    def _start(self, log: int, sample: int | None) -> subprocess.Popen[bytes]:
        variables = {**_environment(self._folder), **self._variables}
        limits = [str(self._limits.seconds), str(self._limits.memory_bytes), str(os.getpid())]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "aotpack.guarded", *limits, str(self._folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            pass_fds=() if sample is None else (sample,), env=variables, cwd="/",
        )  # fmt: skip

    def _talked(self, job: bytes) -> bytes:
        """What the child says of `job`; all of its processes are gone then."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(job)
        with process.stdout as results:
            output = results.read()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._end()
        return output

    def _answer(self, name: str, output: bytes, log: int) -> tuple[Json, float]:
        assert self._process is not None
        try:
            answer = json.loads(output)
        except ValueError:
            raise CompileError(name, f"its process died: {self._death()}", log=_tail(log)) from None
        if "error" in answer:
            raise CompileError(name, str(answer["error"]["message"]).removeprefix(f"{name}: "), log=_tail(log))
        return answer["result"], float(answer["cpu_s"])

    def _death(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        number = -code if code < 0 else code - 128
        if self._stopped:
            return "stopped, as the session was closed"
        if number == signal.SIGKILL:
            return f"killed; it may take {self._limits.seconds:g} seconds and {self._limits.memory_bytes >> 20} MiB"
        return f"by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit status {code}"

    def _kill(self) -> None:
        """Its whole group: a worker that died by itself, for want of memory, leaves the compilers that it started. The
        number of the group is that of no other until it is waited for: by `_end`, or by a server that waits for all."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Kill what is left of it, and have it be gone."""
        with self._lock:
            if self._process is not None:
                self._kill()
                self._process.wait()


def _environment(folder: Path) -> dict[str, str]:
    """The server's, with this checkout of the packages it sees, and all that is written going to `folder`.

    torch asks for a home and for a user's name, which a container may lack.
    """
    dropped = {"AOTPACK_LOG", "AOTPACK_MODE", "PYTHONSTARTUP", "TORCH_LOGS", "TORCH_TRACE"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = [os.path.abspath(place) for place in sys.path if place]
    return {
        "HOME": str(folder), "USER": "aotpack", "LOGNAME": "aotpack", **kept,
        "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0", "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }  # fmt: skip


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    start = max(0, size - LOG_TAIL_BYTES)
    return os.pread(log, size - start, start).decode(errors="replace")
