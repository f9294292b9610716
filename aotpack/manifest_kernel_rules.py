"""What must hold between the keys of a kernel's entry: each mistake at its own place, before anything compiles."""

from __future__ import annotations

import itertools
import keyword
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aotpack.manifest_kernels import Config, KernelEntry, NvrtcEntry, TritonEntry, calls_of, in_order
from aotpack.manifest_values import wrong
from aotpack.suggest import describe, did_you_mean, nearest
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.launch import BLOCK_LIMIT, GRID_LIMITS
from aotpack_runtime.format.words import Word

MOST_VARIANTS = 4096
"""Combinations of one entry for one architecture: a kernel takes 0.1 s and 10 kB, and this many say that a number of
the model has become an axis."""

CLUSTER_LIMIT = 16
SHARED_LIMIT = 227 * 1024
"""Blocks a cluster, bytes of shared memory a block: of every GPU so far (CUDA C++ Programming Guide, technical
specifications per compute capability)."""


@dataclass(frozen=True, slots=True)
class _Names:
    """What each name of an entry is."""

    kinds: Mapping[str, frozenset[str]]
    """Parameter -> the kinds of its words, over all variants."""
    axes: Mapping[str, tuple[int | str, ...]]
    configs: frozenset[str]
    extras: frozenset[str]

    def params(self, *kinds: str) -> set[str]:
        return {name for name, found in self.kinds.items() if found <= set(kinds)}

    @property
    def ints(self) -> set[str]:
        """Arguments that are ints: parameters, and names of the launch."""
        return self.params("int", "literal") | self.extras

    @property
    def numbers(self) -> set[str]:
        """What every variant has one number of: axes of numbers, and fields of a config."""
        return {
            name for name, values in self.axes.items() if all(isinstance(one, int) for one in values)
        } | self.configs

    @property
    def all(self) -> set[str]:
        return {*self.kinds, *self.axes, *self.configs, *self.extras}


def check_kernel_entry(entry: KernelEntry) -> None:
    """Raise `wrong` at the first thing that does not hold."""
    _check_axes(entry)
    _check_new_names(entry)
    names = _Names(_kinds(entry), entry.axis_values(), entry.config_names(), frozenset(entry.extra_names()))
    _check_expressions(entry, names)
    _check_lists(entry, names)
    _check_rules(entry, names)
    _check_choice(entry)
    _check_points(entry, names)
    _check_launch(entry, names)


def _check_axes(entry: KernelEntry) -> None:
    field, axes = entry.axis_field(), entry.axis_values()
    for name, values in axes.items():
        if isinstance(entry, TritonEntry) and isinstance(entry.axes[name], Mapping):
            raise wrong("expected a list of values", field, name)
        if name in Config.model_fields and isinstance(entry, TritonEntry):
            raise wrong(f"{name!r} is a field of triton.Config; give it in configs", field, name)
        if name in entry.params and entry.params[name] != "constexpr":
            raise wrong(f"{name!r} is a parameter too, and would be two things; rename the axis", field, name)
        for place, value in enumerate(values):
            if isinstance(value, str) and not value.isprintable():
                raise wrong(f"expected text on one line, found {describe(value)}", field, name, place)
    for name in entry.params:
        if name in Config.model_fields and isinstance(entry, TritonEntry):
            raise wrong(f"{name!r} is a field of triton.Config; rename the parameter", "params", name)
        if name.startswith("__"):
            raise wrong(f"{name!r}: names that begin with __ are not for parameters", "params", name)
    if isinstance(entry, TritonEntry):
        for name in sorted(entry.config_names() - Config.model_fields.keys()):
            if entry.params.get(name) != "constexpr":
                raise wrong(f"{name!r} is no field of triton.Config and no constexpr of the kernel", "configs", 0, name)
            if name in axes:
                raise wrong(f"{name!r} is in configs and in axes", "configs", 0, name)
        for name in sorted(entry.options.keys() & Config.model_fields.keys()):
            raise wrong(f"{name!r} is a field of triton.Config; give it in configs", "options", name)
    count = math.prod(len(values) for values in axes.values()) * max(len(entry.config_picks()), 1)
    if count > MOST_VARIANTS:
        raise wrong(
            f"{count} combinations, at most {MOST_VARIANTS}; make a number an argument, or leave values out", field
        )


def _check_new_names(entry: KernelEntry) -> None:
    """Names that only the launch has become arguments: they must be names, and not slips of others."""
    known = {*entry.params, *entry.axis_values(), *entry.config_names()}
    for at, text in entry.launch_expressions():
        for name in in_order(text):
            if name in known:
                continue
            if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
                raise wrong(f"{name!r} is not a name; sizes are int arguments", *at)
            slip = nearest(name, known)
            if slip and not entry.points:
                raise wrong(
                    f"unknown name {name!r}; did you mean {slip!r}? (a new int argument needs a value in `points`)", *at
                )


