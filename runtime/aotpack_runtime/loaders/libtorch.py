"""libtorch's C interface by ctypes, with torch never imported: its libraries found, opened once and declared here.

The interface (torch/csrc/inductor/aoti_torch/c/shim.h) is the one that AOTInductor's packages are compiled against and
meant to be stable; GATE says for which versions the calls below were read and tried.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

from aotpack_runtime import forks
from aotpack_runtime.array import Array
from aotpack_runtime.errors import ArtifactError, MissingDependency
from aotpack_runtime.format.target import version
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, contiguous_strides
from aotpack_runtime.machine import Machine, this_machine
from aotpack_runtime.shared_library import open_library

GATE = ((2, 11), (2, 15))
"""First torch minor version whose C interface is known, and the first whose is not."""

CPU_LIBRARY, CUDA_LIBRARY = "libtorch_cpu.so", "libtorch_cuda.so"
WHOLE_LIBRARY = "libtorch.so"
"""Empty but for what it needs."""

NAME = "libtorch"

_int64s = ctypes.POINTER(c_int64)

_DECLARED = {
    "aoti_torch__reinterpret_tensor": (c_int32, (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p)),
    "aoti_torch_abi_version": (c_uint64, ()),
    "aoti_torch_copy_": (c_int32, (c_void_p, c_void_p, c_int32)),
    "aoti_torch_create_tensor_from_blob": (
        c_int32, (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p),
    ),
    "aoti_torch_delete_tensor_object": (c_int32, (c_void_p,)),
    "aoti_torch_device_type_cpu": (c_int32, ()),
    "aoti_torch_device_type_cuda": (c_int32, ()),
    "aoti_torch_empty_strided": (
        c_int32, (c_int64, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p),
    ),
    "aoti_torch_get_device_index": (c_int32, (c_void_p, c_void_p)),
    "aoti_torch_get_device_type": (c_int32, (c_void_p, c_void_p)),
    "aoti_torch_get_data_ptr": (c_int32, (c_void_p, c_void_p)),
    "aoti_torch_get_dim": (c_int32, (c_void_p, c_void_p)),
    "aoti_torch_get_dtype": (c_int32, (c_void_p, c_void_p)),
    "aoti_torch_get_sizes": (c_int32, (c_void_p, c_void_p)),
    "aoti_torch_get_strides": (c_int32, (c_void_p, c_void_p)),
}  # fmt: skip
"""Name -> what it returns and takes. All but the constants return 0 when they did what was asked."""

_CUDA_DECLARED = {
    "aoti_torch_create_cuda_guard": (c_int32, (c_int32, c_void_p)),
    "aoti_torch_delete_cuda_guard": (c_int32, (c_void_p,)),
    "aoti_torch_get_current_cuda_stream": (c_int32, (c_int32, c_void_p)),
    "cudaDeviceSynchronize": (c_int32, ()),
    "cudaGetDeviceCount": (c_int32, (c_void_p,)),
    "cudaStreamSynchronize": (c_int32, (c_void_p,)),
}
"""The last two are the CUDA runtime's, which the library needs and so brings."""

_LAST_WORDS = "torch_exception_get_what_without_backtrace"
"""Since torch 2.13; before it the library says on stderr what went wrong."""


