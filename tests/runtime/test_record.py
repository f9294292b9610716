"""Records: what a frozen dataclass with slots promises, they promise."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.expression_tree import read
from aotpack_runtime.record import EMPTY, Record, replace


class Point(Record):
    """Two numbers and what is known of them."""

    x: int
    y: int = 2
    facts: Any = EMPTY
    _cache: object = None


class Named(Record, kw_only=True):
    """Fields that are given by name."""

    size: int = 1
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Twin:
    """`Point` as a dataclass, without what begins with `_`."""

    x: int
    y: int = 2


def test_values_are_compared_hashed_and_shown_by_their_fields() -> None:
    assert Point(1) == Point(1, 2, _cache=object())
    assert Point(1) != Point(2)
    assert Point(1) != Twin(1)
    assert hash(Point(1, facts=0)) == hash(Point(x=1, y=2, facts=0, _cache=object()))
    assert repr(Point(1)) == "Point(x=1, y=2, facts={})"
    nan = float("nan")
    assert Point(nan) == Point(nan)  # type: ignore[arg-type]  # as tuples compare: the same object
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1, facts={}))


@pytest.mark.parametrize(
    "change", [lambda p: setattr(p, "x", 3), lambda p: setattr(p, "z", 3), lambda p: delattr(p, "x")]
)
def test_a_value_cannot_be_changed(change: Callable[[Any], None]) -> None:
    point = Point(1)
    with pytest.raises(AttributeError, match="Point is frozen"):
        change(point)
    assert point == Point(1)
    assert not hasattr(point, "__dict__")


@pytest.mark.parametrize(
    ("make", "args", "fields", "wrong"),
    [
        pytest.param(Point, (), {}, "missing 1 required positional argument: 'x'", id="missing"),
        pytest.param(Point, (1, 2, 3, 4, 5), {}, "takes from 2 to 5 positional arguments", id="too-many"),
        pytest.param(Point, (1,), {"z": 2}, "unexpected keyword argument 'z'", id="unknown"),
        pytest.param(Named, (1,), {}, "takes 1 positional argument", id="by-place"),
        pytest.param(Named, (), {"size": 1}, "missing 1 required keyword-only argument: 'name'", id="missing-name"),
        pytest.param(replace, (Point(1),), {"z": 1}, "unexpected keyword argument 'z'", id="replace-unknown"),
    ],
)
def test_arguments_that_do_not_fit_are_told_as_python_does(
    make: Callable[..., object], args: tuple[Any, ...], fields: dict[str, Any], wrong: str
) -> None:
    for _ in range(2):  # the first makes the function
        with pytest.raises(TypeError, match=wrong):
            make(*args, **fields)


def test_defaults_follow_or_precede_what_is_given_by_name() -> None:
    assert Named(name="a") == Named(size=1, name="a")
    assert Named.__match_args__ == ()


def test_patterns_take_fields_by_place() -> None:
    match Point(1, 5):
        case Point(x, y):
            assert (x, y) == (1, 5)


def test_copies_are_equal() -> None:
    point = Point(1, 3, {"a": [1]})
    for made in (copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point)), replace(point)):
        assert made == point
    assert copy.deepcopy(point).facts is not point.facts
    assert replace(point, x=7) == Point(7, 3, {"a": [1]})


def test_dataclasses_functions_take_records() -> None:
    point = Point(1, facts={"a": 1})
    assert dataclasses.replace(point, y=4) == Point(1, 4, {"a": 1})
    assert dataclasses.asdict(point) == {"x": 1, "y": 2, "facts": {"a": 1}, "_cache": None}
    assert [field.name for field in dataclasses.fields(Named)] == ["size", "name"]


PLAIN = ["0", "12", "007", "1_0", "9" * 18, "9" * 19, "n", "_n", "print", "x.shape[0]", "x.shape[12]", "x.shape[00]", "n == 3",
         "x.shape[0] == n", "3 == 3", "n == n == n", "n==3", " n", "n ", "n\n", "x.shape", "x.shape[-1]", "True", "None", "if", "match",
         "n == True", "n == if", "n % 2 == 0", "é", "n ==  3", "== 3", ""]  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_an_expression_means_the_same_with_and_without_ast(text: str) -> None:
    env = dict.fromkeys(("n", "_n", "print", "match", "x.shape[0]", "x.shape[12]", "x.shape[-1]", "x.shape", "é"), 3)

    def outcome(make: Callable[[], tuple[str, frozenset[str], Callable[[Any], int]]]) -> object:
        try:
            canonical, names, evaluate = make()
        except ValueError as error:
            return str(error)
        value = evaluate(env)
        return canonical, names, type(value), value

    def quick() -> tuple[str, frozenset[str], Callable[[Any], int]]:
        found = parse(text)
        return found.text, found.names, found

    assert outcome(quick) == outcome(lambda: read(text))
