"""A weight set as handles of libtorch, with torch not imported: the same promises as `TorchWeights` makes.

Tensors lie over the mapped file on the CPU; on CUDA they are copied to the device, once for all variants and for all
names they are tied to. When torch joins the process, `as_torch` makes its tensors over the same
memory, and those lead from then on: one copy, one lock, one update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from aotpack_runtime import forks
from aotpack_runtime.array import Array
from aotpack_runtime.errors import WeightsError
from aotpack_runtime.format.index import WeightRef, WeightSet
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, contiguous_strides
from aotpack_runtime.host_arrays import read_array
from aotpack_runtime.loaders import CROSSING, WEIGHTS, loader
from aotpack_runtime.loaders.library_memory import put, write
from aotpack_runtime.loaders.libtorch import Libtorch, open_libtorch
from aotpack_runtime.loaders.upload import DeviceMemory, upload
from aotpack_runtime.weights import Gone, StoredTensor, WeightsFile, unknown_weight


class ArrayWeights:
    """Tensors by name. `lock` serialises binding an executable and replacing weights; calls never take it.

    While executables are bound anew, `closed` is not empty and calls wait in `wait`: a package's own lock lets readers
    pass a waiting writer, so that calls without a pause would hold an update up for ever.
    """

    def __init__(self, file: WeightsFile | None, weight_set: WeightSet, device: str) -> None:
        self.set, self.device = weight_set, device
        self.lock = forks.lock(forks.WEIGHTS)
        self.state_lock = forks.lock(forks.STATE) if weight_set.state else None
        self._binds: list[Callable[[], None]] = []
        self.closed: list[bool] = []
        self._open = threading.Event()
        self._open.set()
        self._state = {weight_set.weights[name].tensor for name in weight_set.state}
        self._retired: dict[str, Array] = {}
        self._owned: set[str] = set()
        self._torch: Any = None
        self._followed: dict[str, int] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._current: dict[str, Array] = {}
        for ref in weight_set.weights.values():
            if file is not None and ref.tensor not in self._current:
                stored = _array_of(file[ref.tensor])
                self._current[ref.tensor] = stored.copy() if device == "cpu" and ref.tensor in self._state else stored
        if device != "cpu":
            self._current = upload(self._current, int(device.partition(":")[2] or 0))

    def synchronize(self) -> None:
        """Return when no call that was queued reads or writes these tensors any more."""
        if self.device != "cpu":
            open_libtorch().synchronize(self.device)

    def bind(self, rebind: Callable[[], None]) -> None:
        """Call `rebind` now and after every replacement; it asks for `tensors`. The caller holds `lock`."""
        rebind()
        self._binds.append(rebind)

    def tensors(self, names: Mapping[str, str]) -> dict[str, _Tensor]:
        """Constant -> the tensor that is its weight now; what is returned keeps the handles valid."""
        bases: dict[tuple[int, str], _Tensor] = {}
        return {constant: self._tensor(weight, bases) for constant, weight in names.items()}

    def check(self, new: Mapping[str, Any]) -> Any:
        """The values that `new` would give each stored tensor, by its key; WeightsError when it cannot be."""
        if self._torch is not None:
            return self._torch.check({name: _to_torch(value) for name, value in new.items()})
        values: dict[str, Array] = {}
        given: dict[str, str] = {}
        for name, value in new.items():
            ref = self.set.weights.get(name)
            if ref is None:
                raise WeightsError(unknown_weight(name, self.set.weights))
            found = read_array(value)
            if found is None:
                raise WeightsError(f"{name}: expected an array, got {type(value).__name__}")
            if found.array is None or found.array.device not in ("cpu", self.device):
                expected = " or ".join(dict.fromkeys(("cpu", self.device)))
                raise WeightsError(f"{name} {found.meta.odd or f'is on {found.meta.device}, expected {expected}'}")
            dtype, shape = self._facts(name)
            if (found.meta.dtype, found.meta.shape) != (dtype, shape):
                raise WeightsError(
                    f"{name}: expected {dtype} {list(shape)}, got {found.meta.dtype} {list(found.meta.shape)}"
                )
            first = given.setdefault(ref.tensor, name)
            array = _as_stored(found.array, ref)
            if first != name and values[ref.tensor].tobytes() != array.tobytes():
                raise WeightsError(f"{first} and {name} are one tied tensor and were given different values")
            values[ref.tensor] = array
        return values

    def replace(self, values: Any) -> None:
        """Make `values` current in every executable; calls that run meanwhile see the old set or the new one whole.

        Two buffers a weight take turns, as in `TorchWeights`.
        """
        with self.state_lock or nullcontext(), self.lock:
            if self._torch is not None:  # perhaps since they were checked
                self._torch.replace({key: _to_torch(value) for key, value in values.items()})
                return
            self.synchronize()
            for key, array in values.items():
                old = self._current[key]
                if key in self._state:
                    write(old, array)
                    continue
                spare = self._retired.pop(key, None)
                if spare is None:
                    spare = array.copy() if self.device == "cpu" else put(array, self.device)
                else:
                    write(spare, array)
                if key in self._owned:
                    self._retired[key] = old
                self._owned.add(key)
                self._current[key] = spare
            self._rebind(values)

    def snapshot(self) -> dict[str, bytes]:
        """A copy of the state, for `restore`."""
        return {key: self._current[key].tobytes() for key in self._state}

    def restore(self, state: Mapping[str, bytes]) -> None:
        self.synchronize()
        for key, data in state.items():
            known = self._current[key]
            write(known, Array(data, known.dtype, known.shape))

    def as_torch(self) -> Any:
        """The same weights and state as torch's tensors. From now on they lead: what they are replaced by, arrays'
        executables are bound to as well."""
        with self.lock:
            if self._torch is None:
                weights = loader(WEIGHTS).TorchWeights
                torch_weights = weights(self._current, self.set, self.device, state_lock=self.state_lock)
                self._torch = torch_weights
                with torch_weights.lock:
                    torch_weights.bind(self._follow)
            return self._torch

    def close(self) -> None:
        if self._torch is not None:
            self._torch.close()
        with self.lock:
            self._binds.clear()
            self._tensors, self._current, self._retired = {}, Gone(), {}

    # -----------------------------------------------------------------------------------------------------------

    def _facts(self, name: str) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of a weight as the model sees it."""
        ref = self.set.weights[name]
        stored = self._current[ref.tensor]
        return stored.dtype, tuple(stored.shape[axis] for axis in _back(ref, len(stored.shape)))

    def _tensor(self, name: str, bases: dict[tuple[int, str], _Tensor]) -> _Tensor:
        known = self._tensors.get(name)
        if known is None:
            ref = self.set.weights[name]
            stored = self._current[ref.tensor]
            dense = contiguous_strides(stored.shape)
            axes = _back(ref, len(stored.shape))
            shape, strides = [tuple(part[axis] for axis in axes) for part in (stored.shape, dense)]
            known = self._tensors[name] = _Tensor(stored, shape, strides, _base_of(stored, bases))
        return known

    def _rebind(self, keys: Mapping[str, object]) -> None:
        changed = [
            name for name, ref in self.set.weights.items() if ref.tensor in keys and ref.tensor not in self._state
        ]
        for name in changed:
            self._tensors.pop(name, None)
        self._bind_anew()

    def wait(self) -> None:
        """Return when no executable is being bound anew."""
        self._open.wait()

    def _bind_anew(self) -> None:
        self._open.clear()
        self.closed.append(True)
        try:
            for rebind in self._binds:
                rebind()
        finally:
            self.closed.pop()
            self._open.set()

    def _follow(self) -> None:
        """torch's tensors were replaced: take their memory. What torch keeps on the host for its programs (literals)
        is copied to the device, where packages look for it."""
        array_over = loader(CROSSING).array_over
        for key, tensor in self._torch.stored().items():
            found: Array = array_over(tensor)
            if not found.size or found.address in (self._current[key].address, self._followed.get(key)):
                continue
            self._followed[key] = found.address
            self._current[key] = found if found.device == self.device else put(found, self.device)
            for name, ref in self.set.weights.items():
                if ref.tensor == key:
                    self._tensors.pop(name, None)
        self._bind_anew()


