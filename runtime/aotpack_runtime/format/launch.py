"""How a kernel is launched, as data: what goes where in its parameter block, and how large its grid is.

A compiler writes this down once, in our words, from what it knows and from the table in the cubin; the server needs
neither Triton nor NVRTC to launch from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotpack_runtime.format.expression import Expression, parse
from aotpack_runtime.format.guard import DescriptorGuard, IntGuard, LeafGuard, NumberGuard, PointerGuard, ValueGuard
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES
from aotpack_runtime.record import Record

Json = Any

CODE_BYTES = {
    "?": 1, "b": 1, "B": 1, "h": 2, "H": 2, "e": 2, "i": 4, "I": 4, "f": 4, "q": 8, "Q": 8, "d": 8,
}  # fmt: skip
"""`struct`'s letters for what a slot may hold -> its bytes. Q is also an address."""

INT_RANGES = {
    code: (-(1 << 8 * size - 1), (1 << 8 * size - 1) - 1) if code.islower() else (0, (1 << 8 * size) - 1)
    for code, size in CODE_BYTES.items() if code in "bBhHiIqQ"
}  # fmt: skip
"""Letter of an int -> what it holds."""

MAX_PARAMETER_BYTES = 32764
"""Largest parameter block of a kernel (CUDA 12.1 and newer on sm_70 and newer; 4096 before)."""

GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMIT = 1024
"""Blocks of a grid by dim, and threads of a block, of every GPU so far (CUDA C++ Programming Guide, technical
specifications per compute capability)."""

ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
"""CUtensorMapDataType -> bytes of one element (cuda.h)."""

MAX_LEAVES = 4096

DESCRIPTOR_BYTES = 128
"""Size of a CUtensorMap; the driver wants it at an address divisible by 64."""


class Slot(Record):
    """One parameter of a kernel: a scalar or address as `struct` packs it, from the leaf `leaf` of the call; with no
    leaf it is a hidden parameter that is given as 0 (Triton's scratch pointers, of kernels that use none)."""

    offset: int
    code: str
    leaf: int | None


class Descriptor(Record):
    """A tensor descriptor (CUtensorMap) of the leaf `leaf`, made by the driver for each address, shape and strides.

    `block` is the box that one copy moves, in elements, innermost last; `swizzle` and `element` are the values of
    CUtensorMapSwizzle and CUtensorMapDataType.
    """

    offset: int
    leaf: int
    block: tuple[int, ...]
    swizzle: int
    element: int


class Extent(Record):
    """A size or stride of a tensor, passed beside its address or descriptor: `axis` of `sizes` or `strides`."""

    offset: int
    code: str
    leaf: int
    what: str
    axis: int


Parameter = Slot | Descriptor | Extent


class Launch(Record, kw_only=True):
    """One kernel of a cubin or PTX file and how it is launched.

    `grid` (in blocks), `block` (in threads) and `shared` (dynamic shared memory, in bytes) are over the int arguments
    of the call; `bytes` is the size of the parameter block.
    """

    symbol: str
    parameters: tuple[Parameter, ...]
    bytes: int
    grid: tuple[Expression, Expression, Expression]
    block: tuple[Expression, Expression, Expression]
    shared: Expression
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False
    overlap: bool = False
    """Programmatic dependent launch: the kernel waits itself for what the one before it wrote."""

    def expressions(self) -> tuple[Expression, ...]:
        return (*self.grid, *self.block, self.shared)


def dump_launch(launch: Launch) -> Json:
    record: dict[str, Json] = {
        "symbol": launch.symbol,
        "parameters": [_dump_parameter(parameter) for parameter in launch.parameters],
        "bytes": launch.bytes,
        "grid": [extent.text for extent in launch.grid],
        "block": [extent.text for extent in launch.block],
        "shared": launch.shared.text,
    }
    if launch.cluster != (1, 1, 1):
        record["cluster"] = list(launch.cluster)
    return record | {name: True for name in ("cooperative", "overlap") if getattr(launch, name)}


def parse_launch(value: Json) -> Launch:
    launch = Launch(
        symbol=_text(value["symbol"]),
        parameters=tuple(map(_parse_parameter, value["parameters"])),
        bytes=_number(value["bytes"], MAX_PARAMETER_BYTES),
        grid=_three(value["grid"]),
        block=_three(value["block"]),
        shared=parse(_text(value["shared"])),
        cluster=tuple(_number(item, 16) for item in value.get("cluster", (1, 1, 1))),  # type: ignore[arg-type]
        cooperative=_true(value.get("cooperative", False)),
        overlap=_true(value.get("overlap", False)),
    )
    launch.symbol.encode()  # UnicodeEncodeError, a ValueError, for what the driver could not be asked for
    if list(map(type, launch.cluster)).count(int) != 3 or 0 in launch.cluster:
        raise ValueError(f"a cluster of {list(launch.cluster)}")
    return launch


