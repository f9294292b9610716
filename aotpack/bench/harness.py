"""Run the samples: each in a fresh process with private caches, the modes taking turns.

No cache of the user is read or written: Inductor's, Triton's, CUDA's, ours and the temporary folder of every process
lie in a folder that is made for this run and removed after it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aotpack.bench.cases import Case
from aotpack.bench.modes import Mode, modes_of, unmeasurable
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.index import Entry

Json = Any
CHILD = Path(__file__).with_name("child") / "__main__.py"
LIMIT_S = 1800
"""Of one process. Compiling a large model for four shapes takes minutes."""


@dataclass(slots=True)
class Runs:
    """Samples by mode; `unmeasured` says why a mode has none, `wrong` what its answer differs in."""

    samples: dict[str, list[Json]] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    reference: str = "eager"


class Harness:
    """One run over an entry."""

    def __init__(
        self,
        bundle: Path,
        entry: Entry,
        cases: Sequence[Case],
        *,
        device: str,
        folder: Path,
        dtype: str,
        steady: bool,
        report: Callable[[str], None],
        settings: Mapping[str, Json] = {},
    ) -> None:
        self._entry, self._cases, self._report, self._settings = entry, cases, report, settings
        self._modes = modes_of(entry)
        self._job = {
            **settings,
            "bundle": str(bundle.absolute()), "entry": entry.name, "folder": str(folder.absolute()), "dtype": dtype,
            "device": device,
            "cases": [case.record() for case in cases], "steady": steady,
        }  # fmt: skip

    def run(self, modes: Sequence[str], samples: int, after: Callable[[Runs], None] = lambda runs: None) -> Runs:
        """Measure `modes`; a mode whose process fails is not measured, and says why. `after` is called with what there
        is after each sample, whose answers are not compared yet."""
        runs = Runs()
        with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as name:
            root = Path(name)
            reference = self._reference(root, runs)
            ready = [mode for mode in map(self._modes.__getitem__, modes) if self._prepare(mode, root, runs)]
            for number in range(samples):
                for mode in ready:
                    if mode.name not in runs.unmeasured:
                        self._sample(mode, root, runs, number)
                        after(runs)
            self._check(root, runs, reference)
        return runs

    def _reference(self, root: Path, runs: Runs) -> Path:
        """Results to compare with: of eager, else of the bundle's own program; of a kernel, those of its reference in
        torch, on inputs that all modes are given."""
        results = root / "reference.pt"
        if self._entry.kernel is not None:
            runs.reference = str(self._entry.verify["against"])
            self._child("kernel-inputs", root / "caches", reference=str(results), **self._files(root))
            return results
        for mode in ("eager", "program"):
            try:
                self._child("sample", root / f"caches-{mode}", mode=mode, results=str(results), steady=False)
            except CompileError as error:
                runs.unmeasured[f"{mode} (as reference)"] = error.problem
                continue
            runs.reference = mode
            runs.unmeasured.pop("eager (as reference)", None) if mode == "eager" else None
            return results
        raise CompileError(self._entry.name, "there is neither eager nor a program to compare results with")

    def _prepare(self, mode: Mode, root: Path, runs: Runs) -> bool:
        """Run what fills the caches or makes the files of a mode, once."""
        reason = unmeasurable(mode, self._entry, self._settings)
        filled = root / f"filled-{mode.fill}"
        if reason is None and mode.fill and not filled.exists():
            self._report(f"{mode.name}: preparing")
            try:
                self._child(mode.fill, filled, mode=mode.filled_by or mode.name, **self._files(root))
            except CompileError as error:
                reason = error.problem
        if reason is not None:
            runs.unmeasured[mode.name] = reason
        return reason is None

    def _sample(self, mode: Mode, root: Path, runs: Runs, number: int) -> None:
        caches = root / "caches"
        shutil.rmtree(caches, ignore_errors=True)
        if mode.caches == "filled":
            shutil.copytree(root / f"filled-{mode.fill}", caches)
        results = root / f"{mode.name}.pt"
        try:
            sample = self._child(mode.do, caches, mode=mode.name, results=str(results), **self._files(root))
        except CompileError as error:
            runs.unmeasured[mode.name] = error.problem
            runs.samples.pop(mode.name, None)
            return
        runs.samples.setdefault(mode.name, []).append(sample)
        self._report(f"{mode.name}: {sample['first_output_s']:.2f} s to the first output ({number + 1})")

    def _check(self, root: Path, runs: Runs, reference: Path) -> None:
        """Compare the last results of each mode with the reference's; the bundle must have hit, and lightly."""
        files = {name: str(root / f"{name}.pt") for name in runs.samples if name != "import-torch"}
        if files:
            settings = self._entry.verify
            tolerance = {"rtol": settings.get("rtol"), "atol": settings.get("atol")}
            do = "check" if self._entry.kernel is None else "kernel-check"
            found = self._child(do, root / "caches", reference=str(reference), results=files, **tolerance)
            runs.wrong.update({name: problem for name, problem in found.items() if problem})
        hot = sum(case.kind == "hot" for case in self._cases)
        for name in ("bundle", "bundle-arrays", "bundle-torch"):
            for sample in runs.samples.get(name, ()):
                if sample["hits"] < 2 * hot:
                    runs.wrong[name] = f"hit {sample['hits']} times in {2 * hot} calls of hot shapes or more"
                heavy = [call["heavy"] for call in sample["calls"] if call["kind"] == "hot" and call["heavy"]]
                if heavy:
                    runs.wrong[name] = f"a hit imported {', '.join(heavy[0])}"

    def _files(self, root: Path) -> dict[str, str]:
        return {
            "artifacts": str(root / "artifacts.bin"),
            "package": str(root / "package.pt2"),
            "aot": str(root / "aot"),
            "inputs": str(root / "inputs.pickle"),
        }

    def _child(self, do: str, caches: Path, **more: Json) -> Json:
        """What one process printed; CompileError with the end of what it said when it failed."""
        (caches / "tmp").mkdir(parents=True, exist_ok=True)
        mode = self._modes.get(more.get("mode", ""))
        environment = {
            **os.environ, **(mode.environment if mode else {}),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton"),
            "CUDA_CACHE_PATH": str(caches / "cuda"), "AOTPACK_CACHE_DIR": str(caches / "aotpack"),
            "TMPDIR": str(caches / "tmp"), "AOTPACK_MODE": "", "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "",
        }  # fmt: skip
        job = {**self._job, "do": do, **more}
        job["began"] = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, said = process.communicate(json.dumps(job) + "\n", timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise CompileError(self._entry.name, f"{do} took more than {LIMIT_S} s") from None
        if process.returncode:
            last = [line for line in said.splitlines() if line.strip()][-1:] or [f"exit status {process.returncode}"]
            raise CompileError(self._entry.name, last[0].strip()[:300], log=said[-4000:])
        return json.loads(out.splitlines()[-1])
