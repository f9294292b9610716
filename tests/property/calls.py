"""Random calls of one entry of a bundle, each compared with eager: `python -m tests.property.calls BUNDLE ENTRY ...`.

A call is planned first (`Plan`, plain data whose repr says everything), written to a file that outlives a crash, then
made twice from the plan: once for a fresh eager model with the state of the session, once for the entry. Both must
give the same result and leave the same arguments and state behind, or both must raise. Plans follow from the seed
alone: `--only N` makes the one call number N.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import inspect
import json
import math
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import aotpack_runtime as apr
from aotpack.compilers.compare import difference
from aotpack_runtime.dispatch import Hit
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.tree import flatten

Json = Any

# ------------------------------------------------------------------------------------------------------------ plans

DTYPES = ("float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64", "complex128", "float32")
LAYOUTS = ("transposed", "expanded", "sliced", "channels_last", "odd_strides", "contiguous")
EXTRAS = (
    "grad",
    "grad",
    "nonleaf",
    "parameter",
    "subclass",
    "inference",
    "conj",
    "neg",
    "sparse",
    "meta",
    "numpy",
    "list",
)
KINDS_OF_CHANGE = (
    "dtype", "layout", "layout", "offset", "extra", "extra", "size", "size", "rank", "seed", "fill", "again", "scalar",
)  # fmt: skip
SCALARS: tuple[Any, ...] = (
    True, False, 0, 1, 2, 3, -1, 2**31, 2**63, 10**30, 3.0, 1.0, 0.5, 0.0, -0.0, math.nan, math.inf, "s", "", None, 1j, 3 + 0j,
)  # fmt: skip
MODES = (
    "plain",
    "plain",
    "plain",
    "no_grad",
    "no_grad",
    "inference",
    "autocast",
    "autocast no_grad",
    "autocast float16",
)
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 33, 65)


@dataclass(frozen=True, slots=True)
class T:
    """A tensor to make: `shape` and `layout` say how it lies in memory, `extras` what else is odd about it."""

    dtype: str
    shape: tuple[int, ...]
    seed: int = 0
    fill: tuple[int, int] | str = "randn"
    layout: str = "contiguous"
    offset: int = 0
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Again:
    """The tensor number `leaf` of this call once more: itself, or a view of it."""

    leaf: int
    how: str = "same"


@dataclass(frozen=True, slots=True)
class Plan:
    """One call: what is passed by position and by name, and what surrounds it."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    mode: str = "plain"


