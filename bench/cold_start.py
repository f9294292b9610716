"""Process start to first right output, in fresh processes: the bundle against what people do today.

    python bench/cold_start.py --model quickstart --samples 5 --json bench/out/quickstart.json

Every sample is a process of its own with caches of its own. Modes:

    bundle          aotpack_runtime.load on a bundle, first call a hit; model library never imported
    eager           import the model's library, construct it with its weights, call it
    compile_cold    the same under torch.compile, all compiler caches empty
    compile_warm    the same with the caches that one earlier process filled
    package_cold    torch's own aoti_load_package on a package of the same program, compiler cache empty
    package_warm    the same with the cache that one earlier process filled
    import_torch    import torch and nothing else: the floor of everything above

Time runs from before the parent starts the process until the result is there; then the result is compared with eager's
(a mode that answers wrong has no figure). `after_import_s` is the part after `import torch`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "manifests"
OUT = ROOT / "bench" / "out"
MODES = ("bundle", "eager", "compile_cold", "compile_warm", "package_cold", "package_warm", "import_torch")
FORBIDDEN = ("torch._inductor", "torch._dynamo", "sympy", "triton", "yaml", "pydantic", "typer", "transformers")
"""What a hit must not import."""

MODELS: dict[str, dict[str, Any]] = {
    "quickstart": {"manifest": "quickstart.yaml", "entry": "encoder", "vocab": 8192, "output": None},
    "minilm": {"manifest": "minilm.yaml", "entry": "encoder", "vocab": 30522, "output": "embedding"},
}
BATCH, SEQ = 8, 64


# ------------------------------------------------------------------------------------------------ in the child


def child(mode: str, model: str, paths: dict[str, str]) -> dict[str, Any]:
    start = float(os.environ["BENCH_START"])
    phases = {"interpreter": time.monotonic() - start}
    import torch

    phases["import_torch"] = time.monotonic() - start
    if mode == "import_torch":
        return {"total_s": phases["import_torch"], "phases": phases}
    inputs = {
        "input_ids": torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % 1000 + 1,
        "attention_mask": torch.ones(BATCH, SEQ, dtype=torch.int64),
    }
    call = _callable(mode, model, paths, inputs)
    phases["loaded"] = time.monotonic() - start
    with torch.no_grad():
        result = call(**inputs)
    name = MODELS[model]["output"]
    tensor = result[name] if name else result
    tensor.sum().item()
    total = time.monotonic() - start
    with torch.no_grad():
        call(**inputs)
    second = time.monotonic() - start - total
    answer = {
        "total_s": total,
        "after_import_s": total - phases["import_torch"],
        "second_call_s": second,
        "phases": phases,
    }
    answer["heavy"] = [module for module in FORBIDDEN if module in sys.modules]
    answer["rss_mb"] = _rss_mb()
    if mode == "eager":
        torch.save(tensor, paths["expected"])
    answer["error"] = float((tensor - torch.load(paths["expected"])).abs().max())
    return answer


def _callable(mode: str, model: str, paths: dict[str, str], inputs: dict[str, Any]) -> Any:
    import torch

    if mode == "bundle":
        import aotpack_runtime

        session = aotpack_runtime.load(paths["bundle"], mode="strict", source="never")
        return session[MODELS[model]["entry"]]
    if mode.startswith("package"):
        return torch._inductor.aoti_load_package(paths["package"])
    module = build_model(model)
    if mode.startswith("compile"):
        return torch.compile(module, dynamic=False)
    return module


def build_model(model: str) -> Any:
    import importlib

    import yaml

    sys.path.insert(0, str(MANIFESTS))
    entry = yaml.safe_load((MANIFESTS / MODELS[model]["manifest"]).read_text())["entries"][MODELS[model]["entry"]]
    module, _, name = entry["source"].partition(":")
    return getattr(importlib.import_module(module), name)(**entry.get("args", {}))


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def make_package(model: str, path: str) -> None:
    """torch's own package of the model, both dims open, weights inside: what aoti_load_package is given."""
    import torch

    module = build_model(model)
    ids = torch.ones(BATCH, SEQ, dtype=torch.int64)
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("seq", min=2, max=256)}
    with torch.no_grad():
        program = torch.export.export(
            module, (), {"input_ids": ids, "attention_mask": ids.clone()},
            dynamic_shapes={"input_ids": dims, "attention_mask": dims},
        )  # fmt: skip
        torch._inductor.aoti_compile_and_package(program, package_path=path)


