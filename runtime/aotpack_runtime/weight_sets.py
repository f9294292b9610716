"""The weight sets of a session: each made at its first use and shared by all that bind it; which of them an update is
for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aotpack_runtime import forks
from aotpack_runtime.bundle import Bundle
from aotpack_runtime.errors import WeightsError
from aotpack_runtime.format.index import WeightSet
from aotpack_runtime.loaders import ARRAY_WEIGHTS, WEIGHTS, loader
from aotpack_runtime.weights import unknown_weight


class WeightSets:
    """Weight sets by name, on `device`, as torch's tensors or (`tensors` is "array") as arrays. `require_open` raises
    when the session is closed. Thread-safe."""

    def __init__(self, bundle: Bundle, device: str, tensors: str, require_open: Callable[[], None]) -> None:
        self._bundle, self._device, self._tensors, self._require_open = bundle, device, tensors, require_open
        self._made: dict[str, Any] = {}
        self._lock = forks.lock(forks.SESSION)

    def get(self, name: str) -> Any:
        """The set called `name`, its file mapped at the first use."""
        weights = self._made.get(name)
        if weights is None:
            with self._lock:
                self._require_open()
                weights = self._made.get(name)
                if weights is None:
                    weights = self._made[name] = self._make(name)
        return weights

    def as_torch(self, name: str) -> Any:
        """The set as torch's tensors, over the same memory, where sets are arrays."""
        return self.get(name).as_torch()

    def update(self, new: Mapping[str, Any], bound: Iterable[tuple[str, str]]) -> None:
        """Replace weights by name in the sets that are `bound` (set, entry), all or nothing; WeightsError says what is
        wrong."""
        with self._lock:
            self._require_open()
            chosen = self._chosen(new, bound)
            checked = [(self.get(name), self.get(name).check(part)) for name, part in chosen.items()]
            for weights, values in checked:
                weights.replace(values)

    def close(self) -> None:
        with self._lock:
            for weights in self._made.values():
                weights.close()
            self._made.clear()

    def _make(self, name: str) -> Any:
        record = self._bundle.index.weight_sets.get(name, WeightSet({}))
        on_host = self._device == "cpu"
        file = self._bundle.weights(keep=on_host, check=on_host) if record.weights else None
        if self._tensors == "torch":
            weights = loader(WEIGHTS).TorchWeights(file, record, self._device)
        else:
            weights = loader(ARRAY_WEIGHTS).ArrayWeights(file, record, self._device)
        if file is not None:
            self._bundle.check_weights()  # copies to a GPU were made meanwhile; none was used
        return weights

    def _chosen(self, new: Mapping[str, Any], bound: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
        """Weight set -> the part of `new` that it holds."""
        owners: dict[str, set[str]] = {}
        for name, entry in bound:
            owners.setdefault(name, set()).add(entry)
        known = self._bundle.index.weight_sets
        sets = {name: known[name] for name in owners if name in known}
        chosen: dict[str, dict[str, Any]] = {}
        for given, value in new.items():
            prefix, colon, rest = given.partition(":")
            wanted = rest if colon else given
            found = [n for n, item in sets.items() if wanted in item.weights and (not colon or prefix in owners[n])]
            if not found:
                names = {name: None for item in sets.values() for name in item.weights}
                raise WeightsError(unknown_weight(given, names))
            for name in found:
                chosen.setdefault(name, {})[wanted] = value
        return chosen
