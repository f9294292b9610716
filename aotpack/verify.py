"""Is every variant of a bundle what eager is? Asked through the public runtime, against the model's own source.

Each variant and program is run at every example the index has for it (opt, min, max, and 0, 1 and 2 where they are
inside) and compared with the model constructed anew: values within the tolerance, containers, types, dtypes, shapes,
what was written to the arguments and to the state. Eager must take all sizes that the manifest declares. Others, that a
program was let take in host memory, it may refuse on the device: nothing can be compared there, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from aotpack.compilers.compare import difference, largest_error
from aotpack.compilers.modules import (
    import_modules,
    load_source,
    move_module,
    named_tensors,
    own_dense_weights,
)
from aotpack.kernel_verify import verify_kernel
from aotpack_runtime import Session, load
from aotpack_runtime.arguments import describe
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.dispatch import Dispatcher, Miss
from aotpack_runtime.errors import AotpackError, CompileError, SourceError, TargetMismatch
from aotpack_runtime.fallbacks.pad import Fallback as PadFallback
from aotpack_runtime.fallbacks.source import split_arguments
from aotpack_runtime.format.index import Example, Variant
from aotpack_runtime.format.tree import flatten
from aotpack_runtime.kernel_entry import KernelEntry
from aotpack_runtime.loaders.inputs import make_leaves, unflatten
from aotpack_runtime.loaders.source import select_outputs, unwrap_weights
from aotpack_runtime.store import Store
from aotpack_runtime.torch_entry import TorchEntry

Json = Any
State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verified:
    """What was seen of one variant: cases run, the largest absolute difference, and what it was compared with.
    `refused` are sizes, beyond what the manifest declares, that the reference itself does not take on this device."""

    cases: int
    largest_error: float
    compared_values: bool
    reference: str
    refused: tuple[list[Any], ...] = ()


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """The builder's job: verify one variant of a staged bundle. CompileError says how it differs."""
    return asdict(Bundle.opened(job["bundle"], Path(job["folder"])).verify(job["entry"], job["variant"]))


