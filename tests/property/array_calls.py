"""Random calls with arrays: `python -m tests.property.array_calls BUNDLE ENTRY ...`.

Each call is planned as `tests.property.calls` plans it, and made twice from the plan: with torch's tensors in a session
for torch, with arrays of several kinds over the same values in a session for arrays. Both must be judged alike, give the
same bits, hand back the same arguments, and leave the same arguments and state behind; or both must raise.
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import json
import os
import random
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aotpack_runtime as apr
from aotpack_runtime.dispatch import Hit
from aotpack_runtime.format.tree import flatten, map_leaves
from aotpack_runtime.host_arrays import read_array
from tests.property.calls import Again, Plan, Planner, T, make

Json = Any
KINDS = ("numpy", "numpy", "numpy", "own", "dlpack", "interface", "buffer", "read-only")


class DLPackOnly:
    """An array that shows nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> object:
        return self._array.__dlpack__()


class InterfaceOnly:
    """An array that shows nothing but the array interface."""

    def __init__(self, array: Any) -> None:
        self.kept, self.__array_interface__ = array, array.__array_interface__


def plain(plan: Any) -> Any:
    """The plan without what only tensors of torch can be."""
    match plan:
        case T():
            return replace(plan, extras=())
        case tuple() | list():
            return type(plan)(plain(part) for part in plan)
        case dict():
            return {key: plain(part) for key, part in plan.items()}
        case Again():
            return plan
    return plan


