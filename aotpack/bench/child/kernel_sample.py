"""One sample of a kernel: a start, then the launches of every case. What is compared is what it wrote."""

from __future__ import annotations

import pickle
from typing import Any

from aotpack.bench.child.calls import Bound, call_all, measured
from aotpack.bench.child.clock import Clock
from aotpack.bench.child.flat import Flat, bytes_of
from aotpack.bench.child.given import entry_of
from aotpack.bench.child.kernel_start import start
from aotpack.bench.child.sample import HEAVY

Json = Any


def sample(job: Json, clock: Clock) -> Json:
    """Start as the mode says, then launch every case twice, each until its time is steady, and many at once."""
    started = start(job, clock)
    with open(job["inputs"], "rb") as file:
        given = pickle.load(file)  # noqa: S301 - written by our own child a moment ago
    writes = entry_of(job).kernel.writes

    def bind(case: Json) -> Bound:
        values = {name: started.put(one) if isinstance(one, Flat) else one for name, one in given[case["name"]].items()}
        queue = started.bind(case, values)

        def call() -> None:
            queue()
            started.wait()

        return Bound(call, lambda _: {name: bytes_of(values[name].cpu()) for name in writes}, queue, started.wait)

    heavy = HEAVY if job["mode"] == "bundle-torch" else ("torch", *HEAVY)
    calls, results = call_all(job, clock, bind, heavy)
    found = measured(job, clock, calls, {} if started.session is None else started.session.status())
    with open(job["results"], "wb") as out:
        pickle.dump(results, out)
    return found
