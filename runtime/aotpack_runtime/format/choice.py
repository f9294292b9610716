"""Which of the variants that all fit a call is taken: rules that were written down, or times that were measured.

Guards say what may run, a choice what is best. Nothing is timed in a server: a table comes from `aotpack tune`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from aotpack_runtime.format.expression import Env, Expression, parse
from aotpack_runtime.record import Record

Json = Any
Axes = Mapping[str, int | float | str | bool]


class _Chosen(Protocol):
    @property
    def axes(self) -> Axes: ...


V = TypeVar("V", bound=_Chosen)


class Rule(Record):
    """Take variants with the axes `pick` when `when` holds (None: always) of the int arguments."""

    when: Expression | None
    pick: Axes


class Timed(Record):
    """The fastest axes seen at one key: `sizes` by argument name, under the axes `given` (such as a dtype)."""

    sizes: Mapping[str, int]
    given: Axes
    pick: Axes


class Choice(Record):
    """Rules are tried in order, the first whose `when` holds and whose pick fits the call wins. A table takes the row
    whose sizes are nearest to the call's (by the sum of |log2 of the ratio|, the first of two equals) among those whose
    pick fits it. Without either, or where neither helps, the first variant in file order is taken.

    `tables` maps an architecture ("sm_90") to the rows measured there; another architecture of the same major version
    uses them too, rather than none.
    """

    rules: tuple[Rule, ...] = ()
    tables: Mapping[str, tuple[Timed, ...]] | None = None

    def pick(self, fits: Sequence[V], env: Env, capability: tuple[int, int] | None) -> V:
        """The best of `fits`, which is not empty and in file order."""
        return fits[self.among(fits, capability).best(range(len(fits)), env)]

    def among(self, variants: Sequence[_Chosen], capability: tuple[int, int] | None) -> Preference:
        """The same for calls that some of `variants` fit."""
        rows, rules = self._table(capability), self.rules
        return Preference(
            [(row.sizes, _places(variants, row.given, row.pick)) for row in rows],
            [(rule.when, _places(variants, rule.pick)) for rule in rules],
        )

    def names(self) -> set[str]:
        """Int arguments it looks at."""
        names = {name for rule in self.rules if rule.when is not None for name in rule.when.names}
        return names | {name for rows in (self.tables or {}).values() for row in rows for name in row.sizes}

    def _table(self, capability: tuple[int, int] | None) -> tuple[Timed, ...]:
        if not self.tables or capability is None:
            return ()
        own = self.tables.get(f"sm_{capability[0]}{capability[1]}")
        if own is not None:
            return own
        kin = (rows for arch, rows in sorted(self.tables.items()) if arch[3:-1] == str(capability[0]))
        return next(kin, ())


class Preference:
    """A choice among variants that are known, by their places: what needs no call is done once."""

    def __init__(
        self, rows: Sequence[tuple[Mapping[str, int], list[int]]], rules: Sequence[tuple[Expression | None, list[int]]]
    ) -> None:
        self._rows = [({name: _log(size) for name, size in sizes.items()}, places) for sizes, places in rows if places]
        self._rules = [(when, places) for when, places in rules if places]
        self._names = {name for sizes, _ in self._rows for name in sizes}

    def __bool__(self) -> bool:
        return bool(self._rows or self._rules)

    def best(self, fits: Sequence[int], env: Env) -> int:
        """The best of the places `fits`, which is not empty and in file order, for a call of these numbers."""
        if len(fits) == 1:
            return fits[0]
        nearest, least = None, math.inf
        seen = {name: _log(env.get(name, 0)) for name in self._names}
        for sizes, places in self._rows:
            distance = sum([abs(seen[name] - size) for name, size in sizes.items()])
            if distance < least:  # of two equals the first
                place = next((place for place in places if place in fits), None)
                if place is not None:
                    nearest, least = place, distance
        if nearest is not None:
            return nearest
        for when, places in self._rules:
            place = next((place for place in places if place in fits), None)
            if place is not None and _holds(when, env):
                return place
        return fits[0]


def _places(variants: Sequence[_Chosen], *wanted: Axes) -> list[int]:
    """Where those with these axes are."""
    return [
        place for place, variant in enumerate(variants)
        if all(variant.axes.get(name) == value for axes in wanted for name, value in axes.items())
    ]  # fmt: skip


def _holds(when: Expression | None, env: Env) -> bool:
    """A `when` that divides by 0 does not hold."""
    try:
        return when is None or bool(when(env))
    except ZeroDivisionError:
        return False


def _log(size: int) -> float:
    """Sizes below 1 count as 1."""
    return math.log2(max(size, 1))


def dump_choice(choice: Choice) -> Json:
    record: dict[str, Json] = {}
    if choice.rules:
        record["rules"] = [
            {"pick": dict(rule.pick)} | ({} if rule.when is None else {"when": rule.when.text}) for rule in choice.rules
        ]
    if choice.tables is not None:
        record["tables"] = {
            arch: [{"sizes": dict(row.sizes), "given": dict(row.given), "pick": dict(row.pick)} for row in rows]
            for arch, rows in choice.tables.items()
        }
    return record


def parse_choice(value: Json) -> Choice:
    tables = value.get("tables")
    return Choice(
        rules=tuple(
            Rule(parse(item["when"]) if "when" in item else None, parse_axes(item["pick"]))
            for item in value.get("rules", ())
        ),
        tables=None
        if tables is None
        else {
            arch: tuple(Timed(_sizes(row["sizes"]), parse_axes(row["given"]), parse_axes(row["pick"])) for row in rows)
            for arch, rows in tables.items()
        },
    )


def parse_axes(value: Json) -> Axes:
    for name, item in value.items():
        if not isinstance(item, int | float | str):
            raise TypeError(f"axis {name!r} is {str(item)[:40]!r}")
    return dict(value)


def _sizes(value: Json) -> Mapping[str, int]:
    for name, item in value.items():
        if type(item) is not int or abs(item) >= 1 << 63:
            raise TypeError(f"size {name!r} is {str(item)[:40]!r}")
    return dict(value)
