"""A model as a callable: its variants, programs and source, over one set of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from aotpack_runtime.arguments import (
    compile_entry,
    container_key,
    describe,
    flatten_all,
    is_plain_key,
    leaf_kinds_of,
    leaf_paths,
)
from aotpack_runtime.assemble import Serve, assemble
from aotpack_runtime.bundle import Bundle
from aotpack_runtime.dispatch import Dispatcher, Hit, Miss
from aotpack_runtime.entry import Entry
from aotpack_runtime.errors import AotpackError, ArtifactError
from aotpack_runtime.fallbacks import FALLBACKS, POLICIES
from aotpack_runtime.format import index
from aotpack_runtime.format.guard import TensorGuard
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.order import in_order
from aotpack_runtime.format.tree import LEAF
from aotpack_runtime.imported import imported
from aotpack_runtime.loaders import INPUTS, LOADERS, loader


class TorchEntry(Entry):
    """A callable that binds like the model's own forward(), and returns what eager returns."""

    def __init__(
        self,
        record: index.Entry,
        *,
        bundle: Bundle,
        weights: Callable[[str], Any],
        policy: str,
        **rest: Any,
    ) -> None:
        super().__init__(record, policy=policy, **rest)
        self.weights, self._bundle = weights, bundle
        self._serves: dict[tuple[str, bool], Serve] = {}
        self._dispatcher = Dispatcher(record.parameter_names, self.variants, self._skipped)
        self._fallbacks = [import_module(FALLBACKS[way]).Fallback(self) for way in POLICIES[policy]]
        self._written = self._any("written")
        self._leaf_kinds = leaf_kinds_of(record, (*self.variants, *self.programs))
        self._bind = compile_entry(record.parameters, None, aligned=False, memo={}, slow=lambda key, values: values)
        self._install(compile_entry(record.parameters, None, aligned=False, memo={}, slow=self._call))
        self._fast = False

    def explain(self, /, *args: Any, **kwargs: Any) -> Hit | Miss:
        """Which variant this call would hit, or why each was turned down. Runs and loads nothing."""
        values = self._bind(*args, **kwargs)
        trees, leaves = flatten_all(values)  # type: ignore[arg-type]
        return self._dispatcher.choose(describe(trees, leaves, self.device))

    def load(self, variant: Variant) -> None:
        """Load a variant now rather than at its first call."""
        self.serve_for(variant)

    def run_example(self, variant: Variant) -> None:
        """Run a variant once with made-up inputs."""
        inputs, fills = loader(INPUTS), self.record.fills
        leaves = inputs.make_leaves(variant.guards, variant.examples[0], fills, device=self.device)
        self.serve_for(variant)(*leaves)

    def serve_for(self, variant: Variant, *, counted: bool = True) -> Serve:
        """The function that serves calls judged to fit `variant`, loaded once however many threads ask; its calls are
        counted as calls of the variant, or (for a way that counts for itself) not."""
        key = (variant.id, counted)
        serve = self._serves.get(key)
        if serve is None:
            with self._lock:
                serve = self._serves.get(key)
                if serve is None:
                    weights = self.weights(variant.weights)
                    executable = self._executables.get(variant.id)
                    if executable is None:
                        module = loader(LOADERS[variant.artifact.kind])
                        files = self._files.get(variant.id, self._bundle.files)
                        executable = module.load(variant, files(variant), weights)
                        self._executables[variant.id] = executable
                    tick = self.counter(variant.id) if counted else int
                    serve = self._serves[key] = assemble(variant, executable, tick=tick, lock=weights.state_lock)
        return serve

    def adopt(self, variants: Sequence[Variant], files: Callable[[Variant], Mapping[str, str]]) -> None:
        """Dispatch to these variants as well, which were compiled on this host; `files` gives their checked paths.
        They are loaded first: AotpackError when one cannot be, and nothing has changed then."""
        new = [variant for variant in variants if variant.id not in self._adopted]
        self._files |= {variant.id: files for variant in new}
        for variant in new:
            self.load(variant)
        with self._lock:
            self._adopted |= {variant.id: variant for variant in new}
            gone = {name for name, _ in self._skipped} & self._adopted.keys()
            self._skipped = [(name, reason) for name, reason in self._skipped if name not in gone]
            self._dispatch([*self._dispatcher.variants, *new])

    def release(self, variant: Variant) -> None:
        """Dispatch no longer to a variant that was adopted, and let go of it."""
        with self._lock:
            self._let_go(variant)
            executable = self._executables.get(variant.id)
            self._forget(variant)
        if executable is not None:
            executable.release()

    def serve_of(self, call: Any) -> Serve | None:
        """What serves a call by a variant, None when none takes it now."""
        decision = self._dispatcher.choose(call)
        if isinstance(decision, Miss):
            return None
        try:
            return self.serve_for(decision.variant)
        except AotpackError as error:
            self.set_aside(decision.variant, error)
            return None

    def close(self) -> None:
        """Let go of every executable; calls raise SessionClosed from now on."""
        super().close()
        with self._lock:
            self._serves.clear()

    # ------------------------------------------------------------------------------------------------ a call

    def _call(self, key: tuple[object, ...] | None, values: tuple[object, ...]) -> object:
        """A call that the memo did not answer: judge it in full, serve it, remember the judgement."""
        if not self._fast and imported("torch") is not None:
            self._go_fast()
        trees, leaves = flatten_all(values)
        if self._leaf_kinds is None:
            key = container_key(trees, leaves, written=self._written)
            known = self._memo.get(key) if key is not None else None
            if known is not None:
                return known(*leaves)
        dispatcher = self._dispatcher
        serve, remember = self._judge(describe(trees, leaves, self.device), values)
        if (
            remember
            and key is not None
            and is_plain_key(key)
            and all(tree == LEAF for tree in trees) | (self._leaf_kinds is None)
        ):
            with self._lock:
                if dispatcher is self._dispatcher:  # no variant came meanwhile that would have served it
                    self._remember(key, serve)
        try:
            return serve(*leaves)
        except TypeError as error:  # perhaps of the model, which was given an array
            if step := self._next_step(values):
                error.add_note(f"{self.record.name}: {step}")
            raise

    def _next_step(self, values: tuple[object, ...]) -> str:
        """Whoever passes arrays is told how they are served."""
        from aotpack_runtime.array_arguments import is_torch
        from aotpack_runtime.host_arrays import shows_array

        trees, leaves = flatten_all(values)
        for path, leaf in zip(leaf_paths(self.record.parameter_names, trees), leaves, strict=True):
            if not is_torch([leaf]) and shows_array(leaf):
                return (
                    f"{path} is an array ({type(leaf).__qualname__}) where tensors of torch are served: pass "
                    f"torch.from_numpy({path}), or load the bundle with tensors='array' and pass arrays alone"
                )
        return ""

    def _judge(self, call: Any, values: tuple[object, ...]) -> tuple[Serve, bool]:
        """What serves this call, and whether the same serves every call judged alike."""
        while True:
            decision = self._dispatcher.choose(call)
            if isinstance(decision, Miss):
                if self._behind() and self._watch.look():
                    continue
                return self._serve_miss(decision, values)
            try:
                return self.serve_for(decision.variant), True
            except ArtifactError as error:
                self.set_aside(decision.variant, error)

    def _forget(self, variant: Variant) -> None:
        with self._lock:
            for key in [key for key in self._serves if key[0] == variant.id]:
                del self._serves[key]
            self._executables.pop(variant.id, None)
            self._dispatch([item for item in self._dispatcher.variants if item.id != variant.id])

    def _dispatch(self, variants: list[Variant]) -> None:
        """Choose among `variants` from now on; calls that were judged before are judged again."""
        ours = [variant for variant in variants if variant.id not in self._adopted]
        chosen = in_order(variants) if len(ours) < len(variants) else ours
        self._dispatcher = Dispatcher(self.record.parameter_names, chosen, self._skipped)
        self._memo.clear()
        written = self._any("written")
        if written and not self._written:
            self._written, self._fast = written, False

    def _go_fast(self) -> None:
        """torch is there now: answer judged calls from a function compiled for its tensors."""
        with self._lock:
            if self._fast:
                return
            kinds = self._leaf_kinds
            self._install(
                compile_entry(
                    self.record.parameters, kinds, memo=self._memo, slow=self._call,
                    aligned=self._any("aligned"), written=self._written,
                )
            )  # fmt: skip
            self._fast = True

    def _any(self, field: str) -> bool:
        """Does a variant ask this of a tensor?"""
        known = (*self.variants, *self._adopted.values())
        guards = (guard for variant in known for guard in variant.guards.leaves)
        return any(getattr(guard, field) for guard in guards if isinstance(guard, TensorGuard))
