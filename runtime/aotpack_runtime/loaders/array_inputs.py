"""Example inputs for a variant as arrays, for warm-up without torch: any values that the model takes will do."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from aotpack_runtime.array import Array, byte_strides
from aotpack_runtime.format.guard import Guards, TensorGuard, ValueGuard
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, channels_last_strides, contiguous_strides

Json = Any
_INTS = {1: "b", 2: "h", 4: "i", 8: "q"}


def make_leaves(
    guards: Guards, example: tuple[tuple[int, ...] | int | None, ...], fills: Mapping[str, Json]
) -> list[Any]:
    """Leaves of a call with the sizes of `example`: zeros, or the smallest number that the manifest draws."""
    leaves: list[Any] = []
    for guard, size in zip(guards.leaves, example, strict=True):
        if isinstance(guard, TensorGuard) and isinstance(size, tuple):
            leaves.append(_make(guard, size, fills.get(guard.path)))
        else:
            leaves.append(guard.value if isinstance(guard, ValueGuard) else size)
    return leaves


def _make(guard: TensorGuard, shape: tuple[int, ...], fill: Json) -> Array:
    itemsize = ITEMSIZE_BYTES[guard.dtype]
    count = itemsize
    for size in shape:
        count *= size
    data = bytearray(count)
    number = int(fill["randint"][0]) if isinstance(fill, dict) else int(fill == "ones")
    if number and (guard.dtype == "bool" or guard.dtype.startswith(("int", "uint"))):
        element = struct.pack(_INTS[itemsize], number) if number < 0 else number.to_bytes(itemsize, "little")
        data[:] = element * (count // itemsize)
    dense = contiguous_strides(shape)
    layout = guard.layout
    if layout == "channels_last":
        dense = channels_last_strides(shape)
    flat = Array(data, guard.dtype)
    return Array.over(flat.address, guard.dtype, shape, byte_strides(guard.dtype, dense), flat)