class Planner:
    """Plans calls of an entry from its inputs in the manifest: about half of them as the manifest says, the others
    with one to three things changed, and many that repeat the call before with one thing changed."""

    def __init__(self, entry: Json, signature: inspect.Signature, seed: int) -> None:
        self._inputs, self._signature, self._random = entry["inputs"], signature, random.Random(seed)
        self._dims = {name: _choices(size) for point in entry["points"] for name, size in point["dims"].items()}
        self._before: tuple[dict[str, Any], str] | None = None

    def next(self) -> Plan:
        rng = self._random
        if self._before is not None and rng.random() < 0.4:
            bound, mode = dict(self._before[0]), self._before[1]
            changes = rng.choice((0, 1, 1))
        else:
            bound, mode = self._plain(), rng.choice(MODES) if rng.random() < 0.4 else "plain"
            changes = rng.choice((0, 0, 0, 0, 1, 1, 2, 3))
        for _ in range(changes):
            if rng.random() < 0.1:
                mode = rng.choice(MODES)
            else:
                name = rng.choice(list(bound))
                bound[name] = self._changed(bound[name])
        self._before = bound, mode
        return self._passed(bound, mode)

    def _plain(self) -> dict[str, Any]:
        """Arguments as the manifest describes them; sizes mostly inside its ranges."""
        rng = self._random
        sizes = {
            name: rng.choice(SIZES) if rng.random() < 0.15 else rng.choice(choices)
            for name, choices in self._dims.items()
        }
        return {
            name: self._input(item, sizes)
            for name, item in self._inputs.items()
            if not (item.get("optional") and rng.random() < 0.5)
        }

    def _input(self, item: Json, sizes: Mapping[str, int]) -> Any:
        rng = self._random
        match item:
            case {"shape": shape}:
                fill = item.get("fill", "randn")
                return T(
                    item["dtype"],
                    tuple(size if isinstance(size, int) else parse(size)(sizes) for size in shape),
                    seed=rng.randrange(4),
                    fill=tuple(fill["randint"]) if isinstance(fill, dict) else fill,
                    layout=item.get("layout", "contiguous"),
                )
            case {"value": value}:
                return value
            case {"range": [low, high]}:
                return rng.choice((low, low + 1, high, rng.randint(low, high), rng.randint(low - 2, high + 2)))
            case {"list": items}:
                return [self._input(part, sizes) for part in items]
            case {"tuple": items}:
                return tuple(self._input(part, sizes) for part in items)
            case {"dict": items}:
                return {key: self._input(part, sizes) for key, part in items.items()}
        raise AssertionError(item)

    def _changed(self, plan: Any) -> Any:
        """`plan` with one thing changed."""
        rng = self._random
        match plan:
            case T():
                return self._changed_tensor(plan)
            case tuple() | list() if plan and rng.random() < 0.8:
                place = rng.randrange(len(plan))
                return type(plan)(self._changed(part) if n == place else part for n, part in enumerate(plan))
            case dict() if plan and rng.random() < 0.8:
                place = rng.choice(list(plan))
                return {key: self._changed(part) if key == place else part for key, part in plan.items()}
            case tuple() | list():
                return rng.choice((list(plan), tuple(plan), plan[:-1], [*plan, 1], None))
            case dict():
                keys = list(plan)
                return rng.choice(
                    (dict(reversed(plan.items())), {**plan, "extra": 1}, {k: plan[k] for k in keys[:-1]}, keys)
                )
        return T("float32", (), seed=1) if rng.random() < 0.1 else rng.choice(SCALARS)

    def _changed_tensor(self, plan: T) -> Any:
        rng = self._random
        match rng.choice(KINDS_OF_CHANGE):
            case "dtype":
                return replace(plan, dtype=rng.choice(DTYPES))
            case "layout":
                return replace(plan, layout=rng.choice(LAYOUTS))
            case "offset":
                return replace(plan, offset=rng.choice((1, 2, 4)))
            case "extra":
                return replace(plan, extras=(*plan.extras[-1:], rng.choice(EXTRAS)))
            case "size" if plan.shape:
                axis = rng.randrange(len(plan.shape))
                size = rng.choice((*SIZES, plan.shape[axis] + 1, max(plan.shape[axis] - 1, 0)))
                return replace(plan, shape=(*plan.shape[:axis], size, *plan.shape[axis + 1 :]))
            case "rank":
                return replace(plan, shape=rng.choice((plan.shape[1:], (*plan.shape, 1), (1, *plan.shape), ())))
            case "seed":
                return replace(plan, seed=plan.seed + 1)
            case "fill":
                odd = rng.choice(("special", "ones", (-2, 60)))
                return replace(plan, fill=odd)
            case "again":
                return Again(rng.choice((0, 0, 1)), rng.choice(("same", "view", "tail")))
        return rng.choice(SCALARS)

    def _passed(self, bound: dict[str, Any], mode: str) -> Plan:
        """`bound` by position or by name, now and then as Python does not take it."""
        rng = self._random
        parameters = self._signature.parameters
        by_position = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        count = 0
        while count < len(by_position) and by_position[count] in bound:
            count += 1
        count = rng.randint(0, count)
        args = [bound[name] for name in by_position[:count]]
        kwargs = [(name, value) for name, value in bound.items() if name not in by_position[:count]]
        optional = [n for n, p in parameters.items() if p.default is not p.empty and n not in bound]
        if optional and rng.random() < 0.15:
            name = rng.choice(optional)
            kwargs.append((name, rng.choice((parameters[name].default, parameters[name].default, rng.choice(SCALARS)))))
        rng.shuffle(kwargs)
        match rng.choice((*[""] * 30, "unknown", "missing", "extra", "twice")):
            case "unknown":
                kwargs.append((rng.choice(("unknown", "self", "_key", "_memo")), rng.choice((1, T("float32", (2,))))))
            case "missing" if kwargs:
                kwargs.pop()
            case "missing" if args:
                args.pop()
            case "extra":
                args.append(rng.choice((1, None, T("float32", (1,)), Again(0))))
            case "twice" if count:
                kwargs.append((by_position[0], args[0]))
        return Plan(tuple(args), tuple(kwargs), mode)


def _choices(size: Json) -> list[int]:
    """Sizes inside what a point gives a dim: its ends, what is beside them, some between."""
    match size:
        case int():
            return [size]
        case list():
            return list(size)
        case {"ranges": ranges}:
            return [choice for part in ranges for choice in _choices(part)]
        case {"min": low, "max": high}:
            middle = (low + high) // 2
            return sorted({low, min(low + 1, high), middle, min(middle + 1, high), high})
    raise AssertionError(size)


