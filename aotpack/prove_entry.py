"""One entry that was built natively and across, compared: kernels byte by byte, latency at each shape in turns."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aotpack.compilers.cubin import cubins_inside
from aotpack.jobs import Result
from aotpack.verify import Bundle
from aotpack_runtime import Session, load
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.format.index import Entry, Example, Variant
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.torch_entry import TorchEntry

Json = Any
WAYS = ("cross", "native")
Pair = Mapping[str, Result]
"""What a build gave, by way."""

ROUNDS, CALLS = 24, 5
"""Rounds that the ways take turns in, backwards in every other one, and calls of each way in a round; medians are of
all of them. Rounds are short: a host that others share is slower or faster for tenths of a second at a time."""


def what_was_built(pair: Pair, variants: Sequence[str]) -> Json:
    """What builds say of the entry that has these `variants`: what failed or was not run, errors against eager, kernels
    that are the same, seconds by kind of job. Nothing is run."""
    failures = [f"{way}: {name}: {why}" for way in WAYS for name, why in pair[way].failures.items()]
    verified: dict[str, dict[str, Json]] = {}
    seconds: dict[str, dict[str, float]] = {}
    for way in WAYS:
        done = pair[way]
        kinds = dict.fromkeys(kind for kind, _, _ in done.steps)
        seconds[way] = {kind: round(sum(s for k, _, s in done.steps if k == kind), 2) for kind in kinds}
        for name, seen in done.verified.items():
            error = float(f"{seen['largest_error']:.3g}")
            refused = {"refused": seen["refused"]} if seen.get("refused") else {}
            verified.setdefault(name, {})[way] = {"cases": seen["cases"], "largest_error": error, **refused}
        unseen = [name for name in variants if name not in done.verified and name not in done.failures]
        failures += [f"{way}: {name}: {done.unverified.get(name, 'was not compared with eager')}" for name in unseen]
    kernels = {name: _kernels(pair, name) for name in variants if all(name in pair[way].verified for way in WAYS)}
    return {"failures": failures, "verified": verified, "kernels": kernels, "seconds": seconds}


def _kernels(pair: Pair, name: str) -> Json:
    """How many of the kernels of a variant, by their bytes, are the same both ways."""
    digests = {}
    for way in WAYS:
        bundle = open_bundle(pair[way].path)
        variant = next(variant for variant in bundle.index.variants() if variant.id == name)
        (member,) = [member for member in variant.artifact.members() if member.endswith("model.so")]
        digests[way] = {hashlib.sha256(cubin).hexdigest() for cubin in cubins_inside(bundle.path(member))}
        bundle.close()
    return {**{way: len(found) for way, found in digests.items()}, "same": len(set.intersection(*digests.values()))}


def latency(pair: Pair, name: str, folder: Path, at: Sequence[Mapping[str, int]]) -> list[Json]:
    """Median microseconds of eager and of both ways, by variant of entry `name` and sizes: its own and those `at`."""
    bundle = Bundle(str(pair["cross"].path), folder)
    sessions = {way: load(str(pair[way].path), device="cuda", mode="strict", source="never") for way in WAYS}
    found: list[Json] = []
    for cross in bundle.index.entries[name].variants:
        native = next((v for v in sessions["native"].bundle.index.entries[name].variants if v.id == cross.id), None)
        if native is not None:
            found += _of_variant(bundle, sessions, bundle.index.entries[name], cross, native, at)
    for session in sessions.values():
        session.close()
    return found


def _of_variant(
    bundle: Bundle,
    sessions: Mapping[str, Session],
    entry: Entry,
    cross: Variant,
    native: Variant,
    at: Sequence[Mapping[str, int]],
) -> Iterator[Json]:
    reference = bundle.reference(_model(sessions["cross"], entry.name), cross.weights, sessions["cross"])
    for example in _shapes(cross, at):
        leaves = make_leaves(cross.guards, example, entry.fills, device="cuda")
        ways: dict[str, Callable[[], Any]] = {
            "eager": reference.calling(cross, leaves),
            "native": partial(_model(sessions["native"], entry.name).serve_for(native), *leaves),
            "cross": partial(_model(sessions["cross"], entry.name).serve_for(cross), *leaves),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        with torch.no_grad():
            for run in ways.values():
                for _ in range(CALLS):
                    run()
            order = list(ways)
            for _ in range(ROUNDS):
                for way in order:
                    times[way] += _timed(ways[way])
                order.reverse()
        sizes = [list(size) if isinstance(size, tuple) else size for size in example if size is not None]
        medians = {f"{way}_us": round(statistics.median(found), 1) for way, found in times.items()}
        yield {"variant": cross.id, "sizes": sizes, **medians}


def _model(session: Session, name: str) -> TorchEntry:
    entry = session[name]
    assert isinstance(entry, TorchEntry)
    return entry


def _timed(run: Callable[[], Any]) -> list[float]:
    found = []
    torch.cuda.synchronize()
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(1e6 * (time.perf_counter() - start))
    return found


def _shapes(variant: Variant, at: Sequence[Mapping[str, int]]) -> list[Example]:
    """The variant's own examples (opt, min, max), and the sizes `at`, by dim of its first argument in their order."""
    found = dict.fromkeys(variant.examples)
    opt = variant.examples[0]
    for sizes in at:
        first = next(size for size in opt if isinstance(size, tuple))
        changed = {first[axis]: value for axis, value in enumerate(sizes.values())}
        found.setdefault(tuple(tuple(changed.get(s, s) for s in e) if isinstance(e, tuple) else e for e in opt))
    return list(found)
