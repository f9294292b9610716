"""A Triton kernel -> a cubin or PTX for one variant, and what a launch without Triton has to know about it.

No GPU and no driver is looked for. What Triton would find out when it launches (a block of more threads than there
are, more shared memory than a block has) or never say is refused here, in one line.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aotpack.compilers.cubin import CubinKernel, read_cubin, read_ptx, spills
from aotpack.compilers.triton_rules import (
    DESCRIPTOR,
    SCALAR_BYTES,
    SHARED_BYTES,
    capability_of,
    exact_ptx,
    problems,
    read_kernel,
    typed_arguments,
)
from aotpack.compilers.triton_source import load_kernel, own_environment
from aotpack.compilers.user_errors import first_line
from aotpack_runtime.errors import CompileError
from aotpack_runtime.store import Store

Json = Any

TENSOR_MEMORY_COLUMNS = 512


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Compile `job` and put its cubin or PTX in `store`; the record says how to launch it.

    CompileError names the kernel, the field and what it may be, or says what Triton said.
    """
    folder = Path(job["folder"])
    debug = bool(job["options"].get("debug"))
    with own_environment(store, line_info=debug):
        function = load_kernel(job["source"], folder)
        kernel = read_kernel(function.src)
        found = problems(kernel, job)
        if found:
            raise CompileError(job["variant"], f"{kernel.name}: {found[0]}")
        compiled, log = _compiled(function, job)
        cubin, text = compiled.asm["cubin"], compiled.asm["ptx"]
        typed = typed_arguments(job)
        signature = {name: typed[name] for name in kernel.arguments if name in typed}
        record = _record(compiled.metadata, cubin, text, job, kernel.name, log, signature)
        return {"file": store.put_bytes(text.encode() if job.get("ptx") else cubin), **record}


def _compiled(function: Any, job: Mapping[str, Json]) -> tuple[Any, str]:
    """(Triton's compiled kernel, what the assembler printed)."""
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    names: list[str] = function.arg_names
    constants = {name: _constant(job["constants"][name]) for name in names if name in job["constants"]}
    for name in names:
        if name not in constants and name not in job["signature"]:
            constants[name] = function.signature.parameters[name].default
    source = compiler.ASTSource(
        fn=function,
        signature={name: job["signature"].get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in job["divisible"]},
    )
    # Pinned: Triton's default turns with its version (3.10), and a variable of whoever builds would change it.
    options = {"enable_fp_fusion": True, **job["options"], "ptx_options": ""}
    target = backends.GPUTarget("cuda", capability_of(job["arch"]), 32)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        raise _error(error, function, job) from error
    return compiled, printed.getvalue()


def _constant(value: Json) -> Json:
    return tuple(map(_constant, value)) if isinstance(value, list) else value


def _record(  # noqa: PLR0917 - each of them is another fact of the one kernel
    metadata: Any,
    cubin: bytes,
    text: str,
    job: Mapping[str, Json],
    name: str,
    log: str,
    signature: Mapping[str, str],
) -> dict[str, Json]:
    variant, is_ptx = job["variant"], bool(job.get("ptx"))
    _require_plain(metadata, variant, name, capability_of(job["arch"]) or 0)
    ptx, elf = read_ptx(text), read_cubin(cubin)
    if is_ptx and not ptx.target[-1].isdigit():
        raise CompileError(variant, f"{name}: {exact_ptx(capability_of(job['arch']) or 0)}")
    symbol = str(metadata.name)
    kernel = elf.kernels.get(symbol)
    if kernel is None:
        raise CompileError(variant, f"{name}: its cubin has no kernel {symbol!r}, only {', '.join(elf.kernels)}")
    descriptors = [dict(item) for item in getattr(metadata, "tensordesc_meta", None) or ()]
    params = _params(signature, kernel, descriptors, variant, name)
    threads, ctas = 32 * int(metadata.num_warps), int(getattr(metadata, "num_ctas", 1) or 1)
    facts = ((kernel.block, (threads, 1, 1), "block"), (kernel.cluster or (1, 1, 1), (ctas, 1, 1), "cluster"))
    for found, said, what in facts:
        if found is not None and found != said:
            raise CompileError(variant, f"{name}: its cubin is for a {what} of {found}, Triton says {said}")
    return {
        "format": "ptx" if is_ptx else "cubin",
        "symbol": symbol,
        "arch": ptx.target.replace("sm_", "compute_") if is_ptx else elf.architecture,
        "ptx_version": ptx.version if is_ptx else None,
        "params": params,
        "block": [threads, 1, 1],
        "shared_bytes": int(metadata.shared),
        "cluster": [ctas, 1, 1],
        "cooperative": bool(getattr(metadata, "launch_cooperative_grid", False)),
        "pdl": bool(getattr(metadata, "launch_pdl", False)),
        "registers": kernel.registers,
        "spill_bytes": max(spills(log).values(), default=kernel.stack_bytes),
        "static_shared_bytes": kernel.static_shared_bytes,
        "descriptors": descriptors,
        "log": "",
    }


