"""Run a plan: look each job up in the store, run what is new in worker processes, verify, pack, publish.

    export (one an entry and precision) -> compile (one a variant) -> stage -> verify (one a variant) -> publish

An unchanged rebuild finds every record and imports neither torch nor the model.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aotpack.assembly import make_index
from aotpack.compilers.dependencies import changed_dependency
from aotpack.compilers.toolchain import cpu_level, toolchain
from aotpack.manifest_model import Manifest
from aotpack.pack import check_replaceable, index_digest, is_current, merge_weights, publish, stage, staging
from aotpack.plan import EntryPlan, Plan, VariantPlan, make_plan
from aotpack.revisions import AOTI_REVISION, EXPORT_REVISION, VERIFY_REVISION
from aotpack.workers import Workers
from aotpack_runtime.errors import AotpackError, CompileError, MissingDependency, UsageError
from aotpack_runtime.format.codec import dump_guards, dump_outputs
from aotpack_runtime.format.fingerprint import changed, fingerprint
from aotpack_runtime.format.index import Index
from aotpack_runtime.format.target import Target
from aotpack_runtime.machine import cache_dir, this_machine
from aotpack_runtime.store import Store

Json = Any


@dataclass(frozen=True, slots=True)
class Step:
    """One job as the plan shows it: `status` is cached, or why it is to be done ("new", "changed: source, options")."""

    kind: str
    name: str
    target: str
    status: str
    needs_gpu: bool = False

    @property
    def cached(self) -> bool:
        return self.status == "cached"


@dataclass(slots=True)
class Result:
    """What a build did. `failures` maps a variant to the reason why it was left out."""

    path: Path
    digest: str
    steps: list[tuple[str, str, float]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    verified: dict[str, Mapping[str, Json]] = field(default_factory=dict)

    def count(self, kind: str) -> int:
        """How many jobs of a kind were run rather than found."""
        return sum(1 for step, _, _ in self.steps if step == kind)


class Reporter:
    """Told of every job that begins and ends; the command line shows it, others may ignore it."""

    def begin(self, kind: str, total: int) -> None: ...
    def done(self, kind: str, name: str, seconds: float, problem: str | None) -> None: ...


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
) -> Result:
    """Build what `manifest` asks for and publish it at `out` (default `dist/NAME-VERSION`).

    Nothing at `out` changes unless the whole bundle is built and verified. With `keep_going` variants that fail are
    left out and named in the result; without it the first failure raises CompileError or SourceError.
    """
    builder = _Builder(
        make_plan(manifest, only=only, target=target),
        store or Store(cache_dir() / "build"),
        reporter or Reporter(),
        keep_going=keep_going,
    )
    place = out or Path("dist", f"{manifest.bundle.name}-{manifest.bundle.version}")
    check_replaceable(Path(os.path.realpath(place)))
    check_requires(manifest.requires)
    with Workers(builder.store, jobs or default_jobs(manifest)) as workers:
        return builder.run(place, workers)


def steps(plan: Plan, store: Store | None = None) -> list[Step]:
    """The jobs of a plan with what a build would do for each; compiles nothing."""
    builder = _Builder(plan, store or Store(cache_dir() / "build"), Reporter(), keep_going=False)
    return builder.preview()


def default_jobs(manifest: Manifest) -> int:
    """Processes at a time: the manifest's `build.jobs`, AOTPACK_JOBS, else one for each CPU this process may use."""
    wanted = str(os.environ.get("AOTPACK_JOBS") or manifest.build.jobs)
    if wanted == "auto":
        return len(os.sched_getaffinity(0))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise UsageError(f"AOTPACK_JOBS is {wanted!r}; expected a number of processes, or auto")
    return int(wanted)


def check_requires(requires: Mapping[str, str]) -> None:
    """MissingDependency for the first requirement of the manifest that this environment does not meet."""
    from packaging.specifiers import SpecifierSet

    for name, wanted in requires.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise MissingDependency(name, needed_for="this manifest (requires)", install=f"'{name}{wanted}'") from None
        if not SpecifierSet(wanted).contains(found, prereleases=True):
            raise MissingDependency(
                f"{name}{wanted}",
                needed_for=f"this manifest (requires; {found} is installed)",
                install=f"'{name}{wanted}'",
            )


