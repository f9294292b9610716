"""Process start to the first right output with torch never imported, against what needs torch: CPU or one GPU.

    python bench/lean_start.py BUNDLE --source manifests --out bench/results/lean_start_cpu.json
    python bench/lean_start.py BUNDLE --source manifests --device cuda --out DIR/lean_start.json

Every sample is a fresh process; modes take turns, and each result is compared with eager's. Times count from before the
process is started. `compile` runs once before, to fill its caches. Figures are medians; `of_import_torch` and the like
are ratios of them. `cpu_s` is the main thread's CPU time of each phase, for machines that have other work.

    arrays          the bundle, without torch: arrays in, arrays out
    torch           the bundle, with torch's tensors
    import-torch    `import torch` and nothing else
    eager           the model's own source
    compile         torch.compile, with caches that are filled
    cpp             the C++ client's sample server, of the folder of its programs given as --client
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

Json = Any
MODES = ("arrays", "torch", "import-torch", "eager", "compile")
STEADY_CALLS = 30


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    import argparse  # a sample imports no more than what it times needs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--entry")
    parser.add_argument("--source", type=Path, default=Path())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--client", type=Path, help="the folder in which runtime/cpp was built")
    options = parser.parse_args()
    text = json.dumps(measure(options), indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def measure(options: argparse.Namespace) -> Json:
    """All samples, and their medians."""
    import tempfile

    from aotpack.bench.report import machine

    modes = options.modes.split(",")
    with tempfile.TemporaryDirectory(prefix="lean-start-") as folder:
        job = {
            "bundle": str(options.bundle.absolute()), "entry": options.entry, "device": options.device,
            "source": str(options.source.absolute()), "folder": folder,
            "client": str(options.client.absolute()) if options.client else "",
        }  # fmt: skip
        run({**job, "mode": "prepare"})
        for mode in modes:
            run({**job, "mode": mode})  # byte code and caches: nothing of a sample is the first of its kind
        samples: dict[str, list[Json]] = {mode: [] for mode in modes}
        for number in range(options.samples):
            for mode in modes:
                samples[mode].append(run({**job, "mode": mode}))
                print(f"{mode} ({number + 1}): {samples[mode][-1]['total_s']:.3f} s", file=sys.stderr)
    figures = {mode: summary(found) for mode, found in samples.items()}
    lean = figures.get("arrays", {}).get("total_s")
    ratios = {f"{mode}_of_arrays": round(found["total_s"] / lean, 2) for mode, found in figures.items() if lean}
    if lean and "import-torch" in figures:
        torch = figures["import-torch"]
        ratios["arrays_of_import_torch"] = round(lean / torch["total_s"], 3)
        ratios["arrays_rss_of_import_torch"] = round(figures["arrays"]["rss_mb"] / torch["rss_mb"], 3)
    return {
        "command": sys.argv, "date": time.strftime("%Y-%m-%d"), "machine": machine(), "device": options.device,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"), "load_average": os.getloadavg(), "modes": figures,
        "ratios": ratios,
    }  # fmt: skip


def summary(samples: list[Json]) -> Json:
    """Medians of one mode's samples."""
    phases, cpu = (
        {name: round(median(one[kind][name] for one in samples), 4) for name in samples[0].get(kind, ())}
        for kind in ("phases_s", "cpu_s")
    )
    found = {
        "total_s": round(median(one["total_s"] for one in samples), 4),
        "samples_s": [round(one["total_s"], 4) for one in samples],
        "phases_s": phases,
        **({"cpu_s": cpu} if cpu else {}),
        "rss_mb": round(median(one["rss_mb"] for one in samples), 1),
    }
    if "steady_ms" in samples[0]:
        found["steady_ms"] = round(median(one["steady_ms"] for one in samples), 3)
        found["worst_relative_error"] = max(one["error"] for one in samples)
    return found


