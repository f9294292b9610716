"""Tables of `aotpack tune`: which candidate was fastest at each key, on each architecture, with all the times.

A table is a file beside the manifest, reviewed and committed like code. Candidates are known by their content: another
order is the same list, another list is another table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.choice import Timed
from aotpack_runtime.format.fingerprint import canonical

Json = Any
SCHEMA = "aotpack.tuning/v1"


def read_table(path: Path, entry: str, candidates: Sequence[Mapping[str, Json]]) -> dict[str, tuple[Timed, ...]] | None:
    """Rows by architecture; None when there is no table yet. CompileError for one made for other candidates."""
    table = load_table(path, entry)
    if table is None:
        return None
    if _set_of(table["candidates"]) != _set_of(candidates):
        raise CompileError(
            entry, f"{path.name} was measured for other candidates than the manifest has now",
            hint="run `aotpack tune` on a GPU again, or restore the configs",
        )  # fmt: skip
    return {
        arch: tuple(Timed(row["sizes"], row["given"], row["pick"]) for row in measured["rows"])
        for arch, measured in sorted(table["archs"].items())
    }


def load_table(path: Path, entry: str) -> Json | None:
    """The table as JSON, None when there is no file."""
    try:
        table = json.loads(path.read_bytes())
        if table["schema"] != SCHEMA or table["entry"] != entry:
            raise ValueError(f"it is of {table['schema']} and entry {table['entry']}")
        for measured in table["archs"].values():
            for row in measured["rows"]:
                row["sizes"], row["given"], row["pick"]
        table["candidates"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompileError(
            entry, f"{path}: is no tuning table: {type(error).__name__} {error}", hint="run `aotpack tune` again"
        ) from None
    return table


def _set_of(candidates: Sequence[Mapping[str, Json]]) -> set[bytes]:
    return {canonical(dict(one)) for one in candidates}
