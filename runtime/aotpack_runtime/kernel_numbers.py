"""Calls of a kernel that are alike but for their int arguments: judged by a function compiled for all of them.

Sequence lengths change at each call of a server. All else that guards look at (dtypes, devices, alignments) stays, and
was judged before: left are ranges and relations of ints, and the expressions of grids. With them in one function a call
with numbers that were not seen before costs 4 us where a full judgement takes 35, and 11 where it takes 110 (two
variants; twelve with a table; one EPYC core, `bench/kernel_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aotpack_runtime.assemble import Serve
from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format.choice import Preference
from aotpack_runtime.format.expression_source import SCOPE, source
from aotpack_runtime.format.guard import IntGuard, ValueGuard
from aotpack_runtime.format.index import Variant

Key = tuple[object, ...]
MAX_KINDS = 256
"""Kinds of calls of one entry that are kept; then they are found again. A choice: dtypes times alignments are few."""


class Numbers:
    """What serves calls of one kind, by their ints."""

    def __init__(
        self,
        names: Sequence[str],
        variants: Sequence[Variant],
        preference: Preference,
        launcher: Callable[[Variant], Callable[[Sequence[int]], Serve]],
    ) -> None:
        """`names` are the int parameters, in the order of a call's numbers; `variants` all that a call of this kind may
        hit; `launcher(variant)` makes what launches it from the values of its grid, block and shared memory."""
        self._names, self._variants, self._preference, self._launcher = names, variants, preference, launcher
        local = {name: f"n{place}" for place, name in enumerate(names)}
        arguments = ", ".join(local.values())
        lines = [f"def fits({arguments}):"]
        for place, variant in enumerate(variants):
            lines += [f"    if {' and '.join(_conditions(variant, local)) or 'True'}:", f"        yield {place}"]
        for place, variant in enumerate(variants):
            assert variant.launch is not None
            sizes = ", ".join(source(expression, local) for expression in variant.launch.expressions())
            lines += [f"def sizes{place}({arguments}):", f"    return ({sizes})"]
        scope: dict[str, Any] = dict(SCOPE)
        exec(compile("\n".join(lines), "<aotpack kernel numbers>", "exec"), scope)  # noqa: S102 - see expression_source
        self._fits: Callable[..., Iterator[int]] = scope["fits"]
        self._sizes = [scope[f"sizes{place}"] for place in range(len(variants))]
        self._launch: dict[int, Callable[[Sequence[int]], Serve]] = {}

    def serve(self, numbers: Sequence[Any]) -> Serve | None:
        """What serves calls with these numbers; None when they are to be judged in full: nothing fits, a variant does
        not load or cannot be launched so, or a relation divides by 0."""
        try:
            if self._preference:
                places = list(self._fits(*numbers))
                place = self._preference.best(places, dict(zip(self._names, numbers, strict=True))) if places else None
            else:
                place = next(self._fits(*numbers), None)
            if place is None:
                return None
            launch = self._launch.get(place)
            if launch is None:
                launch = self._launch[place] = self._launcher(self._variants[place])
            return launch(self._sizes[place](*numbers))
        except (ArtifactError, ZeroDivisionError):
            return None


class Kinds:
    """The kinds of calls that an entry has seen. A key begins with the `ints` int arguments of a call; what follows is
    its kind."""

    def __init__(self, ints: int, remember: Callable[[Key, Serve], None]) -> None:
        self._ints, self._remember = ints, remember
        self._seen: set[Key] = set()
        self._known: dict[Key, Numbers | None] = {}

    def serve(self, key: Key) -> Serve | None:
        """What serves a call that the memo does not know, None when it is to be judged in full."""
        numbers = self._known.get(key[self._ints :])
        if numbers is None:
            return None
        serve = numbers.serve(key[: self._ints])
        if serve is not None:
            self._remember(key, serve)
        return serve

    def judged(self, key: Key, make: Callable[[], Numbers | None]) -> None:
        """A call was judged in full. At the second of a kind `make` is asked for what serves more of them: a server
        whose numbers stay compiles nothing."""
        kind = key[self._ints :]
        if not self._ints or any(type(number) is not int for number in key[: self._ints]):
            return
        if kind in self._known:
            return
        if len(self._seen) >= MAX_KINDS:
            self.clear()
        if kind in self._seen:
            self._known[kind] = make()
        self._seen.add(kind)

    def clear(self) -> None:
        """Judge in full what comes next."""
        self._seen.clear()
        self._known.clear()


def _conditions(variant: Variant, local: dict[str, str]) -> Iterator[str]:
    """What must hold of the numbers for `variant`."""
    for guard in variant.guards.leaves:
        if isinstance(guard, IntGuard):
            high = "" if guard.dim.high is None else f" <= {guard.dim.high}"
            yield f"{guard.dim.low} <= {local[guard.path]}{high}"
        elif isinstance(guard, ValueGuard):
            yield f"{local[guard.path]} == {int(guard.value)}"  # type: ignore[arg-type]  # of a kernel they are ints
    for relation in variant.guards.where:
        yield source(relation, local)
