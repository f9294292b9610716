"""A kernel as a callable: arguments in, one launch on the caller's stream, nothing returned.

A call is judged once for its numbers, dtypes and alignments; calls like it are answered from the memo by a function
compiled for the entry's signature. Each device has the variants that fit it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from aotpack_runtime.arrays import Argument, is_on_gpu, read_argument, stream_of, torch_stream
from aotpack_runtime.assemble import Serve
from aotpack_runtime.bundle import Bundle
from aotpack_runtime.dispatch import Hit, KernelDispatcher, Miss
from aotpack_runtime.drivers import probe
from aotpack_runtime.entry import Entry
from aotpack_runtime.errors import AotpackError, ArtifactError, SessionClosed
from aotpack_runtime.fallbacks import FALLBACKS, KERNEL_POLICIES, Prepared
from aotpack_runtime.format import index
from aotpack_runtime.format.guard import DescriptorGuard, PointerGuard
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.target import Machine
from aotpack_runtime.format.tensor import Call, TensorMeta
from aotpack_runtime.format.tree import LEAF
from aotpack_runtime.imported import imported
from aotpack_runtime.kernel_arguments import Quick, compile_foreign, compile_kernel, int_parameters
from aotpack_runtime.kernel_numbers import Kinds, Numbers
from aotpack_runtime.loaders import LOADERS, loader
from aotpack_runtime.record import replace
from aotpack_runtime.streams import check_stream, said_stream


class KernelEntry(Entry):
    """A callable that takes the kernel's run-time arguments and the sizes of its grid, queues one launch on the
    caller's current stream and returns None before it has run.

    Tensors may be torch's, or have `__cuda_array_interface__` or `__dlpack__`; they are passed by address. The caller
    keeps them alive and answers for what numbers say about them, as with the kernel itself.
    """

    last_words = "and a kernel runs in no other way"

    def __init__(
        self,
        record: index.Entry,
        *,
        bundle: Bundle,
        device: str,
        machine: Machine,
        reject: Callable[[Variant, Machine], str | None],
        **rest: Any,
    ) -> None:
        super().__init__(record, device=device, **rest)
        assert record.kernel is not None
        self._kernel, self._bundle, self._machine, self._reject = record.kernel, bundle, machine, reject
        self._ordinal = int(device.partition(":")[2] or 0)
        self._pinned = ":" in device
        self._dispatchers: dict[int, KernelDispatcher] = {}
        self._aside: dict[int, dict[str, str]] = {}
        self._streams = threading.local()
        self._written = frozenset(record.kernel.writes)
        ways = KERNEL_POLICIES.get(self.policy, ()) if record.on_miss.get("reference") else ()
        self._fallbacks = [import_module(FALLBACKS[way]).Fallback(self) for way in ways]
        self._read_for(record.variants)

    def _read_for(self, variants: Sequence[Variant]) -> None:
        """Read calls by what guards and launches of these variants look at."""
        record = replace(self.record, variants=tuple(variants))
        leaves = [[variant.guards.leaves[place] for variant in variants] for place in range(len(record.parameters))]
        self._described = [any(isinstance(guard, DescriptorGuard) for guard in guards) for guards in leaves]
        aligned = [tuple(isinstance(guard, PointerGuard) and guard.aligned for guard in guards) for guards in leaves]
        # With several GPUs the driver has to be asked where each array is.
        quick = len(self._machine.gpus) == 1 and not any(self._described)
        self._foreign = compile_foreign(record, aligned) if quick else None
        self._bind = compile_kernel(
            record, self._described, aligned, memo={}, unseen=lambda key: None, slow=lambda key, values: values
        )
        # Keys are of another make now; a call that is being judged remembers in the old ones.
        memo = self._memo = {}
        self._kinds = Kinds(len(int_parameters(record)), partial(self._remember_in, memo))
        unseen = self._kinds.serve
        self._install(compile_kernel(record, self._described, aligned, memo=memo, unseen=unseen, slow=self._call))

    @property
    def operator(self) -> str:
        """The torch operator that it is also called by, "" for none."""
        return self._kernel.operator

    def explain(self, /, *args: Any, **kwargs: Any) -> Hit | Miss:
        """Which variant this call would hit, or why each was turned down. Runs and loads nothing."""
        values: Any = self._bind(*args, **kwargs)
        ordinal, call = self._describe(self._read(values))
        return self._dispatcher(ordinal).choose(call)

    def load(self, variant: Variant) -> None:
        """Load a variant on the session's device now rather than at its first call."""
        self._executable(variant, self._ordinal)

    def adopt(self, variants: Sequence[Variant], files: Callable[[Variant], Mapping[str, str]]) -> None:
        """Dispatch to these variants as well, which were compiled on this host; `files` gives their checked paths. They
        are loaded first, where they fit the session's GPU: AotpackError when one cannot be, and nothing has changed."""
        new = [variant for variant in variants if variant.id not in self._adopted]
        self._files |= {variant.id: files for variant in new}
        for variant in new:
            if self._reject(variant, self._machine.on(self._ordinal)) is None:
                self.load(variant)
        with self._lock:
            if self.closed:
                raise SessionClosed(f"{self.record.name}: the session is closed")
            self._adopted |= {variant.id: variant for variant in new}
            gone = {name for name, _ in self._skipped} & self._adopted.keys()
            self._skipped = [(name, reason) for name, reason in self._skipped if name not in gone]
            for aside in self._aside.values():
                for name in gone:
                    aside.pop(name, None)
            self._dispatchers.clear()
            self._read_for(self._known())

    def release(self, variant: Variant) -> None:
        """Dispatch no longer to a variant that was adopted. Its code stays loaded: graphs may launch it."""
        with self._lock:
            self._let_go(variant)
            for name in [name for name in self._executables if name.partition(" on ")[0] == variant.id]:
                del self._executables[name]
            self._dispatchers.clear()
            if not self.closed:
                self._read_for(self._known())

    def serve_of(self, call: Call) -> Serve | None:
        """A call is judged anew with its arguments, which say more than the call does."""
        return None

    def counts(self) -> dict[str, Any]:
        """As of every entry; `through_ptx` are variants in use that the driver compiled, for want of machine code."""
        ptx = [one.id for one in self.record.variants if one.artifact.kind == "ptx" and one.id in self._executables]
        return {**super().counts(), "through_ptx": ptx}

    def set_aside(self, variant: Variant, error: AotpackError, *, ordinal: int | None = None) -> None:
        """Skip a variant on one GPU, the session's own where none is named."""
        place = self._ordinal if ordinal is None else ordinal
        if place == self._ordinal:
            super().set_aside(variant, error)
        with self._lock:
            self._aside.setdefault(place, {})[variant.id] = f"does not load: {error}"
            self._dispatchers.pop(place, None)
            self._kinds.clear()

    def reject(self, variant: Variant, values: Mapping[str, Any]) -> str | None:
        """Why `variant` does not take the arguments `values`, None when it does."""
        ordinal, call = self._describe(self._read([values[name] for name in self.record.parameter_names]))
        return self._reject(variant, self._machine.on(ordinal)) or variant.guards.reject(
            call, self.record.parameter_names
        )

    def prepare(self, variant: Variant, values: Mapping[str, Any]) -> Callable[[], object]:
        """A function that launches `variant`, and no other, with the arguments `values`, which it takes (`reject`):
        for verification and tuning."""
        arguments = self._read([values[name] for name in self.record.parameter_names])
        ordinal, call = self._describe(arguments)
        foreign = not any(argument.is_torch for argument in arguments)
        serve = self._prepared(self._executable(variant, ordinal), call, arguments, foreign=foreign)
        numbers = [argument.value for argument in arguments]

        def launch() -> object:
            self._streams.handle = stream_of(arguments)
            return serve(*numbers)

        return launch

    def run_variant(self, variant: Variant, values: Mapping[str, Any]) -> None:
        """Launch `variant`, and no other."""
        self.prepare(variant, values)()

    # ------------------------------------------------------------------------------------------------ a call

    def _call(self, key: object, values: Sequence[object]) -> object:
        """A call that the memo did not answer. `key` is that of torch's tensors, None where the fast way has none."""
        quick = self._read_quickly(values) if key is None else None
        if quick is not None:
            known = self._memo.get(quick.key) or self._kinds.serve(quick.key)
            if known is not None:
                said = said_stream()
                self._streams.handle = said if said is not None else quick.stream or 0
                return known(*quick.packed)
        arguments = self._read(values)
        numbers = [argument.value for argument in arguments]
        if not all(argument.is_torch for argument in arguments if isinstance(argument.leaf, TensorMeta)):
            key = None
        foreign = key is None
        if foreign:
            key, self._streams.handle = self._foreign_key(arguments), stream_of(arguments)
            known = self._memo.get(key)
            if known is not None:
                return known(*numbers)
        ordinal, call = self._describe(arguments)
        memo, kinds = self._memo, self._kinds
        serve, remember = self._judge(ordinal, call, arguments, tuple(values), foreign=foreign)
        if not remember:
            return serve(*values)
        if memo is self._memo and all(argument.constant for argument in arguments):
            self._remember(key, serve)
            plain: Any = key if not foreign else None
            if quick is not None and not any(argument.is_torch for argument in arguments):
                plain = quick.key
                self._remember(plain, serve)
            if plain is not None and not any(self._described):
                kinds.judged(plain, lambda: self._numbers(ordinal, call, foreign=foreign))
        return serve(*numbers)

    def _numbers(self, ordinal: int, call: Call, *, foreign: bool) -> Numbers | None:
        """What serves calls that differ from this one in their ints alone; None where each is to be judged in full."""
        variants, preference = self._dispatcher(ordinal).alike(call)
        if self.policy == "jit" and any(variant.artifact.kind == "ptx" for variant in variants):
            return None  # whoever is served by what the driver compiled is watched
        how = self._ways(foreign=foreign)

        def launcher(variant: Variant) -> Callable[[Sequence[int]], Serve]:
            return partial(self._executable(variant, ordinal).sized, tick=self.counter(variant.id), **how)

        try:
            return Numbers(int_parameters(self.record), variants, preference, launcher)
        except (MemoryError, RecursionError, SyntaxError):  # an expression that Python finds too deep
            return None

    def _read_quickly(self, values: Sequence[object]) -> Quick | None:
        """The call as one of arrays with the CUDA array interface, None for any other."""
        if self._foreign is None:
            return None
        try:
            found = Quick(*self._foreign(*values))
            hash(found.key)
            if found.stream is not None:
                check_stream(found.stream)
        except Exception:
            return None
        return found

    def _read(self, values: Sequence[object]) -> list[Argument]:
        """The arguments; what is read-only and would be written is said to be."""
        said = said_stream() or 0
        arguments = [read_argument(value, said) for value in values]
        for place, argument in enumerate(arguments):
            if argument.read_only and self.record.parameter_names[place] in self._written:
                assert isinstance(argument.leaf, TensorMeta)
                arguments[place] = replace(
                    argument, leaf=replace(argument.leaf, odd="is read-only or a copy, and is written")
                )
        return arguments

    def _judge(
        self, ordinal: int, call: Call, arguments: Sequence[Argument], values: tuple[object, ...], *, foreign: bool
    ) -> tuple[Serve, bool]:
        """What serves this call, and whether it is a launch that serves all like it, or takes this call's own values;
        GuardMiss when nothing does."""
        refused: dict[str, str] = {}
        awaited = False
        while True:
            decision = self._dispatcher(ordinal).choose(call, refused)
            if isinstance(decision, Miss):
                if refused or awaited or not self._behind():
                    return self._serve_miss(decision, values)
                if self._watch.look():
                    continue
                if self._watch.background and not isinstance(self._way(decision, values), str):
                    return self._serve_miss(decision, values)
                # Nothing serves it meanwhile (or on_miss says to wait): the call waits for the compile.
                problem = self._watch.awaited(decision)
                awaited = True
                if problem:
                    return self._serve_miss(decision, values, why=f"and none is compiled for it here ({problem})")
                continue
            variant = decision.variant
            try:
                executable = self._executable(variant, ordinal)
            except ArtifactError as error:
                self.set_aside(variant, error, ordinal=ordinal)
                continue
            try:
                serve = self._prepared(executable, call, arguments, foreign=foreign)
            except ArtifactError as error:  # this call's numbers are too much for the device; others may not be
                refused[variant.id] = str(error)
                continue
            if variant.artifact.kind == "ptx" and self.policy == "jit" and self._behind():
                # The driver has compiled it, for want of machine code: that may come from the source meanwhile.
                if self._watch.look():
                    continue
                serve = self._watch.watched(Miss(call, self.record.parameter_names, (variant,)), Prepared(serve))
            return serve, True

    def _describe(self, arguments: Sequence[Argument]) -> tuple[int, Call]:
        """The GPU that the call is for, and the call as guards see it."""
        found = (self._device_of(argument) for argument in arguments if is_on_gpu(argument))
        devices = dict.fromkeys(ordinal for ordinal in found if ordinal is not None)
        state = []
        if len(devices) > 1:
            state.append(f"arguments are on several devices: {', '.join(f'cuda:{one}' for one in devices)}")
        ordinal = next(iter(devices), self._ordinal)
        if self._pinned and ordinal != self._ordinal:
            state.append(f"arguments are on cuda:{ordinal}, the session is for {self.device}")
        leaves = tuple(argument.leaf for argument in arguments)
        return ordinal, Call((LEAF,) * len(leaves), leaves, tuple(state))

    def _device_of(self, argument: Argument) -> int | None:
        """Ordinal of the GPU that an array is on; the driver is asked when neither the array nor their number says.
        None of an empty one that is nowhere."""
        assert isinstance(argument.leaf, TensorMeta)
        said = argument.leaf.device.partition(":")[2]
        if said:
            return int(said)
        if not argument.value:
            return None
        found = probe.device_of_address(argument.value) if len(self._machine.gpus) > 1 else None
        return self._ordinal if found is None else found

    def _foreign_key(self, arguments: Sequence[Argument]) -> tuple[object, ...]:
        """What guards and launches look at in arguments that are not all torch's."""
        parts: list[object] = []
        for place, argument in enumerate(arguments):
            leaf = argument.leaf
            if isinstance(leaf, TensorMeta):
                device = self._device_of(argument) if is_on_gpu(argument) else leaf.device
                parts += [leaf.dtype, device, leaf.offset, leaf.odd, argument.read_only]
                if self._described[place]:
                    parts += [argument.value, leaf.shape, leaf.strides]
            else:
                parts += [type(leaf), None if type(leaf) in (float, bool) else leaf]
        return tuple(parts)

    def _prepared(self, executable: Any, call: Call, arguments: Sequence[Argument], *, foreign: bool) -> Serve:
        variant = executable.variant
        given = [
            (argument.leaf if isinstance(argument.leaf, TensorMeta) else None, argument.value) for argument in arguments
        ]
        serve: Serve = executable.prepare(
            variant.guards.env(call),
            given,
            tick=self.counter(variant.id),
            **self._ways(foreign=foreign),
        )
        return serve

    def _ways(self, *, foreign: bool) -> dict[str, Any]:
        """How launches of calls like this one find their stream, and whether torch makes them."""
        stream = self._foreign_stream if foreign else torch_stream()
        return {"stream": stream, "through_torch": not foreign and imported("torch") is not None}

    def _foreign_stream(self, ordinal: int) -> int:
        return int(getattr(self._streams, "handle", 0))

    # ------------------------------------------------------------------------------------------------ variants

    def _dispatcher(self, ordinal: int) -> KernelDispatcher:
        """Over the variants that fit the GPU numbered `ordinal`."""
        found = self._dispatchers.get(ordinal)
        if found is None:
            with self._lock:
                machine, known = self._machine.on(ordinal), self._known()
                reasons = {variant.id: self._reject(variant, machine) for variant in known}
                reasons |= self._aside.get(ordinal, {})
                skipped = [(name, reason) for name, reason in reasons.items() if reason]
                found = self._dispatchers[ordinal] = KernelDispatcher(
                    self.record.parameter_names,
                    [variant for variant in known if not reasons[variant.id]],
                    skipped,
                    choice=self._kernel.choice,
                    capability=machine.gpu.capability if machine.gpu else None,
                )
        return found

    def _executable(self, variant: Variant, ordinal: int) -> Any:
        name = variant.id if ordinal == self._ordinal else f"{variant.id} on cuda:{ordinal}"
        found = self._executables.get(name)
        if found is None:
            with self._lock:
                found = self._executables.get(name)
                if found is None:
                    module = loader(LOADERS[variant.artifact.kind])
                    files = self._files.get(variant.id, self._bundle.files)
                    found = self._executables[name] = module.load(variant, files(variant), ordinal)
        return found

    def _known(self) -> list[Variant]:
        """The bundle's variants and those that misses compiled, which come before what the driver has to compile."""
        own = self.record.variants
        last = [variant for variant in own if variant.artifact.kind == "ptx"]
        return [*(variant for variant in own if variant not in last), *self._adopted.values(), *last]

    def _forget(self, variant: Variant) -> None:
        self._dispatchers.clear()
        self._kinds.clear()
