"""A call of a kernel that missed -> the variant that would take it: which axes, which words, for which GPU. Pure.

What may be compiled is what the manifest says how to launch: its axes, with values that it does not list where a guard,
a dtype or an alignment of the call asks for one, and (of Triton, which does the same at a launch) a parameter's word
said of another dtype, a wider int or a smaller hint. What C++ may rely on, and the manifest's own guards, stay.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from aotpack_runtime.format.choice import Axes, Choice
from aotpack_runtime.format.expression import Expression
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.gpu import Gpu, parse_arch
from aotpack_runtime.format.guard import DescriptorGuard, PointerGuard, describe
from aotpack_runtime.format.index import Entry
from aotpack_runtime.format.kernel_recipe import Terms, axes_in, filled, terms_of
from aotpack_runtime.format.tensor import Call, Leaf, TensorMeta
from aotpack_runtime.format.words import C_DTYPES, TRITON_DTYPES, Word

Json = Any
MOST_COMBINATIONS = 20_000
"""Of axes, looked through for one miss: a fifth of a second."""
LARGEST = 1 << 20
"""A new value of an axis is at most this: no block of Triton's has more elements."""

CHANGED = 2
"""What a word that is said anew costs, in new values of axes: those are the manifest's own way to say it."""

_C_OF_DTYPE = {dtype: word for word, dtype in reversed(C_DTYPES.items())}
_TRITON_OF_DTYPE = {dtype: word for word, dtype in TRITON_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRequest:
    """What a child is asked to compile. `spelled` are C types of values that the manifest does not spell, `words` each
    parameter's word; `numbers` are those of the call, at which the variant is tried out."""

    entry: str
    arch: str
    axes: Axes
    spelled: Mapping[str, str]
    words: Mapping[str, str]
    source: str
    numbers: Mapping[str, int | float | bool]
    label: str
    dims: Mapping[str, Any]

    def parts(self, bundle: str, device: str) -> dict[str, Json]:
        """Everything that decides what comes out, the toolchain aside: a cubin needs none."""
        return {
            "bundle": bundle, "entry": self.entry, "arch": self.arch, "axes": dict(self.axes),
            "spelled": dict(self.spelled), "words": dict(self.words), "source": self.source,
        }  # fmt: skip

    def key(self, bundle: str, device: str) -> str:
        return fingerprint(self.parts(bundle, device))

    def job(self) -> dict[str, Json]:
        """What the job of the builder says of it."""
        return {
            "kind": "kernel_miss", "arch": self.arch, "axes": dict(self.axes), "spelled": dict(self.spelled),
            "words": dict(self.words), "numbers": dict(self.numbers),
        }  # fmt: skip


def kernel_request(entry: Entry, call: Call, gpu: Gpu) -> KernelRequest | str:
    """The variant to compile for `call` on `gpu`, or why there is none that may be."""
    recipe = entry.kernel.recipe if entry.kernel is not None else None
    if recipe is None or entry.kernel is None:
        return (
            "the bundle holds no source to compile it from: it is of an older format, or its source reaches beyond it"
        )
    if call.state:
        return call.state[0]
    search = _Search(terms_of(recipe), dict(zip(entry.parameter_names, call.leaves, strict=True)))
    found = search.best(entry.kernel.choice, gpu.capability)
    if isinstance(found, str):
        return found
    axes = search.terms.axes
    # A config that the manifest chooses among is no name for a miss; a new value is.
    names = [
        f"{name}{value}" if isinstance(value, int) else str(value) for name, value in found.axes.items() if name in axes
    ]
    return KernelRequest(
        entry=entry.name,
        arch=_arch(recipe.archs, gpu),
        axes=found.axes,
        spelled=found.spelled,
        words=found.words,
        source=fingerprint({path: file.digest for path, file in recipe.files.items()}),
        numbers=search.numbers(),
        label=re.sub(r"[^0-9A-Za-z_]", "", "_".join(names))[:48] or str(gpu),
        dims={},
    )


def call_key(call: Call) -> Hashable:
    """Equal for calls that ask for the same."""
    leaves = [
        (leaf.dtype, leaf.device, leaf.offset, leaf.odd, len(leaf.shape)) if isinstance(leaf, TensorMeta)
        else (type(leaf), leaf) for leaf in call.leaves
    ]  # fmt: skip
    return (*leaves, call.state)


def _arch(archs: tuple[str, ...], gpu: Gpu) -> str:
    """As a target names the GPU at hand, with its suffix (sm_90a); else plainly."""
    own = [arch for arch in archs if parse_arch(arch).capability == gpu.capability and not parse_arch(arch).ptx]
    return own[0] if own else str(gpu)


# ------------------------------------------------------------------------------------------------------------ inside


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that an axis may take, what it costs to take it, and its spelling where the manifest has none."""

    value: int | str
    cost: int = 0
    spelled: str = ""


@dataclass(frozen=True, slots=True)
class _Candidate:
    axes: Axes
    spelled: Mapping[str, str]
    words: Mapping[str, str]
    cost: int


class _Refusal(NamedTuple):
    """Why a combination does not take the call; `stage` is how far it came."""

    stage: int
    why: str


class _Search:
    """Through what the axes may be: what the manifest lists first, then one axis of numbers with a value of its own."""

    def __init__(self, terms: Terms, leaves: Mapping[str, Leaf]) -> None:
        self.terms, self._leaves = terms, leaves
        self._used = {name: axes_in(text) for name, text in terms.params.items()}

    def numbers(self) -> dict[str, int | float | bool]:
        return {name: leaf for name, leaf in self._leaves.items() if isinstance(leaf, int | float)}

    def best(self, choice: Choice, capability: tuple[int, int]) -> _Candidate | str:
        """Of those that cost the least (new values, hints that are dropped), the one the entry's choice takes."""
        values: dict[str, list[_Value]] = {}
        for axis, listed in self.terms.axes.items():
            found = self._values(axis, listed)
            if isinstance(found, str):
                return found
            values[axis] = found
        refused = _Refusal(0, "no value of its axes takes this call")
        for more in self._widened(values):
            if math.prod(map(len, more.values())) * max(len(self.terms.configs), 1) > MOST_COMBINATIONS:
                return "its axes have too many combinations to look for one that takes this call"
            candidates, why = self._candidates(more)
            refused = max(refused, why)
            if candidates:
                least = min(candidate.cost for candidate in candidates)
                fits = [candidate for candidate in candidates if candidate.cost == least]
                ints = {name: leaf for name, leaf in self._leaves.items() if type(leaf) is int}
                return choice.pick(fits, ints, capability)
        return refused.why

    def _values(self, axis: str, listed: tuple[int | str, ...]) -> list[_Value] | str:
        """Values of an axis with which all parameters that follow it alone take the call; of an axis that decides no
        type, those of the manifest."""
        known = [_Value(value) for value in listed]
        followers = [name for name, used in self._used.items() if axis in used]
        if not followers:
            return known
        found, reason = [], ""
        for value in (*known, *self._new_words(axis, listed)):
            fits = [self._best_fit(name, axis, value) for name in followers]
            problems = [fit for fit in fits if isinstance(fit, str)]
            reason = reason or next(iter(problems), "")
            if not problems:
                dropped = sum(fit[1] for fit in fits if not isinstance(fit, str))
                found.append((dropped + value.cost, value))
        least = min((cost for cost, _ in found), default=0)
        return [value for cost, value in found if cost == least] or reason

    def _best_fit(self, name: str, axis: str, value: _Value) -> tuple[str, int] | str:
        """How well a parameter takes its argument with this value of one of its axes, whatever the others are."""
        others = [other for other in self._used[name] if other != axis]
        ways = [[_Value(one) for one in self.terms.axes[other]] for other in others]
        ways = [
            [*way, *self._new_words(other, self.terms.axes[other])] for other, way in zip(others, ways, strict=True)
        ]
        fits = []
        for chosen in itertools.product(*ways):
            spelling = dict(zip([axis, *others], map(self._spelled, [axis, *others], [value, *chosen]), strict=True))
            fits.append(self._fit(name, filled(self.terms.params[name], spelling)))
        taken = [fit for fit in fits if not isinstance(fit, str)]
        return min(taken, key=lambda fit: fit[1]) if taken else fits[0]

    def _spelled(self, axis: str, value: _Value) -> str:
        return value.spelled or self.terms.spelling(axis, value.value, {})

    def _new_words(self, axis: str, listed: tuple[int | str, ...]) -> Iterator[_Value]:
        """Types, and hints of alignment, that templates may be filled with beside those of the manifest."""
        if axis in self.terms.spelled:
            new = (dtype for dtype in _C_OF_DTYPE if dtype not in listed and dtype != "any")
            yield from (_Value(dtype, 1, _C_OF_DTYPE[dtype]) for dtype in new)
        elif all(isinstance(value, int) for value in listed):
            yield from (_Value(value, 1) for value in (16, 1) if value not in listed)
        else:
            words = TRITON_DTYPES if self.terms.kind == "triton" else C_DTYPES
            yield from (_Value(word, 1) for word in words if word not in listed)

    def _widened(self, values: Mapping[str, list[_Value]]) -> Iterator[Mapping[str, list[_Value]]]:
        """The values, then the same with one axis of numbers open: to powers of two where it has no other, and to the
        numbers of the call."""
        yield values
        given = sorted({leaf for leaf in self._leaves.values() if type(leaf) is int and 0 < leaf <= LARGEST})
        powers = [1 << place for place in range(LARGEST.bit_length())]
        for new in (powers, given):
            for axis, listed in self.terms.axes.items():
                numbers = [value for value in listed if isinstance(value, int)]
                decides = any(axis in used for used in self._used.values())
                if len(numbers) < len(listed) or decides or (new is powers and not set(numbers) <= set(powers)):
                    continue
                yield {**values, axis: [_Value(value, 1) for value in new if value not in numbers]}

    def _candidates(self, values: Mapping[str, list[_Value]]) -> tuple[list[_Candidate], _Refusal]:
        """Those that take the call, the smallest numbers first; and what is against the one that came furthest."""
        found: list[tuple[tuple[int, ...], _Candidate]] = []
        refused = _Refusal(0, "")
        order = {axis: {value: place for place, value in enumerate(listed)} for axis, listed in self.terms.axes.items()}
        for chosen in itertools.product(*values.values()):
            for config in self.terms.configs or ({},):
                axes = {**{axis: one.value for axis, one in zip(values, chosen, strict=True)}, **config}
                spelled = {axis: one.spelled for axis, one in zip(values, chosen, strict=True) if one.spelled}
                made = self._candidate(axes, spelled, sum(one.cost for one in chosen))
                if isinstance(made, _Refusal):
                    refused = max(refused, made)
                    continue
                sizes = [one.value if isinstance(one.value, int) else order[axis].get(one.value, len(order[axis]))
                         for axis, one in zip(values, chosen, strict=True)]  # fmt: skip
                found.append((tuple(sizes), made))
        return [made for _, made in sorted(found, key=lambda pair: pair[0])], refused

    def _candidate(self, axes: Axes, spelled: Mapping[str, str], cost: int) -> _Candidate | _Refusal:
        numbers = {name: value for name, value in axes.items() if isinstance(value, int)}
        if not all(_holds(relation, numbers) for relation in self.terms.where):
            return _Refusal(1, "`where` lets no such combination of its axes through")
        words: dict[str, str] = {}
        new = {str(axes[axis]): text for axis, text in spelled.items()}
        for name, text in self.terms.params.items():
            spelling = {axis: self.terms.spelling(axis, axes[axis], new) for axis in self._used[name]}  # type: ignore[arg-type]
            fit = self._fit(name, filled(text, spelling))
            if isinstance(fit, str):
                return _Refusal(2, fit)
            words[name] = fit[0]
            cost += fit[1]
        env = numbers | {name: leaf for name, leaf in self._leaves.items() if type(leaf) is int}
        for guard in self.terms.guards:
            if not _holds(guard, env):
                return _Refusal(3, f"the manifest's guard does not hold: {guard}")
        for extent, low, high in self.terms.limits:
            if extent.names <= env.keys() and not low <= _value(extent, env) <= high:
                return _Refusal(4, f"expected {extent} in [{low}, {high}], actual {_value(extent, env)}")
        return _Candidate(axes, spelled, words, cost)

    def _fit(self, name: str, text: str) -> tuple[str, int] | str:
        """(the word with which the parameter takes its argument, how much of it had to change), or why none does."""
        try:
            word = self.terms.word(text)
        except ValueError as error:
            return str(error)
        if word.kind == "constexpr":
            return text, 0
        if name not in self._leaves:
            return f"{name} is no argument of the entry"
        return fit_word(name, word, text, self._leaves[name], free=self.terms.kind == "triton")


def fit_word(name: str, word: Word, text: str, leaf: Leaf, *, free: bool) -> tuple[str, int] | str:
    """(`text`, 0) when the word takes the argument; where it may be changed (`free`), what it becomes and how many
    changes that takes; else the reason."""
    match word.kind:
        case "pointer":
            return _fit_pointer(name, word, text, leaf, free=free)
        case "descriptor":
            guard = DescriptorGuard(path=name, dtype=word.dtype, device="cuda", rank=len(word.block))
            return guard.reject(leaf, {}) or (text, 0)
        case "int" | "literal":
            if type(leaf) is not int:
                return f"{name}: expected an int, got {describe(leaf)}"
            low, high = (word.value, word.value) if word.kind == "literal" else (word.low, word.high)
            fits, divisible = low <= leaf <= high, leaf % word.divisor == 0
            if fits and divisible:
                return text, 0
            if not free:
                wanted = f"{low} to {high}" if not fits else f"a multiple of {word.divisor}, which C++ may rely on"
                return f"{name}: expected {wanted}, got {leaf}"
            if fits:
                return word.type, CHANGED
            wide = next((wide for wide, bits in (("i32", 31), ("i64", 63)) if -(1 << bits) <= leaf < 1 << bits), "")
            return (wide, CHANGED) if wide else f"{name}: {leaf} is beyond 64 bits"
        case "float":
            return (text, 0) if type(leaf) in (float, int) else f"{name}: expected a float, got {describe(leaf)}"
        case _:
            return (text, 0) if type(leaf) is bool else f"{name}: expected a bool, got {describe(leaf)}"


def _fit_pointer(name: str, word: Word, text: str, leaf: Leaf, *, free: bool) -> tuple[str, int] | str:
    reason = PointerGuard(path=name, dtype="any", device="cuda").reject(leaf, {})
    if reason or not isinstance(leaf, TensorMeta):
        return str(reason)
    same, aligned = word.dtype in ("any", leaf.dtype), word.divisor == 1 or not leaf.offset
    if same and aligned:
        return text, 0
    if not free:
        if not same:
            return f"{name}.dtype: expected {word.dtype}, as its C++ says, got {leaf.dtype}"
        return (
            f"{name}: expected an address divisible by 16, on which C++ may rely, got one {leaf.offset} bytes past it"
        )
    element = _TRITON_OF_DTYPE.get(leaf.dtype)
    if element is None:
        return f"{name}.dtype: Triton has no {leaf.dtype}"
    hint = f":{word.divisor}" if word.divisor > 1 and aligned else ""
    return f"*{'k' if word.const else ''}{element}{hint}", CHANGED * ((not same) + (not aligned))


def _holds(relation: Expression, env: Mapping[str, int]) -> bool:
    return bool(_value(relation, env))


def _value(expression: Expression, env: Mapping[str, int]) -> int:
    """0 where it divides by 0, which no guard and no extent of a launch may be."""
    try:
        return expression(env)
    except (ZeroDivisionError, KeyError):
        return 0
