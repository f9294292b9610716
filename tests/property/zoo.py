"""The bundle that random calls are made to: `models.py` built as one zoo of 23 variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.building import build_zoo, entry


def f32(*shape: int | str, **more: Any) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "float32", **more}


def c64(*shape: int | str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "complex64"}


BATCH = {"min": 1, "max": 8}
IMAGE = {"batch": {"min": 1, "max": 4}, "side": {"min": 4, "max": 12}}
IDS = {"shape": ["batch", "length"], "dtype": "int64", "fill": {"randint": [0, 50]}}
PAIR = {"tuple": [f32("rows", 4), {"value": 2}]}
QUERY = {"dict": {"a": f32("rows", 4), "more": {"list": [f32("rows", 4), f32("rows", 2)]}}}

ENTRIES = {
    "mlp": entry("mlp", {"x": f32("batch", 16)}, [{"dims": {"batch": [1, 8]}}, {"dims": {"batch": {"min": 1, "max": 32}}}]),
    "conv": entry("conv", {"image": f32("batch", 3, "side", "side")}, [{"dims": IMAGE}]),
    "conv_last": entry("conv", {"image": f32("batch", 3, "side", 8, layout="channels_last")}, [{"dims": IMAGE}]),
    "attention": entry(
        "attention",
        {"x": f32("batch", "seq", 16), "mask": {"shape": ["batch", "seq"], "dtype": "bool", "fill": "ones"}},
        [{"dims": {"batch": 2, "seq": 8}}, {"dims": {"batch": BATCH, "seq": {"min": 2, "max": 24}}}],
    ),
    "cell": entry("cell", {"x": f32("batch", 8), "state": {"tuple": [f32("batch", 6)] * 2}}, [{"dims": {"batch": BATCH}}]),
    "embed": entry("embed", {"ids": IDS}, [{"dims": {"batch": BATCH, "length": {"min": 1, "max": 16}}}]),
    "scalars": entry("scalars", {"x": f32(3), "k": {"value": 3}}),
    "narrow": entry(
        "narrow", {"x": f32("n"), "n": {"dtype": "int", "range": [1, 64]}}, [{"dims": {"n": {"min": 2, "max": 64, "opt": 40}}}]
    ),
    "optional": entry(
        "optional", {"x": f32("batch", 6), "mask": f32("batch", 6, optional=True)}, [{"dims": {"batch": BATCH}}]
    ),
    "nested": entry("nested", {"q": QUERY, "pair": PAIR}, [{"dims": {"rows": 4}}, {"dims": {"rows": {"min": 1, "max": 8}}}]),
    "running": entry("running", {"x": f32("rows", 4)}, [{"dims": {"rows": 2}}, {"dims": {"rows": {"min": 1, "max": 16}}}]),
    "reshape": entry("reshape", {"x": f32("4*n")}, [{"dims": {"n": {"min": 1, "max": 50}}}]),
    "grouped": entry(
        "grouped", {"x": f32("4*n"), "y": f32("n")}, [{"dims": {"n": {"min": 1, "max": 12}}}]
    ),
    "branches": entry(
        "branches",
        {"x": f32("rows", 3)},
        [{"dims": {"rows": {"ranges": [{"min": 2, "max": 4}, {"min": 5, "max": 16}]}}}, {"dims": {"rows": 1}}],
    ),
    "complexes": entry("complexes", {"z": c64("n"), "w": c64("n")}, [{"dims": {"n": {"min": 1, "max": 16}}}]),
    "writing": entry("writing", {"x": f32("n", 4), "y": f32("n", 4)}, [{"dims": {"n": {"min": 1, "max": 8}}}]),
    "reading": entry("reading", {"x": f32("n", 4), "y": f32("n", 4)}, [{"dims": {"n": {"min": 1, "max": 8}}}]),
}  # fmt: skip


def property_models() -> Path:
    """The bundle, built now or by an earlier run."""
    return build_zoo("property_models", (Path(__file__).parent / "models.py").read_text(), ENTRIES)