class _Tensor:
    """A handle of libtorch over a weight's memory, which it keeps; deleted with the last who has it. In a `base` it
    costs little: of an address on a GPU libtorch asks the driver whose it is, 0.2 ms each at a start."""

    __slots__ = ("_library", "array", "handle")

    def __init__(
        self, array: Array, shape: tuple[int, ...], strides: tuple[int, ...], base: _Tensor | None = None
    ) -> None:
        self._library: Libtorch = open_libtorch()
        self.array = array
        if base is None:
            self.handle = self._library.over(array.address, array.dtype, shape, strides, array.device)
        else:
            offset = (array.address - base.array.address) // ITEMSIZE_BYTES[array.dtype]
            self.handle = self._library.within(base.handle, shape, strides, offset)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            self._library.delete(self.handle)


def _base_of(stored: Array, known: dict[tuple[int, str], _Tensor]) -> _Tensor | None:
    """All of the memory of weights that went to the device together, as a tensor, to be let go of before them; None for
    memory of their own."""
    memory = stored.owner
    if not isinstance(memory, DeviceMemory) or not stored.size:
        return None
    key = (memory.address, stored.dtype)
    if key not in known:
        itemsize = ITEMSIZE_BYTES[stored.dtype]
        count = memory.size_bytes // itemsize
        whole = Array.over(memory.address, stored.dtype, (count,), (itemsize,), memory, device=stored.device)
        known[key] = _Tensor(whole, (count,), (1,))
    return known[key]


def _back(ref: WeightRef, rank: int) -> list[int]:
    """For each dim of the weight, the stored dim that it is."""
    return list(range(rank)) if ref.order is None else [ref.order.index(axis) for axis in range(rank)]


def _array_of(stored: StoredTensor) -> Array:
    """A stored tensor as an array; a copy where the file does not have it between its elements."""
    data = stored.data if stored.data.nbytes else memoryview(bytearray(0))
    array = Array(data, stored.dtype, stored.shape)
    itemsize = array.nbytes // max(array.size, 1)
    return array.copy() if array.size and array.address % itemsize else array


def _as_stored(array: Array, ref: WeightRef) -> Array:
    """A weight with its dims in the order in which they are stored, row-major; a copy where it is not."""
    if ref.order is not None:
        shape, strides = [tuple(part[axis] for axis in ref.order) for part in (array.shape, array.strides)]
        array = Array.over(array.address, array.dtype, shape, strides, array)
    array = array.forwards()
    return array if array.is_contiguous() else open_libtorch().to_host(array)


def _to_torch(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value
    found = read_array(value)
    if found is None or found.array is None:
        return value
    array = found.array.forwards()
    readable = Array.over(array.address, array.dtype, array.shape, array.strides, array, device=array.device)
    return torch.from_dlpack(readable)  # type: ignore[attr-defined] # it is read, whether or not it may be written