class Libtorch:
    """The opened libraries. `quick` has the declared functions for calls of a microsecond, which keep the GIL; `slow`
    those for calls that may take long, which let go of it. `dtypes` maps torch's names to the library's numbers."""

    def __init__(self, folder: str, found: str) -> None:
        self.folder, self.version = folder, found
        path = os.path.join(folder, CPU_LIBRARY)
        there = os.path.exists("/proc/self/maps") and _text_of(path) is not None
        # Local: a package names this library among those it needs, and finds it loaded.
        self.slow: Any = _open(path)
        self.quick: Any = ctypes.PyDLL(path, handle=self.slow._handle)
        for library in (self.slow, self.quick):
            _declare(library, _DECLARED, found)
        self._check_version()
        self._words: Any = getattr(self.quick, _LAST_WORDS, None)
        if self._words is not None:
            self._words.restype, self._words.argtypes = c_char_p, ()
        self.devices = {
            "cpu": self.quick.aoti_torch_device_type_cpu(),
            "cuda": self.quick.aoti_torch_device_type_cuda(),
        }
        self.dtypes = {name: self._number(f"aoti_torch_dtype_{name}") for name in ITEMSIZE_BYTES}
        self.names = {number: name for name, number in self.dtypes.items()}
        self._cuda: Any = None
        if not there:
            _let_go(path)

    def open_cuda(self) -> Any:
        """The library of CUDA, which brings its device to the interface; ArtifactError where there is none."""
        with _lock:
            if self._cuda is None:
                cuda = _open(os.path.join(self.folder, CUDA_LIBRARY))
                _declare(cuda, _CUDA_DECLARED, self.version)
                self._cuda = cuda
                self.open_whole()
        return self._cuda

    def open_whole(self) -> None:
        """The library that packages for CUDA name, and those for a CPU that a CUDA build of torch compiled."""
        _open(os.path.join(self.folder, WHOLE_LIBRARY))

    def check(self, status: int, what: str) -> None:
        """ArtifactError with the library's own last words when a call gave another status than 0."""
        if status:
            raise ArtifactError(NAME, f"{what} failed: {self.last_words() or 'it said why on stderr'}")

    def last_words(self) -> str:
        """What the last call of this thread that failed said, "" where the library does not keep it."""
        words = self._words() if self._words is not None else None
        return words.decode(errors="replace").strip().splitlines()[0][:300] if words else ""

    # ------------------------------------------------------------------------------------------------------ tensors

    def over(
        self, address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], device: str = "cpu"
    ) -> int:
        """A handle of a tensor over memory, which it does not own; `strides` count elements."""
        kind, _, index = device.partition(":")
        handle = c_void_p()
        status = self.quick.aoti_torch_create_tensor_from_blob(
            address, len(shape), int64s(shape), int64s(strides), 0, self.dtypes[dtype], self.devices[kind],
            int(index or 0), byref(handle),
        )  # fmt: skip
        self.check(status, "making a tensor over memory")
        return handle.value or 0

    def within(self, base: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> int:
        """A handle of a tensor in the memory of the tensor `base`, `offset` elements of its dtype after its start."""
        handle = c_void_p()
        status = self.quick.aoti_torch__reinterpret_tensor(
            base, len(shape), int64s(shape), int64s(strides), offset, byref(handle)
        )
        self.check(status, "making a tensor in the memory of another")
        return handle.value or 0

    def empty(self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], device: str) -> int:
        """A handle of a tensor in memory of libtorch's own; on CUDA of its caching allocator."""
        kind, _, index = device.partition(":")
        handle = c_void_p()
        status = self.slow.aoti_torch_empty_strided(
            len(shape),
            int64s(shape),
            int64s(strides),
            self.dtypes[dtype],
            self.devices[kind],
            int(index or 0),
            byref(handle),
        )
        self.check(status, f"making a tensor on {device}")
        return handle.value or 0

    def to_host(self, array: Array) -> Array:
        """A copy of an array in host memory, made when the device has computed it, on whichever stream."""
        self.synchronize(array.device)
        strides = tuple(step // ITEMSIZE_BYTES[array.dtype] for step in array.strides)
        host = Array(bytearray(array.nbytes), array.dtype, array.shape)
        source = self.over(array.address, array.dtype, array.shape, row_major(array.shape, strides), array.device)
        target = self.over(host.address, host.dtype, host.shape, contiguous_strides(host.shape))
        try:
            self.copy(target, source)
        finally:
            self.delete(source)
            self.delete(target)
        return host

    def current_stream(self, index: int) -> int:
        """The stream on which this thread's work for a GPU is queued."""
        stream = c_void_p()
        self.check(self.open_cuda().aoti_torch_get_current_cuda_stream(index, byref(stream)), "asking for the stream")
        return stream.value or 0

    def synchronize(self, device: str) -> None:
        """Return when all that was queued for a device is done; at once for the host."""
        kind, _, index = device.partition(":")
        if kind == "cpu":
            return
        with self.on_gpu(int(index or 0)):
            status = self.open_cuda().cudaDeviceSynchronize()
        if status:
            raise ArtifactError(NAME, f"{device} failed at work it was given before (CUDA error {status})")

    @contextmanager
    def on_gpu(self, index: int) -> Iterator[None]:
        """This thread's current GPU is the one numbered `index` inside, and what it was before afterwards."""
        cuda, guard = self.open_cuda(), c_void_p()
        self.check(cuda.aoti_torch_create_cuda_guard(index, byref(guard)), f"turning to cuda:{index}")
        try:
            yield
        finally:
            cuda.aoti_torch_delete_cuda_guard(guard)

    def gpu_count(self) -> int:
        """GPUs that this process sees."""
        count = c_int32()
        status = self.open_cuda().cudaGetDeviceCount(byref(count))
        return 0 if status else count.value

    def wait_for(self, stream: int) -> None:
        """Return when all that was queued on a stream of CUDA is done."""
        status = self.open_cuda().cudaStreamSynchronize(stream)
        if status:
            raise ArtifactError(NAME, f"the stream {stream} cannot be waited for (CUDA error {status})")

    def copy(self, target: int, source: int) -> None:
        """Copy the values of one tensor into another, whatever their strides and devices are."""
        self.check(self.slow.aoti_torch_copy_(target, source, 0), "copying a tensor")

    def delete(self, handle: int) -> None:
        self.slow.aoti_torch_delete_tensor_object(handle)

    def address(self, handle: int) -> int:
        """Where its first element lies."""
        found = c_void_p()
        self.check(self.quick.aoti_torch_get_data_ptr(handle, byref(found)), "asking a tensor for its memory")
        return found.value or 0

    def describe(self, handle: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """(dtype, shape, strides in elements) of a tensor."""
        rank, dtype, sizes, strides = c_int64(), c_int32(), _int64s(), _int64s()
        api = self.quick
        status = api.aoti_torch_get_dim(handle, byref(rank)) | api.aoti_torch_get_dtype(handle, byref(dtype))
        status |= api.aoti_torch_get_sizes(handle, byref(sizes)) | api.aoti_torch_get_strides(handle, byref(strides))
        self.check(status, "asking a tensor for its shape")
        name = self.names.get(dtype.value)
        if name is None:
            raise ArtifactError(NAME, f"a result has torch's dtype number {dtype.value}, which has no name here")
        return name, tuple(sizes[: rank.value]), tuple(strides[: rank.value])

    def device_of(self, handle: int) -> str:
        """Where a tensor lies: "cpu" or "cuda:N"."""
        kind, index = c_int32(), c_int32()
        status = self.quick.aoti_torch_get_device_type(handle, byref(kind))
        status |= self.quick.aoti_torch_get_device_index(handle, byref(index))
        self.check(status, "asking a tensor for its device")
        return "cpu" if kind.value == self.devices["cpu"] else f"cuda:{index.value}"

    def _number(self, constant: str) -> int:
        function = getattr(self.quick, constant)
        function.restype, function.argtypes = c_int32, ()
        number: int = function()
        return number

    def _check_version(self) -> None:
        """The library must be of the version that its folder says: packages are compiled for one."""
        number = self.quick.aoti_torch_abi_version()
        actual = (number >> 56, number >> 48 & 255)
        if actual != version(self.version)[:2]:
            raise ArtifactError(
                NAME, f"{self.folder} holds version {actual[0]}.{actual[1]}, beside it stands {self.version}",
                hint="install torch again",
            )  # fmt: skip


def int64s(numbers: tuple[int, ...]) -> Any:
    """`numbers` as C takes them; OverflowError for one that has more bits, which ctypes would cut off."""
    for number in numbers:
        if not -(2**63) <= number < 2**63:
            raise OverflowError(f"{number} is beyond 64 bits: {list(numbers)}")
    return (c_int64 * len(numbers))(*numbers)


def row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides` with those that mean nothing (of dims of 1, of no elements) made ordinary: libtorch takes none below
    0."""
    plain = contiguous_strides(shape)
    if 0 in shape:
        return plain
    return tuple(b if size == 1 else a for size, a, b in zip(shape, strides, plain, strict=True))


_lock = forks.lock(forks.LAST)
_opened: dict[str, Libtorch] = {}


def open_libtorch(machine: Machine | None = None) -> Libtorch:
    """libtorch as this host has it, opened once a process; ArtifactError or MissingDependency says why it cannot be."""
    host = machine or this_machine()
    folder, found = host.libtorch, host.torch
    if folder is None or found is None:
        raise MissingDependency("torch", needed_for="models (its shared libraries)", install="'aotpack-runtime[torch]'")
    if not GATE[0] <= version(found)[:2] < GATE[1]:
        first, end = (".".join(map(str, bound)) for bound in GATE)
        raise ArtifactError(
            NAME,
            f"torch {found}: its C interface is known for {first} and newer, below {end}",
            hint="import torch first",
        )
    with _lock:
        if folder not in _opened:
            _opened[folder] = Libtorch(folder, found)
        return _opened[folder]


def _open(path: str) -> Any:
    try:
        return open_library(path)
    except OSError as error:
        raise ArtifactError(NAME, str(error)) from error


_MADV_DONTNEED = 4


def _let_go(path: str) -> None:
    """Give back the pages of code that only the library's start touched: 45 MB of it (torch 2.13, CPU), which run once
    to register operators. They are the file's own, unchanged; what is needed again is mapped again."""
    text = _text_of(path)
    if text is not None:
        libc = ctypes.CDLL(None)
        libc.madvise(c_void_p(text[0]), ctypes.c_size_t(text[1] - text[0]), _MADV_DONTNEED)


def _text_of(path: str) -> tuple[int, int] | None:
    """Where the code of a loaded library lies, None when it is not loaded."""
    try:
        with open("/proc/self/maps") as file:
            lines = [line.split(maxsplit=5) for line in file if " r-xp " in line]
    except OSError:
        return None
    real = os.path.realpath(path)
    found = next((line[0] for line in lines if len(line) == 6 and line[5].strip() == real), None)
    if found is None:
        return None
    start, _, end = found.partition("-")
    return int(start, 16), int(end, 16)


def _declare(library: Any, declared: dict[str, tuple[Any, tuple[Any, ...]]], found: str) -> None:
    missing = [name for name in declared if not hasattr(library, name)]
    if missing:
        raise ArtifactError(NAME, f"torch {found} does not export {', '.join(missing[:3])}")
    for name, (returns, takes) in declared.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returns, takes