def _require_plain(metadata: Any, variant: str, name: str, capability: int) -> None:
    """CompileError when the kernel asks for what a launch of parameters, grid and block does not give it."""
    for field in ("global_scratch_size", "profile_scratch_size"):
        size = int(getattr(metadata, field, 0) or 0)
        if size:
            raise CompileError(
                variant,
                f"{name}: needs {size} bytes of {field.removesuffix('_size').replace('_', ' ')} memory for each block, "
                f"which only Triton's own launcher gives ({field} {size})",
                hint="tensor descriptors made inside a kernel need it; pass them as tensordesc arguments"
                if field == "global_scratch_size" else "build without instrumentation",
            )  # fmt: skip
    limit = SHARED_BYTES[capability]
    if metadata.shared > limit:
        raise CompileError(
            variant,
            f"{name}: needs {metadata.shared} bytes of shared memory, a block on sm_{capability} has {limit}",
            hint="a smaller block or a lower num_stages needs less",
        )
    columns = int(getattr(metadata, "tmem_size", 0) or 0)
    if columns > TENSOR_MEMORY_COLUMNS:
        raise CompileError(
            variant, f"{name}: needs {columns} columns of tensor memory, there are {TENSOR_MEMORY_COLUMNS}"
        )


# --------------------------------------------------------------------------------------------------- parameters


def _params(
    signature: Mapping[str, str],
    kernel: CubinKernel,
    descriptors: Sequence[Mapping[str, Json]],
    variant: str,
    name: str,
) -> list[dict[str, Json]]:
    """The parameters of a launch in order, at the places that the cubin has them.

    Offsets are the cubin's: they are not those of a C struct where one is aligned to more than 16 bytes, because the
    start of the parameters is not. Trailing pointers that no argument stands for are Triton's scratch memory.
    """
    maps = iter(descriptors)
    wanted: list[tuple[str, Json, int]] = []
    for argument, word in signature.items():
        match = DESCRIPTOR.fullmatch(word)
        if match is None:
            wanted.append((argument, word, 8 if word.startswith("*") else SCALAR_BYTES[word]))
            continue
        axes = range(match[2].count(",") + 1)
        wanted.append((argument, {"descriptor": _tensor_map(next(maps, None), argument, variant, name)}, 128))
        wanted += [(argument, {"sizes": axis}, 4) for axis in axes]
        wanted += [(argument, {"strides": axis}, 8) for axis in axes]
    expected = [size for _, _, size in wanted]
    found = [param.size_bytes for param in kernel.params]
    hidden = found[len(expected) :]
    if found[: len(expected)] != expected or any(size != 8 for size in hidden) or len(hidden) > 2:
        raise CompileError(
            variant, f"{name}: its cubin takes parameters of {found} bytes, its signature says {expected} and scratch"
        )
    wanted += [("", "scratch", 8) for _ in hidden]
    return [
        {"name": argument, "type": word, "offset": param.offset, "bytes": param.size_bytes}
        for (argument, word, _), param in zip(wanted, kernel.params, strict=True)
    ]


def _tensor_map(meta: Mapping[str, Json] | None, argument: str, variant: str, name: str) -> dict[str, Json]:
    """What the driver needs to make the tensor map of a descriptor, in the numbers of its own enumerations."""
    if meta is None or meta.get("fp4_padded") or meta.get("is_im2col"):
        what = "no tensor map" if meta is None else "a tensor map of packed or gathered elements"
        raise CompileError(
            variant, f"{name}: Triton makes {what} of {argument!r}, which only its own launcher passes",
            hint="pass a pointer and strides instead",
        )  # fmt: skip
    numbers = importlib.import_module("triton.backends.nvidia.driver").TMA_DTYPE_DEVICE_TO_HOST
    return {"block": list(meta["block_size"]), "swizzle": meta["swizzle"], "element": numbers[meta["elem_type"]]}


# ------------------------------------------------------------------------------------------------------- errors


def _error(error: Exception, function: Any, job: Mapping[str, Json]) -> CompileError:
    """What Triton says in pages, in one line with the kernel's own line."""
    variant, name = job["variant"], function.__name__
    compilation_error = importlib.import_module("triton.compiler.errors").CompilationError
    text = str(error)
    if isinstance(error, compilation_error):
        inner: Any = error
        while isinstance(inner.__cause__, compilation_error):
            inner = inner.__cause__
        said = [line.strip() for line in str(inner).splitlines() if line.strip()]
        cause = inner.error_message or (str(inner.__cause__) if inner.__cause__ else said[-1])
        first = next(number for number, line in enumerate(function.raw_src) if line.lstrip().startswith("def "))
        line = function.starting_line_number + first + getattr(error.node, "lineno", 1) - 1
        file = Path(inspect.getfile(function.fn)).resolve()
        root = Path(job["folder"]).resolve()
        shown = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
        return CompileError(variant, f"{name}: {shown}:{line}: {cause.strip().splitlines()[0]}")
    if type(error).__name__ == "PTXASError":
        lines = [line.strip() for line in text.splitlines() if re.search(r"\b(error|fatal)\s+:", line)]
        if any("gpu-name" in line for line in lines):
            version = importlib.import_module("triton").__version__
            return CompileError(variant, f"{name}: the assembler of triton {version} does not know {job['arch']}")
        return CompileError(variant, f"{name}: {lines[0] if lines else first_line(error)}", log="\n".join(lines))
    return CompileError(variant, f"{name}: Triton: {type(error).__name__}: {first_line(error)}")
