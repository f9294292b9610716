"""What NVRTC says in a log -> one error with the file and line, and the next step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from aotpack.compilers.nvrtc_library import CUDA
from aotpack_runtime.errors import CompileError

Json = Any

_NO_HEADER = re.compile(r"^(\S+)\((\d+)\): .*(?:could not|cannot) open source file \"([^\"]+)\"")
_STANDARD_HEADERS = frozenset({
    "algorithm", "array", "atomic", "bit", "chrono", "climits", "cmath", "concepts", "cstddef", "cstdint", "cstdio",
    "cstdlib", "cstring", "functional", "iostream", "iterator", "limits", "map", "memory", "numeric", "optional",
    "span", "string", "tuple", "type_traits", "utility", "variant", "vector",
})  # fmt: skip
_CUDA_HEADERS = re.compile(
    r"(?:cuda|cooperative_groups|mma|vector_types|math_constants|curand|builtin_types)\w*\.h(?:pp)?"
)


def error_of(job: Mapping[str, Json], log: str, include_dirs: Sequence[str], status: int) -> CompileError:
    variant, log = job["variant"], _named_folders(log, job, include_dirs)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if match := _NO_HEADER.match(line):
            file, number, header = match.groups()
            searched = ", ".join(job["include_dirs"]) or "no folder (include_dirs is empty)"
            return CompileError(
                variant, f"{file}({number}): there is no header {header!r}; searched {searched}",
                hint=_header_hint(header), log=log,
            )  # fmt: skip
    for line in lines:
        if line.startswith("ptxas") and re.search(r"\b(error|fatal)\s*:", line):
            hint = ""
            if "not supported on .target" in line:
                hint = "instructions of one architecture need its suffix: sm_90a, sm_100a, or sm_100f for its family"
            return CompileError(variant, f"{job['source']}: {line}", hint=hint, log=log)
        if match := re.match(r"^__nv_name_map\(\d+\): error: (.*)", line):
            asked = re.findall(r"#pragma nv_mangled_name (.*)", log)
            name = f" {asked[0].strip()!r}" if asked else ""
            problem = match[1].partition(". Input name expression")[0]
            return CompileError(variant, f"{job['source']}: the name expression{name}: {problem}", log=log)
        if re.search(r"\berror( #[\w-]+)?:", line):
            return CompileError(variant, line.removeprefix("nvrtc: "), log=log)
    return CompileError(variant, f"{job['source']}: NVRTC: {lines[0] if lines else f'status {status}'}", log=log)


def _named_folders(log: str, job: Mapping[str, Json], include_dirs: Sequence[str]) -> str:
    """The log with `@cuda` for the folder that it stands for."""
    for name, path in zip(job["include_dirs"], include_dirs, strict=True):
        log = log.replace(path + os.sep, f"{name}/") if name == CUDA else log
    return log


def _header_hint(header: str) -> str:
    if _CUDA_HEADERS.fullmatch(header):
        return f'headers of CUDA are those of {CUDA}: include_dirs: ["{CUDA}"]'
    if header in _STANDARD_HEADERS:
        return "NVRTC has no C++ standard library; cuda/std has much of it, in a folder that include_dirs names"
    return "name the folder that holds it in include_dirs; the source's own folder is not searched"


_CHATTER = re.compile(r"^ptxas(?:-blackwell)?\s+(?:info\s+:|\.\s)|^Remark: ")


def warnings_in(log: str) -> str:
    """The log without what the assembler says of every function."""
    lines = [line.rstrip() for line in log.splitlines() if not _CHATTER.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
