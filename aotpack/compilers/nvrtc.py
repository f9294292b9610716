"""CUDA C++ -> one cubin or PTX file of a source's kernels, compiled with NVRTC; no GPU and no driver is looked for.

NVRTC is the one of the wheel nvidia-cuda-nvrtc-cu12 where that is installed, whatever else a system has; without it the
one that cuda.bindings finds. `@cuda` among the include folders stands for the CUDA headers of that NVRTC's own major
version, which come in a wheel of their own: headers of another major compile, and then do not work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotpack.compilers.cubin import read_cubin, read_ptx, spills
from aotpack.compilers.dependencies import stamp
from aotpack.compilers.headers import header_files
from aotpack_runtime.errors import CompileError, MissingDependency, SourceError
from aotpack_runtime.store import Store

Json = Any

CUDA = "@cuda"
STANDARD = "--std=c++17"
_WHEEL = "nvidia-cuda-nvrtc-cu12"
_UNVERSIONED = "nvidia-cuda-nvrtc"  # from CUDA 13 on
_HEADERS: Mapping[int, str] = {12: "nvidia-cuda-runtime-cu12", 13: "nvidia-cuda-runtime"}
"""NVRTC's major version -> the distribution with the headers of that version."""

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


# ------------------------------------------------------------------------------------------------------ library


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvrtc:
    """The library that is loaded; `version` as it says itself, `supported` the architectures it compiles for."""

    api: Any
    version: tuple[int, int]
    distribution: str | None
    supported: tuple[int, ...]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


@functools.cache
def load_nvrtc() -> Nvrtc:
    """Load NVRTC into this process; MissingDependency when there is none."""
    try:
        api = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise MissingDependency("cuda-bindings", needed_for="nvrtc entries") from error
    distribution = _preload()
    try:
        (major, minor), supported = _call(api.nvrtcVersion()), _call(api.nvrtcGetSupportedArchs())
    except Exception as error:  # what cuda-pathfinder raises where there is no library is its own business
        raise MissingDependency(_WHEEL, needed_for="nvrtc entries") from error
    if distribution is None and _major(_UNVERSIONED) == major:
        distribution = _UNVERSIONED
    return Nvrtc(api=api, version=(major, minor), distribution=distribution, supported=tuple(supported))


def _preload() -> str | None:
    """Load the wheel's library first: cuda.bindings takes what is loaded, and would search the system otherwise.

    The name of the wheel, None when it is not installed.
    """
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    libraries = [path for path in files if path.name.startswith("libnvrtc") and ".alt." not in path.name]
    # Its headers in machine form are a second library, which it would otherwise look for by name.
    for path in sorted(libraries, key=lambda path: "builtins" not in path.name):
        ctypes.CDLL(str(path.locate()), ctypes.RTLD_GLOBAL)
    return _WHEEL if libraries else None