class Bundle:
    """A bundle open for verification, with the reference model of each entry."""

    _open: ClassVar[dict[str, Bundle]] = {}

    def __init__(
        self,
        path: str,
        folder: Path,
        *,
        need_source: bool = True,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        import_modules((), folder)  # the entries' `imports` are looked up beside the manifest first
        self.index = open_bundle(path).index
        self._path, self._folder, self._need_source, self._report = path, folder, need_source, report
        self._sessions: dict[str, Session] = {}
        self._references: dict[tuple[str, str], Reference] = {}

    def session(self, device: str) -> Session:
        """The bundle open for the device that variants are run on; TargetMismatch where there is none."""
        if device not in self._sessions:
            self._sessions[device] = load(self._path, device=device, mode="eager", source="never")
        return self._sessions[device]

    @classmethod
    def opened(cls, path: str, folder: Path) -> Bundle:
        """The bundle at `path`, opened once in this process."""
        if path not in cls._open:
            cls._open[path] = cls(path, folder)
        return cls._open[path]

    def verify(self, entry_name: str, variant_id: str) -> Verified:
        """Compare one variant or program at all its examples; CompileError with the first difference."""
        record = self.index.entries[entry_name]
        variant = next(v for v in (*record.variants, *record.programs) if v.id == variant_id)
        session = self.session(variant.target.device)
        entry = session[entry_name]
        if isinstance(entry, KernelEntry):
            return Verified(*verify_kernel(entry, variant_id, self._folder))
        assert isinstance(entry, TorchEntry)
        reference = self.reference(entry, variant.weights, session)
        settings = entry.record.verify
        random = bool(settings.get("random"))
        serve = entry.serve_for(variant)
        weights = session._weight_set(variant.weights)
        worst, cases, refused = 0.0, 0, []
        tried = [_example(item) for item in settings.get("tried", {}).get(variant_id, ())]
        for seed, example in _cases(variant, int(settings.get("samples", 3))):
            leaves = make_leaves(variant.guards, example, entry.record.fills, seed=seed, device=entry.device)
            before = weights.snapshot()
            sizes = [size for size in example if size is not None]
            mine = [_copy(leaf) for leaf in leaves]
            try:
                wanted, wrote = reference.run(variant, [_copy(leaf) for leaf in leaves], before)
            except EagerRefusesError:
                if example not in tried or not _survives(serve, mine):
                    raise
                refused.append(sizes)
                weights.restore(before)
                continue
            torch.manual_seed(0)
            with torch.no_grad():
                found = serve(*mine)
            for what, a, b in (
                ("", wanted, found),
                ("its arguments afterwards: ", wrote[0], mine),
                ("its state afterwards: ", wrote[1], weights.snapshot()),
            ):
                problem = difference(a, b, rtol=settings["rtol"], atol=settings["atol"], values=not random)
                if problem:
                    raise CompileError(
                        variant_id,
                        f"disagrees with {reference.name} at sizes {sizes}: {what}{problem}",
                        hint=reference.hint or _of_rounding(wanted),
                    )
            worst = max(worst, 0.0 if random else largest_error(wanted, found))
            weights.restore(before)
            cases += 1
        if entry.record.on_miss.get("policy") == "pad" and variant in entry.variants:
            cases += self._verify_padded(entry, variant, reference)
        itself = isinstance(reference, _Program) and variant in record.programs
        return Verified(cases, worst, not random, "itself" if itself else reference.name, tuple(refused))

    def _verify_padded(self, entry: TorchEntry, variant: Variant, reference: Reference) -> int:
        """Calls a little smaller than the variant takes, padded up and cut back: they must be what eager gives too."""
        settings, way, cases = entry.record.verify, PadFallback(entry), 0
        for seed, less in enumerate((1, 2, 3)):
            leaves = make_leaves(
                variant.guards, variant.examples[0], entry.record.fills, seed=seed, device=entry.device
            )
            for position, guard in enumerate(variant.guards.leaves):
                for axis, _ in entry.record.on_miss["pad"].get(guard.path, ()):
                    size = leaves[position].shape[axis]
                    leaves[position] = leaves[position].narrow(axis, 0, max(size - less, 1)).contiguous()
            call = describe(variant.guards.trees, leaves, entry.device)
            prepared = way.prepare(Miss(call, entry.record.parameter_names, entry.variants), tuple(leaves))
            if isinstance(prepared, str):
                continue
            wanted, _ = reference.run(variant, [_copy(leaf) for leaf in leaves], {})
            with torch.no_grad():
                found = prepared.serve(*leaves)
            problem = difference(wanted, found, rtol=settings["rtol"], atol=settings["atol"])
            if problem:
                shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
                raise CompileError(
                    variant.id, f"padded and cut back it disagrees with {reference.name} at sizes {shapes}: {problem}",
                    hint="what is padded reaches the results: use policy jit or eager",
                )  # fmt: skip
            cases += 1
        return cases

    def reference(self, entry: TorchEntry, weight_set: str, session: Session) -> Reference:
        """Eager for an entry: its source, else (where a bundle is verified far from it) its exported program."""
        key = (entry.record.name, weight_set)
        if key not in self._references:
            try:
                made: Reference = _Source(entry, self._folder, session, weight_set)
            except SourceError as error:
                if self._need_source:
                    raise
                self._report(f"{entry.record.name}: compared with the bundle's own program, not with eager: {error}")
                made = _Program(entry)
            self._references[key] = made
        return self._references[key]


def _of_rounding(result: object) -> str:
    """What to do where numbers of half precision differ; "" for other results."""
    leaves: list[Any] = []
    flatten(result, leaves)
    halves = [leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF]
    if not halves:
        return ""
    name = str(halves[0]).removeprefix("torch.")
    return (
        f"compiled code rounds {name} at other steps than eager: if that is all, allow more by `verify: {{rtol, atol}}`"
    )


HALF = (torch.bfloat16, torch.float16)


class EagerRefusesError(CompileError):
    """Eager raises at these sizes, of itself and not for want of memory."""


class Reference(Protocol):
    """What variants are compared with; `name` says what it is, `hint` what may be the matter when they disagree."""

    name: str
    hint: str

    def run(self, variant: Variant, leaves: list[Any], state: State) -> tuple[Any, tuple[list[Any], State]]:
        """(result, (leaves afterwards, state afterwards)), begun from `state`."""
        ...

    def calling(self, variant: Variant, leaves: Sequence[Any]) -> Callable[[], Any]:
        """A call of it with `leaves`, to be timed."""
        ...


class _Program:
    """The widest program of the bundle that takes the call, with the bundle's weights and state."""

    name = "the bundle's exported program"
    hint = ""

    def __init__(self, entry: TorchEntry) -> None:
        self._entry = entry

    def run(self, variant: Variant, leaves: list[Any], state: State) -> tuple[Any, tuple[list[Any], State]]:
        weights = self._entry.weights(variant.weights)
        trees = variant.guards.trees
        decision = Dispatcher(self._entry.record.parameter_names, self._entry.programs).choose(
            describe(trees, leaves, self._entry.device)
        )
        if isinstance(decision, Miss):
            raise CompileError(variant.id, f"no program of the bundle takes these sizes: {decision}")
        torch.manual_seed(0)
        with torch.no_grad():
            result = self._entry.serve_for(decision.variant)(*leaves)
        after = weights.snapshot()
        weights.restore(state)
        return result, (leaves, after)

    def calling(self, variant: Variant, leaves: Sequence[Any]) -> Callable[[], Any]:
        call = describe(variant.guards.trees, list(leaves), self._entry.device)
        decision = Dispatcher(self._entry.record.parameter_names, self._entry.programs).choose(call)
        if isinstance(decision, Miss):
            raise CompileError(variant.id, f"no program of the bundle takes these sizes: {decision}")
        serve = self._entry.serve_for(decision.variant)
        return lambda: serve(*leaves)


class _Source:
    """The model constructed from its source."""

    name = "eager"
    hint = ""

    def __init__(self, loaded: TorchEntry, folder: Path, session: Session, weight_set: str) -> None:
        self._entry = entry = loaded.record
        module = load_source(entry.source.text, entry.source.args, folder)
        dtype = session.bundle.index.weight_sets[weight_set].dtype if weight_set else ""
        if dtype:
            module.to(getattr(torch, dtype))
        if not isinstance(module, torch.fx.GraphModule):
            module.train(entry.training)
        move_module(module, loaded.device)
        unwrap_weights(module)
        own_dense_weights(module)
        self._module = module
        self._check_weights(session, weight_set)

    def run(self, variant: Variant, leaves: list[Any], state: State) -> tuple[Any, tuple[list[Any], State]]:
        tensors = named_tensors(self._module)
        with torch.no_grad():
            for name, value in state.items():
                tensors[name].copy_(value)
            rest = list(leaves)
            values = [unflatten(tree, rest) for tree in variant.guards.trees]
            args, kwargs = split_arguments(self._entry.parameters, values)
            before = _attributes(self._module)
            torch.manual_seed(0)
            try:
                result = select_outputs(self._module(*args, **kwargs), self._entry.output_names)
            except Exception as error:
                kind = CompileError if isinstance(error, torch.OutOfMemoryError) else EagerRefusesError
                raise kind(variant.id, f"eager itself fails at these sizes: {type(error).__name__}: {error}") from error
            kept = [name for name, value in _attributes(self._module).items() if _is_other(before.get(name), value)]
            if kept:
                self.hint = f"forward() sets {', '.join(kept)}: what calls keep is registered with register_buffer()"
            tensors = named_tensors(self._module)
            return result, (leaves, {name: tensors[name].clone() for name in state})

    def calling(self, variant: Variant, leaves: Sequence[Any]) -> Callable[[], Any]:
        """The model's own call with `leaves`, and nothing else: to be timed."""
        rest = list(leaves)
        values = [unflatten(tree, rest) for tree in variant.guards.trees]
        args, kwargs = split_arguments(self._entry.parameters, values)
        return lambda: self._module(*args, **kwargs)

    def _check_weights(self, session: Session, weight_set: str) -> None:
        """The bundle must hold the weights that the source constructs, bit for bit."""
        stored = session._weight_set(weight_set).tensors
        for name, tensor in named_tensors(self._module).items():
            found = stored.get(name)
            if found is None:
                raise CompileError(self._entry.name, f"the weight {name!r} of its source is not in the bundle")
            same = found.shape == tensor.shape and found.dtype == tensor.dtype
            if not same or not torch.equal(_bits(found), _bits(tensor)):
                raise CompileError(
                    self._entry.name,
                    f"its source gives another {name!r} than the bundle has",
                    hint="draw random weights from torch.manual_seed(...), and build again when the source has changed",
                )


def verify_bundle(
    path: str, folder: Path, report: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Verified | str], dict[str, str]]:
    """What was seen of each variant, or in words what is wrong with it; and which do not fit this host, and why.

    Digests are checked first: BundleError when a member changed. The source is looked up in `folder` first. `report` is
    told what is being verified, and which entries could not be compared with their source.
    """
    bundle = Bundle(path, folder.absolute(), need_source=False, report=report)
    open_bundle(path, check="full").verify()
    seen: dict[str, Verified | str] = {}
    entries = bundle.index.entries
    variants = [variant for record in entries.values() for variant in (*record.variants, *record.programs)]
    skipped: dict[str, str] = {}
    for device in sorted({variant.target.device for variant in variants}):
        ours = {variant.id for variant in variants if variant.target.device == device}
        try:
            skipped |= {name: reason for name, reason in bundle.session(device).skipped.items() if name in ours}
        except TargetMismatch as error:
            if len(ours) == len(variants):
                raise
            skipped |= {name: error.reasons.get(name, str(error)) for name in ours}
    for name, record in entries.items():
        for variant in (*record.variants, *record.programs):
            if variant.id in skipped:
                continue
            report(f"verifying {variant.id}")
            try:
                seen[variant.id] = bundle.verify(name, variant.id)
            except AotpackError as error:
                seen[variant.id] = str(error)
    return seen, skipped


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Tensors and scalars that modules hold as plain attributes, by name."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, owner in module.named_modules()
        for name, value in vars(owner).items()
        if not name.startswith("_") and isinstance(value, torch.Tensor | bool | int | float | str | None)
    }


def _is_other(before: Any, after: Any) -> bool:
    both = isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor)
    return before is not after if both else bool(before != after)


def _cases(variant: Variant, samples: int) -> list[tuple[int, Example]]:
    """(seed, sizes): every example once, and the first, its opt, with further inputs up to `samples` in all."""
    cases = [(seed, example) for seed, example in enumerate(variant.examples)]
    return cases + [(seed, variant.examples[0]) for seed in range(len(cases), samples)]


def _example(record: Json) -> Example:
    return tuple(tuple(item) if isinstance(item, list) else item for item in record)


def _survives(serve: Callable[..., object], leaves: Sequence[Any]) -> bool:
    """Is the device still there, after eager has refused a call and after the same call of a program? What the program
    gives is not looked at: it may raise as well."""
    with torch.no_grad(), suppress(Exception):
        serve(*leaves)
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
