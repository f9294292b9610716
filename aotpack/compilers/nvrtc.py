"""CUDA C++ -> one cubin or PTX file of a source's kernels, compiled with NVRTC; no GPU and no driver is looked for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aotpack.compilers.cubin import CubinKernel, PtxKernel, read_cubin, read_ptx, spills
from aotpack.compilers.nvrtc_library import CUDA, Nvrtc, call, header_folder, known_architectures, load_nvrtc
from aotpack.compilers.nvrtc_messages import error_of, warnings_in
from aotpack.compilers.nvrtc_source import headers_in, read_source
from aotpack_runtime.errors import CompileError
from aotpack_runtime.store import Store

Json = Any
Kernel = TypeVar("Kernel", CubinKernel, PtxKernel)

STANDARD = "--std=c++17"
_REFUSED: Mapping[str, str] = {
    "-I": "the folders of headers are `include_dirs` in the manifest",
    "--include-path": "the folders of headers are `include_dirs` in the manifest",
    "-include": "a header that is read first is named by the source's first line",
    "--pre-include": "a header that is read first is named by the source's first line",
    "-arch": "the architecture is the target's",
    "--gpu-architecture": "the architecture is the target's",
    "-G": "code for a debugger is not optimised, and holds paths of this machine",
    "--device-debug": "code for a debugger is not optimised, and holds paths of this machine",
    "-dlto": "what it gives has to be linked before a driver can load it",
    "--dlink-time-opt": "what it gives has to be linked before a driver can load it",
    "-rdc": "what it gives has to be linked before a driver can load it",
    "--relocatable-device-code": "what it gives has to be linked before a driver can load it",
    "-dc": "what it gives has to be linked before a driver can load it",
    "--device-c": "what it gives has to be linked before a driver can load it",
    "-pch": "precompiled headers are kept outside the bundle, and change what is built",
    "--pch": "precompiled headers are kept outside the bundle, and change what is built",
    "--create-pch": "precompiled headers are kept outside the bundle, and change what is built",
    "--use-pch": "precompiled headers are kept outside the bundle, and change what is built",
}
"""Options of NVRTC that are not for the manifest -> why."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One program: its cubin or PTX, the symbol of each name expression, and what the compiler printed."""

    data: bytes
    symbols: Mapping[str, str]
    log: str
    arch: str
    is_ptx: bool
    nvrtc: str


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Compile all instantiations of `job` in one program and put the file in `store`.

    CompileError has the first error with its file and line; the rest is its log.
    """
    made = compile_program(job)
    facts = (
        _ptx_facts(made.data, made.symbols, made.arch, job) if made.is_ptx
        else _cubin_facts(made.data, made.symbols, made.log, made.arch, job)
    )  # fmt: skip
    return {
        "file": store.put_bytes(made.data),
        "format": "ptx" if made.is_ptx else "cubin",
        "arch": made.arch,
        **facts,
        "nvrtc": made.nvrtc,
        "log": warnings_in(made.log),
    }


def compile_program(job: Mapping[str, Json]) -> Compiled:
    """Compile all instantiations of `job` in one program; CompileError as `compile` has it."""
    nvrtc, folder = load_nvrtc(), Path(job["folder"])
    arch, is_ptx = _target(job, nvrtc)
    _check_options(job)
    include_dirs = []
    for name in job["include_dirs"]:
        if name == CUDA:
            include_dirs.append(str(header_folder(nvrtc, job["source"])[0]))
        else:
            headers_in(name, job["source"], folder)
            include_dirs.append(name)
    options, text = _options(job, arch, include_dirs, is_ptx=is_ptx), read_source(job["source"], folder)
    # From inside the folder, so that headers are named relative to it: in messages, and by assert() in the code.
    with contextlib.chdir(folder), _program(nvrtc, text, job) as program:
        status, log = _compiled(nvrtc, program, options)
        if status != 0:
            raise error_of(job, log, include_dirs, status)
        symbols = {name: call(nvrtc.api.nvrtcGetLoweredName(program, name.encode())) for name in job["expressions"]}
        data = _result(nvrtc, program, is_ptx=is_ptx)
    names = {name: symbol.decode() for name, symbol in symbols.items()}
    return Compiled(data, names, log, arch, is_ptx, nvrtc.name)


def _target(job: Mapping[str, Json], nvrtc: Nvrtc) -> tuple[str, bool]:
    """(the architecture, whether it is PTX that is asked for). Never the library's own default, which is sm_52."""
    arch, ptx = job.get("arch"), job.get("ptx")
    if bool(arch) == bool(ptx):
        given = f"both arch {arch!r} and ptx {ptx!r}" if arch else "none"
        raise CompileError(
            job["variant"], f"{job['source']}: one architecture is needed, the job has {given}",
            hint="name it in the target: arch: [sm_90], or ptx: compute_80",
        )  # fmt: skip
    known = known_architectures(nvrtc)
    if ptx:
        known = [name.replace("sm_", "compute_") for name in known]
    asked = str(ptx or arch)
    if asked not in known:
        raise CompileError(
            job["variant"],
            f"{job['source']}: unknown architecture {asked!r}, known: {', '.join(known)} (NVRTC {nvrtc.name})",
        )
    return asked, bool(ptx)


