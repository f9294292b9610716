"""The miss path under load, on a CPU: what a miss costs the call, what compiles cost the hits, memory over millions of
calls. Servers that are killed in the middle of it are in `miss_kills.py`.

    python bench/miss.py answer hits memory --out bench/results/miss_cpu.json
    python bench/miss.py soak --calls 5000000 --out ...

The models are those of the tests (`tests/support/missing.py`), and a larger one whose calls take a millisecond. `soak`
and `writes` put copies of one compiled library into the overlay in the place of compiling as many shapes: all but the
compiler is real. Each figure is of one run, on the machine that the report names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

import torch  # noqa: E402

import aotpack_runtime as apr  # noqa: E402
from aotpack.bench.report import machine  # noqa: E402
from aotpack_runtime.errors import CompileError  # noqa: E402
from aotpack_runtime.format.fingerprint import fingerprint  # noqa: E402
from aotpack_runtime.format.index import ArtifactRef, Variant  # noqa: E402
from aotpack_runtime.jit import service  # noqa: E402
from aotpack_runtime.jit.overlay import Compiled, Overlay, Seconds  # noqa: E402
from tests.support import missing  # noqa: E402
from tests.support.building import build_zoo, entry  # noqa: E402

Json = Any
LARGE = """
import torch


def large():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) if n % 2 == 0 else torch.nn.GELU() for n in range(12)]
    return torch.nn.Sequential(*layers).eval()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--calls", type=int, default=5_000_000)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: Json = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
            os.environ["AOTPACK_CACHE_DIR"] = str(Path(folder, "cache"))
            report[part] = PARTS[part](options, Path(folder))
        print(part, json.dumps(report[part], indent=1), flush=True)
    report["machine"] = machine()
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def large() -> Path:
    inputs = {"input": {"shape": ["rows", 512], "dtype": "float32"}}
    return build_zoo("misses_large", LARGE.replace("def large", "def make"), {
        "large": entry("make", inputs, [{"dims": {"rows": [8]}}])
    })  # fmt: skip


# ------------------------------------------------------------------------------------------ what a miss costs a call


def answer(options: argparse.Namespace, folder: Path) -> Json:
    """What a miss costs its call, over the same call of a session in mode eager: wall seconds, and CPU seconds of the
    calling thread. `misses` are first calls of shapes that are only watched, `asks` those that ask for a compile too,
    `later` second calls of the latter. `alone` no child runs, so all that is more is ours; `beside` one compiles on the
    other core, stepping back. What torch's own libraries make at the first sight of a size is made by a session of its
    own before: whichever of the others came first would have paid it for all."""
    service.PENDING = 10_000
    real, report = service.Child, {}
    for name, child in (("alone", Idle), ("beside", real)):
        service.Child = child  # type: ignore[assignment, misc]
        for size, rows in (("short", range(10, 64)), ("long", range(64, 144))):
            report[f"{name}, {size} calls"] = answered(large(), rows, beside=child is real)
    service.Child = real  # type: ignore[misc]
    return report


class Idle:
    """In the place of a child: compiles nothing until it is stopped."""

    def __init__(self, *_: Any) -> None:
        self._stopped = threading.Event()

    def run(self, *_: Any) -> tuple[Json, float]:
        self._stopped.wait()
        raise CompileError("idle", "stopped")

    def stop(self) -> None:
        self._stopped.set()


def answered(bundle: Path, sizes: range, *, beside: bool) -> Json:
    draw = random.Random(3)  # noqa: S311 - the same order each time
    ratios: dict[str, list[tuple[float, float]]] = {"misses": [], "asks": [], "later": []}
    more: dict[str, list[float]] = {name: [] for name in ratios}
    seconds: list[float] = []
    with (
        apr.load(bundle, mode="eager") as first,
        apr.load(bundle, mode="eager") as theirs,
        apr.load(bundle, mode="jit", on_miss={"when": "never"}) as watching,
        apr.load(bundle, mode="jit", on_miss={"when": "at_once", "max_jit": 10_000}) as asking,
    ):
        sessions = {"eager": theirs, "misses": watching, "asks": asking}
        for session in (first, *sessions.values()):  # what a session loads once
            session["large"](torch.randn(9, 512))
        wait_until(lambda: asking.status()["jit"]["running"] == 1)
        if beside:
            time.sleep(5)  # it has imported torch by now
        for rows in sizes:
            x = torch.randn(rows, 512)
            first["large"](x)
            took: dict[str, tuple[float, float]] = {}
            for name in draw.sample(sorted(sessions), len(sessions)):
                took[name] = timed(sessions[name]["large"], x)
                time.sleep(0.01)  # what goes on behind one call is no part of the next
            took["later"] = timed(asking["large"], x)
            seconds.append(took["eager"][0])
            for name, found in ratios.items():
                found.append((took[name][0] / took["eager"][0], took[name][1] / took["eager"][1]))
                more[name].append(took[name][1] - took["eager"][1])
        status = asking.status()["jit"]
    return {
        name: {what: spread([pair[place] for pair in found]) for place, what in enumerate(("wall", "cpu"))}
        | {"more_cpu_us": round(1e6 * statistics.median(more[name]))}
        for name, found in ratios.items()
    } | {
        "shapes": len(seconds), "eager_ms": round(1e3 * statistics.median(seconds), 2),
        "asked": status["running"] + status["waiting"],
    }  # fmt: skip


