"""DLPack capsules of memory on a GPU that is not there, laid out by hand as dlpack.h says, which tell when they are given
back."""

from __future__ import annotations

import ctypes
from typing import Any

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor: DLTensor, and who manages it."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    )  # fmt: skip


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, with the same tensor at its end."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", _Managed),
    )  # fmt: skip


class Exporter:
    """An array that shows nothing but DLPack, of `version` and with `flags` where there is one. `made` and `freed` count
    its capsules; `asked` is what each was asked with."""

    def __init__(
        self, address: int, *, device: tuple[Any, Any] = (2, 0), type: tuple[int, int, int] = (2, 32, 1),  # noqa: A002 - dlpack's word
        shape: tuple[int, ...] = (1024,), strides: tuple[int, ...] | None = None, offset: int = 0, name: bytes = b"",
        version: tuple[int, int] | None = None, flags: int = 0, ndim: int | None = None, no_shape: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.name = device, name or (b"dltensor" if version is None else b"dltensor_versioned")
        self.made, self.freed, self.asked = 0, 0, []  # type: ignore[var-annotated]
        self._shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides)
        tensor = _Managed(
            address, int(device[0]), int(device[1]), len(shape) if ndim is None else ndim, *type,
            None if no_shape else ctypes.addressof(self._shape),
            None if self._strides is None else ctypes.addressof(self._strides), offset,
        )  # fmt: skip
        self._tensor: Any = tensor if version is None else _Versioned(*version, None, None, flags, tensor)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self.device

    def __dlpack__(self, **how: Any) -> object:
        self.asked.append(how)
        self.made += 1
        capsule = _new(ctypes.addressof(self._tensor), self.name, ctypes.cast(_destroy, ctypes.c_void_p))
        _exporters[id(capsule)] = self
        return capsule


_exporters: dict[int, Exporter] = {}
"""Capsule -> whose it is, as long as it lives: a collector of cycles may reach either first."""


def _free(capsule: int) -> None:
    _exporters.pop(capsule).freed += 1


_destroy = _Destructor(_free)
