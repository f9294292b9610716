"""May this host compile for a GPU that it does not have? Asked before anything is compiled; no torch is imported.

What is replaced in torch and Triton is private, so a pair of versions is used only where a record says that what it
made was run on a GPU and compared with a native build (`aotpack prove-cross`). Records are JSON files, one for each
torch, Triton and architecture, in `bench/results/cross` of a checkout and in `aotpack/proofs` of an installed package.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotpack.compilers.cross.headers import cuda_headers
from aotpack_runtime.errors import MissingDependency
from aotpack_runtime.format.gpu import parse_arch
from aotpack_runtime.machine import allowed_mismatches, this_machine

Json = Any
SCHEMA = "aotpack.cross-proof/v1"
ALLOW = "cross"
"""In AOTPACK_ALLOW: build with versions of which there is no record."""
LEAST = (8, 0)
"""Capability from which on operators were looked at: attention and bfloat16 differ below."""

OPTIONS: Mapping[str, Json] = {
    "compile_threads": 1,
    "force_disable_caches": True,
    "triton.autotune_at_compile_time": True,
    "triton.multi_kernel": 0,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "shape_padding": False,
    "benchmark_kernel": False,
    "benchmark_fusion": False,
}
"""Nothing that would run or time a kernel, no worker process that would lack what is replaced here, and nothing of a
pretended device in a cache."""

TIMED = ("max_autotune", "coordinate_descent_", "benchmark_", "shape_padding", "triton.multi_kernel")
"""Inductor's options, by how their names begin, that have it time something on the GPU."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What `aotpack prove-cross` saw with one pair of versions on one architecture; a record of some entries of its
    manifest did not pass."""

    torch: str
    triton: str
    arch: str
    gpu: str
    passed: bool

    def __str__(self) -> str:
        return f"torch {self.torch} with triton {self.triton} on {self.arch} ({self.gpu})"


def proofs() -> list[Proof]:
    """Every record that is shipped or checked out; a file that is none is passed over."""
    package = Path(__file__).parents[2]
    folders = (package / "proofs", package.parent / "bench" / "results" / "cross")
    return [proof for folder in folders for proof in proofs_in(folder)]


def proofs_in(folder: Path) -> Iterator[Proof]:
    for path in sorted(folder.glob("*.json")):
        record = _read(path)
        if record is not None:
            torch, triton, arch, gpu = (str(record[name]) for name in ("torch", "triton", "arch", "gpu"))
            yield Proof(torch, triton, arch, gpu, passed=record["passed"] is True and record["whole"] is True)


def _read(path: Path) -> Mapping[str, Json] | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    fits = isinstance(record, dict) and record.get("schema") == SCHEMA
    return record if fits and {"torch", "triton", "arch", "gpu", "passed", "whole"} <= record.keys() else None


def versions() -> tuple[str, str]:
    """(torch, triton) of this environment, without their local parts; "none" for what is not installed."""
    return _version("torch"), _version("triton")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


def refusal(arch: str, inductor: Mapping[str, Json]) -> str | None:
    """Why torch entries for `arch` with these options cannot be compiled here without a GPU, None when they can."""
    machine, (torch, triton) = this_machine(), versions()
    if machine.torch_cuda is None:
        return f"a cross build needs a CUDA build of torch; {torch} is a CPU build"
    if triton == "none":
        return "a cross build needs triton, which is not installed"
    if parse_arch(arch).capability < LEAST or parse_arch(arch).suffix:
        return f"cross builds are for plain architectures from sm_80 on, not for {arch}"
    timed = sorted(name for name, value in inductor.items() if value and name.startswith(TIMED))
    if timed:
        return f"inductor.{timed[0]} times kernels while it compiles, which takes a GPU"
    if inductor.get("aot_inductor.emit_multi_arch_kernel"):
        return (
            "inductor.aot_inductor.emit_multi_arch_kernel takes nvcc, and its PTX is compiled by each server's driver; "
            "a variant for each of the target's architectures takes neither"
        )
    try:
        cuda_headers()
    except MissingDependency as error:
        return f"a cross build needs CUDA headers: {error.message}"
    known = [proof for proof in proofs() if proof.passed]
    if not is_allowed() and (torch, triton) not in {(proof.torch, proof.triton) for proof in known}:
        have = "; ".join(sorted({f"torch {proof.torch} with triton {proof.triton}" for proof in known})) or "none yet"
        return f"torch {torch} with triton {triton} was not proven for cross builds (proven: {have})"
    return None


def is_allowed() -> bool:
    """Does AOTPACK_ALLOW name `cross`?"""
    return ALLOW in allowed_mismatches()


def proof_of(arch: str) -> str:
    """What is known of these versions on this architecture, in words for the bundle."""
    torch, triton = versions()
    ours = [proof for proof in proofs() if proof.passed and (proof.torch, proof.triton) == (torch, triton)]
    exact = [proof for proof in ours if parse_arch(proof.arch).capability == parse_arch(arch).capability]
    if exact:
        return f"proven with {exact[0]}"
    return f"proven on another architecture only: {ours[0]}" if ours else f"not proven: torch {torch}, triton {triton}"
