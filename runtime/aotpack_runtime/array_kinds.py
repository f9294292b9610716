"""The kinds of arrays that callers have: how a result's memory becomes one of them.

NumPy's is made at once; those of libraries with an array namespace (CuPy, JAX, array-api-strict, ...) take ours by
DLPack; a caller with neither gets our own `Array`. Nothing is imported: the caller's library is there already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from aotpack_runtime.array import Array, byte_strides
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, contiguous_strides, same_layout
from aotpack_runtime.host_arrays import in_numpy, read_array
from aotpack_runtime.record import Record

Wrap = Callable[[int, Any], Any]
"""(address, what keeps the memory alive, a buffer where there are elements) -> an array."""


class Form(Record):
    """What a result is like: `strides` count bytes."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], device: str) -> Form:
        """The same of strides in elements."""
        return cls(dtype, shape, byte_strides(dtype, strides), device)

    def is_dense(self) -> bool:
        """Row-major without gaps?"""
        return same_layout(self.shape, self.strides, byte_strides(self.dtype, contiguous_strides(self.shape)))


class OwnKind:
    """Our own `Array`."""

    name = "Array"

    def wrapper(self, form: Form) -> Wrap:
        """What makes results of this form from memory."""
        over, dtype, shape, strides, device = Array.over, form.dtype, form.shape, form.strides, form.device
        return lambda address, owner: over(address, dtype, shape, strides, owner, device=device)

    def view(self, base: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        """An array over the memory of `base`; strides and offset count elements."""
        return _view(base, shape, strides, offset)


class NumpyKind(OwnKind):
    """NumPy's arrays; a dtype that NumPy has not comes from ml_dtypes if the caller imported it, else as `Array`."""

    name = "numpy"

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy

    def wrapper(self, form: Form) -> Wrap:
        known, make = numpy_dtype(self._numpy, form.dtype), self._numpy.ndarray
        shape, strides = form.shape, form.strides
        if known is None or form.device != "cpu":
            return super().wrapper(form)
        if 0 in shape:
            return lambda address, owner: make(shape, known)
        if form.is_dense():
            return lambda address, owner: make(shape, known, owner)
        return lambda address, owner: make(shape, known, owner, 0, strides)

    def view(self, base: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        if type(base) is Array:
            return _view(base, shape, strides, offset)
        itemsize = base.dtype.itemsize
        shown = self._numpy.lib.stride_tricks.as_strided(base, (), ())
        if offset or 0 in base.shape:
            if 0 in shape:
                return self._numpy.ndarray(shape, base.dtype)
            # An offset from the first element, which plain slices cannot say of every layout.
            shown = self._numpy.asarray(_Moved(base, offset * itemsize)).view(base.dtype)
        steps = tuple(step * itemsize for step in strides)
        return self._numpy.lib.stride_tricks.as_strided(shown, shape, steps)


class _Moved:
    """The element `offset_bytes` after the first one of a NumPy array, as an array without dims."""

    def __init__(self, base: Any, offset_bytes: int) -> None:
        address, read_only = base.__array_interface__["data"]
        self.base = base
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{base.dtype.itemsize}", "shape": (),
            "data": (address + offset_bytes, read_only),
        }  # fmt: skip


class NamespaceKind(OwnKind):
    """Arrays of a library that takes DLPack: `from_dlpack` of the array API standard."""

    def __init__(self, name: str, from_dlpack: Callable[[Any], Any]) -> None:
        self.name, self._from_dlpack = name, from_dlpack

    def wrapper(self, form: Form) -> Wrap:
        own, take = super().wrapper(form), self._from_dlpack
        return lambda address, owner: take(own(address, owner))

    def view(self, base: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return self._from_dlpack(_view(base, shape, strides, offset))


OWN = OwnKind()
_known: dict[type, OwnKind] = {}


def kind_of(values: Sequence[Any]) -> OwnKind:
    """The kind of the first array among `values` that has one, NumPy's where any is NumPy's; ours otherwise."""
    arrays = in_numpy("ndarray")
    if any(isinstance(value, arrays) for value in values):
        return _known.setdefault(arrays, NumpyKind(sys.modules["numpy"]))
    for value in values:
        if isinstance(value, Array | type):
            continue
        if type(value) in _known:
            return _known[type(value)]
        namespace = getattr(value, "__array_namespace__", None)
        take = getattr(
            namespace() if namespace else sys.modules.get(type(value).__module__.partition(".")[0]), "from_dlpack", None
        )
        if take is not None and hasattr(value, "__dlpack__"):
            return _known.setdefault(type(value), NamespaceKind(type(value).__module__, take))
    return OWN


def numpy_dtype(numpy: Any, dtype: str) -> Any:
    """NumPy's dtype for a name of torch's; None where nobody brought one."""
    found = getattr(sys.modules.get("ml_dtypes"), dtype, None)
    if found is not None:
        return numpy.dtype(found)
    try:
        return numpy.dtype(dtype)
    except TypeError:
        return None


def _view(base: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Array:
    found = read_array(base)
    assert found is not None
    array = found.array
    assert array is not None
    itemsize = ITEMSIZE_BYTES[array.dtype]
    steps = tuple(step * itemsize for step in strides)
    return Array.over(
        array.address + offset * itemsize,
        array.dtype,
        shape,
        steps,
        base,
        read_only=array.read_only,
        device=array.device,
    )
