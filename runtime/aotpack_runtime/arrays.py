"""Arguments of kernels by duck typing: torch's tensors, CUDA arrays, DLPack, the numbers of Python and NumPy.

What comes out is what guards judge and what a launch packs. Nothing is copied, nothing is imported.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

from aotpack_runtime.format.tensor import ALIGNMENT_BYTES, ITEMSIZE_BYTES, Leaf, Other, TensorMeta, contiguous_strides
from aotpack_runtime.streams import check_stream

_CUDA_DEVICES = (2, 13)
"""kDLCUDA and kDLCUDAManaged of dlpack.h."""

_TYPES = {"f": "float", "i": "int", "u": "uint", "b": "bool", "c": "complex"}
_DLPACK_TYPES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool", 7: "float8_e3m4",
                 8: "float8_e4m3", 10: "float8_e4m3fn", 12: "float8_e5m2"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: as guards see it, the number that is packed for it, and the stream it says it is ready on.

    `constant` when an argument that compares equal to it means the same. `held` is what keeps the memory alive.
    """

    leaf: Leaf
    value: Any
    stream: int | None = None
    is_torch: bool = False
    constant: bool = True
    read_only: bool = False
    held: Any = None


def read_argument(value: Any, stream: int = 0) -> Argument:
    """TypeErrors and ValueErrors of a broken array are told as a reason, not raised. `stream` is where the call is
    going, for arrays that wait for their producer (DLPack)."""
    kind = type(value)
    if kind in (int, float, bool) or value is None:
        return Argument(value, value)
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            return _of_torch(value, torch)
        if (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
            return _of_interface(interface)
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and not hasattr(value, "__dlpack__"):
            return _of_numpy(value)
        if hasattr(value, "__dlpack__"):
            return _of_dlpack(value, stream)
        if hasattr(value, "__index__"):
            number = value.__index__()
            return Argument(number, number, constant=isinstance(value, int))
    except Exception as error:
        return Argument(Other(f"an array that cannot be read ({type(error).__name__}: {error})"), None, constant=False)
    return _other(value)


def _other(value: Any) -> Argument:
    kind = type(value)
    return Argument(Other(f"an instance of {kind.__module__}.{kind.__qualname__}"), None, constant=False)


def _of_numpy(value: Any) -> Argument:
    """A NumPy scalar as the Python number it is; complex numbers, texts and times are none."""
    match value.dtype.kind:
        case "i" | "u":
            number: Any = int(value)
        case "f":
            number = float(value)
        case "b":
            number = bool(value)
        case _:
            return _other(value)
    return Argument(number, number)


def _of_torch(tensor: Any, torch: Any) -> Argument:
    """What has no memory of its own (a fake, a wrapper) is at address 0, and is judged each time."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    dtype, device, odd, address = str(tensor.dtype).removeprefix("torch."), str(tensor.device), "", 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    try:
        address, shape, strides = tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
        if tensor.is_neg() or tensor.is_conj():
            odd = "has its conj or neg bit set, which a kernel does not see"
        elif not address and tensor.numel():
            odd = f"is a {type(tensor).__qualname__} without memory of its own"
    except Exception as error:
        odd = f"is a {type(tensor).__qualname__} without an address ({type(error).__name__})"
    if device.startswith("meta") or type(tensor).__name__ == "FakeTensor":
        odd = "has no data"
    meta = TensorMeta(dtype, device, shape, strides or (0,) * len(shape), address % ALIGNMENT_BYTES, odd)
    return Argument(meta, address, is_torch=True, constant=plain and bool(address) and not odd)


def _of_interface(interface: Any) -> Argument:
    """CUDA Array Interface, versions 2 and 3 (numba's documentation)."""
    address, typestr, shape = interface["data"][0], str(interface["typestr"]), tuple(interface["shape"])
    if address.__class__ is not int or not 0 <= address < 1 << 64:
        raise ValueError(f"its address is {str(address)[:40]!r}")
    stream = interface.get("stream")
    if stream is not None:
        check_stream(stream)
    size_bytes = int(typestr[2:])
    name = _TYPES.get(typestr[1], typestr[1])
    dtype = name if name == "bool" else f"{name}{8 * size_bytes}"
    given = interface.get("strides")
    odd = "is masked" if interface.get("mask") is not None else ""
    if typestr[0] == ">":
        odd = "is big-endian"
    if given is not None and any(step % size_bytes for step in given):
        odd = f"has steps of {list(given)} bytes, no multiples of its element"
    strides = contiguous_strides(shape) if given is None else tuple(step // size_bytes for step in given)
    # Which device it is on, the interface does not say: the driver does, when there are several.
    odd = odd or _nowhere(address, shape)
    meta = TensorMeta(dtype, "cuda", shape, strides, address % ALIGNMENT_BYTES, odd)
    return Argument(meta, address, stream, constant=bool(address), read_only=bool(interface["data"][1]))


def _nowhere(address: int, shape: tuple[int, ...]) -> str:
    return "has elements at address 0" if not address and 0 not in shape else ""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor, the head of what a capsule points to (dlpack.h, version 0.x)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _of_dlpack(array: Any, stream: int) -> Argument:
    """A capsule is only looked into, never consumed: it gives its tensor back when it is collected, so it is held."""
    kind, ordinal = (int(part) for part in array.__dlpack_device__())
    # 0 is not a stream for DLPack: 1 says the default one.
    capsule = array.__dlpack__(stream=stream or 1) if kind in _CUDA_DEVICES else array.__dlpack__()
    tensor = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    row_major = not tensor.strides
    strides = contiguous_strides(shape) if row_major else tuple(tensor.strides[axis] for axis in range(tensor.ndim))
    name = _DLPACK_TYPES.get(tensor.dtype.code, f"dlpack type {tensor.dtype.code}")
    dtype = name if name == "bool" or name.startswith("float8") else f"{name}{tensor.dtype.bits}"
    address = (tensor.data or 0) + tensor.byte_offset
    if ordinal < 0 or address >= 1 << 64:
        raise ValueError(f"it is at {address} on device {ordinal}")
    device = f"cuda:{ordinal}" if kind in _CUDA_DEVICES else "cpu"
    odd = f"has {tensor.dtype.lanes} lanes an element" if tensor.dtype.lanes != 1 else ""
    if dtype not in ITEMSIZE_BYTES:
        odd = f"has elements of {dtype}"
    odd = odd or _nowhere(address, shape)
    meta = TensorMeta(dtype, device, shape, strides, address % ALIGNMENT_BYTES, odd)
    return Argument(meta, address, constant=bool(address), held=capsule)
