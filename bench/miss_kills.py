"""Processes killed with SIGKILL on the miss path, on a CPU: servers in the middle of a compile, writers of the overlay.

    python bench/miss_kills.py kills writes --runs 200 --out bench/results/miss_kills_cpu.json

`kills` adds its runs to those of earlier storms in --out, each with its seed, its moment and what became of it.
`writes` puts copies of one compiled library into the overlay: all but the compiler is real.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

import torch  # noqa: E402

import aotpack_runtime as apr  # noqa: E402
from aotpack.bench.report import machine  # noqa: E402
from aotpack_runtime.format.fingerprint import fingerprint  # noqa: E402
from aotpack_runtime.format.index import ArtifactRef  # noqa: E402
from aotpack_runtime.jit.overlay import Compiled, Overlay  # noqa: E402
from tests.support import missing  # noqa: E402

Json = Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the moments of `kills`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: Json = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
            os.environ["AOTPACK_CACHE_DIR"] = str(Path(folder, "cache"))
            made = PARTS[part](options, Path(folder))
            report[part] = with_earlier(made, report.get(part, {})) if part == "kills" else made
        print(part, json.dumps(report[part], indent=1), flush=True)
    report["machine"] = machine()
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def kills(options: argparse.Namespace, folder: Path) -> Json:
    """Servers killed with SIGKILL at a random moment of a compile and of its publication; after each the next one must
    serve right results, and in the end nothing is left running or lying about. SIGINT ends it after the run at hand."""
    draw = random.Random(options.seed)  # noqa: S311 - the same moments each time
    cache = Path(os.environ["AOTPACK_CACHE_DIR"])
    began = time.monotonic()
    missing.serve(missing.bundle(), 98, cache, threads=1)
    whole_s = time.monotonic() - began
    runs: list[Json] = []
    ended = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: ended.set())
    while len(runs) < options.runs and not ended.is_set():
        run = len(runs)
        runs.append(killed(cache, 100 + run % 7, draw.uniform(0.5, whole_s)))
        print(run + 1, json.dumps(runs[-1]), file=sys.stderr, flush=True)
        if run % 7 == 6:
            shutil.rmtree(cache / "overlay", ignore_errors=True)
    last = missing.serve(missing.bundle(), 99, cache, threads=1)
    left = [str(path.relative_to(cache)) for path in cache.glob("overlay/*/*/build/*")]
    return {"seed": options.seed, "one_run_s": round(whole_s, 1), "last_ok": last["ok"],
            "build_folders_left": left, "processes_left": len(children_of(cache)), "runs": runs}  # fmt: skip


def killed(cache: Path, rows: int, after_s: float) -> Json:
    """One server killed `after_s` seconds after its start, and what the next one says."""
    process = missing.start(missing.bundle(), rows, cache, "threads=1")
    time.sleep(after_s)
    finished = process.poll() is not None
    compiling = any(cache.glob("overlay/*/*/build/*/"))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(0.3)
    outlived = len(children_of(cache))
    seen = missing.start(missing.bundle(), rows, cache, "threads=1", "background=1")
    output, errors = seen.communicate(timeout=300)
    right = seen.returncode == 0 and json.loads(output)["ok"]
    was = "done" if finished else "compiling" if compiling else "before or after it"
    return {"rows": rows, "after_s": round(after_s, 2), "was": was, "children_outlived": outlived, "right": right} | (
        {} if right else {"stderr": errors[-4000:]}
    )


def children_of(cache: Path) -> list[Path]:
    """Processes of compiles into this cache."""
    return [pid for pid in Path("/proc").glob("[0-9]*") if f"TMPDIR={cache}".encode() in read(pid / "environ")]


def with_earlier(storm: Json, earlier: Json) -> Json:
    """The totals of all storms of killed servers, each with its seed and what became of each run."""
    storms = [*earlier.get("storms", []), storm]
    runs = [run for one in storms for run in one["runs"]]
    return {
        "runs": len(runs),
        "killed_while_busy": sum(run["was"] != "done" for run in runs),
        "killed_while_compiling": sum(run["was"] == "compiling" for run in runs),
        "wrong": sum(not run["right"] for run in runs),
        "children_outlived": sum(run["children_outlived"] for run in runs),
        "storms": storms,
    }


def writes(options: argparse.Namespace, folder: Path) -> Json:
    """Processes killed with SIGKILL at a random moment while they put variants into the overlay, one after another:
    every record that is there afterwards must be whole, its files too, and what was left half done must be swept up."""
    draw = random.Random(2)  # noqa: S311 - the same moments each time
    cache = missing.compiled_cache(folder / "cache")
    (root,) = [path.parent for path in (cache / "overlay").glob("*/*/variants")]
    index = apr.load(missing.bundle(), mode="eager").bundle.index
    overlay = Overlay(root)
    (key,) = overlay.names()
    made = overlay.get(key, index)
    assert made is not None
    library = Path(overlay.files(made.variant)["model.so"]).read_bytes()
    records = torn = half_done = 0
    for run in range(options.runs):
        writer = os.fork()
        if writer == 0:
            _write_for_ever(overlay, made, library, run)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        half_done += len(list((root / "build").iterdir())) if (root / "build").is_dir() else 0
        looked = Overlay(root)
        for name in looked.names():
            found = looked.get(name, index)
            records += 1
            try:
                torn += found is None or not looked.files(found.variant)
            except apr.ArtifactError:
                torn += 1
            if name != key:
                looked.drop(name)
        with looked.building("sweep"):
            pass
    left = [path.name for path in (root / "build").iterdir()]
    return {"runs": options.runs, "records_looked_at": records, "torn": torn, "killed_half_way": half_done,
            "build_folders_left": left}  # fmt: skip


def _write_for_ever(overlay: Overlay, made: Compiled, library: bytes, run: int) -> None:
    from aotpack_runtime.bundle import file_of
    from aotpack_runtime.jit.flight import held

    number = 0
    while True:
        number += 1
        key = fingerprint({"run": run, "number": number})
        with held(overlay.lock(key)), overlay.building(key) as place:
            path = place / "model.so"
            path.write_bytes(library + key.encode())  # a file of its own, as each compile gives
            own = {"model.so": file_of(path)}
            artifact = ArtifactRef("aoti", fingerprint({"model.so": own["model.so"].digest}), own)
            variant = replace(made.variant, id=f"mlp/jit-{key[:8]}", artifact=artifact)
            overlay.put(replace(made, key=key, variant=variant), {"model.so": path})


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


PARTS = {"kills": kills, "writes": writes}

if __name__ == "__main__":
    main()
