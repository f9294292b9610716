"""Tables of measured kernel configurations for cross builds of torch entries: made on a GPU, read by the next build.

A kernel is known by the digest of its source, so a table outlives other changes of a model; a kernel that it lacks is
left to the rule of `compilers/cross/choices.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotpack.tables import read_file, write_json
from aotpack_runtime.format.gpu import parse_arch

Json = Any
SCHEMA = "aotpack.torch-tuning/v1"
PARTS = ("kernels", "attention")


def read_picks(path: Path | None, entry: str, arch: str) -> dict[str, dict[str, Json]]:
    """What was fastest on GPUs of `arch`: under `kernels` a configuration by the digest of a kernel, under `attention`
    an operator by the words of a call. Both are empty when there is no table yet."""
    table = load_table(path, entry) if path is not None else None
    wanted = parse_arch(arch).capability
    archs = table["archs"] if table is not None else {}
    measured: Json = next((item for name, item in archs.items() if parse_arch(name).capability == wanted), {})
    return {part: {key: seen["pick"] for key, seen in measured.get(part, {}).items()} for part in PARTS}


def load_table(path: Path, entry: str) -> Json | None:
    """The table as JSON, None when there is no file. CompileError for what is none."""
    return read_file(path, entry, SCHEMA, _check)


def _check(table: Json) -> None:
    for name, measured in table["archs"].items():
        parse_arch(name)
        if not all(isinstance(call["pick"], str) for call in measured.get("attention", {}).values()):
            raise ValueError("an attention operator is a word")
        for kernel in measured["kernels"].values():
            if not all(isinstance(value, int) for value in kernel["pick"].values()):
                raise ValueError(f"a configuration is names and numbers, found {str(kernel['pick'])[:80]}")


def write_picks(path: Path, entry: str, arch: str, measured: Mapping[str, Json]) -> None:
    """Put what was measured on `arch` into the table at `path`; what was not timed this time, and other architectures,
    stay as they are."""
    old = load_table(path, entry) or {"archs": {}}
    before = old["archs"].get(arch, {})
    now = {**measured, **{part: {**before.get(part, {}), **measured.get(part, {})} for part in PARTS}}
    write_json(path, {"schema": SCHEMA, "entry": entry, "archs": {**old["archs"], arch: now}})
