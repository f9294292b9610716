"""An array for callers without an array library: memory with a dtype and a shape, seen by whoever asks for it.

It is what entries return to such callers, and how memory is given a dtype that its own library lacks:
`Array(buffer, "bfloat16", (8, 256))`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import index
from typing import Any

from aotpack_runtime import dlpack
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, contiguous_strides
from aotpack_runtime.streams import ready_on

_FORMATS: dict[str, Any] = {
    "bool": "?", "uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint16": "H", "uint32": "I",
    "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip
"""dtype -> the format of Python's own memoryview."""
_TYPESTRS = {"bool": "|b1", "uint8": "|u1", "int8": "|i1"} | {
    f"{name}{8 * size}": f"<{letter}{size}"
    for name, letter, sizes in (
        ("int", "i", (2, 4, 8)), ("uint", "u", (2, 4, 8)), ("float", "f", (2, 4, 8)), ("complex", "c", (8, 16)),
    )
    for size in sizes
}  # fmt: skip
"""dtype -> NumPy's name of it (array interface protocol); float8 and bfloat16 have none."""


class Array:
    """Memory as an array. `dtype` has torch's names ("float32", "bfloat16"), `strides` count bytes, `device` is "cpu"
    or "cuda:N".

    Others see it through DLPack, the array interface of NumPy or CUDA, or `array.data`; it keeps its memory alive. What
    reads elements (`data`, `tobytes`, `tolist`) is for host memory: `cpu()` brings an array there.
    """

    __slots__ = ("__weakref__", "address", "device", "dtype", "owner", "read_only", "shape", "strides")

    device: str
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Any
    read_only: bool

    def __init__(self, buffer: Any, dtype: str, shape: Sequence[int] | None = None) -> None:
        """See the contiguous memory of `buffer` (bytes, memoryview, mmap, a NumPy array, ...) as a row-major array;
        one-dimensional without `shape`. Nothing is copied. ValueError when it does not have that size."""
        if dtype not in ITEMSIZE_BYTES:
            raise ValueError(f"dtype is {str(dtype)[:40]!r}; expected one of {', '.join(ITEMSIZE_BYTES)}")
        seen = memoryview(buffer)
        if not seen.c_contiguous:
            raise ValueError("the buffer is not row-major; take a copy of it that is")
        nothing = memoryview(b"" if seen.readonly else bytearray())
        view = seen.cast("B") if seen.nbytes else nothing  # Python casts none with a size of 0
        sizes = (view.nbytes // ITEMSIZE_BYTES[dtype],) if shape is None else tuple(map(index, shape))
        wanted = ITEMSIZE_BYTES[dtype]
        for size in sizes:
            wanted *= size
        if wanted != view.nbytes or min(sizes, default=0) < 0:
            raise ValueError(f"{dtype}{list(sizes)} takes {wanted} bytes, the buffer has {view.nbytes}")
        self.address, self.owner = address_of(view)
        self.device, self.dtype, self.shape, self.read_only = "cpu", dtype, sizes, view.readonly
        self.strides = byte_strides(dtype, contiguous_strides(sizes))

    @classmethod
    def over(
        cls, address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], owner: Any,
        *, read_only: bool = False, device: str = "cpu",
    ) -> Array:  # fmt: skip
        """An array over memory that `owner` keeps alive; `strides` count bytes. Nothing is checked."""
        array = cls.__new__(cls)
        array.address, array.dtype, array.shape, array.strides = address, dtype, shape, strides
        array.owner, array.read_only, array.device = owner, read_only, device
        return array

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return ITEMSIZE_BYTES[self.dtype] * self.size

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def data(self) -> memoryview:
        """The elements as a memoryview, in their own shape where Python has their format, else as bytes; a copy when
        the array is not row-major."""
        if self.device != "cpu":
            raise ValueError(f"the array is on {self.device}; take cpu() of it")
        source = self if self.is_contiguous() else self.copy()
        if not source.size:
            return memoryview(b"")
        memory = (ctypes.c_char * source.nbytes).from_address(source.address)
        memory.owner = source  # type: ignore[attr-defined] # the view keeps `memory`, and that the array
        view = memoryview(memory).cast("B")
        view = view.toreadonly() if source.read_only else view
        form = _FORMATS.get(source.dtype)
        return view if form is None else view.cast(form, source.shape)

    def cpu(self) -> Array:
        """This array in host memory: itself, or a copy once the device has computed it."""
        return self if self.device == "cpu" else self.to_host(self)

    def to_host(self, array: Array) -> Array:
        """A copy in host memory of an array that lies in this one's memory."""
        found: Array = self.owner.to_host(array)
        return found

    def is_contiguous(self) -> bool:
        """Row-major without gaps?"""
        wanted = byte_strides(self.dtype, contiguous_strides(self.shape))
        return not self.size or all(
            size == 1 or a == b for size, a, b in zip(self.shape, self.strides, wanted, strict=True)
        )

    def tobytes(self) -> bytes:
        """A copy of the elements, row-major."""
        if not self.size:
            return b""
        if self.device != "cpu":
            return self.cpu().tobytes()
        if self.is_contiguous():
            return ctypes.string_at(self.address, self.nbytes)
        row_bytes = ITEMSIZE_BYTES[self.dtype]
        outer = list(zip(self.shape, self.strides, strict=True))
        while outer and outer[-1][1] == row_bytes:
            row_bytes *= outer.pop()[0]
        places = [self.address]
        for size, step in outer:
            places = [place + step * number for place in places for number in range(size)]
        return b"".join(ctypes.string_at(place, row_bytes) for place in places)

    def copy(self) -> Array:
        """The same elements in memory of their own, row-major."""
        return Array(bytearray(self.tobytes()), self.dtype, self.shape)

    def forwards(self) -> Array:
        """This array, or a row-major copy where it has steps backwards: torch knows none, and libtorch ends the process
        at one. ValueError for such an array on a GPU."""
        if all(step >= 0 for step in self.strides):
            return self
        if self.device != "cpu":
            raise ValueError(f"an array on {self.device} has steps backwards; take a copy of it")
        return self.copy()

    def twin(self) -> Array:
        """The same elements with the same strides (none of them below 0) in writable memory of their own."""
        if not self.size:
            return self.copy()
        span = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        memory = Array(bytearray(ctypes.string_at(self.address, span + ITEMSIZE_BYTES[self.dtype])), self.dtype)
        return Array.over(memory.address, self.dtype, self.shape, self.strides, memory)

    def conj(self) -> Array:
        """A complex array with its imaginary parts negated, in memory of its own."""
        form: Any = "f" if self.dtype == "complex64" else "d"
        numbers = memoryview(bytearray(self.tobytes())).cast(form)
        for place in range(1, len(numbers), 2):
            numbers[place] = -numbers[place]
        return Array(numbers, self.dtype, self.shape)

    def tolist(self) -> Any:
        """The elements as nested lists; ValueError for a dtype whose numbers Python does not have."""
        if self.dtype not in _FORMATS:
            raise ValueError(f"Python has no numbers of {self.dtype}; take tobytes()")
        flat = memoryview(self.tobytes()).cast(_FORMATS[self.dtype])
        return flat.cast("B").cast(_FORMATS[self.dtype], self.shape).tolist() if self.size else _nothing(self.shape)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface("cpu")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface("cuda")

    def _interface(self, kind: str) -> dict[str, Any]:
        if not self.device.startswith(kind) or self.dtype not in _TYPESTRS:
            raise AttributeError(f"an array of {self.dtype} on {self.device} has no interface of {kind}")
        return {
            "version": 3 if kind == "cpu" else 2, "typestr": _TYPESTRS[self.dtype], "shape": self.shape,
            "strides": self.strides, "data": (self.address, self.read_only),
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, _, index = self.device.partition(":")
        return dlpack.CPU_DEVICE if kind == "cpu" else (dlpack.CUDA_DEVICES[0], int(index or 0))

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A capsule as the array API standard has it: of DLPack 1.x where `max_version` takes it, else a legacy one; a
        copy in host memory where `dl_device` asks for it. The array may be read on `stream` (-1: when it is, its
        caller knows).

        BufferError for what cannot be said or done: another device, a copy on a GPU, and memory that must not be
        written in a legacy capsule.
        """
        here = self.__dlpack_device__()
        wanted = here if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if wanted not in (here, dlpack.CPU_DEVICE):
            raise BufferError(f"the array is on {self.device}, not on DLPack's device {wanted}")
        if copy is False and wanted != here:
            raise BufferError(f"the array is on {self.device}, and without a copy it is not in host memory")
        if copy and wanted != dlpack.CPU_DEVICE:
            raise BufferError(f"the array is on {self.device}, where no copy is made; cpu() is one")
        versioned = max_version is not None and tuple(max_version) >= (dlpack.VERSION[0], 0)
        source = self.cpu() if wanted != here else self.copy() if copy else self
        if source.read_only and not versioned:
            raise BufferError(
                "the array is read-only, which a legacy DLPack capsule does not say; ask for max_version=(1, 0), or "
                "give away a copy() of it"
            )
        if source.device == "cpu" and stream not in (None, -1):
            raise BufferError(f"the array is in host memory, where there is no stream {stream}")
        if source.device != "cpu" and stream != -1:
            ready_on(1 if stream is None else stream, source.device)
        itemsize = ITEMSIZE_BYTES[self.dtype]
        steps = tuple(step // itemsize for step in source.strides)
        flags = source.read_only * dlpack.READ_ONLY | (source is not self) * dlpack.IS_COPIED
        return dlpack.make(
            source.address, dlpack.family_of(self.dtype, itemsize), self.shape, steps, source,
            device=wanted, flags=flags if versioned else None,
        )  # fmt: skip

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<aotpack_runtime.Array {self.dtype}{list(self.shape)}>"


def byte_strides(dtype: str, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in bytes of strides in elements."""
    itemsize = ITEMSIZE_BYTES[dtype]
    return tuple(stride * itemsize for stride in strides)


class _Buffer(ctypes.Structure):
    """Py_buffer (Python's C API, stable since 3.11)."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_Buffer))(("PyBuffer_Release", ctypes.pythonapi))
_FULL_READ_ONLY = 0x11C


def address_of(view: memoryview) -> tuple[int, memoryview]:
    """(where the memory of `view` begins, what keeps it there: the view itself)."""
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), _FULL_READ_ONLY)
    address = buffer.buf or 0
    _release_buffer(ctypes.byref(buffer))
    return address, view


def _nothing(shape: tuple[int, ...]) -> list[Any]:
    return [] if len(shape) <= 1 or not shape[0] else [_nothing(shape[1:]) for _ in range(shape[0])]
