"""The public door: `load` a bundle, call its entries, watch it, replace its weights, close it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from aotpack_runtime import forks
from aotpack_runtime.ahead import begin, get_ready, open_device
from aotpack_runtime.bundle import Bundle, Check, open_bundle
from aotpack_runtime.entry import Entry
from aotpack_runtime.errors import AotpackError, SessionClosed, TargetMismatch, UnknownEntry
from aotpack_runtime.fallbacks import POLICIES
from aotpack_runtime.format import index
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.target import DEVICE, Machine
from aotpack_runtime.imported import imported
from aotpack_runtime.loaders import (
    KERNEL_OPERATORS,
    LIBRARY_MEMORY,
    OPERATORS,
    loader,
)
from aotpack_runtime.logs import configure
from aotpack_runtime.machine import (
    allowed_mismatches,
    cache_dir,
    check_numbers,
    in_main_interpreter,
    named_cache,
    this_machine,
)
from aotpack_runtime.on_miss import checked
from aotpack_runtime.verdict import judge, reject_variant
from aotpack_runtime.weight_sets import WeightSets

if TYPE_CHECKING:  # each kind of entry is imported where a bundle has one
    from aotpack_runtime.array import Array
    from aotpack_runtime.kernel_entry import KernelEntry
    from aotpack_runtime.torch_entry import TorchEntry

Mode = Literal["strict", "eager", "jit"]
Tensors = Literal["torch", "array"]
_POLICY_OF_MODE = {"strict": "error", "eager": "eager", "jit": "jit"}


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    tensors: Tensors | None = None,
    mode: Mode | None = None,
    source: Literal["auto", "never"] = "auto",
    check: Check | None = None,
    allow: Iterable[str] = (),
    machine: Machine | None = None,
    on_miss: Mapping[str, Any] | None = None,
) -> Session:
    """Open the bundle at `path` (a folder or an archive) for `device`, after judging that it fits this host.

    `tensors` says what models are called with: `torch`, or `array`, where models are served without importing torch
    and take and return arrays (NumPy, DLPack, buffers, `Array`). By default it is `torch` where torch is imported
    already, and `array` where it is not; torch's tensors work there as well, once there are any.

    `mode` says what a miss does, over the manifest's `on_miss` and the variable AOTPACK_MODE: `strict` raises
    GuardMiss, `eager` runs the bundle's program, `jit` as well and compiles behind the traffic what is expected to pay.
    `on_miss` sets single words of the manifest's `on_miss` for every entry, such as {"background": False}: `policy`
    (jit, eager, error), `when`, `background`, `max_jit`, `max_seconds`, `max_memory`.
    `source="never"` keeps the model's own source out of it. `check` is how much is hashed before it is used: `full`,
    `index` or `off`. `allow` names requirements not to judge (`torch`, `cpu`, `glibc`, ...).

    No library is opened and nothing is loaded yet: variants load at their first hit, or in `warmup`.
    Raises BundleError when the bundle cannot be used, TargetMismatch when nothing in it can run here.
    """
    chosen = mode or os.environ.get("AOTPACK_MODE") or None
    if chosen not in (None, *_POLICY_OF_MODE):
        raise AotpackError(f"{'mode' if mode else 'AOTPACK_MODE'} is {chosen!r}; expected strict, eager or jit")
    if tensors not in (None, "torch", "array"):
        raise AotpackError(f"tensors is {tensors!r}; expected torch or array")
    if source not in ("auto", "never"):
        raise AotpackError(f"source is {source!r}; expected auto or never")
    if not re.fullmatch(DEVICE, device):
        raise AotpackError(f"device is {device!r}; expected cpu, cuda or cuda:N")
    if not in_main_interpreter():
        raise AotpackError(
            "a bundle is served in Python's main interpreter, and this is another one",
            hint="with mod_wsgi: WSGIApplicationGroup %{GLOBAL}",
        )
    words = checked(on_miss or {})
    check_numbers()
    configure()
    bundle = open_bundle(path, check=check)
    try:
        return Session(
            bundle,
            device=device,
            tensors=tensors or ("torch" if sys.modules.get("torch") is not None else "array"),
            policy=_POLICY_OF_MODE[chosen] if chosen else words.get("policy"),
            source=source,
            machine=machine or this_machine(),
            allow=frozenset(allow) | allowed_mismatches(),
            on_miss=words,
        )
    except BaseException:
        bundle.close()
        raise


class Session:
    """A loaded bundle. `session["encoder"]` is a callable; a session is safe to use from many threads."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        device: str,
        tensors: Tensors,
        policy: str | None,
        source: str,
        machine: Machine,
        allow: frozenset[str],
        on_miss: Mapping[str, Any] = {},
    ) -> None:
        self.bundle, self.device, self.tensors = bundle, device, tensors
        self._on_miss, self._cache = on_miss, named_cache()
        self._lock = forks.lock(forks.SESSION)
        self._closed = False
        self._warm: set[str] = set()
        self._jit: Any = None
        with_models = any(record.kernel is None for record in bundle.index.entries.values())
        self._torch_device = _numbered(device) if with_models else device
        if with_models:
            bundle.check_weights_ahead()
            open_device(self._torch_device, libraries=tensors == "array")
        self._weights = WeightSets(bundle, self._torch_device, tensors, self._require_open)
        self._machine, self._allow = machine.on(int(self._torch_device.partition(":")[2] or 0)), allow
        judged = judge(
            bundle.index, device, self._machine, allow, strict=policy == "error",
            compiles=lambda record: (policy or record.on_miss.get("policy")) == "jit" and _compiles_kernels(record),
        )  # fmt: skip
        self.verdict, self.skipped, self._elsewhere = judged
        self._entries = {
            name: self._open(record, policy or record.on_miss.get("policy", "eager"), source)
            for name, record in bundle.index.entries.items()
            if name not in self._elsewhere
        }
        sets = {variant.weights for entry in self._entries.values() for variant in entry.variants}
        served = sets & bundle.index.weight_sets.keys()
        if tensors == "array" and self._torch_device != "cpu" and len(served) == 1:
            begin(lambda: self._weights.get(*served))  # which of several are needed, calls will show
        if served and self._torch_device != "cpu":
            hot = [[variant for variant in entry.variants if variant.tier == "hot"] for entry in self._entries.values()]
            get_ready(self._torch_device, bundle, [first for first, *_ in filter(None, hot)])
        if sys.modules.get("torch") is not None:
            self.register_operators()

    def __getitem__(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            if name in self._elsewhere:
                raise TargetMismatch(f"entry {name!r}", self._elsewhere[name]) from None
            raise UnknownEntry(name, list(self._entries)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def warmup(self, tier: Literal["hot", "warm", "rare", "all"] = "hot") -> dict[str, float]:
        """Load the variants of `tier` and run each once with made-up inputs; seconds by variant.

        State that the model keeps is put back afterwards. What does not load is reported in `status`, not raised.
        """
        self._require_open()
        seconds: dict[str, float] = {}
        for entry in self._entries.values():
            for variant in entry.variants:
                if tier not in ("all", variant.tier):
                    continue
                start = time.perf_counter()
                self._run_once(entry, variant)
                seconds[variant.id] = time.perf_counter() - start
        self._warm.add(tier)
        return seconds

    def status(self) -> dict[str, Any]:
        """A plain dict for a readiness probe and for people: nothing in it is a tensor, all of it is JSON.

        `ready` is true when every hot variant that fits this host is loaded.
        """
        entries = {name: entry.counts() for name, entry in self._entries.items()}
        hot = {v.id for entry in self._entries.values() for v in entry.variants if v.tier == "hot"}
        loaded = {name for counts in entries.values() for name in counts["loaded"]}
        index = self.bundle.index
        hits, misses = [sum(counts[name] for counts in entries.values()) for name in ("hits", "misses")]
        return {
            "bundle": {"name": index.name, "version": index.version, "digest": self.bundle.digest},
            "device": self.device,
            "tensors": self.tensors,
            "verdict": self.verdict,
            "ready": not self._closed and hot - self._skipped(entries) <= loaded,
            "hits": hits,
            "misses": misses,
            "misses_per_1000": round(1000 * misses / (hits + misses), 3) if hits + misses else 0.0,
            "errors": sum(counts["errors"] for counts in entries.values()),
            "jit": self._behind().status() if any(e.policy == "jit" for e in self._entries.values()) else None,
            "entries": entries,
        }

    def register_operators(self) -> list[str]:
        """Register the kernels that name an operator ("ns::name") with torch; the names. `load` does it by itself when
        torch is imported already.

        An operator calls the entry of the session that was loaded last. Raises ArtifactError when the name stands for
        another schema.
        """
        kernels = [(entry, entry.record.kernel) for entry in self._entries.values()]
        found = [(entry, kernel.operator) for entry, kernel in kernels if kernel is not None and kernel.operator]
        for entry, _ in found:
            loader(KERNEL_OPERATORS).register(entry)
        return [operator for _, operator in found]

    def put(self, array: Any) -> Array:
        """An array of any kind on the session's device, as entries for CUDA take it; on the CPU the same memory.

        On a GPU its memory may be used again as soon as nobody holds it: with streams of your own, hold it until the
        work that reads it is done.
        """
        from aotpack_runtime.host_arrays import read_array

        found = read_array(array)
        if found is None or found.array is None:
            odd = f" that {found.meta.odd}" if found is not None else ""
            raise AotpackError(f"expected an array, got {type(array).__name__}{odd}")
        if found.array.device == self._torch_device:
            return found.array
        moved: Array = loader(LIBRARY_MEMORY).put(found.array, self._torch_device)
        return moved

    def update_weights(self, new: Mapping[str, Any]) -> None:
        """Replace weights by name in every variant and fallback, all or nothing.

        Tensors are copied; shapes and dtypes must be those of the bundle. A name may be given as `entry:name` when
        entries hold different tensors of one name. Calls that run meanwhile see the old weights or the new ones,
        never a mixture. WeightsError names what is wrong and nothing is changed.
        """
        bound = [
            (variant.weights, name)
            for name, entry in self._entries.items()
            for variant in (*entry.variants, *entry.programs)
        ]
        self._weights.update(new, bound)

    def close(self) -> None:
        """Let go of everything; calls raise SessionClosed from now on. Tensors that were returned stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._jit is not None:
            self._jit.close()
        # Not under the lock: an entry that loads a variant holds its own and asks for this one.
        for entry in self._entries.values():
            entry.close()
        self._weights.close()
        self.bundle.close()

    # -----------------------------------------------------------------------------------------------------------

    def _open(self, record: index.Entry, policy: str, source: str) -> Entry:
        shared: dict[str, Any] = {
            "bundle": self.bundle,
            "device": self.device,
            "policy": policy if policy in POLICIES else "eager",
            "source_policy": source,
            "variants": [variant for variant in record.variants if variant.id not in self.skipped],
            "programs": [program for program in record.programs if program.id not in self.skipped],
            "skipped": [(item.id, self.skipped[item.id]) for item in record.variants if item.id in self.skipped],
        }
        watch = self._watch if shared["policy"] == "jit" or os.environ.get("AOTPACK_MISS_LOG") else None
        if record.kernel is None:
            shared["device"] = self._torch_device

            def torch_entry(weights: Callable[[str], Any]) -> TorchEntry:
                from aotpack_runtime.torch_entry import TorchEntry

                if record.operators or record.imports:
                    loader(OPERATORS).require(record)
                return TorchEntry(record, weights=weights, watch=watch, **shared)

            if self.tensors == "torch":
                return torch_entry(self._weights.get)
            if record.operators:  # what is missing is told now: these variants are served through torch
                loader(OPERATORS).require(record)
            from aotpack_runtime.array_entry import ArrayEntry

            return ArrayEntry(
                record, weights=self._weights.get, beside=lambda: torch_entry(self._weights.as_torch), **shared
            )
        from aotpack_runtime.kernel_entry import KernelEntry

        return KernelEntry(
            record,
            machine=self._machine,
            reject=lambda variant, machine: reject_variant(variant, self.device, machine, self._allow),
            watch=watch,
            **shared,
        )

    def _watch(self, entry: TorchEntry | KernelEntry) -> Any:
        """What looks at the misses of `entry`: made at its first, as is what all of them share."""
        from aotpack_runtime.jit.counted import Counted
        from aotpack_runtime.jit.kernel_misses import KernelMisses
        from aotpack_runtime.jit.model_misses import ModelMisses
        from aotpack_runtime.jit.watch import Misses, Watch
        from aotpack_runtime.torch_entry import TorchEntry

        self._require_open()
        if entry.policy != "jit":
            return Counted(entry.record.name)
        behind = self._behind()
        misses: Misses = ModelMisses(behind, entry) if isinstance(entry, TorchEntry) else KernelMisses(behind, entry)
        return Watch(behind, entry, misses, {**entry.record.on_miss, **self._on_miss})

    def _behind(self) -> Any:
        """What compiles behind the misses of all entries."""
        if self._jit is None:
            from pathlib import Path

            from aotpack_runtime.jit.service import Jit

            with self._lock:
                if self._jit is None:
                    cache = Path(self._cache) if self._cache else cache_dir()
                    self._jit = Jit(self.bundle, self._torch_device, self._machine, self._allow, cache)
        return self._jit

    def _weight_set(self, name: str) -> Any:
        return self._weights.get(name)

    def _run_once(self, entry: Entry, variant: Variant) -> None:
        """Of a kernel it is loaded, not run: what it writes is the caller's."""
        try:
            entry.load(variant)
        except SessionClosed:  # meanwhile
            raise
        except AotpackError as error:
            entry.set_aside(variant, error)
            return
        if entry.record.kernel is not None:
            return
        weights = self._weights.get(variant.weights)
        if weights.state_lock is None:
            entry.run_example(variant)
            return
        with weights.state_lock:
            state = weights.snapshot()
            try:
                entry.run_example(variant)
            finally:
                weights.restore(state)

    def _skipped(self, entries: Mapping[str, Any]) -> set[str]:
        return {name for counts in entries.values() for name in counts["skipped"]}

    def _require_open(self) -> None:
        if self._closed:
            raise SessionClosed("the session is closed", hint="load the bundle again")


def _compiles_kernels(record: index.Entry) -> bool:
    """Can a miss of this kernel be compiled here?"""
    from aotpack_runtime.jit.kernel_misses import no_compiler

    return not no_compiler(record)


def _numbered(device: str) -> str:
    """The one device that models are on: "cuda" is torch's current one where torch is in use, else the first."""
    if device != "cuda":
        return device
    torch = imported("torch")
    return f"cuda:{torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0}"
