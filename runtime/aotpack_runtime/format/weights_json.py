"""The weights of an entry as JSON: the record's writer and reader."""

from __future__ import annotations

from typing import Any

from aotpack_runtime.format.index import WeightRef, WeightSet
from aotpack_runtime.format.plain import text

Json = Any


def dump_set(item: WeightSet) -> Json:
    weights: dict[str, Json] = {}
    for name, ref in item.weights.items():
        order = {} if ref.order is None else {"order": list(ref.order)}
        weights[name] = {"tensor": ref.tensor} | order | ({"host": True} if ref.host else {})
    return {"weights": weights, "state": list(item.state), "dtype": item.dtype}


def parse_set(value: Json) -> WeightSet:
    refs = {
        name: WeightRef(text(item["tensor"]), tuple(item["order"]) if "order" in item else None, _is_host(item))
        for name, item in value["weights"].items()
    }
    return WeightSet(refs, tuple(text(name) for name in value["state"]), text(value["dtype"]))


def _is_host(item: Json) -> bool:
    found = item.get("host", False)
    if not isinstance(found, bool):
        raise TypeError(f"host: expected true or false, got {str(found)[:80]!r}")
    return found
