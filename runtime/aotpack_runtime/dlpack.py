"""DLPack capsules (dlpack.h, version 0.x): looked into without being consumed, and made of memory of our own."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

CUDA_DEVICES = (2, 13)
"""kDLCUDA and kDLCUDAManaged."""
CPU_DEVICE = (1, 0)
_HOST_DEVICES = (CPU_DEVICE[0], 3, 11)
"""kDLCPU, and the host's memory that CUDA or ROCm has pinned."""

_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool", 7: "float8_e3m4", 8: "float8_e4m3",
          10: "float8_e4m3fn", 12: "float8_e5m2"}  # fmt: skip
_CODES = {name: code for code, name in _NAMES.items()}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    """DLTensor, the head of what a capsule points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    @property
    def dtype_name(self) -> str:
        """torch's name of the dtype; one that torch does not have where it is none of its own."""
        name = _NAMES.get(self.dtype.code, f"dlpack type {self.dtype.code}")
        return name if name == "bool" or name.startswith("float8") else f"{name}{self.dtype.bits}"


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# Of a capsule that is being collected: a py_object would bring it to life again.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def look(capsule: object) -> Tensor:
    """The tensor a capsule holds, which stays valid as long as the capsule does. Nothing is consumed."""
    return Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))


def place_of(kind: int, ordinal: int) -> str:
    """torch's name of a device: "cpu", "cuda:1". ValueError for memory that is neither the host's nor a CUDA GPU's."""
    if ordinal < 0:
        raise ValueError(f"it is on device {ordinal}")
    if kind in CUDA_DEVICES:
        return f"cuda:{ordinal}"
    if kind in _HOST_DEVICES:
        return "cpu"
    raise ValueError(f"it is on a device of DLPack's type {kind}, neither the host nor a GPU of CUDA")


def make(
    address: int, dtype: tuple[str, int], shape: tuple[int, ...], strides: tuple[int, ...], owner: Any,
    *, device: tuple[int, int] = CPU_DEVICE,
) -> object:  # fmt: skip
    """A capsule of memory at `address`, which keeps `owner` until whoever takes it has done with it.

    `dtype` is a family and its bits ("bfloat", 16), `strides` count elements. ValueError for a family that DLPack
    does not have.
    """
    family, bits = dtype
    if family not in _CODES:
        raise ValueError(f"DLPack has no {family}{bits}")
    sizes, steps = [(ctypes.c_int64 * max(len(part), 1))(*part) for part in (shape, strides)]
    managed = _Managed(
        Tensor(address, _Device(*device), len(shape), _Type(_CODES[family], bits, 1), sizes, steps, 0),
        None, ctypes.cast(_release, ctypes.c_void_p),
    )  # fmt: skip
    place = ctypes.addressof(managed)
    _exported[place] = (managed, sizes, steps, owner)
    return _new_capsule(place, b"dltensor", ctypes.cast(_collect, ctypes.c_void_p))


_exported: dict[int, tuple[Any, ...]] = {}
"""Tensors that others hold: by the address of their record, what must stay alive."""


def _give_back(place: int, known: dict[int, Any] = _exported) -> None:
    """The deleter of a record: whoever took the capsule has done with it. May come from any thread."""
    known.pop(place, None)


def _end_capsule(
    capsule: int, known: dict[int, Any] = _exported, api: tuple[Any, Any] = (_is_valid, _dying_pointer)
) -> None:
    """The end of a capsule: one that nobody took gives its memory back."""
    valid, pointer = api
    if valid(capsule, b"dltensor"):
        known.pop(pointer(capsule, b"dltensor"), None)


_release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_give_back)
_collect = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_end_capsule)


def family_of(dtype: str, itemsize_bytes: int) -> tuple[str, int]:
    """What `make` takes, of torch's name of a dtype."""
    bits: Mapping[str, int] = {"bool": 8}
    if dtype == "bool" or dtype.startswith("float8"):
        return dtype, bits.get(dtype, 8)
    return dtype.rstrip("0123456789"), 8 * itemsize_bytes
