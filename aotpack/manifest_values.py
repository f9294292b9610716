"""Values of a manifest: texts with a rule, and the forms of a dim, which become ranges.

A rule is raised as `wrong(message, *at)`: `at` leads from the value that was judged to the place that is meant, and
`manifest.py` turns both into a line and a column.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import Annotated, Any, Self, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from aotpack.suggest import describe

__all__ = [
    "Bytes",
    "Dim",
    "Distinct",
    "Identifier",
    "Limit",
    "Many",
    "ModuleName",
    "Name",
    "ObjectPath",
    "Positive",
    "Range",
    "Scalar",
    "SemVer",
    "Size",
    "Source",
    "Specifier",
    "Strict",
    "matching",
    "middle",
    "wrong",
]

T = TypeVar("T")


def wrong(message: str, *at: str | int) -> PydanticCustomError:
    """The error of a rule of ours; `message` is shown as it is."""
    return PydanticCustomError("aotpack", "{message}", {"message": message, "at": at})


class Strict(BaseModel):
    """A mapping with no unknown keys and no guesses: 8.0 and "8" are not 8."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _note(cls, data: Any, info: ValidationInfo) -> Any:
        """Tell the reporter of errors which model this mapping was read as: it knows the keys that exist."""
        if isinstance(data, dict) and isinstance(info.context, MutableMapping):
            info.context[id(data)] = cls
        return data


# Texts


def matching(pattern: str, expected: str) -> AfterValidator:
    """Text that matches `pattern` in full; `expected` says in words what that is."""
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise wrong(f"expected {expected}, found {describe(text)}")
        return text

    return AfterValidator(check)


