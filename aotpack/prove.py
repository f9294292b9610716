"""Is what is built without a GPU what a build on one gives? Built both ways on a GPU, and compared.

    build, all entries both ways at once -> what was built, as each is ready -> latency, when nothing else runs

Every variant is verified against eager by its build. The record is what `compilers/cross/gate.py` reads: a pair of
torch and Triton is used for cross builds when a record of all entries says that every variant agreed. What is known
after each step is handed out, so that a run that is interrupted leaves it; a later one with the same store goes on.
"""

from __future__ import annotations

import datetime as dt
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from aotpack.build import build_plan, default_jobs
from aotpack.compilers.cross.gate import ALLOW, SCHEMA, versions
from aotpack.jobs import Reporter, Result
from aotpack.manifest_model import Manifest
from aotpack.plan import EntryPlan, Plan, make_plan
from aotpack.prove_entry import WAYS, Pair, latency, what_was_built
from aotpack.revisions import PROOF_REVISION
from aotpack.tables import write_json
from aotpack.workers import Workers
from aotpack_runtime.errors import AotpackError, MissingDevice, UsageError
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.gpu import Gpu, parse_arch
from aotpack_runtime.machine import cache_dir, this_machine
from aotpack_runtime.store import Store

Json = Any
Report = Callable[[str], None]


def prove(
    manifest: Manifest,
    *,
    only: str = "*",
    folder: Path | None = None,
    at: Mapping[str, Sequence[Mapping[str, int]]] = {},
    report: Report = lambda line: None,
    keep: Callable[[Json], None] = lambda record: None,
    store: Store | None = None,
) -> Json:
    """The record of this torch, Triton and GPU; `keep` is called with what there is of it after each step. `at` has
    further sizes to time by entry; the bundles are kept in `folder` where it is given. MissingDevice without a GPU.
    """
    gpu = this_machine().gpu
    if gpu is None:
        problem = "a proof compares with a build on the GPU itself, and this host has no CUDA device"
        raise MissingDevice(problem, hint="run it on a GPU of the target's kind")
    store = store or Store(cache_dir() / "build")
    whole, plans = _of_gpu(make_plan(manifest), gpu), _of_gpu(make_plan(manifest, only=only), gpu)
    if not whole:
        raise UsageError(
            f"no torch entry of the manifest is for {gpu} and names a device",
            hint="give a target this arch and a `device`",
        )
    is_whole = {name: _variants(plan) for name, plan in plans.items()} == {n: _variants(p) for n, p in whole.items()}
    entries: dict[str, Json] = {}

    def known() -> Json:
        return record_of(entries, list(plans), gpu, whole=is_whole)

    with tempfile.TemporaryDirectory() as made, _allowed():
        pairs: dict[str, Pair] = {}
        start = time.perf_counter()
        with closing(_built(plans, folder or Path(made), store, default_jobs(manifest))) as built:
            for name, pair in built:
                pairs[name], entries[name] = pair, what_was_built(pair, _variants(plans[name]))
                failed = len(entries[name]["failures"])
                report(f"{name}: built both ways after {time.perf_counter() - start:.0f} s, {failed} failures")
                keep(known())
        for name, pair in pairs.items():
            sizes = at.get(_entry(plans[name]).entry, ())
            entries[name] = _timed(entries[name], pair, plans[name], sizes, gpu, store)
            report(f"{name}: {_summary(entries[name])}")
            keep(known())
    return known()


def record_of(entries: Mapping[str, Json], wanted: Sequence[str], gpu: Gpu, *, whole: bool) -> Json:
    """What is known of the entries that are `wanted`, which are all of the manifest's if that is the `whole`. It passes
    when they all were built, compared and timed, and nothing failed."""
    entries = {name: entries[name] for name in wanted if name in entries}
    missing = [name for name in wanted if not entries.get(name, {}).get("latency")]
    failures = [failure for entry in entries.values() for failure in entry["failures"]]
    ratios = [row["cross_us"] / row["native_us"] for entry in entries.values() for row in entry.get("latency", ())]
    torch_version, triton_version = versions()
    return {
        "schema": SCHEMA,
        "torch": torch_version,
        "triton": triton_version,
        "arch": str(gpu),
        "gpu": gpu.name,
        "cuda": torch.version.cuda,
        "cuda_driver": ".".join(map(str, gpu.driver)),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "passed": whole and bool(wanted) and not missing and not failures,
        "whole": whole and not missing,
        "missing": missing,
        "failures": failures,
        "latency_ratio": {"worst": round(max(ratios, default=0), 4), "median": _median(ratios)},
        "entries": entries,
    }


