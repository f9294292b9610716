"""A weight set as torch tensors: one tensor a name, shared by every executable, replaced all at once.

State (buffers that calls write) is a private copy for each session, shared by hits and fallbacks; whoever runs a
call that may write it holds `state_lock`. On a GPU every tensor is a copy there, made once for all variants; a weight
that the model keeps on the host (`WeightRef.host`) stays there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from aotpack_runtime import forks
from aotpack_runtime.array import Array
from aotpack_runtime.errors import WeightsError
from aotpack_runtime.format.index import WeightRef, WeightSet
from aotpack_runtime.weights import Gone, StoredTensor, WeightsFile, unknown_weight


class TorchWeights:
    """Tensors by name. `lock` serialises binding an executable and replacing weights; calls never take it."""

    def __init__(
        self,
        file: WeightsFile | Mapping[str, Array],
        weight_set: WeightSet,
        device: str = "cpu",
        *,
        state_lock: Any = None,
    ) -> None:
        """With `state_lock` the state lies in the memory of `file` itself, on the device already, which is shared with
        others who hold that lock when they write it."""
        self.set, self.device = weight_set, torch.device(device)
        self.lock = forks.lock(forks.WEIGHTS)
        self.state_lock = state_lock or (forks.lock(forks.STATE) if weight_set.state else None)
        self._executables: list[Callable[[], None]] = []
        self.gate = Gate()
        self.closed = False
        self._state = {weight_set.weights[name].tensor for name in weight_set.state}
        self._retired: dict[str, torch.Tensor] = {}
        self._owned: set[str] = set()
        # The first call may come in inference mode, and tensors made there could not be written outside of it.
        with torch.inference_mode(False):
            refs = {ref.tensor: ref for ref in weight_set.weights.values()}
            self._shares_state = state_lock is not None
            self._current = {key: self._placed(_as_tensor(file[key]), ref) for key, ref in refs.items()}
            self._synchronize()
            self.tensors = self._named()

    def _placed(self, stored: torch.Tensor, ref: WeightRef) -> torch.Tensor:
        """What sessions use of a stored tensor: itself, or a copy where calls write it or a GPU needs it."""
        if self.device.type != "cpu":
            return stored.to(self.device) if not ref.host else stored.to("cpu", copy=True)
        return stored.clone() if ref.tensor in self._state and not self._shares_state else stored

    def _synchronize(self) -> None:
        """What is copied on this thread's stream is there for all streams, and all that was queued has been read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def named(self, constants: Iterable[tuple[str, str]]) -> dict[str, torch.Tensor]:
        """The current tensors by the names that a package has for them; all of them on its device, since Inductor's
        kernels take literals from there too."""
        return {constant: self.tensors[name].to(self.device) for constant, name in constants}

    def _named(self) -> Mapping[str, torch.Tensor]:
        return {name: _reordered(self._current[ref.tensor], ref.order) for name, ref in self.set.weights.items()}

    def stored(self) -> Mapping[str, torch.Tensor]:
        """The current tensors by their keys in the file, with their dims as they are stored there."""
        return self._current

    def bind(self, rebind: Callable[[], None]) -> None:
        """Call `rebind` now and after every replacement; it reads `tensors`. The caller holds `lock`."""
        rebind()
        self._executables.append(rebind)

    def unbind(self, rebind: Callable[[], None]) -> None:
        """Let go of an executable that `bind` was given."""
        with self.lock:
            self._executables = [known for known in self._executables if known != rebind]

    def check(self, new: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The values that `new` would give each stored tensor, by its key; WeightsError when it cannot be."""
        values: dict[str, torch.Tensor] = {}
        given: dict[str, str] = {}
        for name, value in new.items():
            ref = self.set.weights.get(name)
            if ref is None:
                raise WeightsError(unknown_weight(name, self.set.weights))
            old = self.tensors[name]
            if not isinstance(value, torch.Tensor):
                raise WeightsError(f"{name}: expected a tensor, got {type(value).__name__}")
            if value.shape != old.shape or value.dtype != old.dtype:
                raise WeightsError(
                    f"{name}: expected {old.dtype} {list(old.shape)}, got {value.dtype} {list(value.shape)}"
                )
            if value.layout is not torch.strided or value.is_meta:
                raise WeightsError(f"{name}: expected a strided tensor with data, got {value.layout} on {value.device}")
            stored = value.detach() if ref.order is None else value.detach().permute(ref.order)
            first = given.setdefault(ref.tensor, name)
            if first != name and not _same_bits(values[ref.tensor], stored):
                raise WeightsError(f"{first} and {name} are one tied tensor and were given different values")
            values[ref.tensor] = stored
        return values

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Make `values` current in every executable; calls that run meanwhile see the old set or the new one whole.

        A package keeps every tensor it was ever bound to until the process ends (torch 2.13), so two buffers a weight
        take turns: the one that is written here was retired by the update before, and no call reads it any more.
        """
        with self.state_lock or nullcontext(), self.lock, torch.inference_mode(False), torch.no_grad():
            self.gate.wait_for_earlier()
            self._synchronize()
            fresh: dict[str, torch.Tensor] = {}
            for key in values.keys() - self._state:
                spare = self._retired.get(key)
                fresh[key] = (torch.empty_like(self._current[key]) if spare is None else spare).copy_(values[key])
            for key in values.keys() & self._state:
                self._current[key].copy_(values[key])
            for key in fresh:
                self._retired.pop(key, None)
                if key in self._owned:
                    self._retired[key] = self._current[key]
                self._owned.add(key)
            self._synchronize()
            self._current |= fresh
            self.tensors = self._named()
            for rebind in self._executables:
                rebind()
            self.gate.next_generation()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of the state, for `restore`."""
        return {name: self.tensors[name].clone() for name in self.set.state}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in state.items():
                self.tensors[name].copy_(value)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self._executables.clear()
            self.tensors, self._current, self._retired = Gone(), Gone(), {}


class Gate:
    """Who still reads tensors that an update retired. Whatever runs with the current tensors, packages aside (their
    own lock covers them), enters before it reads `tensors` and leaves when it has run."""

    def __init__(self) -> None:
        self._changed = threading.Condition(forks.lock(forks.LAST))
        self._generation = 0
        self._readers: Counter[int] = Counter()
        forks.in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        """In a forked child nobody reads: who did is not there."""
        self._readers.clear()

    def enter(self) -> int:
        with self._changed:
            self._readers[self._generation] += 1
            return self._generation

    def leave(self, generation: int) -> None:
        with self._changed:
            self._readers[generation] -= 1
            if not self._readers[generation]:
                del self._readers[generation]
                self._changed.notify_all()

    def next_generation(self) -> None:
        with self._changed:
            self._generation += 1

    def wait_for_earlier(self) -> None:
        """Return when all who entered before the current generation have left."""
        with self._changed:
            self._changed.wait_for(lambda: all(reader >= self._generation for reader in self._readers))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal with NaN equal to itself."""
    return torch.equal(*[tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)])


def size_tensor(size: int) -> torch.Tensor:
    """A tensor without elements whose first dim is `size`."""
    return torch.empty((size, 0))


def _as_tensor(stored: StoredTensor | Array) -> torch.Tensor:
    dtype = getattr(torch, stored.dtype)
    if isinstance(stored, Array):
        if not stored.size:
            return torch.empty(stored.shape, dtype=dtype, device=stored.device)
        # As bytes: DLPack of older torch lacks some dtypes.
        flat = Array.over(stored.address, "uint8", (stored.nbytes,), (1,), stored, device=stored.device)
        return torch.from_dlpack(flat).view(dtype).view(stored.shape)  # type: ignore[attr-defined]
    if not stored.data:
        return torch.empty(stored.shape, dtype=dtype)
    if stored.data.nbytes % dtype.itemsize or _address(stored.data) % dtype.itemsize:
        return torch.frombuffer(bytearray(stored.data), dtype=dtype).view(stored.shape)
    return torch.frombuffer(stored.data, dtype=dtype).view(stored.shape)


def _address(data: memoryview) -> int:
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def _reordered(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """A tensor stored with its dims in `order`, seen in their own order again."""
    return tensor if order is None else tensor.permute([order.index(axis) for axis in range(len(order))])
