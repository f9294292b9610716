"""Tables of `aotpack tune`: which candidate was fastest at each key, on each architecture, with all the times.

A table is a file beside the manifest, reviewed and committed like code. Candidates are known by their content: another
order is the same list, another list is another table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from aotpack.tables import no_table, read_file
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.choice import Timed
from aotpack_runtime.format.fingerprint import canonical
from aotpack_runtime.format.gpu import parse_arch

Json = Any
SCHEMA = "aotpack.tuning/v1"


def read_table(
    path: Path, entry: str, candidates: Sequence[Mapping[str, Json]], *, key: Sequence[str], sizes: Collection[str]
) -> dict[str, tuple[Timed, ...]] | None:
    """Rows by architecture; None when there is no table yet. CompileError for one made for other candidates, or whose
    rows are not of the manifest's `key` (of which `sizes` are int arguments) and candidates."""
    table = load_table(path, entry)
    if table is None:
        return None
    known = _set_of(candidates)
    if _set_of(table["candidates"]) != known:
        raise CompileError(
            entry, f"{path.name} was measured for other candidates than the manifest has now",
            hint="run `aotpack tune` on a GPU again, or restore the configs",
        )  # fmt: skip
    found: dict[str, tuple[Timed, ...]] = {}
    for arch, measured in sorted(table["archs"].items()):
        rows = [Timed(row["sizes"], row["given"], row["pick"]) for row in measured["rows"]]
        for place, row in enumerate(rows):
            if {*row.sizes, *row.given} != set(key) or set(row.sizes) != set(sizes):
                raise no_table(
                    path, entry, f"row {place} of {arch} is of {[*row.sizes, *row.given]}, the key is {list(key)}"
                )
            if canonical(dict(row.pick)) not in known:
                raise no_table(path, entry, f"row {place} of {arch} picks {dict(row.pick)}, which is no candidate")
        found[arch] = tuple(rows)
    return found


def load_table(path: Path, entry: str) -> Json | None:
    """The table as JSON, None when there is no file."""
    return read_file(path, entry, SCHEMA, _check)


def _check(table: Json) -> None:
    rows = [row for measured in table["archs"].values() for row in measured["rows"]]
    for row in rows:
        if any(type(size) is not int or abs(size) >= 1 << 63 for size in row["sizes"].values()):
            raise ValueError(f"sizes are ints of 64 bits, found {str(row['sizes'])[:80]}")
    for arch in table["archs"]:
        if parse_arch(arch).ptx or parse_arch(arch).suffix:
            raise ValueError(f"{arch} is no capability such as sm_90")
    for axes in (*[row["pick"] for row in rows], *[row["given"] for row in rows], *table["candidates"]):
        if any(not isinstance(value, int | str) for value in axes.values()):
            raise ValueError(f"axes are numbers and words, found {axes}")


def _set_of(candidates: Sequence[Mapping[str, Json]]) -> set[bytes]:
    return {canonical(dict(one)) for one in candidates}
