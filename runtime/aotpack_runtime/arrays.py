"""Arguments of kernels by duck typing: torch's tensors, CUDA arrays, DLPack, the numbers of Python and NumPy.

What comes out is what guards judge and what a launch packs. Nothing is copied, nothing is imported.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

from aotpack_runtime.format.tensor import ALIGNMENT_BYTES, ITEMSIZE_BYTES, Leaf, Other, TensorMeta, contiguous_strides

_CUDA_DEVICES = (2, 13)
"""kDLCUDA and kDLCUDAManaged of dlpack.h."""

_PLAIN: tuple[type, ...] = (int, float, bool, type(None))
_TYPES = {"f": "float", "i": "int", "u": "uint", "b": "bool", "c": "complex"}
_DLPACK_TYPES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool", 7: "float8_e3m4",
                 8: "float8_e4m3", 10: "float8_e4m3fn", 12: "float8_e5m2"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: as guards see it, the number that is packed for it, and the stream it says it is ready on."""

    leaf: Leaf
    value: Any
    stream: int | None = None
    is_torch: bool = False


def read_argument(value: Any) -> Argument:
    """TypeErrors and ValueErrors of a broken array are told as a reason, not raised."""
    kind = type(value)
    if kind in _PLAIN:
        return Argument(value, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(value, torch)
    try:
        if (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
            return _of_interface(interface)
        if hasattr(value, "__dlpack__"):
            return _of_dlpack(value)
        if hasattr(value, "__index__"):
            number = value.__index__()
            return Argument(number, number)
        if hasattr(value, "__float__") and kind.__module__ == "numpy":
            number = bool(value) if kind.__name__ in ("bool", "bool_") else float(value)
            return Argument(number, number)
    except Exception as error:
        return Argument(Other(f"an array that cannot be read ({type(error).__name__}: {error})"), None)
    return Argument(Other(f"an instance of {kind.__module__}.{kind.__qualname__}"), None)


def _of_torch(tensor: Any, torch: Any) -> Argument:
    dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    odd, address = "", 0
    strides: tuple[int, ...] = ()
    try:
        address, strides = tensor.data_ptr(), tuple(tensor.stride())
        if tensor.is_neg() or tensor.is_conj():
            odd = "has its conj or neg bit set, which a kernel does not see"
    except Exception as error:
        odd = f"has no address: {type(error).__name__}"
    if device.startswith("meta") or type(tensor).__name__ == "FakeTensor":
        odd = "has no data"
    shape = tuple(tensor.shape)
    return Argument(
        TensorMeta(dtype, device, shape, strides or (0,) * len(shape), address % ALIGNMENT_BYTES, odd),
        address,
        is_torch=True,
    )


def _of_interface(interface: Any) -> Argument:
    """CUDA Array Interface, versions 2 and 3 (numba's documentation)."""
    address, typestr, shape = int(interface["data"][0]), str(interface["typestr"]), tuple(interface["shape"])
    size_bytes = int(typestr[2:])
    name = _TYPES.get(typestr[1], typestr[1])
    dtype = name if name == "bool" else f"{name}{8 * size_bytes}"
    given = interface.get("strides")
    strides = contiguous_strides(shape) if given is None else tuple(step // size_bytes for step in given)
    odd = "is masked" if interface.get("mask") is not None else ""
    if typestr[0] == ">":
        odd = "is big-endian"
    # Which device it is on, the interface does not say: the driver does, when there are several.
    meta = TensorMeta(dtype, "cuda", shape, strides, address % ALIGNMENT_BYTES, odd)
    return Argument(meta, address, interface.get("stream"))


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


def _of_dlpack(array: Any) -> Argument:
    """A capsule is only looked into, never consumed: it gives its tensor back when it is collected."""
    kind, ordinal = (int(part) for part in array.__dlpack_device__())
    capsule = array.__dlpack__(stream=-1) if kind in _CUDA_DEVICES else array.__dlpack__()  # -1: do not synchronize
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _Tensor.from_address(get(capsule, b"dltensor"))
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = (
        tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape)
    )
    name = _DLPACK_TYPES.get(tensor.dtype.code, f"dlpack type {tensor.dtype.code}")
    dtype = name if name == "bool" or name.startswith("float8") else f"{name}{tensor.dtype.bits}"
    address = (tensor.data or 0) + tensor.byte_offset
    device = f"cuda:{ordinal}" if kind in _CUDA_DEVICES else "cpu"
    odd = f"has {tensor.dtype.lanes} lanes an element" if tensor.dtype.lanes != 1 else ""
    if dtype not in ITEMSIZE_BYTES:
        odd = f"has elements of {dtype}"
    return Argument(TensorMeta(dtype, device, shape, strides, address % ALIGNMENT_BYTES, odd), address)