def check_launch(launch: Launch, guards: Sequence[LeafGuard]) -> None:
    """ValueError unless parameters lie one after another in the block, and each is packed as what its guard lets in."""
    end = 0
    passed: set[int] = set()
    for parameter in launch.parameters:
        size = DESCRIPTOR_BYTES if isinstance(parameter, Descriptor) else CODE_BYTES[parameter.code]
        if parameter.offset < end:
            raise ValueError(f"{launch.symbol}: two parameters lie at {parameter.offset}")
        end = parameter.offset + size
        if parameter.leaf is None:
            continue
        if not 0 <= parameter.leaf < len(guards):
            raise ValueError(f"{launch.symbol}: a parameter is argument {parameter.leaf} of {len(guards)}")
        if not _agrees(parameter, guards[parameter.leaf]):
            raise ValueError(f"{launch.symbol}: {parameter} is not how {guards[parameter.leaf].words()} is passed")
        if not isinstance(parameter, Extent):
            if parameter.leaf in passed:
                raise ValueError(f"{launch.symbol}: argument {parameter.leaf} is two parameters")
            passed.add(parameter.leaf)
    if end > launch.bytes:
        raise ValueError(f"{launch.symbol}: parameters end at {end}, the block at {launch.bytes}")
    names = {guard.path for guard in guards if isinstance(guard, IntGuard)}
    for expression in launch.expressions():
        for name in expression.names:
            if name not in names:
                raise ValueError(f"{launch.symbol}: {expression} names {name!r}, which is no int of the call")


def _agrees(parameter: Parameter, guard: LeafGuard) -> bool:
    match parameter, guard:
        case Slot(code="Q"), PointerGuard() | DescriptorGuard():
            return True
        case Slot(code=code), IntGuard(dim=dim) if code in INT_RANGES:
            low, high = INT_RANGES[code]
            return low <= dim.low and dim.high is not None and dim.high <= high
        case Slot(code=code), ValueGuard(value=value) if code in INT_RANGES:
            low, high = INT_RANGES[code]
            return type(value) is int and low <= value <= high
        case Slot(code=code), NumberGuard(kind="float"):
            return code in ("e", "f", "d")
        case Slot(code=code), NumberGuard(kind="bool"):
            return code in ("?", "i")
        case Extent(code=code, axis=axis), DescriptorGuard(rank=rank):
            return code in INT_RANGES and axis < rank
        case Descriptor(block=block, element=element), DescriptorGuard(rank=rank, dtype=dtype):
            boxed = len(block) == rank and all(1 <= one <= 256 for one in block)
            return boxed and ELEMENT_BYTES[element] == ITEMSIZE_BYTES[dtype]
    return False


def _dump_parameter(parameter: Parameter) -> Json:
    match parameter:
        case Slot(offset, code, leaf):
            return [offset, code, leaf]
        case Extent(offset, code, leaf, what, axis):
            return [offset, code, leaf, what, axis]
        case Descriptor():
            return {
                "descriptor": parameter.leaf,
                "offset": parameter.offset,
                "block": list(parameter.block),
                "swizzle": parameter.swizzle,
                "element": parameter.element,
            }


def _parse_parameter(value: Json) -> Parameter:
    if type(value) is list and len(value) == 3:  # by far the most
        offset, code, leaf = value
        if isinstance(code, str) and code in CODE_BYTES:
            return Slot(_number(offset, MAX_PARAMETER_BYTES), code, None if leaf is None else _number(leaf, MAX_LEAVES))
    match value:
        case [offset, str(code), leaf, "sizes" | "strides" as what, axis] if code in CODE_BYTES:
            place = _number(offset, MAX_PARAMETER_BYTES)
            return Extent(place, code, _number(leaf, MAX_LEAVES), what, _number(axis, 4))
        case {"descriptor": leaf, "offset": offset, "block": list(block)}:
            return Descriptor(
                _number(offset, MAX_PARAMETER_BYTES), _number(leaf, MAX_LEAVES),
                tuple(_number(item, 256) for item in block),
                _number(value["swizzle"], 3), _number(value["element"], 12),
            )  # fmt: skip
    raise ValueError(f"not a parameter: {str(value)[:80]}")


def _three(value: Json) -> tuple[Expression, Expression, Expression]:
    x, y, z = (parse(_text(item)) for item in value)
    return x, y, z


def _true(value: Json) -> bool:
    if type(value) is not bool:
        raise TypeError(f"expected true or false, got {str(value)[:80]!r}")
    return value


def _number(value: Json, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"expected a number up to {most}, got {str(value)[:80]!r}")
    return value


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {str(value)[:80]!r}")
    return value
