"""Inputs of an entry: one model for each kind of argument that `forward` may take, told apart by their keys."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from aotpack.manifest_values import Identifier, Many, ObjectPath, Scalar, Strict, wrong
from aotpack.suggest import describe, nearest

__all__ = [
    "ClassInput",
    "DictInput",
    "Dtype",
    "Fill",
    "FloatDtype",
    "Input",
    "IntInput",
    "Linear",
    "ListInput",
    "RandintFill",
    "TensorInput",
    "TupleInput",
    "ValueInput",
    "parse_axis",
]

FloatDtype = Literal["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"]
Dtype = Literal[FloatDtype, "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"]


@dataclass(frozen=True, slots=True)
class Linear:
    """The size of an axis that follows a dim: scale * dim + offset."""

    dim: str
    scale: int = 1
    offset: int = 0

    def __call__(self, size: int) -> int:
        """The size of the axis when the dim is `size`."""
        return self.scale * size + self.offset

    def __str__(self) -> str:
        scaled = self.dim if self.scale == 1 else f"{self.scale}*{self.dim}"
        return f"{scaled} {'-' if self.offset < 0 else '+'} {abs(self.offset)}" if self.offset else scaled


_LINEAR = re.compile(r"(?:([1-9][0-9]{0,17})\s*\*\s*)?([^\W\d]\w*)(?:\s*([+-])\s*([0-9]{1,18}))?")


def parse_axis(value: object) -> int | Linear:
    """One item of a shape: 256, `batch`, `2*n`, `n+1`, `2*n - 1`."""
    if isinstance(value, Linear) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    match = _LINEAR.fullmatch(value.strip()) if isinstance(value, str) else None
    if match and not keyword.iskeyword(match[2]):
        return Linear(match[2], int(match[1] or 1), int(f"{match[3] or ''}{match[4] or 0}"))
    hint = "; remove the quotes" if isinstance(value, str) and value.isdigit() else ""
    raise wrong(f"expected a size, a dim name or a form of one dim such as 2*n+1, found {describe(value)}{hint}")


def _below(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] >= bounds[1]:
        raise wrong(f"expected [low, high] with low below high, found [{bounds[0]}, {bounds[1]}]")
    return bounds


Axis = Annotated[int | Linear, BeforeValidator(parse_axis, json_schema_input_type=int | str)]
Bounds = Annotated[tuple[int, int], Field(strict=False), AfterValidator(_below)]


class RandintFill(Strict):
    """Random integers from the first bound up to, and without, the second."""

    randint: Bounds


Fill = Literal["randn", "rand", "ones", "zeros"] | RandintFill
FillForm = Annotated[
    Annotated[Literal["randn", "rand", "ones", "zeros"], Tag("<fill>")] | Annotated[RandintFill, Tag("<randint>")],
    Discriminator(lambda value: "<randint>" if isinstance(value, dict | RandintFill) else "<fill>"),
]


def _continuous(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _default_fill(validated: Mapping[str, Any]) -> Fill:
    dtype = validated["dtype"]
    if _continuous(dtype):
        return "randn"
    return "zeros" if dtype == "bool" else RandintFill(randint=(0, 2))


class TensorInput(Strict):
    """A tensor; a name in its shape is a dim."""

    shape: Annotated[tuple[Axis, ...], Field(strict=False)] = Field(
        description="sizes, dim names, or forms of one dim such as 2*n+1; [] for a scalar tensor"
    )
    dtype: Dtype = Field(description="element type, by torch's name")
    fill: FillForm = Field(
        default_factory=_default_fill,
        description="example values; default: randn for floats, zeros for bool, {randint: [0, 2]} for integers",
    )
    optional: bool = Field(default=False, description="also build variants without it")
    layout: Literal["contiguous", "channels_last"] = "contiguous"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.layout == "channels_last" and len(self.shape) != 4:
            raise wrong(f"channels_last needs 4 dims, the shape has {len(self.shape)}", "layout")
        if self.fill in ("randn", "rand") and not _continuous(self.dtype):
            raise wrong(f"{self.fill} needs a float dtype, not {self.dtype}; use {{randint: [low, high]}}", "fill")
        return self


class ValueInput(Strict):
    """A constant: frozen into the variant, and guarded by value and type."""

    value: Scalar = Field(description="a number, text, true, false or null")


class IntInput(Strict):
    """An int that stays open within its bounds."""

    dtype: Literal["int"]
    range: Bounds = Field(description="smallest and largest value, both included")


class ListInput(Strict):
    """A Python list of inputs."""

    items: Many[Input] = Field(alias="list")


class TupleInput(Strict):
    """A Python tuple of inputs."""

    items: Many[Input] = Field(alias="tuple")


class DictInput(Strict):
    """A Python dict of inputs."""

    items: Mapping[str, Input] = Field(alias="dict", min_length=1)


class ClassInput(Strict):
    """An instance of a class that has these fields, such as a dataclass."""

    class_path: ObjectPath = Field(alias="class", description='"pkg.module:Name"')
    fields: Mapping[Identifier, Input] = Field(min_length=1)


_KIND_BY_KEY = {
    "shape": TensorInput,
    "value": ValueInput,
    "range": IntInput,
    "list": ListInput,
    "tuple": TupleInput,
    "dict": DictInput,
    "class": ClassInput,
}


def _input_tag(data: object) -> str | None:
    """The kind that the keys are about; a slip of a key still says which kind was meant."""
    if isinstance(data, Strict):
        return f"<{type(data).__name__}>"
    if not isinstance(data, dict):
        return None
    known = next((key for key in _KIND_BY_KEY if key in data), None)
    guesses = (nearest(key, _KIND_BY_KEY) for key in data if key not in TensorInput.model_fields)
    key = "range" if data.get("dtype") == "int" else known or next(filter(None, guesses), "shape")
    return f"<{_KIND_BY_KEY[key].__name__}>"


Input = Annotated[
    Annotated["TensorInput", Tag("<TensorInput>")]
    | Annotated["ValueInput", Tag("<ValueInput>")]
    | Annotated["IntInput", Tag("<IntInput>")]
    | Annotated["ListInput", Tag("<ListInput>")]
    | Annotated["TupleInput", Tag("<TupleInput>")]
    | Annotated["DictInput", Tag("<DictInput>")]
    | Annotated["ClassInput", Tag("<ClassInput>")],
    Discriminator(
        _input_tag,
        custom_error_type="input_kind",
        custom_error_message="expected {shape: [...], dtype: ...} for a tensor or {value: ...} for a constant",
    ),
]
