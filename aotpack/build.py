"""Run a plan: look each job up in the store, run what is new in worker processes, verify, pack, publish.

    export (one an entry and precision) -> compile (one a variant) -> stage -> verify (one a variant) -> publish

An unchanged rebuild finds every record and imports neither torch nor the model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotpack import kernel_jobs, torch_jobs
from aotpack.assembly import make_index
from aotpack.compilers.toolchain import cpu_level, gpu_tools, toolchain
from aotpack.jobs import Job, Reporter, Result, Runner, Then
from aotpack.kernel_assembly import tuning_table
from aotpack.kernel_plan import KernelPlan
from aotpack.manifest_model import Manifest
from aotpack.pack import check_replaceable, index_digest, is_current, merge_weights, publish, stage, staging
from aotpack.plan import EntryPlan, Plan, make_plan
from aotpack.requires import check_requires
from aotpack.verify_jobs import not_verifiable, verify_job, verify_key
from aotpack.ways import impossible, on_its_way
from aotpack.workers import Workers
from aotpack_runtime.errors import CompileError, MissingDependency, MissingDevice, UsageError
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.index import Entry, Index, Variant
from aotpack_runtime.format.index_json import dump, parse
from aotpack_runtime.format.target import Target
from aotpack_runtime.machine import cache_dir, this_machine
from aotpack_runtime.store import Store

Json = Any


def build(
    manifest: Manifest,
    out: Path | None = None,
    *,
    jobs: int | None = None,
    only: str = "*",
    target: str | None = None,
    keep_going: bool = False,
    store: Store | None = None,
    reporter: Reporter | None = None,
    tables: bool = True,
    across: bool = False,
) -> Result:
    """Build what `manifest` asks for and publish it at `out` (default `dist/NAME-VERSION`).

    Nothing at `out` changes unless the whole bundle is built and verified. With `keep_going` variants that fail are
    left out and named in the result; without it the first failure raises CompileError or SourceError. Without `tables`
    tuned kernels are built as if they had no table: to be tuned. `across` builds for named devices as if there was no
    GPU here.
    """
    place = out or Path("dist", f"{manifest.bundle.name}-{manifest.bundle.version}")
    plan, store = make_plan(manifest, only=only, target=target), store or Store(cache_dir() / "build")
    with Workers(store, jobs or default_jobs(manifest)) as workers:
        return build_plan(
            plan, place, workers, store,
            keep_going=keep_going, reporter=reporter or Reporter(), tables=tables, across=across,
        )  # fmt: skip


def build_plan(
    plan: Plan,
    out: Path,
    workers: Workers,
    store: Store,
    *,
    keep_going: bool = False,
    reporter: Reporter,
    tables: bool = True,
    across: bool = False,
) -> Result:
    """Build a plan, or a part of one, in processes of `workers`, which other builds may share. As `build` does."""
    builder = _Builder(plan, store, reporter, keep_going=keep_going, tables=tables, across=across)
    check_replaceable(Path(os.path.realpath(out)))
    check_requires(plan.manifest.requires)
    return builder.run(out, workers)


def default_jobs(manifest: Manifest) -> int:
    """Processes at a time: the manifest's `build.jobs`, AOTPACK_JOBS, else one for each CPU this process may use."""
    wanted = str(os.environ.get("AOTPACK_JOBS") or manifest.build.jobs)
    if wanted == "auto":
        return len(os.sched_getaffinity(0))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise UsageError(f"AOTPACK_JOBS is {wanted!r}; expected a number of processes, or auto")
    return int(wanted)


