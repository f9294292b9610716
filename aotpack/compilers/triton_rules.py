"""What can be said of a Triton compile job without Triton: of its text, its types, its options, its architecture."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any

SHARED_BYTES: Mapping[int, int] = {
    75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 110: 232448,
    120: 101376, 121: 101376,
}  # fmt: skip
"""Architectures that kernels are built for -> the most shared memory that one block can ask for there."""

MAX_ELEMENTS = 1048576
SCALAR_BYTES: Mapping[str, int] = {
    "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8,
    "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8,
}  # fmt: skip
POINTEE_BYTES: Mapping[str, int] = {
    **SCALAR_BYTES, "fp8e4nv": 1, "fp8e4b8": 1, "fp8e4b15": 1, "fp8e5": 1, "fp8e5b16": 1,
}  # fmt: skip
_POINTER = re.compile(r"\*k?(\w+)")
DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]>")


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
    job = {**job, "signature": typed_arguments(job)}
    return [
        *_argument_problems(kernel, job),
        *(line for name, word in job["signature"].items() for line in _word_problem(name, word)),
        *_constant_problems(kernel, job["constants"]),
        *_divisible_problems(job["signature"], job["divisible"]),
        *_target_problems(job),
    ]


def typed_arguments(job: Mapping[str, Json]) -> dict[str, Json]:
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
    elif match := DESCRIPTOR.fullmatch(word):
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
    capability = capability_of(job["arch"])
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
        yield f"{exact_ptx(capability)}; build PTX for compute_80 or compute_89"


def exact_ptx(capability: int) -> str:
    return f"Triton's PTX for sm_{capability} is sm_{capability}a, for that one architecture and no later one"


def capability_of(arch: Json) -> int | None:
    """The number of an architecture that kernels are built for; Triton chooses the suffix itself, `a` from 90 on."""
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(a?)", arch) if isinstance(arch, str) else None
    if match is None or int(match[1]) not in SHARED_BYTES or (match[2] and int(match[1]) < 90):
        return None
    return int(match[1])
