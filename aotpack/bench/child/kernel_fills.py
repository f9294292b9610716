"""What one process makes before the samples of a kernel: inputs for all modes, and a filled cache of Triton."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from aotpack.bench.child.clock import Clock
from aotpack.bench.child.flat import Flat, bytes_of, on_host
from aotpack.bench.child.given import entry_of, variants_of
from aotpack.bench.child.kernel_start import start

Json = Any


def inputs(job: Json, clock: Clock) -> Json:
    """The arguments of every case as bytes, and what its reference in torch says must be written."""
    import torch

    from aotpack.kernel_verify import expected_of, make_arguments, reference_of

    entry, variants = entry_of(job), variants_of(job)
    reference = reference_of(entry.verify["against"], Path(job["folder"]))
    given, wanted = {}, {}
    for seed, case in enumerate(job["cases"]):
        values = make_arguments(entry, variants[case["like"]], case["numbers"], seed=seed)
        given[case["name"]] = {name: bytes_of(on_host(value)) for name, value in values.items()}
        wanted[case["name"]] = on_host(expected_of(entry, case["like"], reference, values))
    with open(job["inputs"], "wb") as file:
        pickle.dump(given, file)
    torch.save(wanted, job["reference"])
    return {}


def triton(job: Json, clock: Clock) -> Json:
    """Launch every case once, for the cache that it leaves."""
    started = start(job, clock)
    with open(job["inputs"], "rb") as file:
        given = pickle.load(file)  # noqa: S301 - written by our own child a moment ago
    for case in job["cases"]:
        values = {name: started.put(one) if isinstance(one, Flat) else one for name, one in given[case["name"]].items()}
        started.bind(case, values)()
        started.wait()
    return {}
