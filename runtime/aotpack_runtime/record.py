"""Frozen values with named fields: what `@dataclass(frozen=True, slots=True)` makes, made cheaply.

A dataclass executes the text of six functions and makes its class twice while its module is imported: 0.53 ms a class,
and `dataclasses` itself imports `inspect` (Python 3.11, one EPYC core). It was more than half of what a session's own
imports took. The class of a record is made once, in 10 us; its one function with a text of its own, `__init__`, is
compiled for the first value, in 60 us, and makes a value in two thirds of a dataclass's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, dataclass_transform

EMPTY: Mapping[str, Any] = {}
"""The default of fields that are mappings. Nobody writes to it."""


class _Fields:
    """Lets `dataclasses.fields`, `replace` and `asdict` take records too: what they look for is made when they ask."""

    def __get__(self, value: Record | None, kind: type[Record]) -> Mapping[str, Any]:
        import dataclasses

        made: Any = dataclasses.make_dataclass("_", kind.__slots__, kw_only=True)
        fields: Mapping[str, Any] = made.__dataclass_fields__
        return fields


def _compile_first(self: Record, /, *args: Any, **kwargs: Any) -> None:
    """`__init__` until there is one: compiles it, and does what it does. Its text holds the names of fields, which
    stand in our own modules, and nothing else."""
    kind = type(self)
    setters = {f"_set_{name}": getattr(kind, name).__set__ for name in kind.__slots__}
    defaults = {f"_default_{name}": value for name, value in kind._defaults.items()}
    names = [f"{name}=_default_{name}" if name in kind._defaults else name for name in kind.__slots__]
    scope = setters | defaults
    lines = [f"    _set_{name}(self, {name})" for name in kind.__slots__] or ["    pass"]
    signature = ", ".join(["self", *["*"][: kind._kw_only and bool(names)], *names])
    exec("\n".join([f"def __init__({signature}):", *lines]), scope)  # noqa: S102 - see the docstring
    function = scope["__init__"]
    function.__qualname__ = f"{kind.__qualname__}.__init__"
    kind.__init__ = function  # type: ignore[method-assign]
    function(self, *args, **kwargs)


@dataclass_transform(frozen_default=True)
class _Kind(type):
    """Makes the class of a record; its fields are the annotations of its body."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], *, kw_only: bool = False) -> _Kind:
        fields = tuple(body["__annotations__"]) if bases else ()
        body["_defaults"] = {field: body.pop(field) for field in fields if field in body}
        body["_compared"] = tuple(field for field in fields if not field.startswith("_"))
        body |= {
            "__slots__": fields,
            "_kw_only": kw_only,
            "__match_args__": () if kw_only else fields,
        }
        body |= {"__init__": _compile_first} if bases else {}
        return super().__new__(cls, name, bases, body)


class Record(metaclass=_Kind):
    """Base of frozen values. Fields are annotated as in a dataclass, with their defaults, which all values share; with
    `kw_only=True` beside the base they are given by name. What begins with `_` is neither compared nor shown.

    A record has no further subclasses.
    """

    if TYPE_CHECKING:
        __slots__: ClassVar[tuple[str, ...]]
        _defaults: ClassVar[Mapping[str, Any]]
        _compared: ClassVar[tuple[str, ...]]
        _kw_only: ClassVar[bool]
    else:
        __dataclass_fields__ = _Fields()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: its {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: its {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(_values(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._compared)
        return f"{type(self).__qualname__}({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), {name: getattr(self, name) for name in self.__slots__})


if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414 - so that it is taken for one of this room's own names
else:

    def replace(record: Record, /, **changes: Any) -> Record:
        """`record` with other values in some of its fields."""
        return type(record)(**{name: getattr(record, name) for name in record.__slots__} | changes)


def _values(record: Record) -> tuple[object, ...]:
    return tuple([getattr(record, name) for name in record._compared])


def _again(kind: type[Record], fields: dict[str, Any]) -> Record:
    return kind(**fields)
