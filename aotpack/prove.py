"""Is what is built without a GPU what a build on one gives? Built both ways on a GPU, and compared.

Every variant is verified against eager by its build; kernels are compared byte by byte, and latency at each shape
in rounds that take turns. The record is what `compilers/cross/gate.py` reads: a pair of torch and Triton is used for
cross builds when a record of it says that every variant agreed.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from aotpack.build import build
from aotpack.compilers.cross.gate import ALLOW, SCHEMA, versions
from aotpack.compilers.cubin import cubins_inside
from aotpack.jobs import Result
from aotpack.manifest_model import Manifest
from aotpack.plan import EntryPlan, make_plan
from aotpack.verify import Bundle
from aotpack_runtime import Session, load
from aotpack_runtime.errors import MissingDevice, UsageError
from aotpack_runtime.format.gpu import parse_arch
from aotpack_runtime.format.index import Entry, Example, Variant
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.machine import this_machine
from aotpack_runtime.torch_entry import TorchEntry

Json = Any
Report = Callable[[str], None]

ROUNDS, CALLS = 7, 10
"""Rounds that the ways take turns in, and calls of each way in a round; medians are of all of them."""


def prove(
    manifest: Manifest,
    *,
    only: str = "*",
    folder: Path | None = None,
    at: Mapping[str, Sequence[Mapping[str, int]]] = {},
    report: Report = lambda line: None,
) -> Json:
    """The record of this torch, Triton and GPU. `at` has further sizes to time by entry; the bundles are kept in
    `folder` where it is given. MissingDevice without a GPU."""
    gpu = this_machine().gpu
    if gpu is None:
        raise MissingDevice("a proof compares with a native build", hint="run it on a GPU of the target's kind")
    targets = _targets(manifest, str(gpu))
    with tempfile.TemporaryDirectory() as made, _allowed():
        place = folder or Path(made)
        results: dict[str, dict[str, Result]] = {"cross": {}, "native": {}}
        start = time.perf_counter()
        for target in targets:
            with ThreadPoolExecutor(2) as pool:
                building = {
                    way: pool.submit(
                        build, manifest, place / f"{target}-{way}", only=only, target=target, across=way == "cross",
                        keep_going=True,
                    )
                    for way in results
                }  # fmt: skip
            for way, future in building.items():
                results[way][target] = future.result()
            report(f"built {target} both ways in {time.perf_counter() - start:.0f} s")
        entries: dict[str, Json] = {}
        for target in targets:
            pair = {way: done[target] for way, done in results.items()}
            plan = make_plan(manifest, only=only, target=target)
            names = [entry.entry for entry in plan.entries if isinstance(entry, EntryPlan)]
            entries |= _compared(pair, names, manifest.path.absolute().parent, at, report)
    torch_version, triton_version = versions()
    ratios = [row["cross_us"] / row["native_us"] for entry in entries.values() for row in entry["latency"]]
    failures = [failure for entry in entries.values() for failure in entry["failures"]]
    return {
        "schema": SCHEMA,
        "torch": torch_version,
        "triton": triton_version,
        "arch": str(gpu),
        "gpu": gpu.name,
        "cuda": torch.version.cuda,
        "cuda_driver": ".".join(map(str, gpu.driver)),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "passed": not failures and bool(entries),
        "failures": failures,
        "latency_ratio": {"worst": round(max(ratios, default=0), 4), "median": _median(ratios)},
        "entries": entries,
    }


def write_record(record: Json, folder: Path) -> Path:
    """The record as a file of its own in `folder`, named after what it is of."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['torch']}-{record['triton']}-{record['arch']}.json"
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
    return path


def _targets(manifest: Manifest, arch: str) -> list[str]:
    capability = parse_arch(arch).capability
    found = [
        entry.target
        for entry in make_plan(manifest).entries
        if isinstance(entry, EntryPlan) and entry.gpu and parse_arch(entry.arch).capability == capability
    ]
    if not found:
        raise UsageError(
            f"no torch entry of the manifest is for {arch} and names a device",
            hint="give a target this arch and a `device`",
        )
    return list(dict.fromkeys(found))


