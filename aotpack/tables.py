"""Tables of measured choices as files: read with what is wrong in one line, written whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aotpack_runtime.errors import CompileError

Json = Any


def read_file(path: Path, entry: str, schema: str, check: Callable[[Json], None]) -> Json | None:
    """The table of `entry` as JSON, None when there is no file. CompileError for what is no table, which `check`
    raises a ValueError for."""
    try:
        table = json.loads(path.read_bytes())
        if table["schema"] != schema or table["entry"] != entry:
            raise ValueError(f"it is of {table['schema']} and entry {table['entry']}")
        check(table)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise no_table(path, entry, f"{type(error).__name__} {error}") from None
    return table


def no_table(path: Path, entry: str, problem: str) -> CompileError:
    return CompileError(entry, f"{path}: is no tuning table: {problem}", hint="run `aotpack tune` again")


def write_json(path: Path, value: Json) -> None:
    """`value` at `path`, the same text for the same value; who reads sees the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