def as_array(tensor: Any, kind: str, known: dict[int, Any]) -> Any:
    """The same memory as an array of `kind`, where that kind has its dtype; one tensor gives one array."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if id(tensor) not in known:
        known[id(tensor)] = _as_array(tensor, kind), tensor
    return known[id(tensor)][0]


def _as_array(tensor: torch.Tensor, kind: str) -> Any:
    if tensor.dtype is torch.bfloat16:
        bits = tensor.view(torch.int16).numpy()
        steps = tuple(2 * step for step in tensor.stride())
        return apr.Array.over(bits.__array_interface__["data"][0], "bfloat16", tuple(tensor.shape), steps, bits)
    array = tensor.numpy()
    match kind:
        case "own":
            found = read_array(array)
            assert found is not None
            return found.array if found.array is not None else array
        case "dlpack":
            return DLPackOnly(array)
        case "interface":
            return InterfaceOnly(array)
        case "buffer" if (
            array.flags.c_contiguous and array.dtype.kind in "fiu" and array.dtype.itemsize != 2 and array.size
        ):
            return memoryview(array)  # type: ignore[arg-type] # NumPy's stubs know no buffers before Python 3.12
        case "read-only":
            array.flags.writeable = False
    return array


@dataclass(slots=True)
class Seen:
    """What a call did."""

    result: Any = None
    error: Exception | None = None
    arguments: Any = None
    given: list[Any] = field(default_factory=list)


def watch(function: Any, plan: Plan, kind: str | None) -> Seen:
    """Make the arguments of `plan`, as arrays of a kind or as tensors, and call `function` with them."""
    seen, made = Seen(), []  # type: ignore[var-annotated]
    args: Any = [make(part, made) for part in plan.args]
    kwargs = {name: make(part, made) for name, part in plan.kwargs}
    if kind is not None:
        known: dict[int, Any] = {}
        args, kwargs = map_leaves([args, kwargs], lambda leaf: as_array(leaf, kind, known))
        made = [as_array(tensor, kind, known) for tensor in made]
    seen.arguments, seen.given = [args, kwargs], made
    try:
        with torch.no_grad():
            seen.result = function(*args, **kwargs)
    except Exception as error:
        seen.error = error
    return seen


def compare(wanted: Seen, found: Seen) -> str | None:
    """How a call with arrays differs from the one with tensors in one line; None when it does not."""
    if (wanted.error is None) != (found.error is None):
        return f"with tensors {_words(wanted)}, with arrays {_words(found)}"
    if wanted.error is not None:
        return None
    for what in ("result", "arguments"):
        left: list[Any] = []
        right: list[Any] = []
        trees = flatten(getattr(wanted, what), left), flatten(getattr(found, what), right)
        if trees[0] != trees[1]:
            return f"{what}: expected {trees[0]}, got {trees[1]}"
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            problem = _leaf_difference(a, b, wanted, found, strides=what == "result")
            if problem:
                return f"{what} {number}: {problem}"
    return None


def _leaf_difference(a: Any, b: Any, wanted: Seen, found: Seen, *, strides: bool) -> str | None:
    if not isinstance(a, torch.Tensor):
        same = type(a) is type(b) and (a == b or a != a)  # noqa: PLR0124 - NaN
        return None if same else f"expected {a!r}, got {b!r}"
    if strides:
        places = [[n for n, one in enumerate(seen.given) if one is leaf] for seen, leaf in ((wanted, a), (found, b))]
        if places[0] != places[1]:
            return f"is the argument {places[0]} with tensors, {places[1]} with arrays"
    seen = read_array(b)
    if seen is None or seen.array is None:
        return f"expected an array, got {type(b).__name__} {seen}"
    a = a.detach().resolve_conj().resolve_neg()
    facts = str(a.dtype).removeprefix("torch."), tuple(a.shape)
    if (seen.meta.dtype, seen.meta.shape) != facts:
        return f"expected {facts}, got {seen.meta}"
    bits = bits_of(a)
    if seen.array.tobytes() != bits:
        return f"other bits: expected {a.reshape(-1)[:4]}, got {b}"
    real = [n for n, size in enumerate(a.shape) if size > 1] if a.numel() else []
    if strides and not a.is_complex() and any(a.stride(n) != seen.meta.strides[n] for n in real):
        return f"expected strides {a.stride()}, got {seen.meta.strides}"
    return None


def bits_of(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order; a stride that means nothing would keep torch from showing them as bytes."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _words(seen: Seen) -> str:
    return "returns" if seen.error is None else f"raises {type(seen.error).__name__}: {str(seen.error)[:300]}"


class Run:
    """One entry of a bundle, loaded for torch and for arrays."""

    def __init__(self, bundle: Path, name: str, seed: int) -> None:
        sys.path.insert(0, str(bundle.parent))
        record = json.loads((bundle.parent / "manifest.yaml").read_text())["entries"][name]
        module, _, builder = record["source"].partition(":")
        model = getattr(__import__(module), builder)()
        self._sessions = {tensors: apr.load(bundle, mode="eager", tensors=tensors) for tensors in ("torch", "array")}
        self._entries = {tensors: session[name] for tensors, session in self._sessions.items()}
        weights = self._sessions["torch"].bundle.index.weight_sets[name]
        self._name, self._state = name, weights.state
        self._writes = any(
            getattr(guard, "written", False)
            for program in self._entries["torch"].programs
            for guard in program.guards.leaves
        )
        self._random = random.Random(seed)
        self.planner = Planner(record, inspect.signature(model.forward), seed)
        self.tally: Counter[str] = Counter()

    def call(self, plan: Plan) -> str | None:
        """Make one call both ways; what differs, None when nothing does."""
        plan = Plan(plain(plan.args), plain(plan.kwargs))
        kind = self._random.choice([kind for kind in KINDS if kind != "read-only" or not self._writes])
        by_torch, by_array = self._entries["torch"], self._entries["array"]
        decisions = [watch(by_torch.explain, plan, None), watch(by_array.explain, plan, kind)]
        before = by_array.counts()
        found = watch(by_array, plan, kind)
        wanted = watch(by_torch, plan, None)
        hits = by_array.counts()["hits"] - before["hits"]
        self.tally.update([kind, "raised" if found.error else "returned", *(["hit"] if hits else [])])
        return compare(wanted, found) or self._judgement_difference(decisions) or self._state_difference()

    def _judgement_difference(self, decisions: list[Seen]) -> str | None:
        wanted, found = [seen.result for seen in decisions]
        names = [decision.variant.id if isinstance(decision, Hit) else "miss" for decision in (wanted, found)]
        return (
            None
            if names[0] == names[1]
            else f"judged {names[0]} with tensors, {names[1]} with arrays: {wanted}; {found}"
        )

    def _state_difference(self) -> str | None:
        wanted, found = [session._weight_set(self._name) for session in self._sessions.values()]
        for name in self._state:
            if found._current[wanted.set.weights[name].tensor].tobytes() != bits_of(wanted.tensors[name].detach()):
                return f"state {name} differs"
        return None


def run(bundle: Path, entry: str, seed: int, calls: int, *, only: int | None, log: int) -> Json:
    """Make `calls` calls of one entry; what was seen. The call under way is written to the descriptor `log`."""
    run, failures = Run(bundle, entry, seed), []
    for number in range(calls):
        plan = run.planner.next()
        if only not in (None, number):
            continue
        text = f"{entry}, call {number}: {plan}"
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
    np.seterr(all="ignore")
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for entry in options.entries:
        found = run(options.bundle.absolute(), entry, options.seed, options.calls, only=options.only, log=log)
        print(json.dumps(found), flush=True)  # noqa: T201 - this is what the command gives


if __name__ == "__main__":
    main()