def _kinds(entry: KernelEntry) -> dict[str, frozenset[str]]:
    """The kinds of every parameter; its word must be one in every variant, and of one kind but for literals."""
    axes = entry.axis_values()
    for at, text in entry.templates():
        _require(re.findall(r"\{(\w+)\}", text), axes, *at)
    kinds: dict[str, frozenset[str]] = {}
    for name, text in entry.params.items():
        words = list(_words(entry, text, axes, name))
        found = frozenset(word.kind for word in words)
        if "constexpr" in found and name not in axes and name not in entry.config_names():
            raise wrong(f"constexpr {name!r} has no value; give it as an axis or in configs", "params", name)
        if len(found) > 1 and not found <= {"int", "literal"} and not found <= {"pointer", "descriptor"}:
            raise wrong(f"{name!r} is of several kinds: {', '.join(sorted(found))}", "params", name)
        kinds[name] = found
    return kinds


def _words(entry: KernelEntry, text: str, axes: Mapping[str, Sequence[int | str]], name: str) -> Iterable[Word]:
    used = list(dict.fromkeys(re.findall(r"\{(\w+)\}", text)))
    for values in itertools.product(*[axes[axis] for axis in used]):
        spelled = {axis: entry.spelling(axis, value) for axis, value in zip(used, values, strict=True)}
        try:
            yield entry.word(text.format(**spelled))
        except ValueError as error:
            raise wrong(str(error), "params", name) from None


def _check_expressions(entry: KernelEntry, names: _Names) -> None:
    for at, text in entry.launch_expressions():
        _require_kind(parse(text).names, names.ints | names.numbers, names, "an int argument or a number", *at)
    for place, text in enumerate(entry.guards):
        _require_kind(
            parse(text).names, names.ints | names.numbers, names, "an int argument or a number", "guards", place
        )
    for place, text in enumerate(entry.where):
        relation = parse(text)
        _require_kind(relation.names, names.numbers, names, "a number of the variant", "where", place)
    _check_where(entry)


def _check_where(entry: KernelEntry) -> None:
    try:
        if not any(True for _ in entry.combinations()):
            raise wrong("no combination of the axes is left", "where")
    except ZeroDivisionError:
        for place, text in enumerate(entry.where):
            if re.search(r"//|%|ceil_div", text):
                raise wrong(f"{text} divides by 0 for some values of the axes", "where", place) from None
        raise


def _check_lists(entry: KernelEntry, names: _Names) -> None:
    pointers = names.params("pointer", "descriptor")
    for field in ("writes", "shapes", "fill"):
        given: Iterable[str] = getattr(entry, field) or ()
        for place, name in enumerate(given):
            at = (field, place) if field == "writes" else (field, name)
            _require([name], entry.params, *at)
            if name not in pointers:
                raise wrong(f"{name!r} is no pointer", *at)
    axes = {name for name in names.axes if name not in entry.params or name in names.numbers}
    for place, name in enumerate(entry.key):
        _require([name], names.all, "key", place)
        if name not in names.ints | axes:
            raise wrong(f"{name!r} is no int argument and no axis", "key", place)
        if name in entry.key[:place]:
            raise wrong(f"{name!r} is in the list twice; remove one", "key", place)


def _check_rules(entry: KernelEntry, names: _Names) -> None:
    picks, axes = entry.config_picks(), names.axes
    for place, rule in enumerate(entry.rules):
        if "when" in rule:
            try:
                used = parse(str(rule["when"])).names
            except ValueError as error:
                raise wrong(str(error), "rules", place, "when") from None
            _require_kind(used, names.ints, names, "an int argument", "rules", place, "when")
        if rule.keys() == {"when"}:
            raise wrong("picks nothing; give an axis" + (" or `config: N`" if picks else ""), "rules", place)
        for name, value in rule.items():
            if name == "when":
                continue
            if name == "config" and picks:
                if type(value) is not int or not 0 <= value < len(picks):
                    raise wrong(f"config {value!r} is not one of 0 to {len(picks) - 1}", "rules", place, name)
                continue
            _require([name], {*axes, "when", *(["config"] if picks else [])}, "rules", place, name)
            if not any(value == one and type(value) is type(one) for one in axes[name]):
                raise wrong(f"{value!r} is no value of the axis {name!r}", "rules", place, name)


def _check_choice(entry: KernelEntry) -> None:
    if entry.on_miss.reference and entry.verify is None:
        raise wrong("needs `verify.against`, which is what serves", "on_miss", "reference")
    if entry.choose == "rules" and not entry.rules:
        raise wrong("rules needs `rules`", "choose")
    if entry.choose == "tuned" and not (entry.tuning and entry.key):
        raise wrong("tuned needs `tuning` (a path) and `key`", "choose")


