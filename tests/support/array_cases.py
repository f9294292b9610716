"""The bundle of `array_models.py`."""

from __future__ import annotations

from pathlib import Path

from tests.support.building import build_zoo, entry

ROWS = [{"dims": {"rows": {"min": 1, "max": 16}}}]


def array_cases() -> Path:
    """The bundle, built now or by an earlier run."""
    return build_zoo(
        "array_cases",
        Path(__file__).with_name("array_models.py").read_text(),
        {
            "half": entry(
                "half", {"x": {"shape": ["rows", 8], "dtype": "bfloat16"}}, ROWS, verify={"rtol": 0.02, "atol": 0.02}
            ),
            "turned": entry("turned", {"x": {"shape": ["rows", 6], "dtype": "float32"}}, ROWS),
        },
    )
