"""The builder behind a miss: one job in a process that a server may start beside its own work.

    python -P -m aotpack.guarded SECONDS MEMORY_BYTES PARENT_PID STORE     one job on stdin, its result on stdout

Two processes in one group: a guard that does nothing but wait, and the worker. The guard ends the whole group, the
compilers that the worker started included, when the time is up or when the server that asked is gone, however it went
and whatever the worker is doing: a worker inside of C++ would see neither a signal handler nor the end of stdin, and a
worker that is killed by itself would leave its compilers behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import NoReturn

from aotpack.worker import opened, run

_PR_SET_PDEATHSIG = 1


def main(seconds: float, memory_bytes: int, parent: int, root: str) -> NoReturn:
    """Run one job at the lowest priority; the process ends with it."""
    _die_with(parent, signal.SIGTERM)
    _step_back(int(os.environ.get("AOTPACK_JIT_NICE") or 19))
    os.umask(0o077)  # a server may leave its files to all; what is kept here is run by this user
    # What is private counts, not what is mapped of files: the weights are the server's own pages.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        _die_with(guard, signal.SIGKILL)
        _work(root)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _work(root: str) -> NoReturn:
    """Results go to the descriptor that stdout was; what libraries print goes to stderr, the log."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = run(json.loads(sys.stdin.readline()), opened(root))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer["cpu_s"] = sum(one.ru_utime + one.ru_stime for one in used)
    print(json.dumps(answer), file=results, flush=True)
    os._exit(0)


def _step_back(nice: int) -> None:
    """Behind the server by `nice`, and at 19 behind whatever else runs; first to go where memory runs out.

    Linux groups processes by session where it schedules for a desktop (sched_autogroup_enabled, which servers have on
    too), and shares the CPUs out between the groups: there a process of a session of its own is nice to itself alone,
    and the group has a number of its own. A batch process waits for the end of the slice of whoever it would preempt;
    an idle one is preempted at once by what wakes up.
    """
    os.nice(nice)
    policy = os.SCHED_IDLE if nice == 19 else os.SCHED_BATCH
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))
    with contextlib.suppress(OSError):  # whoever runs out of memory ends the compile, and no server
        Path("/proc/self/oom_score_adj").write_text("1000")


def _die_with(parent: int, number: signal.Signals) -> None:
    """Get `number` when `parent` ends; end now if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