def _identifier(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise wrong(f"expected a Python name such as batch or seq_len, found {describe(text)}")
    return text


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        hint = f'; write "=={text}"' if re.fullmatch(r"[0-9][0-9A-Za-z.]*", text) else ""
        raise wrong(f'expected a PEP 440 specifier such as ">=5.20,<6", found {describe(text)}{hint}') from None
    return text


def _scalar(value: object) -> object:
    if isinstance(value, list | dict):
        raise wrong(f"expected text, a number, true, false or null, found {describe(value)}")
    return value


_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(value: object) -> int:
    """2GiB, 1.5GB or a number of bytes -> bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"([0-9]{1,15})(?:\.([0-9]{1,3}))?\s*([a-zA-Z]*)", value) if isinstance(value, str) else None
    if match is None or match[3] not in _UNITS:
        raise wrong(f"expected a size such as 2GiB, 500MB or a number of bytes, found {describe(value)}")
    whole, fraction, unit = match[1], match[2] or "", _UNITS[match[3]]
    return int(whole + fraction) * unit // int("1" + "0" * len(fraction))


_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_NUMBER = r"(0|[1-9][0-9]*)"
_PRE = r"(0|[1-9][0-9]*|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)"
_SEMVER = rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-{_PRE}(\.{_PRE})*)?(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?"

Name = Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_.-]*", "a name (letters, digits, _ . - after a letter or _)")]
Identifier = Annotated[str, AfterValidator(_identifier)]
ModuleName = Annotated[str, matching(_DOTTED, "a module name such as pkg.ops")]
ObjectPath = Annotated[str, matching(f"{_DOTTED}:{_DOTTED}", '"pkg.module:Name"')]
Source = Annotated[str, matching(rf"{_DOTTED}:{_DOTTED}|.+\.pt2", '"pkg.module:name" or a path that ends in .pt2')]
SemVer = Annotated[str, matching(_SEMVER, "a semantic version such as 1.4.0")]
Specifier = Annotated[str, AfterValidator(_specifier)]
Scalar = Annotated[bool | int | float | str | None, BeforeValidator(_scalar)]
Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
Size = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Limit = Annotated[float, Field(ge=0, allow_inf_nan=False)]


# Lists


def _filled(items: tuple[T, ...]) -> tuple[T, ...]:
    if not items:
        raise wrong("is empty; expected at least one item")
    return items


def _distinct(items: tuple[T, ...]) -> tuple[T, ...]:
    seen: set[T] = set()
    for index, item in enumerate(items):
        if item in seen:
            raise wrong("is in the list twice; remove one", index)
        seen.add(item)
    return items


Many = Annotated[tuple[T, ...], Field(strict=False, json_schema_extra={"minItems": 1}), AfterValidator(_filled)]
"""A list that is never empty. Not strict, because strict pydantic wants a tuple where YAML has lists; and not
`min_length`, which counts the items without a mistake."""

Distinct = Annotated[Many[T], AfterValidator(_distinct)]


# Dims


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes of one dim that one variant takes, both ends included; `max` None has no end, min == max is static.

    `opt` is the size for tuning, verification and bench; always inside.
    """

    min: int
    max: int | None
    opt: int

    def __str__(self) -> str:
        if self.min == self.max:
            return str(self.min)
        return f"{self.min} and up" if self.max is None else f"{self.min} to {self.max}"


def middle(low: int, high: int | None) -> int:
    """The opt of a range that names none: the geometric middle, rounded, never outside.

    0 counts as 1 here: an empty tensor would tune and verify nothing. Without an end it is twice the start and at
    least 16, past the sizes 0 and 1 that compilers treat apart.
    """
    if high is None:
        return max(2 * low, 16)
    product = max(low, 1) * high
    root = isqrt(product)
    rounded = root + (product > root * root + root)
    return min(max(rounded, low), high)


class RangeForm(Strict):
    """One dynamic variant for a range of sizes."""

    min: Size = Field(description="smallest size")
    max: Size | None = Field(description="largest size; null for no end")
    opt: Size | None = Field(default=None, description="size to tune and verify for; default: the geometric middle")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise wrong(f"min {self.min} is above max {self.max}", "min")
        if self.opt is not None and not (self.min <= self.opt and (self.max is None or self.opt <= self.max)):
            raise wrong(f"opt {self.opt} is outside the range, {Range(self.min, self.max, 0)}", "opt")
        return self

    def range(self) -> Range:
        """The same with opt filled in."""
        return Range(self.min, self.max, middle(self.min, self.max) if self.opt is None else self.opt)


class RangesForm(Strict):
    """One dynamic variant for each range."""

    ranges: Many[RangeForm]


def _dim_tag(value: object) -> str:
    if isinstance(value, dict):
        return "<ranges>" if "ranges" in value else "<range>"
    return "<sizes>" if isinstance(value, list) else "<size>"


DimForm = Annotated[
    Annotated[Size, Tag("<size>")]
    | Annotated[Many[Size], Tag("<sizes>")]
    | Annotated[RangeForm, Tag("<range>")]
    | Annotated[RangesForm, Tag("<ranges>")],
    Discriminator(_dim_tag),
]
_DIM_FORM: TypeAdapter[int | tuple[int, ...] | RangeForm | RangesForm] = TypeAdapter(DimForm, config={"strict": True})


def _ranges(value: object, info: ValidationInfo) -> tuple[Range, ...]:
    """8, [1, 8], {min, max, opt} or {ranges: [...]} -> ranges that do not overlap, in the manifest's order."""
    if isinstance(value, tuple) and all(isinstance(each, Range) for each in value):
        return _apart(value)  # from Python, where a point is written with our own values
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        raise wrong("expected a list of sizes, found mappings in it; for ranges write {ranges: [...]}")
    match _DIM_FORM.validate_python(value, context=info.context):
        case int() as size:
            return (Range(size, size, size),)
        case RangeForm() as form:
            return (form.range(),)
        case RangesForm(ranges=forms):
            return _apart(tuple(form.range() for form in forms), "ranges")
        case sizes:
            return _apart(tuple(Range(size, size, size) for size in sizes))


def _apart(ranges: tuple[Range, ...], *at: str) -> tuple[Range, ...]:
    """The same; an overlap is an error at the later one of the two."""
    order = sorted(range(len(ranges)), key=lambda index: ranges[index].min)
    for below, above in pairwise(order):
        end = ranges[below].max
        if end is None or ranges[above].min <= end:
            first, second = sorted((below, above))
            message = f"{ranges[second]} overlaps {ranges[first]}, given before it; a size belongs to one variant"
            raise wrong(message, *at, second)
    return ranges


Dim = Annotated[tuple[Range, ...], BeforeValidator(_ranges, json_schema_input_type=DimForm)]