# ----------------------------------------------------------------------------------------------- in the parent


def run(mode: str, model: str, paths: dict[str, str], cache: Path) -> dict[str, Any]:
    """One sample: a fresh process whose compiler caches and temporary files are under `cache`."""
    (cache / "tmp").mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton"),
        "TMPDIR": str(cache / "tmp"), "AOTPACK_CACHE_DIR": str(cache / "aotpack"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--child", mode, "--model", model, "--paths", json.dumps(paths)]
    environment["BENCH_START"] = repr(time.monotonic())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{mode} failed:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if answer.get("error", 0.0) > 1e-3:
        raise SystemExit(f"{mode} answered wrong: largest difference from eager {answer['error']}")
    if mode == "bundle" and answer["heavy"]:
        raise SystemExit(f"a hit imported {answer['heavy']}")
    return answer


def measure(model: str, bundle: Path, modes: list[str], samples: int) -> dict[str, list[dict[str, Any]]]:
    """Samples by mode, the modes taking turns so that a slow minute of the machine hits all of them."""
    OUT.mkdir(parents=True, exist_ok=True)
    paths = {
        "bundle": str(bundle), "expected": str(OUT / f"{model}.expected.pt"), "package": str(OUT / f"{model}.pt2"),
    }  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory(prefix="bench", dir=OUT) as folder:
        caches = Path(folder)
        run("eager", model, paths, caches / "expected")
        if any(mode.startswith("package") for mode in modes) and not Path(paths["package"]).exists():
            subprocess.run(
                [sys.executable, __file__, "--package", "--model", model, "--paths", json.dumps(paths)], check=True
            )
        for mode in modes:
            if mode.endswith("_warm"):
                run(mode, model, paths, caches / mode)
        for sample in range(samples):
            for mode in modes:
                cache = caches / mode if mode.endswith("_warm") else caches / f"{mode}{sample}"
                found[mode].append(run(mode, model, paths, cache))
                if not mode.endswith("_warm"):
                    shutil.rmtree(cache, ignore_errors=True)
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians, and each mode as a multiple of the bundle."""
    medians = {mode: statistics.median(sample["total_s"] for sample in samples) for mode, samples in found.items()}
    base = medians.get("bundle")
    lines = [f"{'mode':14} {'first output':>13} {'after import':>13} {'min..max':>15} {'x bundle':>9} {'RSS MB':>7}"]
    for mode, samples in found.items():
        totals = [sample["total_s"] for sample in samples]
        after = [sample["after_import_s"] for sample in samples if "after_import_s" in sample]
        rss = [sample["rss_mb"] for sample in samples if "rss_mb" in sample]
        lines.append(
            f"{mode:14} {medians[mode]:11.2f} s {statistics.median(after) if after else 0:11.3f} s "
            f"{min(totals):7.2f}..{max(totals):<6.2f} {medians[mode] / base if base else 0:9.2f} "
            f"{statistics.median(rss) if rss else 0:7.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="quickstart")
    parser.add_argument("--bundle", type=Path, help="default: built from the model's manifest into bench/out")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child")
    parser.add_argument("--package", action="store_true")
    parser.add_argument("--paths", type=json.loads)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.model, options.paths)))
        return
    if options.package:
        make_package(options.model, options.paths["package"])
        return
    bundle = options.bundle or OUT / options.model
    if options.bundle is None:
        manifest = str(MANIFESTS / MODELS[options.model]["manifest"])
        subprocess.run(
            [sys.executable, "-m", "aotpack", "build", manifest, "-o", str(bundle)], check=True, stdout=sys.stderr
        )
    found = measure(options.model, bundle, options.modes.split(","), options.samples)
    print(table(found))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {"command": sys.argv, "python": platform.python_version(), "cpus": len(os.sched_getaffinity(0)),
                 "torch": _torch_version(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        options.json.write_text(json.dumps({"facts": facts, "model": options.model, "samples": found}, indent=1) + "\n")


def _torch_version() -> str:
    import importlib.metadata

    return importlib.metadata.version("torch")


if __name__ == "__main__":
    main()
