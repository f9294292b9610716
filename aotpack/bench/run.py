"""A bundle -> the report of a bench over one of its entries."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotpack.bench.cases import make_cases
from aotpack.bench.harness import Harness, Runs
from aotpack.bench.modes import MODES
from aotpack.bench.report import make_report
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.errors import UnknownEntry, UsageError
from aotpack_runtime.format.index import Entry

Json = Any


def run_bench(
    bundle: Path,
    *,
    entry: str | None = None,
    device: str = "cpu",
    calls: Sequence[Mapping[str, tuple[int, ...]]] = (),
    source: Path = Path(),
    modes: Sequence[str] | None = None,
    samples: int = 5,
    steady: bool = True,
    report: Callable[[str], None] = lambda line: None,
    keep: Callable[[Json], None] = lambda found: None,
) -> Json:
    """Measure `entry` (the bundle's only one when it is not named) on `device` in `modes`, all when none are named.

    `calls` are shapes by argument, to be called in this order; by default the hot shapes, and one that no variant
    takes. `source` is where the model's module is looked up first. `keep` gets the report after each sample, so that a
    run which is cut short leaves what it saw. Raises UsageError and UnknownEntry for what is not there.
    """
    for name in modes or ():
        if name not in MODES:
            raise UsageError(f"no mode {name!r}; there are: {', '.join(MODES)}")
    opened = open_bundle(bundle)
    opened.close()
    index = opened.index
    models = [name for name, record in index.entries.items() if record.kernel is None]
    if entry is None and len(models) != 1:
        raise UsageError(f"the bundle has {len(models)} entries of models", hint=f"name one with --entry: {models}")
    name = entry or models[0]
    if name not in index.entries:
        raise UnknownEntry(name, list(index.entries))
    record = index.entries[name]
    if record.kernel is not None:
        raise UsageError(f"{name!r} is a kernel", hint="kernels are timed by bench/kernel_start.py, on a GPU")
    record = _on(record, device)
    cases = make_cases(record, calls)
    weights = index.weight_sets.get(record.variants[0].weights)
    harness = Harness(
        bundle,
        record,
        cases,
        device=device,
        folder=source,
        dtype=weights.dtype if weights else "",
        steady=steady,
        report=report,
    )
    about = {"name": index.name, "version": index.version, "digest": opened.digest}
    size_bytes, version = sum(file.size_bytes for file in index.members().values()), importlib.metadata.version("torch")

    def made(runs: Runs, *, whole: bool) -> Json:
        found = make_report(runs, cases, entry=name, size_bytes=size_bytes, bundle=about, version=version)
        return found if whole else {**found, "ok": False, "partial": "answers are not compared yet"}

    runs = harness.run(list(modes or MODES), samples, lambda runs: keep(made(runs, whole=False)))
    report_of_all = made(runs, whole=True)
    keep(report_of_all)
    return report_of_all


def _on(record: Entry, device: str) -> Entry:
    """The entry with what it has for this kind of device."""
    kind = device.partition(":")[0]
    variants = tuple(variant for variant in record.variants if variant.target.device == kind)
    if not variants:
        raise UsageError(f"{record.name!r} has no variants for {kind}", hint="name another device with --device")
    programs = tuple(program for program in record.programs if program.target.device == kind)
    return replace(record, variants=variants, programs=programs)