def _check_points(entry: KernelEntry, names: _Names) -> None:
    literals = names.params("literal")
    wanted = (names.ints | names.params("float", "bool")) - literals
    for place, point in enumerate(entry.points):
        for name, value in point.items():
            _require([name], wanted | literals, "points", place, name)
            _check_point_value(value, name, names, place)
            if isinstance(value, str):
                _require(parse(value).names, point, "points", place, name)
        missing = sorted(wanted - point.keys())
        if missing:
            raise wrong(f"{missing[0]!r} is not given", "points", place)
    unshaped = sorted(names.params("pointer", "descriptor") - entry.shapes.keys())
    if entry.points and unshaped:
        raise wrong(f"points need the shape of the pointer {unshaped[0]!r}", "shapes")
    floats = names.params("float")
    for place, point in enumerate(entry.points):
        try:
            calls = list(calls_of(point))
        except ValueError as error:
            raise wrong(str(error), "points", place) from None
        except ZeroDivisionError:
            raise wrong("an expression divides by 0", "points", place) from None
        for call in calls:
            for name, value in call.items():
                if name not in floats and not isinstance(value, int):
                    raise wrong(f"{name!r} is an int, its expression gives {value}", "points", place, name)
            _check_sizes(entry, call, place)


def _check_sizes(entry: KernelEntry, call: Mapping[str, Any], place: int) -> None:
    """No tensor of a point has a negative size, as far as its numbers decide them; axes have their own check."""
    for name, dims in entry.shapes.items():
        for text in dims:
            expression = parse(text)
            if expression.names and expression.names <= call.keys():
                found = _value(expression, call, ("points", place))
                if found < 0:
                    raise wrong(f"{name!r} would have a size of {found}: {text}", "points", place)


def _check_point_value(value: Any, name: str, names: _Names, place: int) -> None:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str):
            continue
        if name in names.ints and type(one) is not int:
            raise wrong(f"{name!r} is an int, found {describe(one)}", "points", place, name)
        if name in names.params("bool") and type(one) is not bool:
            raise wrong(f"{name!r} is true or false, found {describe(one)}", "points", place, name)
        if name in names.params("float") and (isinstance(one, bool) or not math.isfinite(one)):
            raise wrong(f"{name!r} is a finite number, found {describe(one)}", "points", place, name)


def _check_launch(entry: KernelEntry, names: _Names) -> None:
    """Grids, blocks and clusters that no GPU can launch, as far as axes decide them."""
    bounds: list[tuple[tuple[str | int, ...], str, int, int]] = [
        (("grid", place), text, 0, GRID_LIMITS[place]) for place, text in enumerate(entry.grid)
    ]
    if isinstance(entry, NvrtcEntry):
        bounds += [(("block", place), text, 1, BLOCK_LIMIT) for place, text in enumerate(entry.block)]
        bounds.append((("smem",), entry.smem, 0, SHARED_LIMIT))
        if entry.cluster and math.prod(entry.cluster) > CLUSTER_LIMIT:
            raise wrong(f"{math.prod(entry.cluster)} blocks a cluster, at most {CLUSTER_LIMIT}", "cluster")
    bounds += [
        (("shapes", name, place), text, 0, 2**63 - 1)
        for name, dims in entry.shapes.items()
        for place, text in enumerate(dims)
    ]
    for at, text, low, high in bounds:
        expression = parse(text)
        if expression.names - names.numbers:
            continue
        for axes in entry.combinations():
            numbers = {name: value for name, value in axes.items() if isinstance(value, int)}
            found = _value(expression, numbers, at)
            if not low <= found <= high:
                if text == str(found):
                    raise wrong(f"expected {low} to {high}, found {found}", *at)
                raise wrong(f"{text} is {found}, expected {low} to {high}", *at)


def _value(
    expression: Callable[[Mapping[str, int]], int], numbers: Mapping[str, int], at: tuple[str | int, ...]
) -> int:
    try:
        return expression(numbers)
    except ZeroDivisionError:
        raise wrong(f"{expression} divides by 0", *at) from None


def _require(names: Iterable[str], known: Iterable[str], *at: str | int) -> None:
    known = set(known)
    for name in names:
        if name not in known:
            raise wrong(f"unknown name {name!r}{did_you_mean(name, known)}", *at)


def _require_kind(names: Iterable[str], right: Collection[str], known: _Names, what: str, *at: str | int) -> None:
    """A name that is none at all is a slip, one that is something else is said to be it."""
    for name in names:
        if name not in right:
            _require([name], known.all, *at)
            raise wrong(f"{name!r} is not {what}", *at)