# ------------------------------------------------------------------------------------------------------- from plans


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


def make(plan: Any, made: list[torch.Tensor]) -> Any:
    """What `plan` stands for, made anew; tensors are appended to `made`."""
    match plan:
        case T():
            return _tensor(plan, made)
        case Again():
            return _again(plan, made)
        case tuple() | list():
            return type(plan)(make(part, made) for part in plan)
        case dict():
            return {key: make(part, made) for key, part in plan.items()}
    return plan


def _again(plan: Again, made: list[torch.Tensor]) -> Any:
    if plan.leaf >= len(made):
        return None
    tensor = made[plan.leaf]
    if plan.how == "same" or not tensor.dim() or tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.detach()
    return tensor[1:] if plan.how == "tail" else tensor.view_as(tensor)


def _tensor(plan: T, made: list[torch.Tensor]) -> Any:
    with torch.inference_mode("inference" in plan.extras):
        tensor: Any = _laid_out(_values(plan), plan)
        for extra in plan.extras:
            tensor = _with_extra(tensor, extra)
    if isinstance(tensor, torch.Tensor):
        made.append(tensor)
    return tensor


def _values(plan: T) -> torch.Tensor:
    generator = torch.Generator().manual_seed(plan.seed)
    match plan.fill:
        case (int(low), int(high)):
            return torch.randint(low, high, plan.shape, generator=generator).to(getattr(torch, plan.dtype))
        case "ones":
            return torch.ones(plan.shape).to(getattr(torch, plan.dtype))
    values = torch.randn(plan.shape, generator=generator)
    if plan.fill == "special" and values.numel():
        chosen = torch.randint(0, 4, plan.shape, generator=generator)
        values = torch.tensor([math.nan, math.inf, -0.0, 1e30])[chosen]
    if plan.dtype.startswith("complex"):
        values = torch.complex(values, torch.randn(plan.shape, generator=generator))
    elif not plan.dtype.startswith(("float", "bfloat")):
        values = values.nan_to_num(0, 2, -2).clamp(-2, 2).abs()
    return values.to(getattr(torch, plan.dtype))


