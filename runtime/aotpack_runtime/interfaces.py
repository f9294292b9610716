"""What arrays say of themselves: the array interface protocols of NumPy and CUDA, and DLPack. Nothing is copied."""

from __future__ import annotations

from operator import index
from typing import Any

from aotpack_runtime import dlpack
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, contiguous_strides
from aotpack_runtime.record import Record

_TYPES = {"f": "float", "i": "int", "u": "uint", "b": "bool", "c": "complex"}


class Seen(Record):
    """An array as numbers. `strides` count elements; `odd` says why no compiled code may see it, "" when it may.
    `read_only` is memory that must not be written, or that is a copy: what is written there its caller does not see."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    odd: str = ""
    read_only: bool = False


def of_interface(interface: Any) -> Seen:
    """`__array_interface__`, or the same of CUDA (versions 2 and 3); ValueErrors and TypeErrors of a broken one."""
    data, typestr, shape = interface["data"], str(interface["typestr"]), tuple(map(index, interface["shape"]))
    if not isinstance(data, tuple | list):  # the first byte of a buffer is no address
        raise ValueError(f"its data is of the type {type(data).__name__}, expected (address, read-only)")
    address = data[0]
    if address.__class__ is not int or not 0 <= address < 1 << 64:
        raise ValueError(f"its address is {str(address)[:40]!r}")
    size_bytes = int(typestr[2:])
    name = _TYPES.get(typestr[1], typestr[1])
    dtype = name if name == "bool" else f"{name}{8 * size_bytes}"
    given = interface.get("strides")
    odd = "is masked" if interface.get("mask") is not None else ""
    if typestr[0] == ">":
        odd = "is big-endian"
    if given is not None and any(step % size_bytes for step in given):
        odd = f"has steps of {list(given)} bytes, no multiples of its element"
    strides = contiguous_strides(shape) if given is None else tuple(index(step) // size_bytes for step in given)
    _require_numbers(address, shape, strides, size_bytes)
    return Seen(address, dtype, shape, strides, odd or nowhere(address, shape), bool(data[1]))


def of_capsule(capsule: object, device: str) -> Seen:
    """A DLPack capsule, which is not consumed; ValueError when it is not on the device that its array said."""
    tensor, flags = dlpack.look(capsule)
    found = dlpack.place_of(tensor.device.type, tensor.device.id)
    if found != device:
        raise ValueError(f"it said that it is on {device}, and its capsule is on {found}")
    if not 0 <= tensor.ndim <= dlpack.MAX_RANK or (tensor.ndim and not tensor.shape):
        raise ValueError(f"it has {tensor.ndim} dims{'' if tensor.shape else ' without sizes'}")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    row_major = not tensor.strides
    strides = contiguous_strides(shape) if row_major else tuple(tensor.strides[axis] for axis in range(tensor.ndim))
    dtype = tensor.dtype_name
    address = (tensor.data or 0) + tensor.byte_offset
    _require_numbers(address, shape, strides, ITEMSIZE_BYTES.get(dtype, 1))
    odd = f"has {tensor.dtype.lanes} lanes an element" if tensor.dtype.lanes != 1 else ""
    if dtype not in ITEMSIZE_BYTES:
        odd = f"has elements of {dtype}"
    read_only = bool(flags & (dlpack.READ_ONLY | dlpack.IS_COPIED))
    return Seen(address, dtype, shape, strides, odd or nowhere(address, shape), read_only)


def _require_numbers(address: int, shape: tuple[int, ...], strides: tuple[int, ...], size_bytes: int) -> None:
    """ValueError for what C has no numbers for: sizes and steps of 64 bits, bytes at addresses of 64 bits."""
    if min(shape, default=0) < 0 or len(strides) != len(shape):
        raise ValueError(f"its shape is {list(shape)} and it has {len(strides)} strides")
    if address >= 1 << 64:
        raise ValueError(f"it is at {address}")
    if max(map(abs, (*shape, *strides)), default=0) >= 1 << 63:
        raise ValueError(f"its shape {list(shape)} or its strides {list(strides)} are beyond 64 bits")
    if 0 not in shape:
        low, high = reach(shape, tuple(step * size_bytes for step in strides))
        if address + low < 0 or address + high + size_bytes > 1 << 64:
            raise ValueError(f"its elements reach beyond 64 bits of addresses: {list(shape)} by {list(strides)}")


def reach(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, int]:
    """(from the first element down to the lowest, up to the highest) of an array with elements, in the unit of
    `steps`."""
    low = high = 0
    for size, step in zip(shape, steps, strict=True):
        low, high = low + min(step * (size - 1), 0), high + max(step * (size - 1), 0)
    return low, high


def nowhere(address: int, shape: tuple[int, ...]) -> str:
    """Why an array at this address has no memory, "" when it has."""
    return "has elements at address 0" if not address and 0 not in shape else ""


def overlapping(spans: list[tuple[int, int, int]]) -> tuple[int, ...]:
    """Positions of the (start, end, position) that lie in another one."""
    found: set[int] = set()
    end, last = 0, -1
    for start, stop, position in sorted(spans):
        if start < end:
            found |= {last, position}
        if stop > end:
            end, last = stop, position
    return tuple(sorted(found))
