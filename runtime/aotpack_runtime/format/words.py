"""What a kernel's parameter is said to be: Triton's signature words and C's types, read into one form.

Triton: `*fp16:16` a pointer known divisible by 16, `i32`, `fp32`, `constexpr`, `1` (the argument is folded to it).
C: `const float*`, `int`, `__half*:16`. Widths are those of CUDA on 64-bit hosts (CUDA C++ Programming Guide, B.3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from aotpack_runtime.record import Record

Kind = Literal["pointer", "int", "float", "bool", "literal", "constexpr", "descriptor"]

DIVISORS = (1, 16)
"""What may stand after the colon: Triton's compiler uses the divisor 16 alone; 1 says nothing."""


class Word(Record):
    """`type` as its compiler spells it; `dtype` torch's name of what a pointer leads to; `code` how `struct` packs it;
    `low` and `high` what an int holds; `block` the box of a descriptor."""

    kind: Kind
    type: str = ""
    dtype: str = ""
    code: str = ""
    divisor: int = 1
    low: int = 0
    high: int = 0
    value: int = 0
    const: bool = False
    block: tuple[int, ...] = ()


_INTS = {
    "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
}  # fmt: skip
_FLOATS = {"fp16": "e", "fp32": "f", "fp64": "d"}
TRITON_DTYPES = {
    "i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16",
    "u32": "uint32", "u64": "uint64", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2",
}  # fmt: skip
"""Triton's word for an element -> torch's dtype."""

C_DTYPES = {
    "float": "float32", "double": "float64", "__half": "float16", "half": "float16", "__nv_bfloat16": "bfloat16",
    "nv_bfloat16": "bfloat16", "int": "int32", "unsigned int": "uint32", "unsigned": "uint32", "short": "int16",
    "unsigned short": "uint16", "long long": "int64", "unsigned long long": "uint64", "long": "int64",
    "unsigned long": "uint64", "signed char": "int8", "char": "int8", "unsigned char": "uint8", "bool": "bool",
    "int8_t": "int8", "uint8_t": "uint8", "int16_t": "int16", "uint16_t": "uint16", "int32_t": "int32",
    "uint32_t": "uint32", "int64_t": "int64", "uint64_t": "uint64", "size_t": "uint64", "void": "any",
    "__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""C's word for an element -> torch's dtype, by its size."""

_WORD_OF_DTYPE = {dtype: word for word, dtype in TRITON_DTYPES.items()}
_TRITON = re.compile(r"(?P<pointer>\*k?)?(?P<type>\w+)(:(?P<divisor>\d+))?")
_DESCRIPTOR = re.compile(r"tensordesc<(?P<type>\w+)\[(?P<block> *\d+ *(, *\d+ *)*)\]>")
_C = re.compile(
    r"(?P<const>const\s+)?(?P<type>\w+(?:\s+\w+)*?)\s*(?P<pointer>\*)?(?:\s*__restrict__)?(?::(?P<divisor>\d+))?"
)


def triton_word(text: str) -> Word:
    """ValueError with what is expected when `text` is no word of a Triton signature."""
    text = text.strip()
    if text == "constexpr":
        return Word("constexpr")
    if re.fullmatch(r"-?\d+", text):
        return Word("literal", value=int(text))
    if described := _DESCRIPTOR.fullmatch(text):
        dtype = _known(described["type"], TRITON_DTYPES)
        return Word("descriptor", text.replace(" ", ""), dtype, block=_block(described["block"]))
    match = _TRITON.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a type such as *fp16:16, i32, fp32, constexpr or a number, found {text!r}")
    divisor = _divisor(match["divisor"])
    dtype = _known(match["type"], TRITON_DTYPES)
    if match["pointer"]:
        return Word("pointer", match["pointer"] + match["type"], dtype, "Q", divisor, const="k" in match["pointer"])
    return _scalar(match["type"], match["type"], divisor)


def c_word(text: str) -> Word:
    """ValueError with what is expected when `text` is no C type of a parameter."""
    match = _C.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a C type such as const float* or int, found {text!r}")
    divisor = _divisor(match["divisor"])
    dtype = _known(" ".join(match["type"].split()), C_DTYPES)
    if match["pointer"]:
        return Word("pointer", f"{match['type']}*", dtype, "Q", divisor, const=bool(match["const"]))
    return _scalar(match["type"], _WORD_OF_DTYPE.get(dtype, dtype), divisor)


def _scalar(text: str, word: str, divisor: int) -> Word:
    if word == "i1":
        return Word("bool", text, code="?", divisor=_plain(divisor, text))
    if word in _FLOATS:
        return Word("float", text, code=_FLOATS[word], divisor=_plain(divisor, text))
    if word in _INTS:
        bits = int(word[1:])
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if word[0] == "i" else (0, (1 << bits) - 1)
        return Word("int", text, code=_INTS[word], divisor=divisor, low=low, high=high)
    raise ValueError(f"a scalar of type {text!r} is not supported; pass fp32 or fp64")


def _known(name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise ValueError(f"unknown type {name!r}; known: {', '.join(known)}")
    return known[name]


def _divisor(text: str | None) -> int:
    divisor = int(text or 1)
    if divisor not in DIVISORS:
        raise ValueError(
            f"divisible by {divisor} is not supported; a hint is :16 (divisible by 16) or :1 (nothing known)"
        )
    return divisor


def _plain(divisor: int, text: str) -> int:
    if divisor != 1:
        raise ValueError(f"a {text} cannot be said to be divisible by {divisor}")
    return divisor


def _block(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))
