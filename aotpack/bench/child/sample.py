"""One sample: a start, then the calls of every case, and what was seen of them."""

from __future__ import annotations

import pickle
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotpack.bench.child.clock import Clock
from aotpack.bench.child.flat import arrays_of, bytes_of, on_host
from aotpack.bench.child.given import arguments_of
from aotpack.bench.child.start import Call, start, waiting

Json = Any

STEADY_SECONDS = 0.3
STEADY_CALLS = (3, 50)
HEAVY = ("torch._inductor", "torch._dynamo", "sympy", "triton")
"""What a hit of a bundle must not import."""


def sample(job: Json, clock: Clock) -> Json:
    """Start as the mode says, then call every case twice and each until its time is steady."""
    if job["mode"] == "bundle-arrays":
        return _sample_arrays(job, clock)
    import torch

    clock.end("import_torch")
    if job["mode"] == "import-torch":
        return measured(job, clock, [], {})
    session, started = start(job, clock)
    call = waiting(started, job["device"])
    with torch.no_grad():
        calls, results = call_all(job, clock, call, lambda case: arguments_of(job, case), HEAVY)
    torch.save(on_host(results), job["results"])
    return measured(job, clock, calls, {} if session is None else session.status())


def _sample_arrays(job: Json, clock: Clock) -> Json:
    """The same with torch not imported: inputs lie in a file, results go to one."""
    import aotpack_runtime
    from aotpack_runtime.format.tree import map_leaves

    session = aotpack_runtime.load(job["bundle"], device=job["device"], mode="eager", source="never", tensors="array")
    entry = session[job["entry"]]
    clock.end("load")
    with open(job["inputs"], "rb") as file:
        given = pickle.load(file)  # noqa: S301 - written by our own child a moment ago
    own = aotpack_runtime.Array
    inputs = {
        name: map_leaves(arrays_of(one), lambda leaf: session.put(leaf) if type(leaf) is own else leaf)
        for name, one in given.items()
    }

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return map_leaves(entry(*args, **kwargs), lambda leaf: leaf.cpu() if type(leaf) is own else leaf)

    calls, results = call_all(job, clock, call, lambda case: inputs[case["name"]], ("torch", *HEAVY))
    found = measured(job, clock, calls, session.status())
    with open(job["results"], "wb") as out:
        pickle.dump({name: bytes_of(one) for name, one in results.items()}, out)
    return found


def call_all(
    job: Json, clock: Clock, call: Call, arguments: Callable[[Json], tuple[Any, Any]], heavy: Sequence[str]
) -> tuple[list[Json], dict[str, Any]]:
    """What each case took, and the result of its first call; `heavy` is what must not be imported then."""
    calls, results = [], {}
    for number, case in enumerate(job["cases"]):
        args, kwargs = arguments(case)
        if number == 0:
            clock.end("inputs")
        results[case["name"]], first = _timed(call, args, kwargs)
        if number == 0:
            clock.end("first_call")
        resident_bytes = _resident_bytes()
        _, second = _timed(call, args, kwargs)
        steady = _steady(call, args, kwargs) if job["steady"] else None
        seconds = {"first_s": first, "second_s": second, "steady_s": steady}
        # What is imported so far: a miss may import more than a hit.
        imported = [name for name in heavy if name in sys.modules]
        calls.append(
            {"case": case["name"], "kind": case["kind"], "heavy": imported, "rss_bytes": resident_bytes, **seconds}
        )
    return calls, results


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


def _timed(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
    begun = time.monotonic()
    result = call(args, kwargs)
    return result, time.monotonic() - begun


def _steady(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The median of a few calls."""
    times: list[float] = []
    end = time.monotonic() + STEADY_SECONDS
    while len(times) < STEADY_CALLS[0] or (len(times) < STEADY_CALLS[1] and time.monotonic() < end):
        times.append(_timed(call, args, kwargs)[1])
    return sorted(times)[len(times) // 2]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _gpu_bytes(device: str) -> int | None:
    """What torch's allocator had from the GPU at most; None where it had no part."""
    torch = sys.modules.get("torch")
    return None if device == "cpu" or torch is None else int(torch.cuda.max_memory_reserved())