def timed(call: Callable[[torch.Tensor], object], x: torch.Tensor) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this thread) of one call."""
    start, used = time.perf_counter(), time.thread_time()
    call(x)
    return time.perf_counter() - start, time.thread_time() - used


def spread(found: list[float]) -> Json:
    return {"median": round(statistics.median(found), 3), "p90": round(sorted(found)[int(0.9 * len(found))], 3)}


def hits(options: argparse.Namespace, folder: Path) -> Json:
    """p50 and p99 of hits, in halves of the time: without compiles, and while two run."""
    os.environ |= {"AOTPACK_JIT_JOBS": "2"}
    seen: dict[str, list[float]] = {}
    compiles = 0
    x = torch.randn(8, 512)
    on_miss = {"when": "at_once", "max_jit": 1000}
    with apr.load(large(), mode="jit", on_miss=on_miss) as session:
        call = session["large"]
        for _ in range(500):
            call(x)
        for name in ("without", "during"):
            if name == "during":
                for rows in (9, 10):  # two exact shapes; what follows keeps both places taken
                    call(torch.randn(rows, 512))
                wait_until(lambda: session.status()["jit"]["running"] == 2)
            found, end, rows = [], time.monotonic() + options.seconds / 2, 11
            looked = time.monotonic()
            while time.monotonic() < end:
                start = time.perf_counter()
                call(x)
                found.append(time.perf_counter() - start)
                time.sleep(0.001)
                if name == "during" and time.monotonic() - looked > 1:
                    looked = time.monotonic()
                    jit = session.status()["jit"]
                    if jit["running"] + jit["waiting"] < 3:
                        call(torch.randn(rows, 512))
                        rows += 40
            seen[name] = sorted(found)
            compiles = session.status()["jit"]["compiles"]
    report: Json = {
        name: {
            "calls": len(found),
            "p50_us": round(1e6 * found[len(found) // 2], 1),
            "p99_us": round(1e6 * found[int(0.99 * len(found))], 1),
        }
        for name, found in seen.items()
    }
    ratio = report["during"]["p99_us"] / report["without"]["p99_us"]
    return report | {"p99_ratio": round(ratio, 2), "compiles_ended": compiles, "seconds": options.seconds}


def memory(options: argparse.Namespace, folder: Path) -> Json:
    """Resident memory of the server before a compile, and after its variant has served."""
    with apr.load(missing.bundle(), mode="jit", on_miss={"when": "never"}) as session:
        session["mlp"](torch.randn(4, 8))
        session["mlp"](torch.randn(6, 8))
    found = []
    with apr.load(missing.bundle(), mode="jit", on_miss={"when": "at_once"}) as session:
        session["series"](torch.randn(3, 4), torch.ones(4))  # begins a compile of another entry, which is waited for
        wait_until(lambda: session.status()["jit"]["waiting"] + session.status()["jit"]["running"] == 0)
        session["mlp"](torch.randn(4, 8))
        for rows in (6, 5):
            before = resident()
            x = torch.randn(rows, 8)
            session["mlp"](x)
            wait_until(lambda: session.status()["jit"]["waiting"] + session.status()["jit"]["running"] == 0)
            for _ in range(100):
                session["mlp"](x)
            found.append(round((resident() - before) / 1e6, 2))
    return {"grown_mb_by_compile": found}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# --------------------------------------------------------------------------------------------------------- the soak


class Copies:
    """In the place of a child: a copy of a library that takes a range of rows, kept for the rows that missed."""

    source: tuple[Variant, dict[str, str]]

    def __init__(self, folder: Path, limits: Any, variables: Any) -> None:
        self._folder = folder

    def run(self, job: Json, sample: int | None) -> tuple[Json, float]:
        made, files = self.source
        (shape,) = [leaf["shape"] for leaf in job["leaves"]]
        path = Path(shutil.copy(files["model.so"], self._folder / "model.so"))
        with path.open("ab") as file:  # a file of its own, as each compile gives
            file.write(job["key"].encode())
        from aotpack_runtime.bundle import file_of

        own = {"model.so": file_of(path)}
        guards = replace(made.guards, leaves=(replace(made.guards.leaves[0], dims=tuple(shape)),))
        artifact = ArtifactRef("aoti", fingerprint({"model.so": own["model.so"].digest}), own)
        variant = replace(made, id=job["variant"], artifact=artifact, guards=guards, examples=((tuple(shape),),))
        compiled = Compiled(
            key=job["key"], entry="mlp", variant=variant, seconds=Seconds(1.0, 1e-4, 5e-5), parts=job["parts"]
        )
        Overlay(Path(job["overlay"])).put(compiled, {"model.so": path})
        return {}, 0.0

    def stop(self) -> None: ...


def ranged_library(folder: Path) -> tuple[Variant, dict[str, str]]:
    """A variant of `mlp` for a range of rows, really compiled."""
    session = apr.load(missing.bundle(), mode="jit", on_miss={"background": False})
    watched: Any = session["mlp"]
    for rows in (5, 600, 1024):
        watched(torch.randn(rows, 8))
    session._behind().history["elsewhere"] = {"k": (1e-9, 1.0, 0.5)}
    watched._watch._revise()
    watched(torch.randn(600, 8))
    ((made, overlay),) = watched._watch._adopted._made.values()
    files = {name: shutil.copy(path, folder / name) for name, path in overlay.files(made.variant).items()}
    session.close()
    shutil.rmtree(Path(os.environ["AOTPACK_CACHE_DIR"]))
    return made.variant, files


def soak(options: argparse.Namespace, folder: Path) -> Json:
    """`--calls` calls, of which 1 % are of 500 shapes that no variant of the bundle takes, with a cap of 50."""
    Copies.source = ranged_library(folder)
    service.Child = Copies  # type: ignore[assignment, misc]
    from aotpack_runtime.jit import watch

    watch.KEEPS_CHANGING = 10**9  # type: ignore[attr-defined]
    draw = random.Random(0)  # noqa: S311 - the same traffic each time
    shapes = [torch.randn(rows, 8) for rows in range(5, 505)]
    hit = torch.randn(4, 8)
    marks: list[Json] = []
    most = 0
    with apr.load(missing.bundle(), mode="jit", on_miss={"when": "at_once", "max_jit": 50}) as session:
        call = session["mlp"]
        start = time.monotonic()
        for number in range(options.calls):
            call(shapes[int(draw.random() * 500)] if number % 100 == 0 else hit)
            if number % (options.calls // 20) == options.calls // 20 - 1:
                jit = session.status()["jit"]
                most = max(most, jit["overlay"]["variants"])
                marks.append({"calls": number + 1, "rss_mb": round(resident() / 1e6, 1),
                              "descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
                              "overlay": jit["overlay"]["variants"], "compiles": jit["compiles"],
                              "evictions": jit["overlay"]["evictions"]})  # fmt: skip
                print(marks[-1], flush=True)
        seconds = time.monotonic() - start
        counts, jit = call.counts(), session.status()["jit"]
    if not jit["compiles"] or jit["failures"]:
        raise SystemExit(f"nothing was soaked: {jit['compiles']} compiles, {jit['failures']} failures")
    warm, end = marks[len(marks) // 4], marks[-1]
    return {
        "calls": options.calls, "seconds": round(seconds, 1), "hits_by_tier": counts["hits_by_tier"],
        "misses": counts["misses"], "variants_at_most": most,
        "rss_growth_after_warm_up": round(end["rss_mb"] / warm["rss_mb"] - 1, 4),
        "descriptors_after_warm_up": [warm["descriptors"], end["descriptors"]], "marks": marks,
    }  # fmt: skip


def wait_until(holds: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)


PARTS = {"answer": answer, "hits": hits, "memory": memory, "soak": soak}

if __name__ == "__main__":
    main()
