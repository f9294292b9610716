"""One sample of a model: a start, then the calls of every case."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

from aotpack.bench.child.calls import Bound, call_all, measured
from aotpack.bench.child.clock import Clock
from aotpack.bench.child.flat import arrays_of, bytes_of, on_host
from aotpack.bench.child.given import arguments_of
from aotpack.bench.child.start import start, waiting

Json = Any

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
        calls, results = call_all(job, clock, lambda case: Bound(partial(call, *arguments_of(job, case))), HEAVY)
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

    def bind(case: Json) -> Bound:
        args, kwargs = inputs[case["name"]]
        return Bound(lambda: map_leaves(entry(*args, **kwargs), lambda leaf: leaf.cpu() if type(leaf) is own else leaf))

    calls, results = call_all(job, clock, bind, ("torch", *HEAVY))
    found = measured(job, clock, calls, session.status())
    with open(job["results"], "wb") as out:
        pickle.dump({name: bytes_of(one) for name, one in results.items()}, out)
    return found
