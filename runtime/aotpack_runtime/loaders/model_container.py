"""AOTInductor's C interface by ctypes: the container of one package's library, with tensors as handles.

The names are those of torch/csrc/inductor/aoti_runtime/interface.h. ctypes lets go of the GIL around a run.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import byref, c_bool, c_char_p, c_int32, c_size_t, c_void_p
from typing import Any

from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.shared_library import open_library

_DECLARED = {
    "AOTInductorModelContainerCreateWithDevice": (c_void_p, c_size_t, c_char_p, c_char_p),
    "AOTInductorModelContainerDelete": (c_void_p,),
    "AOTInductorModelContainerGetConstantName": (c_void_p, c_size_t, c_void_p),
    "AOTInductorModelContainerGetConstantOriginalFQN": (c_void_p, c_size_t, c_void_p),
    "AOTInductorModelContainerGetNumConstants": (c_void_p, c_void_p),
    "AOTInductorModelContainerGetNumInputs": (c_void_p, c_void_p),
    "AOTInductorModelContainerGetNumOutputs": (c_void_p, c_void_p),
    "AOTInductorModelContainerSwapConstantBuffer": (c_void_p,),
    "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs": (c_void_p, c_void_p, c_size_t, c_bool, c_bool),
}
"""Name -> what it takes. All return 0 when they did what was asked."""

RUN, RUN_SINGLE_THREADED = "AOTInductorModelContainerRun", "AOTInductorModelContainerRunSingleThreaded"
"""Two ways to run, which take the same."""
_RUN_TAKES = (c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p)

_LAST_ERROR = "AOTInductorGetLastError"
"""Of newer packages; others say on stderr what went wrong."""


class _Pair(ctypes.Structure):
    """AOTInductorConstantMapEntry."""

    _fields_ = (("name", c_char_p), ("handle", c_void_p))


class ModelContainer:
    """One model container of a library. `run_handles` may be called from many threads at once."""

    def __init__(self, path: str, variant: str, concurrency: int, *, device: str = "cpu", run_name: str = RUN) -> None:
        self.variant, self._handle, self._bound = variant, c_void_p(), False
        try:
            self._library: Any = open_library(path)
        except OSError as error:
            raise ArtifactError(variant, str(error), hint=mount_hint(str(error), path)) from error
        declared = {**_DECLARED, run_name: _RUN_TAKES}
        missing = [name for name in declared if not hasattr(self._library, name)]
        if missing:
            raise ArtifactError(variant, f"its library does not export {missing[0]}")
        for name, takes in declared.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = c_int32, takes
        folder = None if device == "cpu" else os.path.dirname(path).encode()  # where the kernels lie
        create = self._library.AOTInductorModelContainerCreateWithDevice
        self._check(create(byref(self._handle), concurrency, device.encode(), folder), "created")
        self.inputs = self._count("AOTInductorModelContainerGetNumInputs")
        self.outputs = self._count("AOTInductorModelContainerGetNumOutputs")
        self.run_function = getattr(self._library, run_name)

    @property
    def handle(self) -> int:
        return self._handle.value or 0

    def constant_names(self) -> dict[str, str]:
        """The library's own name of each constant -> its name in the model that was compiled."""
        own, original = c_char_p(), c_char_p()
        names: dict[str, str] = {}
        for number in range(self._count("AOTInductorModelContainerGetNumConstants")):
            for ask, place in (
                (self._library.AOTInductorModelContainerGetConstantName, own),
                (self._library.AOTInductorModelContainerGetConstantOriginalFQN, original),
            ):
                self._check(ask(self._handle, number, byref(place)), "asked for its constants")
            names[(own.value or b"").decode()] = (original.value or b"").decode()
        return names

    def bind_handles(self, handles: Mapping[str, int]) -> None:
        """Use these tensors as constants from now on, without a copy; a call that runs meanwhile sees one set whole.

        The first time there is nothing to swap; later the other buffer is filled and swapped in, which waits for
        running calls. The handles must stay valid until two sets later.
        """
        pairs = (_Pair * len(handles))(*[_Pair(name.encode(), handle) for name, handle in handles.items()])
        update = self._library.AOTInductorModelContainerUpdateUserManagedConstantBufferPairs
        self._check(update(self._handle, pairs, len(handles), self._bound, True), "bound")
        if self._bound:
            self._check(self._library.AOTInductorModelContainerSwapConstantBuffer(self._handle), "swapped")
        self._bound = True

    def refused(self) -> RuntimeError:
        """What a run that gave another status than 0 raises."""
        words = self._last_words()
        return RuntimeError(f"{self.variant}: the compiled model refused the call{words or '; it said why on stderr'}")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.AOTInductorModelContainerDelete(self._handle)

    def _count(self, name: str) -> int:
        count = c_size_t()
        self._check(getattr(self._library, name)(self._handle, byref(count)), "asked for its numbers")
        return count.value

    def _last_words(self) -> str:
        ask = getattr(self._library, _LAST_ERROR, None)
        if ask is None:
            return ""
        ask.restype, ask.argtypes = c_int32, (c_void_p,)
        found = c_char_p()
        if ask(byref(found)) or not found.value:
            return ""
        return ": " + found.value.decode(errors="replace").strip().splitlines()[0][:300]

    def _check(self, status: int, what: str) -> None:
        if status:
            words = self._last_words() or "; the library said why on stderr"
            raise ArtifactError(self.variant, f"its container could not be {what}{words}")


def mount_hint(words: str, path: str) -> str:
    """The next step for a library that did not open, where there is one."""
    if "failed to map segment" in words:
        return f"{path} is on a file system mounted noexec; put the bundle, or AOTPACK_CACHE_DIR, on another"
    return ""
