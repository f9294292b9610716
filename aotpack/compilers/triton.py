"""A Triton kernel -> a cubin or PTX for one variant, and what a launch without Triton has to know about it.

No GPU and no driver is looked for. What Triton would find out when it launches (a block of more threads than there
are, more shared memory than a block has) or never say is refused here, in one line.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import io
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

from aotpack.compilers.cubin import CubinKernel, read_cubin, read_ptx, spills
from aotpack.compilers.dependencies import dependencies, recording
from aotpack_runtime.errors import CompileError, MissingDependency, SourceError
from aotpack_runtime.store import Store

Json = Any

SHARED_BYTES: Mapping[int, int] = {
    75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 110: 232448,
    120: 101376, 121: 101376,
}  # fmt: skip
"""Architectures that kernels are built for -> the most shared memory that one block can ask for there."""

MAX_ELEMENTS = 1048576
TENSOR_MEMORY_COLUMNS = 512
SCALAR_BYTES: Mapping[str, int] = {
    "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8,
    "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8,
}  # fmt: skip
POINTEE_BYTES: Mapping[str, int] = {
    **SCALAR_BYTES, "fp8e4nv": 1, "fp8e4b8": 1, "fp8e4b15": 1, "fp8e5": 1, "fp8e5b16": 1,
}  # fmt: skip
_POINTER = re.compile(r"\*k?(\w+)")
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]>")


# ---------------------------------------------------------------------------------------- checks, without Triton


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """What the text of a kernel says about its arguments; `sizes` are constants that become sizes of blocks."""

    name: str
    arguments: tuple[str, ...]
    constexprs: tuple[str, ...]
    optional: tuple[str, ...]
    sizes: tuple[str, ...]


def read_kernel(text: str) -> KernelText:
    """Read the source of one kernel, as `describe` gives it."""
    function = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    own = function.args
    args = [*own.posonlyargs, *own.args, *own.kwonlyargs]
    defaulted = [*([*own.posonlyargs, *own.args][len(own.posonlyargs) + len(own.args) - len(own.defaults) :])]
    defaulted += [arg for arg, default in zip(own.kwonlyargs, own.kw_defaults, strict=True) if default is not None]
    constexprs = tuple(arg.arg for arg in args if arg.annotation and "constexpr" in ast.unparse(arg.annotation))
    return KernelText(
        name=function.name,
        arguments=tuple(arg.arg for arg in args),
        constexprs=constexprs,
        optional=tuple(arg.arg for arg in defaulted),
        sizes=tuple(name for name in constexprs if name in _block_sizes(function)),
    )


def _block_sizes(function: ast.FunctionDef) -> set[str]:
    """Names that `tl.arange(0, NAME)`, `tl.zeros((NAME, ...), ...)` and `tl.full` are given as they are."""
    found: set[str] = set()
    written: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            written.add(node.id)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        match node.func.attr, node.args:
            case "arange", [ast.Constant(value=0), ast.Name(id=name)]:
                found.add(name)
            case (("zeros" | "full"), [ast.Tuple(elts=parts) | ast.List(elts=parts), *_]):
                found |= {part.id for part in parts if isinstance(part, ast.Name)}
    return found - written


def problems(kernel: KernelText, job: Mapping[str, Json]) -> list[str]:
    """What is wrong with a compile job, one line each: the field, what it is, and what it may be. Pure."""
    job = {**job, "signature": _typed(job)}
    return [
        *_argument_problems(kernel, job),
        *(line for name, word in job["signature"].items() for line in _word_problem(name, word)),
        *_constant_problems(kernel, job["constants"]),
        *_divisible_problems(job["signature"], job["divisible"]),
        *_target_problems(job),
    ]


def _typed(job: Mapping[str, Json]) -> dict[str, Json]:
    """The arguments that a launch passes; the others may stand among them as `constexpr`, with a value elsewhere."""
    return {name: word for name, word in job["signature"].items() if word != "constexpr"}


def _argument_problems(kernel: KernelText, job: Mapping[str, Json]) -> Iterator[str]:
    signature, constants = job["signature"], job["constants"]
    has = f"the kernel has: {', '.join(kernel.arguments)}"
    for field, names in (("signature", signature), ("constants", constants), ("divisible", job["divisible"])):
        yield from (f"{field}: unknown argument {name!r}; {has}" for name in names if name not in kernel.arguments)
    both = [name for name in kernel.arguments if name in signature and name in constants]
    yield from (f"{name!r} is both in signature and in constants; it is one or the other" for name in both)
    for name in kernel.arguments:
        if name in kernel.constexprs and name in signature:
            yield f"signature: {name!r} is a constexpr of the kernel; give its value in constants"
        if name not in signature and name not in constants and name not in kernel.optional:
            what = "constexpr" if name in kernel.constexprs else "argument"
            yield f"missing {what} {name!r}; {'constants give its value' if what == 'constexpr' else 'give its type'}"


def _word_problem(name: str, word: Json) -> Iterator[str]:
    known = f"a scalar ({', '.join(SCALAR_BYTES)}), a pointer (*fp16) or tensordesc<fp16[64,64]>"
    if not isinstance(word, str):
        yield f"signature: {name} is {word!r}; a type is {known}"
    elif match := _DESCRIPTOR.fullmatch(word):
        if match[1] not in POINTEE_BYTES:
            yield f"signature: {name} is {word!r}, of the unknown type {match[1]!r}; known: {', '.join(POINTEE_BYTES)}"
    elif match := _POINTER.fullmatch(word):
        if match[1] not in POINTEE_BYTES:
            yield f"signature: {name} is {word!r}, to the unknown type {match[1]!r}; known: {', '.join(POINTEE_BYTES)}"
    elif word not in SCALAR_BYTES:
        yield f"signature: {name} is {word!r}; a type is {known}"


def _constant_problems(kernel: KernelText, constants: Mapping[str, Json]) -> Iterator[str]:
    for name in kernel.sizes:
        value = constants.get(name, 1)
        if not _is_power_of_two(value) or value > MAX_ELEMENTS:
            yield f"constants: {name} is {value!r}; the size of a block is a power of two from 1 to {MAX_ELEMENTS}"
    for name, value in constants.items():
        if name not in kernel.constexprs and not isinstance(value, int | float | None):
            yield f"constants: {name} is {value!r}; an argument that is no constexpr is folded to a number or None"


def _divisible_problems(signature: Mapping[str, str], divisible: Sequence[str]) -> Iterator[str]:
    for name in divisible:
        word = str(signature.get(name, ""))
        if word and not (_POINTER.fullmatch(word) or re.fullmatch(r"[iu]\d+", word)):
            yield f"divisible: {name!r} is {word}; only pointers and integers are known to be divisible by 16"
        if not word:
            yield f"divisible: {name!r} is no argument of the signature, so there is nothing to be divisible by 16"


def _is_power_of_two(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value & (value - 1) == 0


_BOOLEAN = ("true or false", lambda value: isinstance(value, bool))
_OPTIONS: Mapping[str, tuple[str, Any]] = {
    "num_warps": ("1, 2, 4, 8, 16 or 32 (a block has at most 1024 threads)",
                  lambda value: _is_power_of_two(value) and value <= 32),
    "num_stages": ("a whole number from 1", lambda value: _is_whole(value) and value >= 1),
    "num_ctas": ("1, 2, 4, 8 or 16", lambda value: _is_power_of_two(value) and value <= 16),
    "maxnreg": ("a whole number from 16 to 255", lambda value: _is_whole(value) and 16 <= value <= 255),
    "ptx_version": ("the version without its dot, 80 for PTX 8.0", lambda value: _is_whole(value) and value >= 70),
    "default_dot_input_precision": ("tf32, tf32x3, ieee, bf16x3 or bf16x6",
                                    lambda value: value in ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")),
    "enable_fp_fusion": _BOOLEAN,
    "enable_reflect_ftz": _BOOLEAN,
    "launch_cooperative_grid": _BOOLEAN,
    "launch_pdl": _BOOLEAN,
    "sanitize_overflow": _BOOLEAN,
    "debug": _BOOLEAN,
}  # fmt: skip
"""Option -> what it takes, and whether a value is of that. Triton ignores names that it does not know."""


def _is_whole(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _target_problems(job: Mapping[str, Json]) -> Iterator[str]:
    options = job["options"]
    for name, value in options.items():
        if name not in _OPTIONS:
            yield f"unknown option {name!r}; known: {', '.join(_OPTIONS)}"
        elif value is not None and not _OPTIONS[name][1](value):
            yield f"{name} is {value!r}; it is {_OPTIONS[name][0]}"
    capability = _capability(job["arch"])
    if capability is None:
        yield f"unknown architecture {job['arch']!r}, known: {', '.join(f'sm_{number}' for number in SHARED_BYTES)}"
        return
    if capability < 90 and (options.get("num_ctas") or 1) != 1:
        yield f"num_ctas is {options['num_ctas']}; blocks form clusters from sm_90 on, so on {job['arch']} it is 1"
    if capability < 90 and options.get("launch_pdl"):
        yield f"launch_pdl is true; dependent launches exist from sm_90 on, so on {job['arch']} it is false"
    for name, word in job["signature"].items():
        if capability < 90 and isinstance(word, str) and word.startswith("tensordesc"):
            yield f"signature: {name} is {word}; tensor maps exist from sm_90 on, so on {job['arch']} pass a pointer"
    if job.get("ptx") and capability >= 90:
        yield f"{_exact_ptx(capability)}; build PTX for compute_80 or compute_89"


def _exact_ptx(capability: int) -> str:
    return f"Triton's PTX for sm_{capability} is sm_{capability}a, for that one architecture and no later one"


def _capability(arch: Json) -> int | None:
    """The number of an architecture that kernels are built for; Triton chooses the suffix itself, `a` from 90 on."""
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(a?)", arch) if isinstance(arch, str) else None
    if match is None or int(match[1]) not in SHARED_BYTES or (match[2] and int(match[1]) < 90):
        return None
    return int(match[1])


# ------------------------------------------------------------------------------------------------------- source


def describe(job: Mapping[str, Json], store: Store) -> Json:
    """What the kernel that `job` names is: its text and arguments, what it depends on, and a digest of all that its
    code is made from.

    SourceError says what is in its place.
    """
    folder = Path(job["folder"])
    with _own_environment(store), recording(native=False) as recorder:
        function = _load(job["source"], folder)
        depends = dependencies(recorder, folder)
        kernel = read_kernel(function.src)
        return {
            "digest": _digest(function),
            "text": function.src,
            "arguments": list(function.arg_names),
            "constexprs": [name for name in function.arg_names if name in kernel.constexprs],
            "depends": depends,
        }


def _load(source: str, folder: Path) -> Any:
    """The JITFunction that `source` names, looked up in `folder` first."""
    _import_triton()
    module_name, _, name = source.partition(":")
    if not name:
        raise SourceError(source, "names no kernel", hint="write it as module:kernel")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        problem = f"cannot be imported: {type(error).__name__}: {_first_line(error)}{_place(error, folder)}"
        raise SourceError(source, problem) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return _jit_function(found, source, name, module)


def _jit_function(found: Any, source: str, name: str, module: ModuleType) -> Any:
    jit = importlib.import_module("triton.runtime.jit")
    autotuner = importlib.import_module("triton.runtime.autotuner")
    if isinstance(found, autotuner.Autotuner | autotuner.Heuristics):
        decorator = "autotune" if isinstance(found, autotuner.Autotuner) else "heuristics"
        raise SourceError(
            source,
            f"is wrapped by @triton.{decorator}, which chooses when it is launched; a bundle holds what was built",
            hint="write its configs in the manifest, and name the kernel under the decorator",
        )
    if type(found).__name__ == "InterpretedFunction":
        raise SourceError(source, "was imported for Triton's interpreter", hint="unset TRITON_INTERPRET")
    if not isinstance(found, jit.JITFunction):
        kernels = [key for key, value in vars(module).items() if isinstance(value, jit.JITFunction)]
        what = f"there is no {name!r}" if found is None else f"{name!r} is a {type(found).__name__}"
        raise SourceError(source, f"{what}, not a @triton.jit function; the module has: {', '.join(kernels) or 'none'}")
    if found.is_gluon():
        raise SourceError(source, "is a Gluon kernel; only @triton.jit kernels can be built")
    return found


def _digest(function: Any) -> str:
    """Of the kernel's text, of every function it calls and of every value outside it that it names.

    Not Triton's `cache_key`: that moves with the line on which a kernel starts, and does not see a constant that is
    read through its module (`sizes.BLOCK`).
    """
    digest = hashlib.sha256()
    for line in sorted(set(_uses(function, set()))):
        digest.update(line.encode())
        digest.update(b"\0")
    digest.update(str(importlib.import_module("triton").__version__).encode())
    return digest.hexdigest()


def _uses(value: Any, seen: set[int]) -> Iterator[str]:
    """What `value` is, and what it makes use of, a line each. More than is used rather than less."""
    function = getattr(value, "fn", value)  # of a JITFunction or a constexpr_function
    if not isinstance(function, FunctionType):
        yield _text_of(value)
        return
    if id(function) in seen or function.__module__.partition(".")[0] == "triton":
        return
    seen.add(id(function))
    settings = {key: getattr(value, key, None) for key in ("noinline", "do_not_specialize", "debug")}
    source = getattr(value, "raw_src", None) or inspect.getsourcelines(function)[0]
    yield f"{function.__qualname__} {settings} {''.join(source)} {inspect.signature(function)}"
    names = set(_names(function.__code__))
    outside = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for name in sorted(names & outside.keys()):
        found = outside[name]
        if isinstance(found, ModuleType):
            if found.__name__.partition(".")[0] != "triton":
                for attribute in sorted(names & vars(found).keys()):
                    yield from _labelled(f"{name}.{attribute}", vars(found)[attribute], seen)
        else:
            yield from _labelled(name, found, seen)


def _labelled(name: str, value: Any, seen: set[int]) -> Iterator[str]:
    yield from (f"{name} = {line}" for line in _uses(value, seen))


def _names(code: Any) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def _text_of(value: Any) -> str:
    """A value as text that is the same in every process; a class as its source."""
    if isinstance(value, type):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return value.__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# ------------------------------------------------------------------------------------------------------ compile


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Compile `job` and put its cubin or PTX in `store`; the record says how to launch it.

    CompileError names the kernel, the field and what it may be, or says what Triton said.
    """
    folder = Path(job["folder"])
    debug = bool(job["options"].get("debug"))
    with _own_environment(store, line_info=debug):
        function = _load(job["source"], folder)
        kernel = read_kernel(function.src)
        found = problems(kernel, job)
        if found:
            raise CompileError(job["variant"], f"{kernel.name}: {found[0]}")
        compiled, log = _compiled(function, job)
        cubin, text = compiled.asm["cubin"], compiled.asm["ptx"]
        typed = _typed(job)
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
    target = backends.GPUTarget("cuda", _capability(job["arch"]), 32)
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
    _require_plain(metadata, variant, name, _capability(job["arch"]) or 0)
    ptx, elf = read_ptx(text), read_cubin(cubin)
    if is_ptx and not ptx.target[-1].isdigit():
        raise CompileError(variant, f"{name}: {_exact_ptx(_capability(job['arch']) or 0)}")
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
        match = _DESCRIPTOR.fullmatch(word)
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
        return CompileError(variant, f"{name}: {lines[0] if lines else _first_line(error)}", log="\n".join(lines))
    return CompileError(variant, f"{name}: Triton: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _place(error: BaseException, folder: Path) -> str:
    """Such as " at kernels/norm.py:12", for the last line of the user's files in the traceback."""
    root = str(folder.resolve()) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(root):
            return f" at {frame.filename.removeprefix(root)}:{frame.lineno}"
    return ""


# -------------------------------------------------------------------------------------------------- environment

_TOOLS = frozenset({"TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH"})
_LOOSE = frozenset({"PTXAS_OPTIONS", "DISABLE_PTXAS_OPT", "NVPTX_ENABLE_DUMP"})


@contextlib.contextmanager
def _own_environment(store: Store, *, line_info: bool = False) -> Iterator[None]:
    """A cache of this job's own, gone afterwards, and no variable by which a shell changes what Triton makes.

    Those that say where its tools are stay: on some systems the ones it carries do not run.
    """
    root = store.root / "build"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="triton-", dir=root) as folder:
        drop = {name for name in os.environ if name.startswith("TRITON_")} - _TOOLS | _LOOSE
        own = {
            "TRITON_CACHE_DIR": f"{folder}/cache",
            "TRITON_ALWAYS_COMPILE": "1",
            "TRITON_DUMP_PTXAS_LOG": "1",
            **({} if line_info else {"TRITON_DISABLE_LINE_INFO": "1"}),
        }
        kept = {name: value for name, value in os.environ.items() if name not in drop}
        with mock.patch.dict(os.environ, kept | own, clear=True):
            if "triton" in sys.modules:
                library = importlib.import_module("triton._C.libtriton")
                for name in library.get_cache_invalidating_env_vars().keys() - own.keys():
                    del os.environ[name]
            yield


def _import_triton() -> None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise MissingDependency("triton", needed_for="triton entries") from error