@contextmanager
def _allowed() -> Iterator[None]:
    """The gate is open: it waits for the record that is being made."""
    words = [os.environ.get("AOTPACK_ALLOW", ""), ALLOW]
    with mock.patch.dict(os.environ, AOTPACK_ALLOW=",".join(filter(None, words))):
        yield


def _compared(
    pair: Mapping[str, Result],
    names: Sequence[str],
    folder: Path,
    at: Mapping[str, Sequence[Mapping[str, int]]],
    report: Report,
) -> dict[str, Json]:
    bundles = {way: Bundle(str(done.path), folder) for way, done in pair.items()}
    left_out = {way: done.failures for way, done in pair.items()}
    sessions = {way: load(str(done.path), device="cuda", mode="strict", source="never") for way, done in pair.items()}
    found: dict[str, Json] = {}
    for name in names:
        record: Json = {"failures": [], "verified": {}, "kernels": {}, "latency": [], "seconds": {}}
        for way, done in pair.items():
            record["failures"] += [f"{way}: {v}: {why}" for v, why in left_out[way].items() if v.startswith(name + "/")]
            steps = [(kind, s) for kind, step, s in done.steps if step.startswith(name + "/")]
            record["seconds"][way] = {kind: round(sum(s for k, s in steps if k == kind), 2) for kind, _ in steps}
            for variant, seen in done.verified.items():
                if variant.startswith(name + "/"):
                    error = float(f"{seen['largest_error']:.3g}")
                    refused = {"refused": seen["refused"]} if seen.get("refused") else {}
                    record["verified"].setdefault(variant, {})[way] = {
                        "cases": seen["cases"], "largest_error": error, **refused,
                    }  # fmt: skip
        cross, native = (bundles[way].index.entries.get(name) for way in ("cross", "native"))
        for one in cross.variants if cross else ():
            other = next((v for v in native.variants if v.id == one.id), None) if native else None
            if cross is None or other is None:
                continue
            record["kernels"][one.id] = _kernels(sessions, one, other)
            record["latency"] += list(_latency(bundles["cross"], sessions, cross, one, other, at.get(name, ())))
        report(f"{name}: {_summary(record)}")
        found[name] = record
    for session in sessions.values():
        session.close()
    return found


def _summary(record: Json) -> str:
    rows = [f"{row['sizes']} {row['cross_us'] / row['native_us']:.3f} x native" for row in record["latency"]]
    return "; ".join([*rows, *record["failures"]]) or "nothing compared"


def _kernels(sessions: Mapping[str, Session], one: Variant, other: Variant) -> Json:
    """How many of the kernels, by their bytes, are the same both ways."""
    digests = {}
    for way, variant in (("cross", one), ("native", other)):
        (member,) = [name for name in variant.artifact.members() if name.endswith("model.so")]
        cubins = cubins_inside(sessions[way].bundle.path(member))
        digests[way] = {hashlib.sha256(cubin).hexdigest() for cubin in cubins}
    return {
        "cross": len(digests["cross"]),
        "native": len(digests["native"]),
        "same": len(set.intersection(*digests.values())),
    }


def _latency(
    bundle: Bundle,
    sessions: Mapping[str, Session],
    entry: Entry,
    one: Variant,
    other: Variant,
    at: Sequence[Mapping[str, int]],
) -> Iterator[Json]:
    reference = bundle.reference(_model(sessions["cross"], entry.name), one.weights, sessions["cross"])
    for example in _shapes(one, at):
        leaves = make_leaves(one.guards, example, entry.fills, device="cuda")
        ways: dict[str, Callable[[], Any]] = {
            "eager": reference.calling(one, leaves),
            "native": partial(_model(sessions["native"], entry.name).serve_for(other), *leaves),
            "cross": partial(_model(sessions["cross"], entry.name).serve_for(one), *leaves),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        with torch.no_grad():
            for run in ways.values():
                for _ in range(CALLS):
                    run()
            for _ in range(ROUNDS):
                for way, run in ways.items():
                    times[way] += _timed(run)
        sizes = [list(size) if isinstance(size, tuple) else size for size in example if size is not None]
        medians = {f"{way}_us": round(statistics.median(found), 1) for way, found in times.items()}
        yield {"variant": one.id, "sizes": sizes, **medians}


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


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4) if values else 0.0
