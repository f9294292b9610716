"""A bundle -> the report of a bench over one of its entries."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotpack.bench.cases import make_cases
from aotpack.bench.harness import Harness, Runs
from aotpack.bench.kernel_cases import make_kernel_cases
from aotpack.bench.modes import KERNEL_MODES, MODES, modes_of
from aotpack.bench.nvrtc_jobs import nvrtc_jobs
from aotpack.bench.report import make_report
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.errors import MissingDevice, UnknownEntry, UsageError
from aotpack_runtime.format.index import Entry, Index
from aotpack_runtime.machine import this_machine

Json = Any


def run_bench(
    bundle: Path,
    *,
    entry: str | None = None,
    device: str | None = None,
    calls: Sequence[Mapping[str, tuple[int, ...]]] = (),
    source: Path | None = None,
    manifest: Path | None = None,
    modes: Sequence[str] | None = None,
    samples: int = 5,
    steady: bool = True,
    report: Callable[[str], None] = lambda line: None,
    keep: Callable[[Json], None] = lambda found: None,
) -> Json:
    """Measure `entry` (the bundle's only one when it is not named) on `device` (of models the CPU, of kernels the GPU,
    when it is not named) in `modes`, all when none are named.

    `calls` are shapes by argument, to be called in this order; by default the hot shapes, and one that no variant
    takes. Of a kernel they are numbers, and by default its first points. `source` is where the source's module is
    looked up first, and `manifest` how CUDA C++ was compiled. `keep` gets the report after each sample, so that a run
    which is cut short leaves what it saw. Raises UsageError, UnknownEntry and MissingDevice for what is not there.
    """
    for name in modes or ():
        if name not in MODES and name not in KERNEL_MODES:
            known = dict.fromkeys((*MODES, *KERNEL_MODES))
            raise UsageError(f"no mode {name!r}; there are: {', '.join(known)}")
    opened = open_bundle(bundle)
    opened.close()
    index = opened.index
    record = _entry(index, entry)
    there = modes_of(record)
    foreign = [name for name in modes or () if name not in there]
    if foreign:
        raise UsageError(f"mode {foreign[0]!r} is not for {record.name!r}; there are: {', '.join(there)}")
    folder = source or (manifest.parent if manifest else Path())
    settings: dict[str, Json] = {}
    if record.kernel is None:
        device = device or "cpu"
        record = _on(record, device)
        cases = make_cases(record, calls)
        weights = index.weight_sets.get(record.variants[0].weights)
        dtype = weights.dtype if weights else ""
    else:
        device = _gpu(record.name, device)
        cases = make_kernel_cases(record, this_machine().on(int(device.partition(":")[2] or 0)), device, calls)
        dtype = ""
        if manifest is not None and "nvrtc-cold" in there:
            settings["nvrtc"] = nvrtc_jobs(manifest, record, [case.like for case in cases])
    harness = Harness(
        bundle, record, cases,
        device=device, folder=folder, dtype=dtype, steady=steady, report=report, settings=settings,
    )  # fmt: skip
    about = {"name": index.name, "version": index.version, "digest": opened.digest}
    size_bytes, version = sum(file.size_bytes for file in index.members().values()), importlib.metadata.version("torch")

    def made(runs: Runs, *, whole: bool) -> Json:
        found = make_report(
            runs, cases, modes=there, entry=record.name, size_bytes=size_bytes, bundle=about, version=version
        )
        return found if whole else {**found, "ok": False, "partial": "answers are not compared yet"}

    runs = harness.run(list(modes or there), samples, lambda runs: keep(made(runs, whole=False)))
    report_of_all = made(runs, whole=True)
    keep(report_of_all)
    return report_of_all


def _entry(index: Index, name: str | None) -> Entry:
    """The entry that is named; else the only model, or the only entry."""
    if name is None:
        models = [one for one, record in index.entries.items() if record.kernel is None] or list(index.entries)
        if len(models) != 1:
            raise UsageError(
                f"the bundle has {len(models)} entries to choose from",
                hint=f"name one with --entry: {', '.join(models)}",
            )
        name = models[0]
    if name not in index.entries:
        raise UnknownEntry(name, list(index.entries))
    return index.entries[name]


def _gpu(name: str, device: str | None) -> str:
    if device is not None and device.partition(":")[0] != "cuda":
        raise UsageError(
            f"{name!r} is a kernel, which does not run on {device}", hint="leave --device out, or name cuda:N"
        )
    if not this_machine().gpus:
        raise MissingDevice(
            f"{name!r} is a kernel: measuring it needs a CUDA device, and this host has none", hint="run it on a GPU"
        )
    return device or "cuda"


def _on(record: Entry, device: str) -> Entry:
    """The entry with what it has for this kind of device."""
    kind = device.partition(":")[0]
    variants = tuple(variant for variant in record.variants if variant.target.device == kind)
    if not variants:
        raise UsageError(f"{record.name!r} has no variants for {kind}", hint="name another device with --device")
    programs = tuple(program for program in record.programs if program.target.device == kind)
    return replace(record, variants=variants, programs=programs)