def _laid_out(values: torch.Tensor, plan: T) -> torch.Tensor:
    """The same values and shape in memory of another layout, where the shape has one."""
    shape, last = plan.shape, len(plan.shape) - 1
    match plan.layout:
        case "transposed" if last >= 1:
            values = values.transpose(-1, -2).contiguous().transpose(-1, -2)
        case "expanded" if last >= 0 and values.numel():
            values = values.narrow(0, 0, 1).clone().expand(shape)
        case "sliced" if last >= 0:
            values = torch.stack((values, values), -1).flatten(last)[..., ::2] if values.numel() else values
        case "channels_last" if last == 3:
            values = values.contiguous(memory_format=torch.channels_last)
        case "odd_strides" if 1 in shape:
            strides = [999 if size == 1 else stride for size, stride in zip(shape, values.stride(), strict=True)]
            values = values.as_strided(shape, strides)
    if plan.offset:
        whole = torch.empty(values.untyped_storage().nbytes() // values.itemsize + plan.offset, dtype=values.dtype)
        moved = whole.as_strided(values.shape, values.stride(), plan.offset)
        values = moved.copy_(values) if plan.layout != "expanded" else whole.fill_(1).as_strided(
            values.shape, values.stride(), plan.offset
        )  # fmt: skip
    return values


def _with_extra(tensor: Any, extra: str) -> Any:
    """The tensor with one more oddity, where it can have it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return tensor
    continuous = tensor.is_floating_point() or tensor.is_complex()
    match extra:
        case "grad" if continuous and tensor.is_leaf:
            return tensor.requires_grad_()
        case "nonleaf" if continuous and tensor.is_leaf:
            with torch.enable_grad():
                return tensor.requires_grad_() * 1
        case "parameter" if tensor.is_leaf:
            return torch.nn.Parameter(tensor, requires_grad=continuous)
        case "subclass":
            return tensor.as_subclass(Plain)
        case "conj" if tensor.is_complex():
            return tensor.conj()
        case "neg" if continuous:
            return torch._neg_view(tensor)
        case "sparse" if tensor.dim() and continuous:
            return tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().to_sparse()
        case "meta":
            return tensor.to("meta")
        case "numpy" if tensor.dtype is not torch.bfloat16:
            return tensor.detach().resolve_conj().resolve_neg().numpy()
        case "list":
            return tensor.detach().tolist()
    return tensor


@contextlib.contextmanager
def surrounded(mode: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for word in mode.split():
            match word:
                case "no_grad":
                    stack.enter_context(torch.no_grad())
                case "inference":
                    stack.enter_context(torch.inference_mode())
                case "autocast":
                    dtype = torch.float16 if "float16" in mode else torch.bfloat16
                    stack.enter_context(torch.autocast("cpu", dtype=dtype))
        yield


# --------------------------------------------------------------------------------------------------------- comparing


@dataclass(slots=True)
class Seen:
    """What a call did: its result or error, its arguments afterwards."""

    result: Any = None
    error: Exception | None = None
    arguments: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)


def watch(function: Any, plan: Plan) -> Seen:
    """Make the arguments of `plan` and call `function` with them."""
    seen = Seen()
    args = [make(part, seen.tensors) for part in plan.args]
    kwargs = {name: make(part, seen.tensors) for name, part in plan.kwargs}
    seen.arguments = [args, kwargs]
    try:
        with surrounded(plan.mode):
            seen.result = function(*args, **kwargs)
    except Exception as error:
        seen.error = error
    return seen


def compare(eager: Seen, ours: Seen) -> str | None:
    """How our call differs from eager's in one line; None when it does not."""
    if eager.error is not None or ours.error is not None:
        if eager.error is not None and ours.error is not None:
            return None
        if eager.error is not None:
            return f"eager raises {_words(eager.error)}, ours returns"
        assert ours.error is not None
        return f"ours raises {_words(ours.error)}, eager returns"
    # Eager itself reads stray memory where a meta tensor meets a real one (`embedding`, torch 2.13).
    values = not any(tensor.is_meta for tensor in eager.tensors)
    for what, a, b in (("result", eager.result, ours.result), ("arguments", eager.arguments, ours.arguments)):
        found = difference(_comparable(a), _comparable(b), values=values) or _facts_difference(a, b)
        if found:
            return f"{what}: {found}"
    return _aliases_difference(eager, ours)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _comparable(value: Any) -> Any:
    """`value` with its tensors as plain dense ones, and arrays as tensors."""
    match value:
        case tuple() | list():
            return type(value)(_comparable(part) for part in value)
        case dict():
            return {key: _comparable(part) for key, part in value.items()}
        case torch.Tensor():
            if value.is_meta:
                return torch.zeros(value.shape, dtype=value.dtype)
            value = value.detach()
            if value.dtype is torch.complex32:  # has no comparison of its own
                value = value.to(torch.complex64)
            return value.to_dense() if value.layout is not torch.strided else value.as_subclass(torch.Tensor)
    return torch.as_tensor(value) if type(value).__module__ == "numpy" else value


def _facts_difference(eager: Any, ours: Any) -> str | None:
    """What `difference` does not look at: the class of a tensor, its device and layout, whether it asks for grad."""
    left: list[Any] = []
    right: list[Any] = []
    flatten(eager, left)
    flatten(ours, right)
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            for name in ("device", "layout", "requires_grad"):
                if getattr(a, name) != getattr(b, name):
                    return f"expected {name} {getattr(a, name)}, got {getattr(b, name)}"
            if a.is_inference() != b.is_inference():
                return f"expected is_inference() {a.is_inference()}, got {b.is_inference()}"
        if type(a) is not type(b):
            return f"expected {type(a).__name__}, got {type(b).__name__}"
    return None


def _aliases_difference(eager: Seen, ours: Seen) -> str | None:
    """Which results are, or share memory with, which arguments and results before them."""
    for n, (a, b) in enumerate(zip(_aliases(eager), _aliases(ours), strict=True)):
        if a != b:
            return f"tensor {n} of the result: expected it to be {a or 'on its own'}, it is {b or 'on its own'}"
    return None


def _aliases(seen: Seen) -> list[str]:
    leaves: list[Any] = []
    flatten(seen.result, leaves)
    found = []
    known = [(f"argument {n}", tensor) for n, tensor in enumerate(seen.tensors)]
    for n, leaf in enumerate(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)):
        same = next((f"{name} itself" for name, tensor in known if tensor is leaf), None)
        shared = same or next((f"a view of {name}" for name, tensor in known if _memory(tensor) == _memory(leaf)), "")
        found.append(shared)
        known.append((f"result {n}", leaf))
    return found


