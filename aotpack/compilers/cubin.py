"""What a cubin and a PTX text say about their kernels: the architecture they are for, parameters, registers, memory.

A cubin is an ELF file. What is read of it is not documented by NVIDIA; names and layouts are those that
`cuobjdump -elf` prints (12.9 and 13.4), and every build compares them with what its own compiler says.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

EM_CUDA = 190


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One kernel parameter, where a launch has to put it."""

    ordinal: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinKernel:
    """One kernel of a cubin. `block` is the block that it must be launched with, None when any of up to `max_threads`
    will do; `cluster` likewise.

    `stack_bytes` are local memory of one thread: what is spilled, and arrays that are indexed at run time.
    """

    symbol: str
    params: tuple[Param, ...]
    param_bytes: int
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    max_threads: int | None
    block: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """`architecture` as compilers spell it ("sm_90a"); `imports` are functions of the driver's (vprintf, malloc)."""

    architecture: str
    kernels: Mapping[str, CubinKernel]
    imports: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxParam:
    """One parameter of an entry; `type` without its dot, `size_bytes` of all of an array's elements."""

    name: str
    type: str
    offset: int
    size_bytes: int
    align_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxKernel:
    symbol: str
    params: tuple[PtxParam, ...]
    max_threads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ptx:
    """`target` is what it was written for ("sm_80"), `version` what a driver must be able to read ("8.8")."""

    version: str
    target: str
    kernels: Mapping[str, PtxKernel]


def read_cubin(data: bytes) -> Cubin:
    """Read a cubin; ValueError when `data` is not one, or says nothing about a kernel that it holds."""
    try:
        elf: Any = ELFFile(io.BytesIO(data))
        if elf.header.e_machine not in (EM_CUDA, "EM_CUDA"):
            raise ValueError(f"an ELF file for machine {elf.header.e_machine}, not for CUDA")
        sections = {section.name: section for section in elf.iter_sections()}
        symbols = _symbols(sections[".symtab"])
        totals = _totals(sections[".nv.info"].data())
        kernels = {
            symbol.name: _kernel(symbol, totals, sections)
            for symbol in symbols
            if symbol.is_function and symbol.is_entry and symbol.is_defined
        }
    except (ELFError, KeyError, struct.error) as error:
        raise ValueError(f"not a cubin that can be read: {type(error).__name__}: {error}") from error
    imports = sorted(symbol.name for symbol in symbols if symbol.is_function and not symbol.is_defined)
    return Cubin(architecture=_architecture(elf, sections), kernels=kernels, imports=tuple(imports))


def archs_inside(path: Path) -> set[str]:
    """The architectures of the cubins that a shared library carries as data."""
    return {read_cubin(cubin).architecture for cubin in cubins_inside(path)}


def cubins_inside(path: str | Path) -> list[bytes]:
    """The cubins that a shared library carries as data, in their order. The table of sections is an ELF file's end."""
    data = Path(path).read_bytes()
    found = []
    for match in re.finditer(rb"\x7fELF\x02\x01", data):
        start = match.start()
        if int.from_bytes(data[start + 18 : start + 20], "little") == EM_CUDA:
            (sections,) = struct.unpack_from("<Q", data, start + 40)
            size, count = struct.unpack_from("<HH", data, start + 58)
            found.append(data[start : start + sections + size * count])
    return found


# ------------------------------------------------------------------------------------------------ architecture

_ACCELERATED_OLD = 0x800
_ACCELERATED_NEW = 0x8
_COMPAT_ACCELERATED = 0x09


def _architecture(elf: Any, sections: Mapping[str, Any]) -> str:
    """The number and the suffix, which are in places of their own for every ABI version and every writer of the ELF.

    ABI 7 (CUDA 12, to sm_90)       number in bits 0..7 of e_flags, `a` in bit 11
    ABI 8 (CUDA 12, from sm_100)    number in bits 8..15 of e_flags, `a` in bit 3
    ABI 8 (CUDA 13)                 number in bits 8..15 of e_flags, `a` in .nv.compat

    Code of the `f` suffix is that of the plain number, bit for bit; only the assembler's command line, kept in a note,
    tells them apart.
    """
    flags = int(elf.header.e_flags)
    if elf.header.e_ident.EI_ABIVERSION < 8:
        return f"sm_{flags & 0xFF}{'a' if flags & _ACCELERATED_OLD else ''}"
    number = flags >> 8 & 0xFF
    compat = sections.get(".nv.compat")
    is_accelerated = compat is not None and any(
        code == _COMPAT_ACCELERATED and value[0] == 1 for code, value in _attributes(compat.data())
    )
    if flags & _ACCELERATED_NEW or is_accelerated:
        return f"sm_{number}a"
    note = sections.get(".note.nv.tkinfo")
    is_family = note is not None and re.search(rf"-arch[ =]sm_{number}f\b".encode(), note.data())
    return f"sm_{number}{'f' if is_family else ''}"


# ------------------------------------------------------------------------------------------------------ kernels

_PARAM_CBANK = 0x0A
_MAX_THREADS = 0x05
_REQNTID = 0x10
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_KPARAM_INFO = 0x17
_CBANK_PARAM_SIZE = 0x19
_REGCOUNT = 0x2F
_CTA_PER_CLUSTER = 0x3D
_KPARAM_INFO_V2 = 0x45
_ONE_WORD = (0x01, 0x02, 0x03)
_COUNTED = 0x04

_RESERVED_SHARED_BYTES = 1024
"""From sm_90 on, the driver's own part is counted in the size of a kernel's section of shared memory."""