def write_record(record: Json, folder: Path) -> Path:
    """The record as a file of its own in `folder`, named after what it is of: one of some entries as `.partial.json`,
    beside that of all, which it leaves alone and is replaced by."""
    stem = f"{record['torch']}-{record['triton']}-{record['arch']}"
    partial = folder / f"{stem}.partial.json"
    path = folder / f"{stem}.json" if record["whole"] else partial
    write_json(path, record)
    if path != partial:
        partial.unlink(missing_ok=True)
    return path


def _of_gpu(plan: Plan, gpu: Gpu) -> dict[str, Plan]:
    """The plan of each torch entry for a GPU of this capability that names its device, by its name; where several
    targets are of such, by the target's name too."""
    capability = parse_arch(str(gpu)).capability
    found = [
        entry
        for entry in plan.entries
        if isinstance(entry, EntryPlan) and entry.gpu and parse_arch(entry.arch).capability == capability
    ]
    several = len({entry.target for entry in found}) > 1
    return {
        f"{entry.target}/{entry.entry}" if several else entry.entry: replace(plan, entries=(entry,)) for entry in found
    }


def _entry(plan: Plan) -> EntryPlan:
    (entry,) = plan.entries
    assert isinstance(entry, EntryPlan)
    return entry


def _variants(plan: Plan) -> list[str]:
    return [variant.id for variant in _entry(plan).variants]


@contextmanager
def _allowed() -> Iterator[None]:
    """The gate is open: it waits for the record that is being made."""
    words = [os.environ.get("AOTPACK_ALLOW", ""), ALLOW]
    with mock.patch.dict(os.environ, AOTPACK_ALLOW=",".join(filter(None, words))):
        yield


def _built(plans: Mapping[str, Plan], place: Path, store: Store, jobs: int) -> Generator[tuple[str, Pair]]:
    """Each entry when both of its builds are done. They share the processes of one pool for each way; when the caller
    goes away those are ended, and their builds with them."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(2 * len(plans)))
        workers = {way: stack.enter_context(Workers(store, max(1, jobs // 2))) for way in WAYS}
        running: dict[Future[Result], tuple[str, str]] = {}
        for name, plan in plans.items():
            for way in WAYS:
                out = place / f"{name.replace('/', '-')}-{way}"
                future = threads.submit(
                    build_plan, plan, out, workers[way], store, keep_going=True, reporter=Reporter(),
                    across=way == "cross",
                )  # fmt: skip
                running[future] = (name, way)
        done: dict[str, dict[str, Result]] = {name: {} for name in plans}
        for future in as_completed(running):
            name, way = running[future]
            try:
                done[name][way] = future.result()
            except AotpackError as error:
                lost = dict.fromkeys(_variants(plans[name]), str(error))
                done[name][way] = Result(Path(), "", failures=lost)
            if len(done[name]) == len(WAYS):
                yield name, done[name]


def _timed(
    entry: Json,
    pair: Pair,
    plan: Plan,
    at: Sequence[Mapping[str, int]],
    gpu: Gpu,
    store: Store,
) -> Json:
    """The entry with its latency, as it was seen before if these very bundles were timed on this GPU. What failed is
    not timed."""
    if entry["failures"]:
        return {**entry, "latency": []}
    key = fingerprint(
        {
            **{way: pair[way].digest for way in WAYS},
            "gpu": [gpu.name, list(gpu.driver)],
            "at": [dict(sizes) for sizes in at],
            "aotpack": PROOF_REVISION,
        }
    )
    before = store.get_record("proof", key)
    if before is not None:
        return before
    source = plan.manifest.path.absolute().parent
    timed = {**entry, "latency": latency(pair, _entry(plan).entry, source, at)}
    store.put_record("proof", key, timed)
    return timed


def _summary(record: Json) -> str:
    rows = [f"{row['sizes']} {row['cross_us'] / row['native_us']:.3f} x native" for row in record["latency"]]
    return "; ".join([*rows, *record["failures"]]) or "nothing compared"


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4) if values else 0.0
