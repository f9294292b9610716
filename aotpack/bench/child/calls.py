"""The calls of a sample: every case twice, then until it is steady."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aotpack.bench.child.clock import Clock

Json = Any

STEADY_SECONDS = 0.5
STEADY_CALLS = (3, 1000)
QUEUED = 100
"""Launches that are queued one after another before the GPU is waited for; its queue holds ten times as many."""


def same(result: Any) -> Any:
    """`result` itself."""
    return result


@dataclass(frozen=True, slots=True)
class Bound:
    """A case with its arguments: `call` returns when its result is there, `answer` makes of it what is compared.

    Where `queue` is there, it returns when the work is queued, and `wait` when it is done.
    """

    call: Callable[[], Any]
    answer: Callable[[Any], Any] = same
    queue: Callable[[], Any] | None = None
    wait: Callable[[], Any] | None = None


def call_all(
    job: Json, clock: Clock, bind: Callable[[Json], Bound], heavy: Sequence[str]
) -> tuple[list[Json], dict[str, Any]]:
    """What each case took, and the answer of its first call; `heavy` is what must not be imported then."""
    calls, answers = [], {}
    for number, case in enumerate(job["cases"]):
        bound = bind(case)
        if number == 0:
            clock.end("inputs")
        result, first = _timed(bound.call)
        if number == 0:
            clock.end("first_call")
        resident_bytes = _resident_bytes()
        answers[case["name"]] = bound.answer(result)
        _, second = _timed(bound.call)
        steady = _steady(bound.call) if job["steady"] else None
        seconds = {"first_s": first, "second_s": second, "steady_s": steady}
        if bound.queue is not None and bound.wait is not None and job["steady"]:
            seconds["launch_s"] = _queued(bound.queue, bound.wait)
        # What is imported so far: a miss may import more than a hit.
        imported = [name for name in heavy if name in sys.modules]
        calls.append(
            {"case": case["name"], "kind": case["kind"], "heavy": imported, "rss_bytes": resident_bytes, **seconds}
        )
    return calls, answers


def measured(job: Json, clock: Clock, calls: list[Json], status: Json) -> Json:
    """The record of a sample."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return {
        "first_output_s": clock.total,
        "phases_s": clock.phases,
        "calls": calls,
        "peak_gpu_bytes": _gpu_bytes(job["device"]),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "compiles": 0 if dynamo is None else int(dynamo.counters["stats"].get("unique_graphs", 0)),
        "hits": status.get("hits"),
        "misses": status.get("misses"),
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.monotonic()
    result = call()
    return result, time.monotonic() - begun


def _steady(call: Callable[[], Any]) -> float:
    """The median of many calls, as many as fit in the time."""
    times: list[float] = []
    end = time.monotonic() + STEADY_SECONDS
    while len(times) < STEADY_CALLS[0] or (len(times) < STEADY_CALLS[1] and time.monotonic() < end):
        times.append(_timed(call)[1])
    return sorted(times)[len(times) // 2]


def _queued(queue: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Seconds until one launch is queued: the median over batches of launches."""

    def batch() -> None:
        for _ in range(QUEUED):
            queue()

    times: list[float] = []
    end = time.monotonic() + STEADY_SECONDS
    while len(times) < STEADY_CALLS[0] or (len(times) < STEADY_CALLS[1] and time.monotonic() < end):
        times.append(_timed(batch)[1] / QUEUED)
        wait()
    return sorted(times)[len(times) // 2]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _gpu_bytes(device: str) -> int | None:
    """What torch's allocator had from the GPU at most; None where it had no part."""
    torch = sys.modules.get("torch")
    return None if device == "cpu" or torch is None else int(torch.cuda.max_memory_reserved())