@dataclass(frozen=True, slots=True)
class _Symbol:
    index: int
    name: str
    is_function: bool
    is_entry: bool
    is_defined: bool


def _symbols(table: Any) -> list[_Symbol]:
    # pyelftools takes st_other apart as other machines use it, and drops the bit that marks a kernel.
    raw, size = table.data(), table["sh_entsize"]
    return [
        _Symbol(
            index,
            symbol.name,
            symbol["st_info"]["type"] == "STT_FUNC",
            bool(raw[index * size + 5] & 0x10),
            symbol["st_shndx"] != "SHN_UNDEF",
        )
        for index, symbol in enumerate(table.iter_symbols())
    ]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(code, value) of each item of a section of attributes."""
    place = 0
    while place < len(data):
        form, code = data[place], data[place + 1]
        if form == _COUNTED:
            (size,) = struct.unpack_from("<H", data, place + 2)
            yield code, data[place + 4 : place + 4 + size]
            place += 4 + size
        elif form in _ONE_WORD:
            yield code, data[place + 2 : place + 4]
            place += 4
        else:
            raise ValueError(f"not a cubin that can be read: attribute {code:#x} has the unknown form {form}")


def _totals(data: bytes) -> dict[tuple[int, int], int]:
    """(attribute, symbol's index) -> value, of the attributes that are kept for all functions together."""
    kept = (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE)
    found = {}
    for code, value in _attributes(data):
        if code in kept:
            symbol, number = struct.unpack("<II", value)
            found[code, symbol] = number
    return found


def _kernel(symbol: _Symbol, totals: Mapping[tuple[int, int], int], sections: Mapping[str, Any]) -> CubinKernel:
    params: list[Param] = []
    triples: dict[int, tuple[int, int, int]] = {}
    param_bytes = 0
    for code, value in _attributes(sections[f".nv.info.{symbol.name}"].data()):
        if code == _KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            params.append(Param(ordinal=ordinal, offset=offset, size_bytes=packed >> 18))
        elif code == _KPARAM_INFO_V2:  # in place of the former where one parameter has more than fits in 14 bits
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            params.append(Param(ordinal=ordinal, offset=offset, size_bytes=packed & 0xFFFF))
        elif code == _CBANK_PARAM_SIZE:
            (param_bytes,) = struct.unpack("<H", value)
        elif code in (_MAX_THREADS, _REQNTID, _CTA_PER_CLUSTER):
            x, y, z = struct.unpack("<III", value)
            triples[code] = (x, y, z)
    limit = triples.get(_REQNTID, triples.get(_MAX_THREADS))
    shared = sections.get(f".nv.shared.{symbol.name}")
    reserved = _RESERVED_SHARED_BYTES if ".nv.shared.reserved.0" in sections else 0
    return CubinKernel(
        symbol=symbol.name,
        params=tuple(sorted(params, key=lambda param: param.ordinal)),
        param_bytes=param_bytes,
        registers=totals[_REGCOUNT, symbol.index],
        stack_bytes=max(totals.get((code, symbol.index), 0) for code in (_FRAME_SIZE, _MIN_STACK_SIZE)),
        static_shared_bytes=max(shared["sh_size"] - reserved, 0) if shared is not None else 0,
        max_threads=limit[0] * limit[1] * limit[2] if limit else None,
        block=triples.get(_REQNTID),
        cluster=triples.get(_CTA_PER_CLUSTER),
    )


# ---------------------------------------------------------------------------------------------- assembler's words

_FUNCTION = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def spills(log: str) -> dict[str, int]:
    """Function -> bytes that it stores to and loads from local memory for want of registers, from `ptxas -v`."""
    found: dict[str, int] = {}
    function = ""
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            function = match[1]
        elif match := _SPILLS.search(line):
            found[function] = int(match[1]) + int(match[2])
    return found


# ---------------------------------------------------------------------------------------------------------- PTX

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)")
_PTX_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?:\.ptr\b[^,]*?\s)?(?P<name>[\w$%]+)"
    r"\s*(?:\[(?P<count>\d+)\])?\s*$"
)
_MAX_THREADS_PTX = re.compile(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


def read_ptx(text: str) -> Ptx:
    """Read what a PTX text says about its entries; ValueError when it is not PTX."""
    version = re.search(r"^\s*\.version\s+([\d.]+)", text, re.MULTILINE)
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    if version is None or target is None:
        raise ValueError("not PTX: it has no .version and .target")
    bare = re.sub(r"//[^\n]*", "", text)
    kernels = {}
    for match in _ENTRY.finditer(bare):
        symbol, params, directives = match[1], match[2] or "", match[3]
        limit = _MAX_THREADS_PTX.search(directives)
        kernels[symbol] = PtxKernel(
            symbol=symbol,
            params=tuple(_ptx_params(params)),
            max_threads=int(limit[1]) * int(limit[2] or 1) * int(limit[3] or 1) if limit else None,
        )
    return Ptx(version=version[1], target=target[1], kernels=kernels)


def _ptx_params(text: str) -> Iterator[PtxParam]:
    place = 0
    for part in filter(None, map(str.strip, text.split(","))):
        match = _PTX_PARAM.match(part)
        if match is None:
            raise ValueError(f"not PTX that can be read: parameter {part!r}")
        # The width is the type's last number ("u64", "b8", "f16x2" is two of them); predicates are no parameters.
        width, _, lanes = match["type"].lstrip("busfp").partition("x")
        size = int(width) * int(lanes or 1) // 8
        align = int(match["align"] or size)
        size *= int(match["count"] or 1)
        place = -(-place // align) * align
        yield PtxParam(name=match["name"], type=match["type"], offset=place, size_bytes=size, align_bytes=align)
        place += size
