"""What a build would do, job by job: found, or to be done and why. Compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aotpack import kernel_jobs, torch_jobs
from aotpack.jobs import Reporter, Result, Runner
from aotpack.kernel_plan import KernelPlan
from aotpack.plan import EntryPlan, Plan
from aotpack.ways import Way, on_its_way, way_of
from aotpack_runtime.machine import cache_dir
from aotpack_runtime.store import Store

Json = Any


@dataclass(frozen=True, slots=True)
class Step:
    """One job as the plan shows it: `status` is cached, or why it is to be done ("new", "changed: source, options"). Of
    a torch entry for a GPU `way` says how it is built here, and why; `attention` is what its manifest names."""

    kind: str
    name: str
    target: str
    status: str
    needs_gpu: bool = False
    way: str = ""
    attention: tuple[str, ...] = ()

    @property
    def cached(self) -> bool:
        return self.status == "cached"


def steps(plan: Plan, store: Store | None = None) -> list[Step]:
    """The jobs of a plan with what a build would do for each."""
    found = Runner(
        plan.manifest.path, store or Store(cache_dir() / "build"), Reporter(), Result(Path(), ""), keep_going=False
    )
    folder, exports = plan.manifest.path.absolute().parent, dict[str, str]()
    shown: list[Step] = []
    for entry in on_its_way(plan).entries:
        of_entry = _kernel_steps if isinstance(entry, KernelPlan) else _torch_steps
        shown += of_entry(entry, found, folder, exports)  # type: ignore[arg-type]
    return list(dict.fromkeys(shown))


def _kernel_steps(entry: KernelPlan, runner: Runner, folder: Path, exports: dict[str, str]) -> Iterator[Step]:
    job = kernel_jobs.source_job(entry, folder)
    record, why = runner.find(job)
    yield Step(job.kind, job.name, entry.target, why)
    if record is None:
        names = dict.fromkeys(kernel_jobs.job_name(entry, variant) for variant in entry.variants)
        yield from (Step(entry.kind, name, entry.target, f"after {job.name}") for name in names)
        return
    for job in kernel_jobs.compile_jobs(entry, record, folder):
        yield Step(job.kind, job.name, job.target, runner.find(job)[1])


def _torch_steps(entry: EntryPlan, runner: Runner, folder: Path, exports: dict[str, str]) -> Iterator[Step]:
    """`exports` has the name of each export by its key: entries that share one show it once."""
    way = way_of(entry, across=entry.across) if entry.device == "cuda" else None
    if way is not None and way.kind == "impossible":
        yield from (_compile("aoti", variant.id, entry, "needs a GPU", way) for variant in entry.variants)
        return
    job = torch_jobs.source_job(entry, folder)
    record, why = runner.find(job)
    if exports.setdefault(job.key, job.name) == job.name:
        yield _later(job.kind, job.name, entry, why, None if entry.across else way)
    after, kind = exports[job.key], "aoti"
    if entry.across:
        after, kind = torch_jobs.move_name(entry), "cross"
        move = torch_jobs.move_job(entry, record, folder) if record is not None else None
        record, why = runner.find(move) if move is not None else (None, f"after {exports[job.key]}")
        yield _later("move", after, entry, why, None)
        record = torch_jobs.own_names(entry, record) if record is not None else None
    if record is None:
        yield from (_compile(kind, variant.id, entry, f"after {after}", way) for variant in entry.variants)
        return
    for job in torch_jobs.compile_jobs(entry, record, folder):
        yield _compile(job.kind, job.name, entry, runner.find(job)[1], way)


def _compile(kind: str, name: str, entry: EntryPlan, status: str, way: Way | None) -> Step:
    return replace(_later(kind, name, entry, status, way), attention=tuple(entry.compile["attention"]))


def _later(kind: str, name: str, entry: EntryPlan, status: str, way: Way | None) -> Step:
    return Step(kind, name, entry.target, status, way is not None and way.kind != "cross", str(way or ""))
