"""Nine variants of MiniLM built from nothing: by `aotpack build` in one process and in two, and by nine bare calls of
torch's `aoti_compile_and_package` in two processes.

    python bench/build_speed.py --out bench/results/build_minilm_cpu.json

Whole processes, caches empty and private, one after another. The build of a bundle also exports the program that serves
misses, runs every variant against eager and packs; the bare calls export, compile and write nine packages, each with
the weights in it.

Beside wall time, which anything else on the machine lengthens, stands CPU time along the longest way: of each phase of
a build (source, compile, verify) that of the worker with the most, and the parent's; of the bare calls that of the
longer process. On an idle machine of two cores the two are nearly the same. `--quick` leaves the build in one process
out: its CPU time is that of all jobs of the other, without the second worker's start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from aotpack.bench.report import machine

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "manifests"
POINTS = [(batch, seq) for batch in (1, 4, 8, 16) for seq in ((8, 64), (65, 128))] + [(None, (2, 256))]
"""Batch and the range of seq, as in manifests/minilm.yaml; a batch of None varies from 1 to 32."""
PHASES = {"export": "source", "aoti_warm": "warm-up", "aoti": "compile", "verify": "verify"}
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--build", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare is not None:
        bare(options.bare)
        return
    if options.build is not None:
        print(json.dumps(build(options.build)))
        return
    # The bare calls stand between the two builds, so that a machine that slows down favours neither.
    two = built(2)
    seconds, cpu = {"aotpack_two": two["wall_s"]}, {"aotpack_two": longest(two)}
    seconds["bare_two"], cpu["bare_two"] = in_two_processes()
    if options.quick:
        cpu["aotpack_one"] = two["parent_s"] + sum(job["cpu_s"] for job in two["jobs"]) - second_start(two)
    else:
        one = built(1)
        seconds["aotpack_one"], cpu["aotpack_one"] = one["wall_s"], longest(one)
    report = {
        name: {
            "seconds": {way: round(value, 1) for way, value in found.items()},
            **({"one_of_two": round(found["aotpack_one"] / found["aotpack_two"], 3)} if "aotpack_one" in found else {}),
            "two_of_bare": round(found["aotpack_two"] / found["bare_two"], 3),
        }
        for name, found in (("cpu", cpu), ("wall", seconds))
    }
    report["phases_cpu_s"] = {phase: round(value, 1) for phase, value in phases(two).items()}
    report["load"] = {"of_1_5_15_minutes": list(os.getloadavg())}
    report["machine"] = machine()
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------------- builds


def built(jobs: int) -> dict[str, Any]:
    """What `build` in a fresh process saw of itself."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), "--build", str(jobs)]
        done = subprocess.check_output(command, env=private(folder), cwd=folder)
        found: dict[str, Any] = json.loads(done)
        return found


def build(jobs: int) -> dict[str, Any]:
    """Build here: the CPU seconds of each job, by the worker that did it. The first of a worker holds its start."""
    from aotpack import build as build_bundle
    from aotpack import read_manifest, workers

    run, seen, before = workers._Process.run, [], defaultdict[int, float](float)

    def recorded(self: Any, job: Any) -> Any:
        answer, worker = run(self, job), self._process.pid
        spent = cpu_of(worker)
        seen.append({"kind": job["kind"], "worker": worker, "cpu_s": spent - before[worker]})
        before[worker] = spent
        return answer

    workers._Process.run = recorded  # type: ignore[method-assign]
    started = time.perf_counter()
    build_bundle(read_manifest(MANIFESTS / "minilm.yaml"), Path("out"), jobs=jobs)
    used = os.times()
    return {"wall_s": time.perf_counter() - started, "parent_s": used.user + used.system, "jobs": seen}


def cpu_of(process: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def phases(found: dict[str, Any]) -> dict[str, float]:
    """CPU seconds of each phase along its longest worker. A worker gets ready to compile while another exports: what of
    that takes longer than the export counts to its compiles."""
    spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for job in found["jobs"]:
        spent[PHASES[job["kind"]]][job["worker"]] += job["cpu_s"]
    warm, source = spent.pop("warm-up", {}), max(spent["source"].values())
    for worker, seconds in warm.items():
        spent["compile"][worker] += max(0.0, seconds - source)
    return {phase: max(workers.values()) for phase, workers in spent.items()}


def longest(found: dict[str, Any]) -> float:
    return float(found["parent_s"] + sum(phases(found).values()))


def second_start(found: dict[str, Any]) -> float:
    """CPU seconds of a second worker's start, which a build in one process does not have: what a worker that was not
    warmed up took for its first variant more than for the others (headers are precompiled once either way)."""
    warmed = {job["worker"] for job in found["jobs"] if job["kind"] == "aoti_warm"}
    times: dict[int, list[float]] = defaultdict(list)
    for job in found["jobs"]:
        if job["kind"] == "aoti":
            times[job["worker"]].append(job["cpu_s"])
    extra = [own[0] - sorted(own[1:])[len(own[1:]) // 2] for who, own in times.items() if who not in warmed and own[1:]]
    return max(min(extra, default=0.0), 0.0)


# --------------------------------------------------------------------------------------------------------- bare calls


def in_two_processes() -> tuple[float, float]:
    """(wall seconds, CPU seconds of the longer process)."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, str(Path(__file__)), "--bare"]
        both = [
            subprocess.Popen([*command, str(place)], cwd=folder, env=private(f"{folder}/{place}", folder))
            for place in (0, 1)
        ]
        ended = [os.wait4(process.pid, 0) for process in both]
        if any(status for _, status, _ in ended):
            raise SystemExit("a bare build failed")
        return time.perf_counter() - start, max(used.ru_utime + used.ru_stime for _, _, used in ended)


def private(folder: str, shared: str = "") -> dict[str, str]:
    """Caches in `folder`; the temporary folder, in which torch keeps precompiled headers, there or in `shared`."""
    return os.environ | {
        "AOTPACK_CACHE_DIR": f"{folder}/aotpack",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TMPDIR": shared or folder,
        "OMP_NUM_THREADS": "1",
    }


def bare(place: int) -> None:
    import torch

    sys.path.insert(0, str(MANIFESTS))
    from models.minilm import build as build_model

    model = build_model()
    for number, (batch, (low, high)) in list(enumerate(POINTS))[place::2]:
        seq = torch.export.Dim("seq", min=low, max=high)
        dims = {1: seq} if batch is not None else {0: torch.export.Dim("batch", min=1, max=32), 1: seq}
        ids = torch.ones(batch or 8, (low + high) // 2, dtype=torch.int64)
        with torch.no_grad():
            program = torch.export.export(model, (ids, ids.clone()), dynamic_shapes=(dims, dims), strict=False)
            torch._inductor.aoti_compile_and_package(program, package_path=f"{os.getcwd()}/{number}.pt2")


if __name__ == "__main__":
    main()