def _memory(tensor: torch.Tensor) -> object:
    """What two tensors have in common when they share memory; an object of its own where there is none to share."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.untyped_storage().nbytes():
        return object()
    return tensor.untyped_storage().data_ptr()


# ------------------------------------------------------------------------------------------------------------- a run


class Run:
    """One entry of a loaded bundle beside its eager model."""

    def __init__(self, bundle: Path, name: str, seed: int) -> None:
        sys.path.insert(0, str(bundle.parent))
        manifest = json.loads((bundle.parent / "manifest.yaml").read_text())
        record = manifest["entries"][name]
        module, _, builder = record["source"].partition(":")
        self.session = apr.load(bundle, mode="eager")
        self.entry = self.session[name]
        self._model = getattr(__import__(module), builder)().requires_grad_(False)
        self._weights = self.session._weight_set(name) if self.session.bundle.index.weight_sets[name].weights else None
        self._state = tuple(self._weights.set.state) if self._weights else ()
        self.planner = Planner(record, inspect.signature(self._model.forward), seed)
        self.tally: Counter[str] = Counter()

    def call(self, plan: Plan) -> str | None:
        """Make one call on both sides; what differs, None when nothing does."""
        model = self._eager()
        eager = watch(model, plan)
        explained = watch(self.entry.explain, plan)
        before = self._counts()
        ours = watch(self.entry, plan)
        served = [name for name, count in self._counts().items() if count != before[name]]
        self.tally.update([*served, "raised" if ours.error else "returned"])
        return (
            compare(eager, ours)
            or self._state_difference(model, eager)
            or self._tier_problem(served, explained, ours, eager)
        )

    def _eager(self) -> torch.nn.Module:
        """The model as the source builds it, with the state that the session has now."""
        if not self._state:
            return self._model
        model = copy.deepcopy(self._model)
        for name in self._state:
            owner, _, leaf = name.rpartition(".")
            tensor = self._weights.tensors[name]  # type: ignore[union-attr]
            if tensor.requires_grad:
                tensor.detach_()  # a call under autograd left its graph here; eager would keep it as well
            model.get_submodule(owner)._buffers[leaf] = tensor.clone()
        return model

    def _state_difference(self, model: torch.nn.Module, eager: Seen) -> str | None:
        if not self._state or eager.error is not None:
            return None
        buffers = dict(model.named_buffers())
        wanted = {name: buffers[name].detach() for name in self._state}
        found = difference(wanted, {name: self._weights.tensors[name].detach() for name in self._state})  # type: ignore[union-attr]
        return f"state: {found}" if found else None

    def _counts(self) -> dict[str, int]:
        counts = self.entry.counts()
        tiers = {"program": 0, "source": 0, **counts["misses_by_tier"]}
        return {"hit": counts["hits"], **tiers, "refused": counts["errors"]}

    def _tier_problem(self, served: list[str], explained: Seen, ours: Seen, eager: Seen) -> str | None:
        """`explain` must say what a call then does, and a call that does not bind must raise what Python raises."""
        try:
            inspect.signature(self._model.forward).bind(*eager.arguments[0], **eager.arguments[1])
        except TypeError:
            bad = [type(s.error).__name__ for s in (ours, explained) if type(s.error) is not TypeError]
            return f"does not bind: expected a TypeError, got {bad[0]}" if bad else None
        if explained.error is not None:
            return None if ours.error else f"explain raises {_words(explained.error)}"
        if served == ["refused"]:
            return f"refused: {ours.error}"
        hit = isinstance(explained.result, Hit)
        if ours.error is None and (served == ["hit"]) != hit:
            return f"explain says {explained.result}, the call was served by {served}"
        return None


def run(bundle: Path, entry: str, seed: int, calls: int, *, only: int | None, log: int) -> Json:
    """Make `calls` calls of one entry; what was seen. The call under way is written to the descriptor `log`."""
    run = Run(bundle, entry, seed)
    failures: list[str] = []
    for number in range(calls):
        plan = run.planner.next()
        if only not in (None, number):
            continue
        command = (
            f"python -m tests.property.calls {bundle} {entry} --seed {seed} --calls {number + 1} [--only {number}]"
        )
        text = f"{entry}, call {number}: {plan}\n  again: {command}"
        os.pwrite(log, text.encode().ljust(8000), 0)
        problem = run.call(plan)
        if problem:
            failures.append(f"{problem}\n  {text}")
    return {"entry": entry, "tally": run.tally, "failed": len(failures), "failures": failures[:5]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("entries", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=100, help="of each entry")
    parser.add_argument("--only", type=int, default=None, help="make this one call, not those before it")
    parser.add_argument("--log", type=Path, default=os.devnull, help="where the call under way is written")
    options = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for entry in options.entries:
        found = run(options.bundle.absolute(), entry, options.seed, options.calls, only=options.only, log=log)
        print(json.dumps(found), flush=True)  # noqa: T201 - this is what the command gives


if __name__ == "__main__":
    main()