class _Builder:
    """One build: the plan, the store, and what was found or made so far."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        reporter: Reporter,
        *,
        keep_going: bool,
        tables: bool = True,
        across: bool = False,
    ) -> None:
        self.plan = on_its_way(plan, across=across, tables=tables)
        self.store, self.reporter = store, reporter
        self.keep_going, self.tables = keep_going, tables
        self.folder = plan.manifest.path.absolute().parent
        self.result = Result(Path(), "")
        self.runner = Runner(plan.manifest.path, store, reporter, self.result, keep_going=keep_going)

    # -------------------------------------------------------------------------------------------------- the line

    def run(self, out: Path, workers: Workers) -> Result:
        self._require_gpu()
        self._require_cpu()
        self._require_tables()
        sources = self._sources(workers)
        jobs = [
            job
            for number, source in sources.items()
            for job in _jobs_of(self.plan.entries[number]).compile_jobs(self.plan.entries[number], source, self.folder)
        ]
        compiled = self.runner.run(jobs, workers, "compile")
        index = self._index(sources, compiled)
        self._require_some(index)
        index = self._verified(index, Path(os.path.realpath(out)), workers)
        self.result.path, self.result.digest = out, index_digest(index)
        return self.result

    def _sources(self, workers: Workers) -> dict[int, Json]:
        """What the first job of each entry gave, by its place in the plan."""
        jobs = {
            number: _jobs_of(entry).source_job(entry, self.folder) for number, entry in enumerate(self.plan.entries)
        }
        self._warm_up(jobs, workers)
        across = {n: e for n, e in enumerate(self.plan.entries) if isinstance(e, EntryPlan) and e.across}
        moved_later = {jobs[number].key: entry for number, entry in across.items()}
        jobs = {number: replace(job, apart=job.apart or job.key in moved_later) for number, job in jobs.items()}

        def move(job: Job, record: Json) -> Job | None:  # in the process that has the model already
            entry = moved_later.get(job.key)
            return torch_jobs.move_job(entry, record, self.folder) if entry is not None else None

        found = self._once(jobs, workers, "source", move)
        moves = {n: torch_jobs.move_job(e, found.pop(n), self.folder) for n, e in across.items() if n in found}
        moved = self._once(moves, workers, "move")
        found |= {number: torch_jobs.own_names(across[number], record) for number, record in moved.items()}
        return {number: self._with_text(record) for number, record in sorted(found.items())}

    def _once(self, jobs: Mapping[int, Job], workers: Workers, label: str, then: Then | None = None) -> dict[int, Json]:
        """The record of each job; those that are the same are run once, under the name of the first."""
        first: dict[str, Job] = {}
        for job in jobs.values():
            first.setdefault(job.key, job)
        records = self.runner.run(list(first.values()), workers, label, then)
        named = {number: first[job.key].name for number, job in jobs.items()}
        return {number: records[name] for number, name in named.items() if name in records}

    def _warm_up(self, jobs: Mapping[int, Job], workers: Workers) -> None:
        """Before a model is exported anew, let the workers that have nothing to export get ready to compile."""
        new = {job.name: self.plan.entries[number] for number, job in jobs.items() if not self.runner.find(job)[0]}
        exported = [entry for entry in new.values() if isinstance(entry, EntryPlan)]
        if exported:
            most = sum(len(entry.variants) for entry in exported)
            apart = all(entry.across for entry in exported)
            job = torch_jobs.warm_up_job(exported[0], most + self.store.count_records("aoti"))
            workers.warm_up(job, busy=len(new), most=most, apart=apart)

    def _with_text(self, record: Json) -> Json:
        """A record of a kernel's source with its text, and the files that it is read from, as files of the store."""
        if "text" not in record:
            return record
        files, problem = kernel_jobs.source_files(record, self.folder)
        if problem:
            self.result.notes.append(f"misses of it will not be compiled: {problem}")
        kept = {path: self.store.put_file(self.folder / path) for path in files}
        return {**record, "file": self.store.put_bytes(record["text"].encode()), "files": kept}

    def _require_gpu(self) -> None:
        """A torch entry for CUDA without its GPU ends a build before anything is compiled, or is left out."""
        reasons = {number: impossible(entry) for number, entry in enumerate(self.plan.entries)}
        for number, reason in reasons.items():
            entry = self.plan.entries[number]
            if reason and not self.keep_going:
                raise MissingDevice(
                    f"target {entry.target!r}: {entry.entry} {reason}",
                    hint="build there, or without it: --target, or --keep-going",
                )
            if reason:
                self.result.failures.update({variant.id: reason for variant in entry.variants})
        kept = tuple(entry for number, entry in enumerate(self.plan.entries) if not reasons[number])
        self.plan = replace(self.plan, entries=kept)

    def _require_cpu(self) -> None:
        """Nothing is packed unverified, and a variant for a CPU that this host is not cannot be run here."""
        for entry in self.plan.entries:
            if not isinstance(entry, EntryPlan):
                continue
            level = cpu_level(entry.compile["cpu"]["march"], entry.compile["cpu"]["simd"])
            reason = Target("cpu", {"cpu": level.needs}).reject(this_machine())
            if reason:
                raise MissingDependency(
                    level.needs, needed_for=f"target {entry.target!r}, to verify its variants here ({reason})",
                    install="(none): build on a host that has it, or name a lower level",
                )  # fmt: skip

    def _require_tables(self) -> None:
        """A table of other candidates ends a build before anything is compiled; under `keep_going` its entry is left
        out when the index is made."""
        if self.tables and not self.keep_going:
            for entry in self.plan.entries:
                if isinstance(entry, KernelPlan):
                    tuning_table(entry, self.folder)

    # ---------------------------------------------------------------------------------------- index, verification

    def _index(self, sources: Mapping[int, Json], compiled: Mapping[str, Json]) -> Index:
        index = make_index(
            self.plan, sources, compiled, self._tools(), tables=self.tables,
            failures=self.result.failures if self.keep_going else None,
        )  # fmt: skip
        self.result.notes += self._untuned(index.index) if self.tables else []
        files = {name: Path(self.store.object(record["sha256"])) for name, record in index.parts.items()}
        if len(set(files.values())) <= 1:
            return index.finish(next(iter(index.parts.values()), None), merged=False)
        key = fingerprint({"merge": {name: record["sha256"] for name, record in index.parts.items()}})
        merged = self.store.get_record("weights", key)
        if merged is None:
            with tempfile.TemporaryDirectory(dir=self.store.root) as folder:
                path = Path(folder, "weights.safetensors")
                merge_weights(sorted(files.items()), path)
                merged = self.store.put_file(path)
            self.store.put_record("weights", key, merged)
        return index.finish(merged, merged=True)

    def _verified(self, index: Index, out: Path, workers: Workers) -> Index:
        """Publish `index` at `out` after verifying what was not verified before; the index that was published."""
        pending = {
            (name, variant.id): key
            for name, entry in index.entries.items()
            for variant in (*entry.variants, *entry.programs)
            if self._verifiable(entry, variant)
            and (key := verify_key(index, name, variant))
            and not self._known_good(variant.id, key)
        }
        if not pending and is_current(index, out):
            return index
        # Kernels are not run where there is no GPU, but no bundle is published that cannot be opened.
        parse(dump(index))
        with staging(out) as staged:
            stage(index, self.store, out, staged)
            if pending and (bad := self._verify(staged, pending, workers)):
                index = _without(index, bad)
                self._require_some(index)
                stage(index, self.store, out, staged)
            publish(staged, out)
        return index

    def _verify(self, staged: Path, pending: Mapping[tuple[str, str], str], workers: Workers) -> set[str]:
        self.reporter.begin("verify", len(pending))
        running = []
        for (entry, variant), key in pending.items():
            job = verify_job(staged, self.folder, entry, variant)
            running.append((variant, key, self.runner.submit(workers, "verify", job, variant)))
        bad = set()
        for variant, key, future in running:
            seen = self.runner.outcome(future, [variant])
            if seen is None:
                bad.add(variant)
            else:
                self.store.put_record("verified", key, seen)
                self.result.verified[variant] = seen
        return bad

    def _tools(self) -> dict[str, str]:
        """Versions of what this plan is built with."""
        kinds = {entry.kind for entry in self.plan.entries if isinstance(entry, KernelPlan)}
        devices = {entry.device for entry in self.plan.entries if isinstance(entry, EntryPlan)}
        tools = {**toolchain(), **(gpu_tools() if "cuda" in devices else {})} if devices else {}
        for kind in sorted(kinds):
            tools |= kernel_jobs.kernel_tools(kind)
        return tools

    def _untuned(self, index: Index) -> list[str]:
        """What to say of kernels that were to be tuned and have no table."""
        records = {entry.entry: entry.record for entry in self.plan.entries if isinstance(entry, KernelPlan)}
        return [
            f"{name}: there is no {records[name].tuning} yet, so rules decide, and where none holds the first variant "
            "that fits; run `aotpack tune` on a GPU"
            for name, entry in index.entries.items()
            if entry.kernel and records[name].choose == "tuned" and not entry.kernel.choice.tables
        ]

    def _verifiable(self, entry: Entry, variant: Variant) -> bool:
        """Is it to be run here? What is not is packed unverified, and said to be."""
        reason = not_verifiable(entry, variant, across=self._is_across(entry.name, variant.target.device))
        if reason is not None:
            self.result.unverified[variant.id] = reason
        return reason is None

    def _is_across(self, name: str, device: str) -> bool:
        """Was it built without its GPU? Its programs too were never run on one."""
        built = [entry for entry in self.plan.entries if isinstance(entry, EntryPlan) and entry.entry == name]
        return device == "cuda" and any(entry.across for entry in built)

    def _known_good(self, variant: str, key: str) -> bool:
        seen = self.store.get_record("verified", key)
        if seen is not None:
            self.result.verified[variant] = seen
        return seen is not None

    def _require_some(self, index: Index) -> None:
        if not any(entry.variants for entry in index.entries.values()):
            why = next(iter(self.result.failures.values()), "the manifest has none")
            raise CompileError(self.plan.manifest.bundle.name, f"no variant could be built: {why}")


def _jobs_of(entry: EntryPlan | KernelPlan) -> Any:
    """The module that makes the jobs of this kind of entry."""
    return torch_jobs if isinstance(entry, EntryPlan) else kernel_jobs


def _without(index: Index, bad: set[str]) -> Index:
    """The index without the variants that failed."""
    entries = {
        name: replace(
            entry,
            variants=tuple(variant for variant in entry.variants if variant.id not in bad),
            programs=tuple(program for program in entry.programs if program.id not in bad),
        )
        for name, entry in index.entries.items()
    }
    return replace(index, entries={name: entry for name, entry in entries.items() if entry.variants})
