"""Times, on a GPU, what a cross compile chose between: the configurations of every kernel, by the code that Inductor
generated for that, and the operators of attention."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.nn.attention import SDPBackend, sdpa_kernel

from aotpack.compilers.cross.choices import config_record, kernel_digest
from aotpack_runtime.store import Store

Json = Any

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Plain matrix products are what is left where none of these can be, and are not timed."""


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """By kernel and by call of attention: the times of all candidates in us, and the fastest."""
    wanted = json.loads(store.object(job["to_time"]).read_bytes())
    with torch.no_grad():
        return {
            "kernels": _kernels(wanted["code"]),
            "attention": dict(filter(None, map(_attention, wanted["attention"]))),
        }


def _kernels(code: str) -> Json:
    found: dict[str, Json] = {}
    original = CachingAutotuner.benchmark_all_configs

    def noted(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        times: Json = original(tuner, *args, **kwargs)
        timed = [(1000 * float(ms), config_record(one.config)) for one, ms in times.items()]
        # What spills is not timed, and stands at infinity.
        ranked = sorted((pair for pair in timed if math.isfinite(pair[0])), key=lambda pair: pair[0])
        if ranked:
            found[kernel_digest(tuner.fn.src, tuner.fn.__name__)] = {"kernel": tuner.fn.__name__, **_ranked(ranked)}
        return times

    with mock.patch.object(CachingAutotuner, "benchmark_all_configs", noted):
        exec(code, {})  # noqa: S102 - Inductor's own code, from the store of this build
    torch.cuda.synchronize()
    return found


def _attention(call: Json) -> tuple[str, Json] | None:
    """(the words of a call, its times); None where there is nothing to choose between."""
    from triton.testing import do_bench

    ways = [way for way in call["ways"] if way in _BACKENDS]
    if len(ways) < 2:
        return None
    dtype = getattr(torch, call["dtype"])
    query, kept = (torch.randn(call[name], dtype=dtype, device="cuda") for name in ("query", "kept"))
    mask = None if call["mask"] is None else torch.zeros(call["mask"], dtype=dtype, device="cuda")
    grouped = query.shape[1] != kept.shape[1]
    timed = []
    for way in ways:
        if grouped and way == "efficient":
            kept = kept.repeat_interleave(query.shape[1] // kept.shape[1], 1)

        def run(kept: torch.Tensor = kept) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                query, kept, kept, mask, is_causal=call["causal"], enable_gqa=query.shape[1] != kept.shape[1]
            )

        with sdpa_kernel(_BACKENDS[way]):
            timed.append((1000 * float(do_bench(run, return_mode="median")), way))
    return call["key"], _ranked(sorted(timed))


def _ranked(timed: list[tuple[float, Json]]) -> Json:
    return {"pick": timed[0][1], "times_us": [[candidate, round(time, 3)] for time, candidate in timed]}
