"""Are the answers of a mode the reference's?"""

from __future__ import annotations

import pickle
from typing import Any

from aotpack.bench.child.clock import Clock
from aotpack.bench.child.flat import tensors_of
from aotpack.bench.child.given import entry_of

Json = Any


def check(job: Json, clock: Clock) -> Json:
    """For each file of results, the first difference from the reference's in one line, or null."""
    import torch

    from aotpack.compilers.compare import difference

    wanted = torch.load(job["reference"], weights_only=False)  # written by our own child a moment ago
    found: dict[str, str | None] = {}
    for name, path in job["results"].items():
        results = _results(path)
        problems = [
            f"{case}: {problem}"
            for case in wanted
            if (problem := difference(wanted[case], results[case], rtol=job["rtol"], atol=job["atol"]))
        ]
        found[name] = problems[0] if problems else None
    return found


def check_kernel(job: Json, clock: Clock) -> Json:
    """The same of a kernel, by the bounds that its verification has."""
    import torch

    from aotpack.kernel_verify import differences

    entry, wanted = entry_of(job), torch.load(job["reference"], weights_only=False)
    found: dict[str, str | None] = {}
    for mode, path in job["results"].items():
        results = _results(path)
        problems = [
            f"{case}: {name}: {problem}"
            for case, tensors in wanted.items()
            for name, tensor in tensors.items()
            for problem, _ in differences(results[case][name], tensor, entry)
            if problem
        ]
        found[mode] = problems[0] if problems else None
    return found


def _results(path: str) -> Any:
    """Results by case, of tensors or of arrays."""
    import torch

    try:
        with open(path, "rb") as file:
            given = pickle.load(file)  # noqa: S301 - written by our own child a moment ago
    except pickle.UnpicklingError:
        return torch.load(path, weights_only=False)
    return tensors_of(given)
