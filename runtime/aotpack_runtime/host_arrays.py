"""Arguments of models by duck typing, for callers without torch: NumPy, array interfaces, DLPack, buffers.

What comes out is what guards judge (`TensorMeta`) and the memory that a compiled model is shown (`Array`). Nothing is
copied, nothing is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from aotpack_runtime.array import Array, address_of, byte_strides
from aotpack_runtime.dlpack import ask, place_of
from aotpack_runtime.drivers.probe import device_of_address
from aotpack_runtime.format.tensor import ALIGNMENT_BYTES, ITEMSIZE_BYTES, TensorMeta, contiguous_strides
from aotpack_runtime.imported import imported
from aotpack_runtime.interfaces import Seen, of_capsule, of_interface, overlapping, reach
from aotpack_runtime.record import Record
from aotpack_runtime.streams import check_stream, said_stream

_FORMATS = {
    "?": "bool", "B": "uint8", "b": "int8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32", "l": "int64",
    "L": "uint64", "q": "int64", "Q": "uint64", "e": "float16", "f": "float32", "d": "float64", "Zf": "complex64",
    "Zd": "complex128",
}  # fmt: skip
"""Formats of Python's buffers -> torch's dtypes (struct module; Z is NumPy's word for complex)."""


class Given(Record):
    """One array of a call: as guards see it, its memory (None where no compiled code may see it), and the CUDA stream
    on which it says that it is being made."""

    meta: TensorMeta
    array: Array | None
    stream: int | None = None


def read_array(value: Any) -> Given | None:
    """`value` as an array, None when it is none. TypeErrors and ValueErrors of a broken one become its oddity."""
    try:
        seen = _seen(value)
    except Exception as error:
        return Given(TensorMeta("", "cpu", (), (), odd=f"cannot be read ({type(error).__name__}: {error})"), None)
    if seen is None:
        return None
    facts, device, owner, stream = seen
    odd = facts.odd
    itemsize = ITEMSIZE_BYTES.get(facts.dtype, 0)
    strides = contiguous_strides(facts.shape) if 0 in facts.shape else facts.strides
    offset = 0 if odd or 0 in facts.shape else facts.address % ALIGNMENT_BYTES
    if not odd and not itemsize:
        odd = f"has elements of {facts.dtype}"
    elif not odd and offset % itemsize:
        odd = f"lies {offset} bytes past an address divisible by 16, which is not between its elements of {itemsize}"
    meta = TensorMeta(facts.dtype, device, facts.shape, strides, offset, odd, locked=facts.read_only)
    if odd or type(value) is Array:
        return Given(meta, None if odd else value)
    steps = byte_strides(facts.dtype, strides)
    array = Array.over(facts.address, facts.dtype, facts.shape, steps, owner, read_only=facts.read_only, device=device)
    return Given(meta, array, stream)


def _seen(value: Any) -> tuple[Seen, str, Any, int | None] | None:
    """(numbers, device, what keeps the memory alive, the stream that it names)."""
    if type(value) is Array:
        steps = tuple(step // ITEMSIZE_BYTES[value.dtype] for step in value.strides)
        return (
            Seen(value.address, value.dtype, value.shape, steps, read_only=value.read_only),
            value.device,
            value,
            None,
        )
    if isinstance(value, (type, in_numpy("generic"))):
        return None
    if isinstance(value, in_numpy("ndarray")):
        return _of_numpy(value), "cpu", value, None
    if (interface := getattr(value, "__array_interface__", None)) is not None:
        facts, owner = _of_host_interface(interface, value)
        return facts, "cpu", owner, None
    if (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
        facts, stream = of_interface(interface), interface.get("stream")
        if stream is not None:
            check_stream(stream)
        # Which device it is on, the interface does not say.
        return facts, f"cuda:{device_of_address(facts.address) or 0}", (value, interface), stream
    if hasattr(value, "__dlpack__"):
        kind, ordinal = value.__dlpack_device__()
        device = place_of(int(kind), int(ordinal))
        # It is ready on the stream that is said; 0 is not a stream for DLPack, 1 says the default one.
        capsule = ask(value, None if device == "cpu" else said_stream() or 1)
        return of_capsule(capsule, device), device, (capsule, value), None
    if type(value) in (memoryview, bytes, bytearray) or type(value).__module__ in ("array", "mmap"):
        view = memoryview(value)  # as long as it is there, a bytearray cannot be made larger elsewhere
        return _of_buffer(view), "cpu", (value, view), None
    return None


def shows_array(value: Any) -> bool:
    """Does it say that it is an array, without being asked for more?"""
    names = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")
    return not isinstance(value, (type, in_numpy("generic"))) and any(hasattr(value, name) for name in names)


def why_not_torch(given: Given, *, written: bool) -> str:
    """Why an array cannot be taken over to torch, "" when it can. torch knows neither read-only tensors nor steps
    backwards: such an array is copied, which does for all but those that are `written`."""
    array = given.array
    if array is None:
        return f"{given.meta.odd}, which neither compiled code nor torch reads; pass a plain array"
    backwards = min(array.strides, default=0) < 0
    if backwards and array.device != "cpu":
        return f"has steps backwards on {array.device}; pass a copy of it"
    if written and (backwards or array.read_only):
        what = "has steps backwards" if backwards else "is read-only, or a copy that DLPack gave"
        return f"{what}, and the model writes it; pass a copy of it"
    return ""


def in_numpy(name: str, module: str = "numpy") -> Any:
    """A class of NumPy's for `isinstance`, none where the caller has not imported it."""
    found = imported(module)
    return getattr(found, name) if found is not None else ()


def _of_host_interface(interface: Any, value: Any) -> tuple[Seen, Any]:
    """(numbers, what keeps the memory alive). The memory may be said by a buffer instead of an address, as Pillow's
    images do: `data`, or `value` itself where there is none."""
    data = interface.get("data")
    if isinstance(data, tuple | list):
        return of_interface(interface), (value, interface)
    view = memoryview(value if data is None else data).cast("B")
    address, offset = address_of(view)[0], int(interface.get("offset", 0))
    seen = of_interface({**interface, "data": (address + offset, view.readonly)})
    itemsize = ITEMSIZE_BYTES.get(seen.dtype, 0)
    if itemsize and 0 not in seen.shape:
        low, high = reach(seen.shape, byte_strides(seen.dtype, seen.strides))
        if offset + low < 0 or offset + high + itemsize > view.nbytes:
            raise ValueError(f"its elements reach beyond its buffer of {view.nbytes} bytes")
    return seen, (value, view)


def _of_numpy(array: Any) -> Seen:
    interface = array.__array_interface__
    name = array.dtype.name
    if not array.dtype.isnative:
        odd = "is not in this machine's byte order"
    elif isinstance(array, in_numpy("MaskedArray", "numpy.ma")):
        odd = "is masked"
    else:
        odd = ""
    itemsize = array.dtype.itemsize
    if not odd and array.size and any(step % itemsize for step in array.strides):
        odd = f"has steps of {list(array.strides)} bytes, no multiples of its element"
    steps = tuple(step // max(itemsize, 1) for step in array.strides)
    return Seen(interface["data"][0], name, array.shape, steps, odd, not array.flags.writeable)


def _of_buffer(view: memoryview) -> Seen:
    form = view.format.lstrip("@=<") if sys.byteorder == "little" else view.format.lstrip("@=")
    dtype = _FORMATS.get(form, f"the format {view.format!r}")
    if ITEMSIZE_BYTES.get(dtype, view.itemsize) != view.itemsize:  # "<l" is four bytes, "l" is eight
        dtype = f"the format {view.format!r} of {view.itemsize} bytes"
    address, _ = address_of(view)
    steps = view.strides or ()
    odd = "has suboffsets" if view.suboffsets else ""
    if any(step % view.itemsize for step in steps):
        odd = f"has steps of {list(steps)} bytes, no multiples of its element"
    shape = tuple(view.shape or ())
    return Seen(address, dtype, shape, tuple(step // view.itemsize for step in steps), odd, view.readonly)


def sharing(arrays: Sequence[Array | None]) -> tuple[int, ...]:
    """Positions of the arrays in whose memory, from first to last element, another one lies."""
    spans: list[tuple[int, int, int]] = []
    for position, array in enumerate(arrays):
        if array is None or not array.size:
            continue
        low, high = reach(array.shape, array.strides)
        spans.append((array.address + low, array.address + high + ITEMSIZE_BYTES[array.dtype], position))
    return overlapping(spans)