def run(job: Json) -> Json:
    """What one fresh process measured."""
    if job["mode"] == "cpp":
        return run_client(job)
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": f"{job['folder']}/inductor", "TRITON_CACHE_DIR": f"{job['folder']}/triton",
        "PYTHONPYCACHEPREFIX": f"{job['folder']}/pyc", "PYTHONDONTWRITEBYTECODE": "", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    import subprocess

    command = [sys.executable, __file__, "--child", json.dumps({**job, "began": time.monotonic()})]
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{job['mode']} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_client(job: Json) -> Json:
    """The same of the C++ sample server: its first answer to the request of `prepare`."""
    import base64
    import subprocess

    from aotpack_runtime.machine import this_machine

    name = job["entry"] or Path(job["folder"], "entry").read_text()
    request = Path(job["folder"], "request.json").read_text()
    command = [f"{job['client']}/aotpack-serve", job["bundle"], name, str(this_machine().libtorch)]
    command += ["--device", job["device"], "--base64"]
    began = time.monotonic()
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(request)
    server.stdin.flush()
    server.stdout.readline()
    opened = time.monotonic()
    answer = server.stdout.readline()
    total = time.monotonic() - began
    memory = resident_mb(str(server.pid))
    times = []
    for _ in range(STEADY_CALLS):
        start = time.perf_counter()
        server.stdin.write(request)
        server.stdin.flush()
        server.stdout.readline()
        times.append(time.perf_counter() - start)
    server.stdin.close()
    if server.wait():
        sys.exit("the client failed")
    results = [base64.b64decode(one["data"]) for one in json.loads(answer)["results"]]
    return {
        "total_s": total, "phases_s": {"open": opened - began, "first_call": total - (opened - began)},
        "rss_mb": memory, "error": error_of(results, job), "steady_ms": median(times) * 1e3,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ one process


def child(job: Json) -> None:
    """One sample of a mode, printed as JSON."""
    phases: dict[str, float] = {}
    cpu: dict[str, float] = {}
    last, spent = job["began"], 0.0

    def lap(name: str) -> None:
        nonlocal last, spent
        now, used = time.monotonic(), time.thread_time()
        phases[name], cpu[name], last, spent = now - last, used - spent, now, used

    lap("interpreter")
    if job["mode"] == "prepare":
        prepare(job)
        print("{}")
        return
    call = WAYS[job["mode"]](job, lap)
    results = call() if call else []
    lap("first_call")
    found = {"total_s": sum(phases.values()), "phases_s": phases, "cpu_s": cpu, "rss_mb": resident_mb()}
    if call:
        found["error"] = error_of(results, job)
        times = []
        for _ in range(STEADY_CALLS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        found["steady_ms"] = median(times) * 1e3
    if job["mode"] == "arrays" and "torch" in sys.modules:
        sys.exit("torch was imported")
    print(json.dumps(found))


def arrays(job: Json, lap: Callable[[str], None]) -> Callable[[], list[bytes]]:
    """The bundle, called with arrays."""
    import aotpack_runtime as apr

    session = apr.load(job["bundle"], device=job["device"], mode="strict", tensors="array")
    entry = session[job["entry"] or next(iter(session))]
    lap("load")
    given = {name: session.put(apr.Array(bytearray(data), dtype, shape)) for name, dtype, shape, data in inputs(job)}
    lap("inputs")
    return lambda: [array.cpu().tobytes() for array in leaves_of(entry(**given))]


def with_torch(job: Json, lap: Callable[[str], None]) -> Callable[[], list[bytes]]:
    """The bundle, called with torch's tensors."""
    import torch

    lap("import_torch")
    import aotpack_runtime as apr

    session = apr.load(job["bundle"], device=job["device"], mode="strict", tensors="torch")
    entry = session[job["entry"] or next(iter(session))]
    lap("load")
    given = tensors(job, torch)
    lap("inputs")
    return lambda: results_of(entry, given, torch)


def only_torch(job: Json, lap: Callable[[str], None]) -> None:
    """`import torch` and nothing else."""
    import torch  # noqa: F401

    lap("import_torch")


def eager(job: Json, lap: Callable[[str], None]) -> Callable[[], list[bytes]]:
    """The model's own source."""
    import torch

    lap("import_torch")
    model = build(job)
    lap("load")
    given = tensors(job, torch)
    lap("inputs")
    return lambda: results_of(model, given, torch)


def compiled(job: Json, lap: Callable[[str], None]) -> Callable[[], list[bytes]]:
    """torch.compile of the same."""
    import torch

    lap("import_torch")
    model = torch.compile(build(job))
    lap("load")
    given = tensors(job, torch)
    lap("inputs")
    return lambda: results_of(model, given, torch)


WAYS: Mapping[str, Callable[[Json, Callable[[str], None]], Any]] = {
    "arrays": arrays, "torch": with_torch, "import-torch": only_torch, "eager": eager, "compile": compiled,
}  # fmt: skip


def prepare(job: Json) -> None:
    """Write the inputs of the first variant, and eager's results."""
    import pickle

    import torch

    import aotpack_runtime as apr
    from aotpack_runtime.loaders.inputs import make_leaves

    session = apr.load(job["bundle"], device=job["device"], tensors="torch")
    record = session[job["entry"] or next(iter(session))].record
    variant = record.variants[0]
    leaves = make_leaves(variant.guards, variant.examples[0], record.fills)
    rows = [
        (name, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), bytes_of(leaf))
        for name, leaf in zip(record.parameter_names, leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    Path(job["folder"], "inputs").write_bytes(pickle.dumps(rows))
    Path(job["folder"], "entry").write_text(record.name)
    request = {
        name: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in zip(record.parameter_names, leaves, strict=True)
    }
    Path(job["folder"], "request.json").write_text(json.dumps(request) + "\n")
    found = leaves_of(build(job)(**tensors(job, torch)))
    kept = [(str(tensor.dtype).removeprefix("torch."), bytes_of(tensor)) for tensor in found]
    Path(job["folder"], "reference").write_bytes(pickle.dumps(kept))


def build(job: Json) -> Any:
    """The model as a server without aotpack has it, on the device, with the outputs that the manifest names."""
    import torch

    from aotpack_runtime.bundle import open_bundle
    from aotpack_runtime.loaders.source import build_module, select_outputs

    sys.path.insert(0, job["source"])
    index = open_bundle(job["bundle"]).index
    record = index.entries[job["entry"] or next(iter(index.entries))]
    model = build_module(record.source.text, record.source.args).eval()
    dtype = index.weight_sets[record.variants[0].weights].dtype
    if dtype:
        model = model.to(getattr(torch, dtype))
    if record.output_names:
        model.register_forward_hook(lambda _, args, result: select_outputs(result, record.output_names))
    return model.to(job["device"]).requires_grad_(requires_grad=False)


def median(numbers: Any) -> float:
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def inputs(job: Json) -> Json:
    import pickle

    return pickle.loads(Path(job["folder"], "inputs").read_bytes())  # noqa: S301 - written by our own process


def tensors(job: Json, torch: Any) -> dict[str, Any]:
    return {
        name: torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape).to(job["device"])
        for name, dtype, shape, data in inputs(job)
    }


def results_of(call: Callable[..., Any], given: Mapping[str, Any], torch: Any) -> list[bytes]:
    with torch.no_grad():
        return [bytes_of(tensor) for tensor in leaves_of(call(**given))]


def bytes_of(tensor: Any) -> bytes:
    import torch

    plain: bytes = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return plain


def leaves_of(result: Any) -> list[Any]:
    """The tensors or arrays of a result."""
    from aotpack_runtime.format.tree import flatten

    leaves: list[Any] = []
    flatten(result, leaves)
    return [leaf for leaf in leaves if hasattr(leaf, "shape")]


def error_of(results: list[bytes], job: Json) -> float:
    """The largest difference from eager's results, by relative norm."""
    import pickle

    import numpy as np

    def floats(data: bytes, dtype: str) -> Any:
        if dtype == "bfloat16":
            return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return np.frombuffer(data, dtype).astype(np.float64)

    worst = 0.0
    reference = pickle.loads(Path(job["folder"], "reference").read_bytes())  # noqa: S301 - as the inputs
    for (dtype, wanted), found in zip(reference, results, strict=True):
        a, b = floats(wanted, dtype), floats(found, dtype)
        worst = max(worst, float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30)))
    if not worst < (0.05 if any(dtype in ("bfloat16", "float16") for dtype, _ in reference) else 1e-3):
        sys.exit(f"{job['mode']} answers wrong: {worst}")
    return worst


def resident_mb(process: str = "self") -> float:
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
