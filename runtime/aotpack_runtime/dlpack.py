"""DLPack capsules (dlpack.h, 0.x and 1.x): asked for, looked into without being consumed, and made."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

VERSION = (1, 1)
"""The newest that is read and made; its minor versions add only what can be left unread."""
READ_ONLY, IS_COPIED = 1, 2
"""Flags of a tensor since 1.0: its memory must not be written; it is a copy, where writes are seen by nobody else."""
MAX_RANK = 64
"""Dims that torch and NumPy have at most. Beyond it a number is no rank, and as many sizes would be read."""

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
        whole = self.dtype.bits == 8 and (name == "bool" or name.startswith("float8"))
        return name if whole else f"{name}{self.dtype.bits}"


class _Managed(ctypes.Structure):
    """DLManagedTensor, of a legacy capsule."""

    _fields_ = (("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, since 1.0. Of another major version only its first three fields may be read."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor),
    )  # fmt: skip


_LEGACY_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
"""Names of capsules that nobody has taken yet."""

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


def ask(array: Any, stream: int | None = None) -> object:
    """A capsule of `array`, to be ready on `stream` (None of host memory). Arrays that know 1.x give one with flags,
    others are asked as before it; what they raise is theirs."""
    how = {} if stream is None else {"stream": stream}
    try:
        return array.__dlpack__(max_version=VERSION, **how)
    except TypeError:
        return array.__dlpack__(**how)


def look(capsule: object) -> tuple[Tensor, int]:
    """(the tensor a capsule holds, its flags), which stay valid as long as the capsule does. Nothing is consumed."""
    if not _is_valid(id(capsule), _VERSIONED_NAME):
        return Tensor.from_address(_capsule_pointer(capsule, _LEGACY_NAME)), 0
    managed = _Versioned.from_address(_capsule_pointer(capsule, _VERSIONED_NAME))
    if managed.major != VERSION[0]:
        raise ValueError(f"its capsule is of DLPack {managed.major}.{managed.minor}, expected 0.x or {VERSION[0]}.x")
    return managed.tensor, managed.flags


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
    *, device: tuple[int, int] = CPU_DEVICE, flags: int | None = None,
) -> object:  # fmt: skip
    """A capsule of memory at `address`, which keeps `owner` until whoever takes it has done with it.

    `dtype` is a family and its bits ("bfloat", 16), `strides` count elements; with `flags` it is one of 1.x, else a
    legacy one. ValueError for a family that DLPack does not have.
    """
    family, bits = dtype
    if family not in _CODES:
        raise ValueError(f"DLPack has no {family}{bits}")
    sizes, steps = [(ctypes.c_int64 * max(len(part), 1))(*part) for part in (shape, strides)]
    tensor = Tensor(address, _Device(*device), len(shape), _Type(_CODES[family], bits, 1), sizes, steps, 0)
    release = ctypes.cast(_release, ctypes.c_void_p)
    managed = _Managed(tensor, None, release) if flags is None else _Versioned(*VERSION, None, release, flags, tensor)
    place = ctypes.addressof(managed)
    _exported[place] = (managed, sizes, steps, owner)
    name = _LEGACY_NAME if flags is None else _VERSIONED_NAME
    return _new_capsule(place, name, ctypes.cast(_collect, ctypes.c_void_p))


_exported: dict[int, tuple[Any, ...]] = {}
"""Tensors that others hold: by the address of their record, what must stay alive."""


def _give_back(place: int, known: dict[int, Any] = _exported) -> None:
    """The deleter of a record: whoever took the capsule has done with it. May come from any thread."""
    known.pop(place, None)


def _end_capsule(
    capsule: int,
    known: dict[int, Any] = _exported,
    api: tuple[Any, Any] = (_is_valid, _dying_pointer),
    names: tuple[bytes, ...] = (_LEGACY_NAME, _VERSIONED_NAME),
) -> None:
    """The end of a capsule: one that nobody took gives its memory back. Python may be ending: names are its own."""
    valid, pointer = api
    for name in names:
        if valid(capsule, name):
            known.pop(pointer(capsule, name), None)


_release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_give_back)
_collect = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_end_capsule)


def family_of(dtype: str, itemsize_bytes: int) -> tuple[str, int]:
    """What `make` takes, of torch's name of a dtype."""
    bits: Mapping[str, int] = {"bool": 8}
    if dtype == "bool" or dtype.startswith("float8"):
        return dtype, bits.get(dtype, 8)
    return dtype.rstrip("0123456789"), 8 * itemsize_bytes
