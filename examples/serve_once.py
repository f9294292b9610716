"""Load a bundle in a process that imports no compiler, and serve a hit, a miss and a wrong call."""

from __future__ import annotations

import sys
import time

import torch

import aotpack_runtime as apr


def main(path: str) -> None:
    start = time.perf_counter()
    session = apr.load(path)
    encoder = session["encoder"]
    loaded = time.perf_counter()
    ids = torch.randint(0, 8192, (4, 100))
    hit = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
    print(f"load {1e3 * (loaded - start):.0f} ms, first call {1e3 * (time.perf_counter() - loaded):.0f} ms")
    print(f"hit    {tuple(ids.shape)}: {tuple(hit.shape)}  {encoder.explain(ids, torch.ones_like(ids))}")
    compilers = [name for name in ("torch._inductor", "torch._dynamo", "triton", "sympy") if name in sys.modules]
    print(f"compilers imported: {compilers or 'none'}")

    many = torch.randint(0, 8192, (40, 16))
    miss = encoder(many, torch.ones_like(many))
    reasons = encoder.explain(many, torch.ones_like(many)).reasons
    print(f"miss   {tuple(many.shape)}: {tuple(miss.shape)}, served by the bundle's program")
    print("       " + next(reversed(reasons.values())))
    try:
        encoder(ids)
    except TypeError as error:
        print(f"wrong  {error}")
    status = session.status()
    print(f"status hits {status['hits']}, misses {status['misses']}, errors {status['errors']}")


if __name__ == "__main__":
    main(sys.argv[1])
