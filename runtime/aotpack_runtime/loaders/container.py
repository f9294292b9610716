"""AOTInductor's C interface by ctypes: run a package without holding the GIL.

torch's own runner (`torch._C._aoti`, torch 2.13) holds the GIL while a model runs: in a server, one call of 90 ms stops
every other thread for 90 ms, health checks included. The library it calls exports a C interface; ctypes lets go of the
GIL around it. Handles go through Python here, so only calls that take long go this way.

The names are those of torch/csrc/inductor/aoti_runtime/interface.h; `Container.open` returns None where a library does
not export them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from ctypes import byref, c_bool, c_char_p, c_size_t, c_void_p
from typing import Any, Self

import torch

from aotpack_runtime.errors import ArtifactError

_NAMES = (
    "AOTInductorModelContainerCreateWithDevice",
    "AOTInductorModelContainerDelete",
    "AOTInductorModelContainerGetConstantName",
    "AOTInductorModelContainerGetConstantOriginalFQN",
    "AOTInductorModelContainerGetNumConstants",
    "AOTInductorModelContainerGetNumOutputs",
    "AOTInductorModelContainerSwapConstantBuffer",
    "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs",
)


class _Pair(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("handle", c_void_p))


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, (ctypes.py_object, c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)


class Container:
    """One model container of a loaded library; `run` may be called from many threads at once."""

    run_name = "AOTInductorModelContainerRun"

    def __init__(self, library: Any, variant: str, concurrency: int, device: torch.device) -> None:
        self._library, self._variant = library, variant
        self._run = getattr(library, self.run_name)
        self._run.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p)
        self._handle = c_void_p()
        self._bound = False
        self._paused: threading.Event | None = None
        create = library.AOTInductorModelContainerCreateWithDevice
        name = str(device).encode()
        self._check(create(byref(self._handle), c_size_t(concurrency), name, None), "created")
        count = c_size_t()
        self._check(library.AOTInductorModelContainerGetNumOutputs(self._handle, byref(count)), "asked for its outputs")
        self._outputs = count.value
        self._results_type = c_void_p * count.value

    @classmethod
    def open(cls, path: str, variant: str, concurrency: int, device: torch.device) -> Self | None:
        """A container of the library at `path`; None where it lacks the interface. OSError when it does not load."""
        library = ctypes.CDLL(path)
        if not all(hasattr(library, name) for name in (*_NAMES, cls.run_name)):
            return None
        return cls(library, variant, concurrency, device)

    def constant_names(self) -> dict[str, str]:
        """The library's own name of each constant -> its name in the model that was compiled."""
        count, own, original = c_size_t(), c_char_p(), c_char_p()
        self._check(self._library.AOTInductorModelContainerGetNumConstants(self._handle, byref(count)), "asked")
        names: dict[str, str] = {}
        for number in map(c_size_t, range(count.value)):
            for ask, place in (
                (self._library.AOTInductorModelContainerGetConstantName, own),
                (self._library.AOTInductorModelContainerGetConstantOriginalFQN, original),
            ):
                self._check(ask(self._handle, number, byref(place)), "asked for its constants")
            names[(own.value or b"").decode()] = (original.value or b"").decode()
        return names

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these constants from now on, without a copy; a call that runs meanwhile sees one set whole."""
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors.values()))
        pairs = (_Pair * len(tensors))(
            *[_Pair(name.encode(), _get_pointer(handle, None)) for name, handle in zip(tensors, handles, strict=True)]
        )
        # A swap waits for a moment without calls, and the library's lock lets new calls pass those who wait: under
        # steady traffic it would wait for ever. So new calls wait here.
        paused = self._paused = threading.Event()
        try:
            self._exchange(pairs)
        finally:
            self._paused = None
            paused.set()

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The model's results; RuntimeError when the model refuses, its own words are on stderr."""
        paused = self._paused
        if paused is not None:
            paused.wait()
        return self._call(inputs, None)

    def _exchange(self, pairs: Any) -> None:
        """Fill the set of constants that is not in use, and swap the two; the first time there is nothing to swap."""
        update = self._library.AOTInductorModelContainerUpdateUserManagedConstantBufferPairs
        self._check(update(self._handle, pairs, c_size_t(len(pairs)), c_bool(self._bound), c_bool(True)), "bound")
        if self._bound:
            self._check(self._library.AOTInductorModelContainerSwapConstantBuffer(self._handle), "swapped")
        self._bound = True

    def _call(self, inputs: list[torch.Tensor], stream: int | None) -> list[torch.Tensor]:
        count = len(inputs)
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)
        # The model takes over the handles; the array stays ours.
        given = (c_void_p * count)(*[_get_pointer(handle, None) for handle in handles])
        results = self._results_type()
        if self._run(self._handle, given, count, results, self._outputs, stream, None):
            raise RuntimeError(f"{self._variant}: the compiled model refused the call; it said why on stderr")
        capsules = [_new_capsule(result, None, None) for result in results]
        found: list[torch.Tensor] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
        return found

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.AOTInductorModelContainerDelete(self._handle)

    def _check(self, status: int, what: str) -> None:
        if status:
            raise ArtifactError(self._variant, f"its container could not be {what}; the library said why on stderr")


class CudaContainer(Container):
    """A container on a GPU, of one model object: a second would load every kernel again, at the second call.

    Its work is queued on torch's current stream of the container's device. The library's own way to run takes a model
    object out of use until the GPU has finished with it, so that calls would not be queued behind each other, and asks
    events, which a stream that is being captured forbids. Queueing is all that must not be done twice at a time, so
    calls take turns here and go the other way.
    """

    run_name = "AOTInductorModelContainerRunSingleThreaded"

    def __init__(self, library: Any, variant: str, concurrency: int, device: torch.device) -> None:
        super().__init__(library, variant, concurrency, device)
        self._stream, self._index = torch._C._cuda_getCurrentRawStream, device.index
        self._turn = threading.Lock()

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The model's results, perhaps before the GPU has made them."""
        paused = self._paused
        if paused is not None:
            paused.wait()
        with self._turn:
            return self._call(inputs, self._stream(self._index))

    def _exchange(self, pairs: Any) -> None:
        with self._turn:
            super()._exchange(pairs)
