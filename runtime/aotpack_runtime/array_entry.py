"""A model as a callable for arrays: served through libtorch's C interface, with torch not imported.

What this door cannot serve (a miss, a package that needs torch's Python, tensors of torch) goes to a `TorchEntry`
beside it, over the same weights and state: torch is imported then, which `status` says and times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any

from aotpack_runtime.arguments import compile_entry, flatten_all, leaf_kinds_of, leaf_paths
from aotpack_runtime.array import Array
from aotpack_runtime.array_arguments import (
    compile_array_entry,
    describe_arrays,
    is_torch,
    judged_key,
)
from aotpack_runtime.array_kinds import OwnKind, kind_of
from aotpack_runtime.assemble import Assembly, Serve
from aotpack_runtime.bundle import Bundle
from aotpack_runtime.dispatch import Dispatcher, Hit, Miss
from aotpack_runtime.entry import Entry
from aotpack_runtime.errors import ArtifactError, CallError, GuardMiss, MissingDependency
from aotpack_runtime.format import index
from aotpack_runtime.format.guard import TensorGuard
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.tree import map_leaves
from aotpack_runtime.host_arrays import Given, in_numpy, read_array, sharing, why_not_torch
from aotpack_runtime.loaders import AOTI_ARRAYS, ARRAY_INPUTS, CROSSING, LIBRARY_MEMORY, loader
from aotpack_runtime.logs import logger

if TYPE_CHECKING:  # opened for what this door cannot serve
    from aotpack_runtime.torch_entry import TorchEntry


class ArrayEntry(Entry):
    """A callable that binds like the model's own forward(), takes arrays, and returns what eager returns as arrays of
    the caller's kind."""

    def __init__(
        self,
        record: index.Entry,
        *,
        bundle: Bundle,
        weights: Callable[[str], Any],
        beside: Callable[[], TorchEntry],
        policy: str,
        **rest: Any,
    ) -> None:
        super().__init__(record, policy=policy, **rest)
        self.weights, self._bundle, self._make_beside = weights, bundle, beside
        self._beside: TorchEntry | None = None
        self._import_s: float | None = None
        self._reasons_for_torch: dict[str, str] = {}
        self._assemblies: dict[str, Assembly] = {}
        self._judged: dict[object, Serve] = {}
        self._dispatcher = Dispatcher(record.parameter_names, self.variants, self._skipped)
        everything = (*self.variants, *self.programs)
        self._written = {
            guard.path
            for variant in everything
            for guard in variant.guards.leaves
            if isinstance(guard, TensorGuard) and guard.written
        }
        kinds = None if self._written else leaf_kinds_of(record, everything)
        self._bind = compile_entry(record.parameters, None, aligned=False, memo={}, slow=lambda key, values: values)
        again = loader(AOTI_ARRAYS).Misplaced
        self._install(compile_array_entry(record.parameters, kinds, memo=self._memo, slow=self._call, again=again))

    def explain(self, /, *args: Any, **kwargs: Any) -> Hit | Miss:
        """Which variant this call would hit, or why each was turned down. Runs and loads nothing."""
        values = self._bind(*args, **kwargs)
        trees, leaves = flatten_all(values)  # type: ignore[arg-type]
        if is_torch(leaves):
            return self._torch("tensors of torch were passed").explain(*args, **kwargs)
        given = [read_array(leaf) for leaf in leaves]
        return self._dispatcher.choose(describe_arrays(trees, leaves, given, self._shared(given), self.device))

    def counts(self) -> dict[str, Any]:
        """As of every entry; calls that went through torch are among them, and `torch` says why it was imported."""
        own = super().counts()
        own["through_torch"] = dict(self._reasons_for_torch)
        if self._beside is None:
            return own
        other = self._beside.counts()
        for name in ("hits", "misses", "errors"):
            own[name] += other[name]
        for name in ("hits_by_variant", "misses_by_tier", "misses_by_reason"):
            own[name] = {key: own[name].get(key, 0) + other[name].get(key, 0) for key in {**own[name], **other[name]}}
        own["loaded"] = sorted({*own["loaded"], *other["loaded"]})
        own["skipped"] = {**other["skipped"], **own["skipped"]}
        own["import_torch_s"] = self._import_s
        return own

    def load(self, variant: Variant) -> None:
        """Load a variant now rather than at its first call."""
        if not self._load_here(variant):
            self._torch(self._reasons_for_torch[variant.id]).load(variant)

    def run_example(self, variant: Variant) -> None:
        """Run a variant once with made-up inputs."""
        if variant.id in self._reasons_for_torch:
            self._torch(self._reasons_for_torch[variant.id]).run_example(variant)
            return
        leaves = loader(ARRAY_INPUTS).make_leaves(variant.guards, variant.examples[0], self.record.fills)
        if self.device != "cpu":
            put = loader(LIBRARY_MEMORY).put
            leaves = [put(leaf, self.device) if isinstance(leaf, Array) else leaf for leaf in leaves]
        given = [read_array(leaf) for leaf in leaves]
        call = describe_arrays(variant.guards.trees, leaves, given, (), self.device)
        serve = self._assembly(variant).serve(*self._plan(variant, call.leaves, leaves, kind_of(())))
        serve(*leaves)

    def close(self) -> None:
        """Let go of every executable; calls raise SessionClosed from now on."""
        super().close()
        with self._lock:
            self._judged.clear()
            self._assemblies.clear()
            if self._beside is not None:
                self._beside.close()

    # ------------------------------------------------------------------------------------------------ a call

    def _call(self, key: tuple[object, ...] | None, values: tuple[object, ...]) -> object:
        """A call that the memo did not answer: judge it in full, serve it, remember the judgement."""
        trees, leaves = flatten_all(values)
        if is_torch(leaves):
            return self._call_torch("tensors of torch were passed", values)
        given = [read_array(leaf) for leaf in leaves]
        for found in given if self.device != "cpu" else ():  # whoever serves it, a package or torch
            if found is not None and found.stream is not None:
                loader(AOTI_ARRAYS).wait_for(found.stream)
        shared = self._shared(given)
        kind = kind_of(leaves)
        judged = judged_key(trees, leaves, given, shared)
        plain = [_is_plain(leaf, found) for leaf, found in zip(leaves, given, strict=True)]
        shown = [
            leaf if is_plain or found is None else found.array
            for leaf, found, is_plain in zip(leaves, given, plain, strict=True)
        ]
        known = (kind.name, tuple(map(type, shown)), judged)
        serve = self._judged.get(known) if judged is not None else None
        if serve is None:
            call = describe_arrays(trees, leaves, given, shared, self.device)
            decision = self._dispatcher.choose(call)
            if isinstance(decision, Miss):
                return self._serve_miss_through_torch(decision, values, given)
            variant = decision.variant
            if not self._load_here(variant):
                return self._call_torch(self._reasons_for_torch[variant.id], values)
            serve = self._assembly(variant).serve(*self._plan(variant, call.leaves, shown, kind))
            if judged is not None:
                if len(self._judged) >= self._memo_limit:
                    self._judged.clear()
                self._judged[known] = serve
        if key is not None and all(plain) and not self._written:
            self._remember(key, serve)
        if all(plain):
            return serve(*shown)
        # What was read through an array of our own comes back as the caller's object.
        theirs = {id(array): leaf for array, leaf in zip(shown, leaves, strict=True) if array is not leaf}
        return map_leaves(serve(*shown), lambda leaf: theirs.get(id(leaf), leaf))

    def _plan(self, variant: Variant, described: Sequence[Any], shown: Sequence[Any], kind: OwnKind) -> tuple[Any, Any]:
        """What `Assembly.serve` takes: the plan for calls like this one, and how views of its arrays are made."""
        arrays = in_numpy("ndarray")
        plan = self._executables[variant.id].plan(described, [isinstance(leaf, arrays) for leaf in shown], kind)
        return plan, plan.view

    def _load_here(self, variant: Variant) -> bool:
        """Is the variant loaded for arrays? If it cannot be, `_reasons_for_torch` says why."""
        if variant.id in self._executables:
            return True
        with self._lock:
            if variant.id in self._executables:
                return True
            if variant.id in self._reasons_for_torch:
                return False
            try:
                module = loader(AOTI_ARRAYS)
                reason = module.needs_torch(variant)
                if reason:
                    raise ArtifactError(variant.id, reason)
                files, weights = self._bundle.files(variant), self.weights(variant.weights)
                self._executables[variant.id] = module.load(variant, files, weights)
            except (ArtifactError, MissingDependency) as error:
                logger("load").info("%s is served through torch: %s", variant.id, error)
                self._reasons_for_torch[variant.id] = str(error)
                return False
        return True

    def _assembly(self, variant: Variant) -> Assembly:
        found = self._assemblies.get(variant.id)
        if found is None:  # else not under the lock, which a miss holds for as long as it imports torch
            lock = self.weights(variant.weights).state_lock
            with self._lock:
                found = self._assemblies.get(variant.id)
                if found is None:
                    tick = self.counter(variant.id)
                    found = self._assemblies[variant.id] = Assembly(variant, tick=tick, lock=lock)
        return found

    def _shared(self, given: Sequence[Given | None]) -> tuple[int, ...]:
        """Only where a variant writes its arguments does it matter that two lie in one memory."""
        return sharing([found.array if found is not None else None for found in given]) if self._written else ()

    # ------------------------------------------------------------------------------------------- through torch

    def _serve_miss_through_torch(
        self, miss: Miss, values: tuple[object, ...], given: Sequence[Given | None]
    ) -> object:
        """Raises GuardMiss where a miss is an error, or torch is not there; CallError for an array that it would not
        take either, which is no reason to import it."""
        if self.policy == "error":
            serve, _ = self._serve_miss(miss, values)
            return serve  # `_serve_miss` has no way to serve one here, and raises
        for path, found in zip(self._paths(values), given, strict=True):
            reason = why_not_torch(found, written=path in self._written) if found is not None else ""
            if reason:
                self.counter("error")()
                raise CallError(f"{self.record.name}: {path} {reason}")
        try:
            self._torch(f"a miss: {miss.last_reason() or 'no variants'}")
        except MissingDependency as error:
            self.counter("error")()
            raise GuardMiss(
                self.record.name, miss.reasons, why=f"and torch, which would run it, is missing: {error}"
            ) from error
        return self._call_torch("", values)

    def _torch(self, reason: str) -> TorchEntry:
        """The entry for torch's tensors; the first time torch is imported, for the reason given."""
        if self._beside is None:
            with self._lock:
                if self._beside is None:
                    start = time.perf_counter()
                    there = "torch" in sys.modules
                    _open_crossing(self.record.name, reason)
                    beside = self._make_beside()
                    if not there:
                        self._import_s = time.perf_counter() - start
                        logger("load").warning(
                            "%s: torch was imported (%.2f s): %s", self.record.name, self._import_s, reason
                        )
                    self._reasons_for_torch.setdefault("", reason)
                    self._beside = beside
        return self._beside

    def _call_torch(self, reason: str, values: tuple[object, ...]) -> object:
        """The call with torch's tensors over the same memory, and its result as arrays of the caller's kind again."""
        beside = self._torch(reason)
        crossing = loader(CROSSING)
        from aotpack_runtime.fallbacks.source import split_arguments

        args, kwargs = split_arguments(self.record.parameters, values)
        _, leaves = flatten_all(values)
        if is_torch(leaves):
            return beside(*args, **kwargs)
        paths = dict(zip(map(id, leaves), self._paths(values), strict=True))
        over = crossing.Crossing(self.record.name, kind_of(leaves), paths, self._written)
        with crossing.undisturbed(self.device):  # on its stream, where arrays are ready
            args, kwargs = map_leaves(args, over.to_torch), map_leaves(kwargs, over.to_torch)
            result = beside(*args, **kwargs)
        return map_leaves(result, over.from_torch)

    def _paths(self, values: tuple[object, ...]) -> list[str]:
        return leaf_paths(self.record.parameter_names, flatten_all(values)[0])

    def _forget(self, variant: Variant) -> None:
        remaining = [item for item in self._dispatcher.variants if item.id != variant.id]
        self._dispatcher = Dispatcher(self.record.parameter_names, remaining, self._skipped)


def _is_plain(leaf: Any, found: Given | None) -> bool:
    """May a plan read this leaf itself? A number, our own array, or NumPy's whose memory is where plans look for it."""
    if found is None or found.array is leaf:
        return True
    head = object.__basicsize__
    return (
        isinstance(leaf, in_numpy("ndarray"))
        and found.array is not None
        and (c_void_p.from_address(id(leaf) + head).value or 0) == found.array.address
    )


def _open_crossing(entry: str, reason: str) -> None:
    try:
        loader(CROSSING)
    except MissingDependency as error:
        raise MissingDependency(
            "torch", needed_for=f"{entry} ({reason})", install="'aotpack-runtime[torch]'"
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ArtifactError(entry, f"is served through torch ({reason}), which cannot be imported: {what}") from error