def _check_options(job: Mapping[str, Json]) -> None:
    for option in job["options"]:
        name = re.split(r"[=\s]", option.strip(), maxsplit=1)[0]
        if name.startswith("-I"):
            name = "-I"
        if name in _REFUSED:
            raise CompileError(
                job["variant"], f"{job['source']}: the option {option!r} is not for the manifest: {_REFUSED[name]}"
            )


def _options(job: Mapping[str, Json], arch: str, include_dirs: Sequence[str], *, is_ptx: bool) -> list[str]:
    has_standard = any(re.match(r"--?std\b", option) for option in job["options"])
    return [
        f"--gpu-architecture={arch}",
        *([] if has_standard else [STANDARD]),
        *job["options"],
        # Headers come from the folders of the manifest, whose files are in the digest, and from nowhere else.
        "--no-source-include",
        *(f"--include-path={path}" for path in include_dirs),
        *([] if is_ptx else ["--ptxas-options=-v"]),
    ]


@contextlib.contextmanager
def _program(nvrtc: Nvrtc, text: str, job: Mapping[str, Json]) -> Iterator[Any]:
    headers = sorted(job["headers"].items())
    program = call(
        nvrtc.api.nvrtcCreateProgram(
            text.encode(), job["source"].encode(), len(headers),
            [text.encode() for _, text in headers], [name.encode() for name, _ in headers],
        )
    )  # fmt: skip
    try:
        for name in job["expressions"]:
            call(nvrtc.api.nvrtcAddNameExpression(program, name.encode()))
        yield program
    finally:
        nvrtc.api.nvrtcDestroyProgram(program)


def _compiled(nvrtc: Nvrtc, program: Any, options: Sequence[str]) -> tuple[int, str]:
    """(NVRTC's status, its log)."""
    (status,) = nvrtc.api.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytes(call(nvrtc.api.nvrtcGetProgramLogSize(program)))
    call(nvrtc.api.nvrtcGetProgramLog(program, log))
    return int(status), log.rstrip(b"\0").decode(errors="replace")


def _result(nvrtc: Nvrtc, program: Any, *, is_ptx: bool) -> bytes:
    size, get = ("nvrtcGetPTXSize", "nvrtcGetPTX") if is_ptx else ("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    data = bytes(call(getattr(nvrtc.api, size)(program)))
    call(getattr(nvrtc.api, get)(program, data))
    return data.rstrip(b"\0") if is_ptx else data


# -------------------------------------------------------------------------------------------------------- facts


def _cubin_facts(
    data: bytes, symbols: Mapping[str, str], log: str, arch: str, job: Mapping[str, Json]
) -> dict[str, Json]:  # fmt: skip
    cubin = read_cubin(data)
    if cubin.architecture != arch:
        raise CompileError(
            job["variant"], f"{job['source']}: built for {arch}, but its cubin is for {cubin.architecture}"
        )
    spilled = spills(log)
    # Functions that were not inlined spill for every kernel: which of them calls which is not said.
    shared = max((size for name, size in spilled.items() if name not in cubin.kernels), default=0)
    kernels = {
        expression: common
        | {
            "registers": kernel.registers,
            "spill_bytes": spilled.get(kernel.symbol, kernel.stack_bytes) + shared,
            "static_shared_bytes": kernel.static_shared_bytes,
        }
        for expression, kernel, common in _asked(cubin.kernels, symbols, job)
    }
    return {"ptx_version": None, "kernels": kernels}


def _ptx_facts(data: bytes, symbols: Mapping[str, str], arch: str, job: Mapping[str, Json]) -> dict[str, Json]:
    """Registers and memory are the driver's to choose when it compiles PTX, so nothing is said of them.

    Nor are offsets final: a parameter that is aligned to more than 16 bytes is moved for the architecture at hand.
    """
    ptx = read_ptx(data.decode())
    if ptx.target != arch.replace("compute_", "sm_"):
        raise CompileError(job["variant"], f"{job['source']}: built for {arch}, but its PTX is for {ptx.target}")
    unknown = dict.fromkeys(("registers", "spill_bytes", "static_shared_bytes"))
    kernels = {expression: common | unknown for expression, _, common in _asked(ptx.kernels, symbols, job)}
    return {"ptx_version": ptx.version, "kernels": kernels}


def _asked(
    kernels: Mapping[str, Kernel], symbols: Mapping[str, str], job: Mapping[str, Json]
) -> Iterator[tuple[str, Kernel, dict[str, Json]]]:
    """(name expression, its kernel, what is known of it in either format); CompileError for what is no kernel."""
    for expression, symbol in symbols.items():
        kernel = kernels.get(symbol)
        if kernel is None:
            raise CompileError(
                job["variant"],
                f"{job['source']}: {expression!r} ({symbol}) is no kernel of the program",
                hint="a kernel is a __global__ function",
            )
        params = [{"offset": param.offset, "bytes": param.size_bytes} for param in kernel.params]
        yield expression, kernel, {"symbol": symbol, "params": params, "max_threads": kernel.max_threads}