def _major(distribution: str) -> int | None:
    """The major version of an installed distribution, None when it is not installed."""
    try:
        return int(importlib.metadata.version(distribution).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def _call(answer: Any) -> Any:
    """The values of a call of cuda.bindings; RuntimeError when it did not succeed."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def header_folder(nvrtc: Nvrtc, source: str) -> tuple[Path, str]:
    """(the folder that `@cuda` stands for, the distribution it comes from)."""
    major = nvrtc.version[0]
    name = _HEADERS.get(major, f"nvidia-cuda-runtime-cu{major}")
    if _major(name) != major:
        raise MissingDependency(
            name, needed_for=f"{CUDA} of {source} with NVRTC {nvrtc.name}", install=f"'{name}=={major}.*'"
        )
    for path in importlib.metadata.files(name) or ():
        if path.name == "cuda_fp16.h":
            return Path(str(path.locate())).resolve().parent, name
    raise SourceError(source, f"{name} has no cuda_fp16.h for {CUDA}")


def known_architectures(nvrtc: Nvrtc) -> list[str]:
    """Every spelling that the library takes, `compute_` in the place of `sm_` for PTX: sm_90, sm_90a, sm_100f..."""
    return [
        f"sm_{number}{suffix}"
        for number in nvrtc.supported
        for suffix in ("", *(("a",) if number >= 90 else ()), *(("f",) if number >= 100 else ()))
    ]


# ------------------------------------------------------------------------------------------------------- source


def describe(job: Mapping[str, Json], store: Store) -> Json:
    """The source that `job` names, what a build of it depends on, and a digest of all that is compiled.

    SourceError names what is missing and where it was looked for. A header that is new in a folder is in the digest,
    but is not in `depends`: ask again rather than compare.
    """
    folder, source, nvrtc = Path(job["folder"]), job["source"], load_nvrtc()
    text = _text(source, folder)
    paths = [folder / source]
    parts = [("source", text), ("nvrtc", nvrtc.name)]
    distributions = [nvrtc.distribution] if nvrtc.distribution else []
    for name in job["include_dirs"]:
        if name == CUDA:
            distributions.append(header_folder(nvrtc, source)[1])
            continue
        for path in _headers(name, source, folder):
            paths.append(path)
            parts.append((f"file {path.relative_to(folder / name).as_posix()} of {name}", _sha256(path)))
    parts += [(f"header {name}", header) for name, header in sorted(job["headers"].items())]
    versions = {name: importlib.metadata.version(name) for name in sorted({*distributions, "cuda-bindings"})}
    digest = hashlib.sha256()
    for part in (*parts, *((name, version) for name, version in versions.items() if name != "cuda-bindings")):
        for piece in part:
            digest.update(len(piece.encode()).to_bytes(8, "little") + piece.encode())
    files = {_named(path, folder): stamp(path) for path in paths}
    return {
        "digest": digest.hexdigest(),
        "text": text,
        "depends": {"files": dict(sorted(files.items())), "distributions": versions},
    }


def _text(source: str, folder: Path) -> str:
    path = folder / source
    try:
        return path.read_text()
    except FileNotFoundError:
        raise SourceError(source, f"there is no such file; searched {path}") from None
    except (OSError, ValueError) as error:
        raise SourceError(source, f"cannot be read: {error}") from error


def _headers(name: str, source: str, folder: Path) -> list[Path]:
    """The files of an include folder."""
    path = folder / name
    if not path.is_dir():
        raise SourceError(source, f"its include folder {name!r} is not there; searched {path}")
    return header_files(path)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _named(path: Path, folder: Path) -> str:
    real, root = path.resolve(), folder.resolve()
    return real.relative_to(root).as_posix() if real.is_relative_to(root) else str(real)


# ------------------------------------------------------------------------------------------------------ compile


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Compile all instantiations of `job` in one program and put the file in `store`.

    CompileError has the first error with its file and line; the rest is its log.
    """
    nvrtc, folder = load_nvrtc(), Path(job["folder"])
    arch, is_ptx = _target(job, nvrtc)
    _check_options(job)
    include_dirs = []
    for name in job["include_dirs"]:
        if name == CUDA:
            include_dirs.append(str(header_folder(nvrtc, job["source"])[0]))
        else:
            _headers(name, job["source"], folder)
            include_dirs.append(name)
    options, text = _options(job, arch, include_dirs, is_ptx=is_ptx), _text(job["source"], folder)
    # From inside the folder, so that headers are named relative to it: in messages, and by assert() in the code.
    with contextlib.chdir(folder), _program(nvrtc, text, job) as program:
        status, log = _compiled(nvrtc, program, options)
        if status != 0:
            raise _error(job, log, include_dirs, status)
        symbols = {name: _call(nvrtc.api.nvrtcGetLoweredName(program, name.encode())) for name in job["expressions"]}
        data = _result(nvrtc, program, is_ptx=is_ptx)
    names = {name: symbol.decode() for name, symbol in symbols.items()}
    facts = _ptx_facts(data, names, arch, job) if is_ptx else _cubin_facts(data, names, log, arch, job)
    return {
        "file": store.put_bytes(data),
        "format": "ptx" if is_ptx else "cubin",
        "arch": arch,
        **facts,
        "nvrtc": nvrtc.name,
        "log": _warnings(log),
    }


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
    program = _call(
        nvrtc.api.nvrtcCreateProgram(
            text.encode(), job["source"].encode(), len(headers),
            [text.encode() for _, text in headers], [name.encode() for name, _ in headers],
        )
    )  # fmt: skip
    try:
        for name in job["expressions"]:
            _call(nvrtc.api.nvrtcAddNameExpression(program, name.encode()))
        yield program
    finally:
        nvrtc.api.nvrtcDestroyProgram(program)


def _compiled(nvrtc: Nvrtc, program: Any, options: Sequence[str]) -> tuple[int, str]:
    """(NVRTC's status, its log)."""
    (status,) = nvrtc.api.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytes(_call(nvrtc.api.nvrtcGetProgramLogSize(program)))
    _call(nvrtc.api.nvrtcGetProgramLog(program, log))
    return int(status), log.rstrip(b"\0").decode(errors="replace")


def _result(nvrtc: Nvrtc, program: Any, *, is_ptx: bool) -> bytes:
    size, get = ("nvrtcGetPTXSize", "nvrtcGetPTX") if is_ptx else ("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    data = bytes(_call(getattr(nvrtc.api, size)(program)))
    _call(getattr(nvrtc.api, get)(program, data))
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
    kernels = {}
    for expression, symbol in symbols.items():
        kernel = cubin.kernels.get(symbol)
        if kernel is None:
            raise _no_kernel(expression, symbol, job)
        kernels[expression] = {
            "symbol": symbol,
            "params": [{"offset": param.offset, "bytes": param.size_bytes} for param in kernel.params],
            "registers": kernel.registers,
            "spill_bytes": spilled.get(symbol, kernel.stack_bytes) + shared,
            "static_shared_bytes": kernel.static_shared_bytes,
            "max_threads": kernel.max_threads,
        }
    return {"ptx_version": None, "kernels": kernels}


def _ptx_facts(data: bytes, symbols: Mapping[str, str], arch: str, job: Mapping[str, Json]) -> dict[str, Json]:
    """Registers and memory are the driver's to choose when it compiles PTX, so nothing is said of them.

    Nor are offsets final: a parameter that is aligned to more than 16 bytes is moved for the architecture at hand.
    """
    ptx = read_ptx(data.decode())
    if ptx.target != arch.replace("compute_", "sm_"):
        raise CompileError(job["variant"], f"{job['source']}: built for {arch}, but its PTX is for {ptx.target}")
    kernels = {}
    for expression, symbol in symbols.items():
        kernel = ptx.kernels.get(symbol)
        if kernel is None:
            raise _no_kernel(expression, symbol, job)
        kernels[expression] = {
            "symbol": symbol,
            "params": [{"offset": param.offset, "bytes": param.size_bytes} for param in kernel.params],
            "registers": None,
            "spill_bytes": None,
            "static_shared_bytes": None,
            "max_threads": kernel.max_threads,
        }
    return {"ptx_version": ptx.version, "kernels": kernels}


def _no_kernel(expression: str, symbol: str, job: Mapping[str, Json]) -> CompileError:
    return CompileError(
        job["variant"],
        f"{job['source']}: {expression!r} ({symbol}) is no kernel of the program",
        hint="a kernel is a __global__ function",
    )


_CHATTER = re.compile(r"^ptxas(?:-blackwell)?\s+(?:info\s+:|\.\s)|^Remark: ")


def _warnings(log: str) -> str:
    """The log without what the assembler says of every function."""
    lines = [line.rstrip() for line in log.splitlines() if not _CHATTER.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


# ------------------------------------------------------------------------------------------------------- errors

_NO_HEADER = re.compile(r"^(\S+)\((\d+)\): .*(?:could not|cannot) open source file \"([^\"]+)\"")
_STANDARD_HEADERS = frozenset({
    "algorithm", "array", "atomic", "bit", "chrono", "climits", "cmath", "concepts", "cstddef", "cstdint", "cstdio",
    "cstdlib", "cstring", "functional", "iostream", "iterator", "limits", "map", "memory", "numeric", "optional",
    "span", "string", "tuple", "type_traits", "utility", "variant", "vector",
})  # fmt: skip
_CUDA_HEADERS = re.compile(
    r"(?:cuda|cooperative_groups|mma|vector_types|math_constants|curand|builtin_types)\w*\.h(?:pp)?"
)


def _error(job: Mapping[str, Json], log: str, include_dirs: Sequence[str], status: int) -> CompileError:
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
