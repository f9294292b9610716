"""A package's container for torch's tensors: run without holding the GIL, and on a GPU in the order of a stream.

torch's own runner (`torch._C._aoti`, torch 2.13) holds the GIL while a model runs: in a server, one call of 90 ms stops
every other thread for 90 ms, health checks included. The library it calls exports a C interface; ctypes lets go of the
GIL around it. Handles go through Python here, so on the CPU only calls that take long go this way.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from ctypes import c_char_p, c_void_p
from typing import Self

import torch

from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.loaders.model_container import RUN, RUN_SINGLE_THREADED, ModelContainer
from aotpack_runtime.shared_library import open_library

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, (ctypes.py_object, c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)


class Container:
    """One model container of a loaded library; `run` may be called from many threads at once."""

    run_name = RUN

    def __init__(self, container: ModelContainer, device: torch.device) -> None:
        self._container = container
        self._paused: threading.Event | None = None
        self._results_type = c_void_p * container.outputs

    @classmethod
    def open(cls, path: str, variant: str, concurrency: int, device: torch.device) -> Self | None:
        """A container of the library at `path`; None where it lacks the interface. OSError when it does not load."""
        open_library(path)
        try:
            container = ModelContainer(path, variant, concurrency, device=str(device), run_name=cls.run_name)
        except ArtifactError:
            return None
        return cls(container, device)

    def constant_names(self) -> Mapping[str, str]:
        """The library's own name of each constant -> its name in the model that was compiled."""
        return self._container.constant_names()

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these constants from now on, without a copy; a call that runs meanwhile sees one set whole."""
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors.values()))
        handles = {name: _get_pointer(capsule, None) for name, capsule in zip(tensors, capsules, strict=True)}
        # A swap waits for a moment without calls, and the library's lock lets new calls pass those who wait: under
        # steady traffic it would wait for ever. So new calls wait here.
        paused = self._paused = threading.Event()
        try:
            self._exchange(handles)
        finally:
            self._paused = None
            paused.set()

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The model's results; RuntimeError when the model refuses, with its own words where it keeps them."""
        paused = self._paused
        if paused is not None:
            paused.wait()
        return self._call(inputs, None)

    def _exchange(self, handles: Mapping[str, int]) -> None:
        self._container.bind_handles(handles)

    def _call(self, inputs: list[torch.Tensor], stream: int | None) -> list[torch.Tensor]:
        count, container = len(inputs), self._container
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)
        # The model takes over the handles; the array stays ours.
        given = (c_void_p * count)(*[_get_pointer(handle, None) for handle in handles])
        results = self._results_type()
        if container.run_function(container.handle, given, count, results, container.outputs, stream, None):
            raise container.refused()
        capsules = [_new_capsule(result, None, None) for result in results]
        found: list[torch.Tensor] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
        return found


class CudaContainer(Container):
    """A container on a GPU, of one model object: a second would load every kernel again, at the second call.

    Its work is queued on torch's current stream of the container's device. The library's own way to run takes a model
    object out of use until the GPU has finished with it, so that calls would not be queued behind each other, and asks
    events, which a stream that is being captured forbids. Queueing is all that must not be done twice at a time, so
    calls take turns here and go the other way.
    """

    run_name = RUN_SINGLE_THREADED

    def __init__(self, container: ModelContainer, device: torch.device) -> None:
        super().__init__(container, device)
        self._stream, self._index = torch._C._cuda_getCurrentRawStream, device.index
        self._turn = threading.Lock()

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The model's results, perhaps before the GPU has made them."""
        paused = self._paused
        if paused is not None:
            paused.wait()
        with self._turn:
            return self._call(inputs, self._stream(self._index))

    def _exchange(self, handles: Mapping[str, int]) -> None:
        with self._turn:
            super()._exchange(handles)
