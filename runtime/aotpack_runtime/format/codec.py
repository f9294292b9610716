"""JSON forms of guards, outputs and scalars: each record's writer and reader side by side.

Readers raise KeyError, TypeError or ValueError on anything that is not what a writer makes; `index_json.parse` adds
where.
"""

from __future__ import annotations

from typing import Any

from aotpack_runtime.format import tree
from aotpack_runtime.format.expression import Expression, parse
from aotpack_runtime.format.guard import (
    DescriptorGuard,
    Dim,
    Guards,
    IntGuard,
    Layout,
    LeafGuard,
    NumberGuard,
    PointerGuard,
    Range,
    TensorGuard,
    ValueGuard,
)
from aotpack_runtime.format.output import Argument, OutputLeaf, Outputs, Result, Size, Value, View
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, Scalar

Json = Any


def dump_scalar(value: Scalar) -> Json:
    """Floats by their exact hex, so that NaN, infinities and signed zeros survive."""
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    return value


def parse_scalar(value: Json) -> Scalar:
    match value:
        case None | bool() | int() | str():
            return value
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"complex": [str(real), str(imaginary)]}:
            return complex(float.fromhex(real), float.fromhex(imaginary))
    raise ValueError(f"not a scalar: {str(value)[:80]}")


def dump_guards(guards: Guards) -> Json:
    return {
        "trees": list(guards.trees),
        "leaves": [_dump_leaf(guard) for guard in guards.leaves],
        "where": [relation.text for relation in guards.where],
    }


def parse_guards(value: Json) -> Guards:
    return Guards(
        trees=tuple(map(tree.parse, value["trees"])),
        leaves=tuple(map(_parse_leaf, value["leaves"])),
        where=tuple(parse(text) for text in value["where"]),
    )


def _dump_leaf(guard: LeafGuard) -> Json:
    match guard:
        case TensorGuard():
            record: dict[str, Json] = {
                "path": guard.path,
                "dtype": guard.dtype,
                "dims": [_dump_dim(dim) for dim in guard.dims],
                "device": guard.device,
            }
            if guard.layout != "contiguous":
                record["layout"] = guard.layout if isinstance(guard.layout, str) else _texts(guard.layout)
            if guard.aligned:
                record["aligned"] = True
            if guard.written:
                record["written"] = True
            return record
        case ValueGuard():
            return {"path": guard.path, "value": dump_scalar(guard.value)}
        case IntGuard():
            return {"path": guard.path, "int": _dump_dim(guard.dim)}
        case PointerGuard():
            record = {"path": guard.path, "pointer": guard.dtype, "device": guard.device}
            return record | ({"aligned": True} if guard.aligned else {})
        case DescriptorGuard():
            return {"path": guard.path, "descriptor": guard.dtype, "device": guard.device, "rank": guard.rank}
        case NumberGuard():
            return {"path": guard.path, "number": guard.kind}


def _parse_leaf(value: Json) -> LeafGuard:
    path = _text(value["path"])
    if "dtype" in value:
        layout = value.get("layout", "contiguous")
        return TensorGuard(
            path=path,
            dtype=_text(value["dtype"]),
            dims=tuple(map(_parse_size, value["dims"])),
            device=_text(value["device"]),
            layout=layout if isinstance(layout, str) else _expressions(layout),
            aligned=bool(value.get("aligned", False)),
            written=bool(value.get("written", False)),
        )
    if "pointer" in value:
        aligned = bool(value.get("aligned", False))
        return PointerGuard(path=path, dtype=_text(value["pointer"]), device=_text(value["device"]), aligned=aligned)
    if "descriptor" in value:
        dtype, rank = _text(value["descriptor"]), value["rank"]
        if dtype not in ITEMSIZE_BYTES or type(rank) is not int or not 1 <= rank <= 5:
            raise ValueError(f"{path}: no descriptor of {dtype} with {rank!r} dims")
        return DescriptorGuard(path=path, dtype=dtype, device=_text(value["device"]), rank=rank)
    if "number" in value:
        if value["number"] not in ("float", "bool"):
            raise ValueError(f"{path}: a number is a float or a bool, not {value['number']!r}")
        return NumberGuard(path=path, kind=value["number"])
    if "int" in value:
        dim = _parse_dim(value["int"])
        if not isinstance(dim, Range):
            raise ValueError(f"{path}: int takes a range")
        return IntGuard(path=path, dim=dim)
    return ValueGuard(path=path, value=parse_scalar(value["value"]))


def _dump_dim(dim: Dim) -> Json:
    return dim if isinstance(dim, int) else [dim.low, dim.high]


def _parse_size(value: Json) -> Dim:
    if type(value) is int and value >= 0:
        return value
    dim = _parse_dim(value)
    if (dim.low if isinstance(dim, Range) else dim) < 0:
        raise ValueError(f"not a size or range: {value!r}")
    return dim


def _parse_dim(value: Json) -> Dim:
    match value:
        case bool():
            pass
        case int():
            return value
        case [int(low), int() | None as high] if type(low) is not bool and type(high) is not bool:
            return Range(low, high)
    raise ValueError(f"not a size or range: {value!r}")


def dump_outputs(outputs: Outputs) -> Json:
    return {"tree": outputs.tree, "leaves": [_dump_output(leaf) for leaf in outputs.leaves]}


def parse_outputs(value: Json) -> Outputs:
    return Outputs(tree.parse(value["tree"]), tuple(_parse_output(leaf) for leaf in value["leaves"]))


def _dump_output(leaf: OutputLeaf) -> Json:
    match leaf:
        case Result(index, dtype, shape):
            return {"result": index, "dtype": dtype, "shape": None if shape is None else _texts(shape)}
        case Argument(index):
            return {"argument": index}
        case Value(value):
            return {"value": dump_scalar(value)}
        case Size(size):
            return {"size": size.text}
        case View(of, shape, strides, offset, conj):
            record = {"shape": _texts(shape), "strides": _texts(strides), "offset": offset.text}
            return {"view": _dump_output(of), **record} | ({"conj": True} if conj else {})


def _parse_output(value: Json) -> OutputLeaf:
    match value:
        case {"view": of, "shape": shape, "strides": strides, "offset": str(offset)}:
            base = _parse_output(of)
            if not isinstance(base, Result | Argument):
                raise ValueError("a view is of a result or an argument")
            return View(base, _expressions(shape), _expressions(strides), parse(offset), bool(value.get("conj", False)))
        case {"result": int(index), "dtype": str(dtype), "shape": shape}:
            return Result(index, dtype, None if shape is None else _expressions(shape))
        case {"argument": int(index)}:
            return Argument(index)
        case {"size": str(size)}:
            return Size(parse(size))
        case {"value": item}:
            return Value(parse_scalar(item))
    raise ValueError(f"not an output: {str(value)[:80]}")


def _texts(expressions: Layout) -> list[str]:
    return [expression.text for expression in expressions]  # type: ignore[union-attr]


def _expressions(texts: Json) -> tuple[Expression, ...]:
    return tuple(parse(_text(item)) for item in texts)


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {str(value)[:80]!r}")
    return value


def no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """For json.loads: ValueError for a key that is given twice, of which readers could take either."""
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return record