class _Builder:
    """One build: the plan, the store, and what was found or made so far."""

    def __init__(self, plan: Plan, store: Store, reporter: Reporter, *, keep_going: bool) -> None:
        self.plan, self.store, self.reporter, self.keep_going = plan, store, reporter, keep_going
        self.folder = plan.manifest.path.absolute().parent
        self.result = Result(Path(), "")
        self.exports: dict[int, Json] = {}
        self.compiled: dict[str, Json] = {}

    # -------------------------------------------------------------------------------------------------- the line

    def run(self, out: Path, workers: Workers) -> Result:
        self._turn_down_cuda()
        self._require_cpu()
        self._export(workers)
        self._compile(workers)
        index = self._index()
        self._require_some(index)
        index = self._verified(index, Path(os.path.realpath(out)), workers)
        self.result.path, self.result.digest = out, index_digest(index)
        return self.result

    def preview(self) -> list[Step]:
        found: list[Step] = []
        for entry in self.plan.entries:
            if entry.device != "cpu":
                found += [
                    Step("aoti", variant.id, entry.target, "needs a GPU", needs_gpu=True) for variant in entry.variants
                ]
                continue
            key, parts = self._export_key(entry)
            record, why = self._find_export(key, parts, entry)
            found.append(Step("export", _export_name(entry), entry.target, why))
            for variant in entry.variants:
                status = "after its export" if record is None else self._compile_status(entry, variant, record)
                found.append(Step("aoti", variant.id, entry.target, status))
        return found

    def _turn_down_cuda(self) -> None:
        others = [entry for entry in self.plan.entries if entry.device != "cpu"]
        if not others:
            return
        reason = "torch entries for CUDA need a GPU to be built, and are not in this version"
        if not self.keep_going:
            raise MissingDependency(
                "a CUDA device",
                needed_for=f"target {others[0].target!r}: {reason}",
                install="(none): use --target, or --keep-going",
            )
        for entry in others:
            self.result.failures.update({variant.id: reason for variant in entry.variants})
        self.plan = replace(self.plan, entries=tuple(entry for entry in self.plan.entries if entry.device == "cpu"))

    def _require_cpu(self) -> None:
        """Nothing is packed unverified, and a variant for a CPU that this host is not cannot be run here."""
        for entry in self.plan.entries:
            level = cpu_level(entry.compile["cpu"]["march"], entry.compile["cpu"]["simd"])
            reason = Target("cpu", {"cpu": level.needs}).reject(this_machine())
            if reason:
                raise MissingDependency(
                    level.needs, needed_for=f"target {entry.target!r}, to verify its variants here ({reason})",
                    install="(none): build on a host that has it, or name a lower level",
                )  # fmt: skip

    # --------------------------------------------------------------------------------------------------- exports

    def _export(self, workers: Workers) -> None:
        running: list[tuple[int, EntryPlan, str, dict[str, Json], Future[Json]]] = []
        for number, entry in enumerate(self.plan.entries):
            key, parts = self._export_key(entry)
            record, _ = self._find_export(key, parts, entry)
            if record is not None:
                self.exports[number] = record
                self._remember(_export_name(entry), parts)
                continue
            job = {"kind": "export", **entry.export, "folder": str(self.folder)}
            running.append(
                (number, entry, key, parts, self._submit(workers, "export", job, _export_name(entry), fresh=True))
            )
        if running:
            self.reporter.begin("export", len(running))
        for number, entry, key, parts, future in running:
            record = self._outcome(future, [variant.id for variant in entry.variants])
            if record is not None:
                self.store.put_record("export", key, record)
                self._remember(_export_name(entry), parts)
                self.exports[number] = record

    def _export_key(self, entry: EntryPlan) -> tuple[str, dict[str, Json]]:
        parts: dict[str, Json] = {
            **{name: value for name, value in entry.export.items() if name != "entry"},
            "folder": str(self.folder),
            "toolchain": {"torch": toolchain()["torch"], "python": sys.version.split()[0], "aotpack": EXPORT_REVISION},
        }
        return fingerprint(parts), parts

    def _find_export(self, key: str, parts: Mapping[str, Json], entry: EntryPlan) -> tuple[Json | None, str]:
        """(record, "cached"), or (None, why it is to be exported)."""
        record = self.store.get_record("export", key)
        if record is None:
            last = self.store.get_record("last", _last_key(self.plan, _export_name(entry)))
            return None, "new" if last is None else "changed: " + ", ".join(changed(last, parts))
        moved = changed_dependency(record["depends"], self.folder)
        return (None, f"changed: {moved}") if moved else (record, "cached")

    # -------------------------------------------------------------------------------------------------- variants

    def _compile(self, workers: Workers) -> None:
        running: list[tuple[VariantPlan, str, dict[str, Json], Future[Json]]] = []
        for number, entry in enumerate(self.plan.entries):
            if number not in self.exports:
                continue
            for variant in entry.variants:
                key, parts = self._compile_key(entry, variant, self.exports[number])
                record = self.store.get_record("aoti", key)
                if record is not None:
                    self.compiled[variant.id] = record
                    self._remember(variant.id, parts)
                    continue
                program = self.exports[number]["programs"][self.exports[number]["program_of_variant"][variant.id]]
                job = {
                    "kind": "aoti", "variant": variant.id, "key": key, "program": program,
                    "dims": variant.record()["dims"], "fills": entry.export["fills"],
                    "inductor": entry.compile["inductor"], "cpu": parts["target"],
                    "folder": str(self.folder), "imports": entry.export["imports"],
                }  # fmt: skip
                running.append((variant, key, parts, self._submit(workers, "aoti", job, variant.id)))
        if running:
            self.reporter.begin("compile", len(running))
        for variant, key, parts, future in running:
            record = self._outcome(future, [variant.id])
            if record is not None:
                self.store.put_record("aoti", key, record)
                self._remember(variant.id, parts)
                self.compiled[variant.id] = record

    def _compile_key(self, entry: EntryPlan, variant: VariantPlan, export: Json) -> tuple[str, dict[str, Json]]:
        program = export["programs"][export["program_of_variant"][variant.id]]
        level = cpu_level(entry.compile["cpu"]["march"], entry.compile["cpu"]["simd"])
        own = {"example", "examples", "file"} if "content" in program else {"example", "examples"}
        parts = {
            "program": fingerprint({name: program[name] for name in sorted(program) if name not in own}),
            "sizes": variant.record()["dims"],
            "options": entry.compile["inductor"],
            "target": {"march": level.march, "simd_bits": level.simd_bits, "needs": level.needs},
            "toolchain": {**toolchain(), "aotpack": AOTI_REVISION},
        }
        return fingerprint(parts), parts

    def _compile_status(self, entry: EntryPlan, variant: VariantPlan, export: Json) -> str:
        key, parts = self._compile_key(entry, variant, export)
        if self.store.get_record("aoti", key) is not None:
            return "cached"
        last = self.store.get_record("last", _last_key(self.plan, variant.id))
        return "new" if last is None else "changed: " + ", ".join(changed(last, parts))

    # ---------------------------------------------------------------------------------------- index, verification

    def _index(self) -> Index:
        index = make_index(self.plan, self.exports, self.compiled, toolchain())
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
            if (key := self._verify_key(index, name, variant)) and not self._known_good(variant.id, key)
        }
        if not pending and is_current(index, out):
            return index
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
            job = {
                "kind": "verify",
                "bundle": str(staged),
                "folder": str(self.folder),
                "entry": entry,
                "variant": variant,
            }
            running.append((variant, key, self._submit(workers, "verify", job, variant)))
        bad = set()
        for variant, key, future in running:
            seen = self._outcome(future, [variant])
            if seen is None:
                bad.add(variant)
            else:
                self.store.put_record("verified", key, seen)
                self.result.verified[variant] = seen
        return bad

    def _verify_key(self, index: Index, entry: str, variant: Any) -> str:
        record = index.entries[entry]
        return fingerprint(
            {
                "artifact": variant.artifact.digest,
                "examples": [list(example) for example in variant.examples],
                "weights": index.weights_file.digest if index.weights_file else "",
                "source": {
                    "text": record.source.text,
                    "args": dict(record.source.args),
                    "files": dict(record.source.files),
                },
                "imports": list(record.imports),
                "settings": dict(record.verify),
                "fills": dict(record.fills),
                "guards": dump_guards(variant.guards),
                "outputs": dump_outputs(variant.outputs),
                "aotpack": VERIFY_REVISION,
            }
        )

    def _known_good(self, variant: str, key: str) -> bool:
        seen = self.store.get_record("verified", key)
        if seen is not None:
            self.result.verified[variant] = seen
        return seen is not None

    # ------------------------------------------------------------------------------------------------------ jobs

    def _submit(
        self, workers: Workers, kind: str, job: Mapping[str, Json], name: str, *, fresh: bool = False
    ) -> Future[Json]:
        future = workers.submit(job, fresh=fresh)
        start = time.perf_counter()

        def ended(done: Future[Json]) -> None:
            if not done.cancelled():
                seconds = time.perf_counter() - start
                problem = done.exception()
                self.result.steps.append((kind, name, seconds))
                self.reporter.done(kind, name, seconds, str(problem) if problem else None)

        future.add_done_callback(ended)
        return future

    def _remember(self, name: str, parts: Mapping[str, Json]) -> None:
        """Keep the parts of a job of this manifest, whether it was run now or found, for the next plan to compare."""
        key = _last_key(self.plan, name)
        if self.store.get_record("last", key) != parts:
            self.store.put_record("last", key, parts)

    def _outcome(self, future: Future[Json], variants: Sequence[str]) -> Json | None:
        """The job's result; None for one that failed and that `keep_going` leaves out."""
        try:
            return future.result()
        except AotpackError as error:
            if not self.keep_going:
                raise
            self.result.failures.update({variant: str(error) for variant in variants})
            return None

    def _require_some(self, index: Index) -> None:
        if not any(entry.variants for entry in index.entries.values()):
            why = next(iter(self.result.failures.values()), "the manifest has none")
            raise CompileError(self.plan.manifest.bundle.name, f"no variant could be built: {why}")


def _export_name(entry: EntryPlan) -> str:
    return "/".join(part for part in (entry.entry, "export", entry.precision, entry.target) if part)


def _last_key(plan: Plan, name: str) -> str:
    """Where the parts of a job's last run are kept, so that a plan can say what changed since."""
    return fingerprint({"manifest": str(plan.manifest.path.absolute()), "job": name})


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
