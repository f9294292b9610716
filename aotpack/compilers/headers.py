"""Files that a C++ source may include: what a job depends on, whether it includes them today or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from aotpack_runtime.format import layout


def header_files(folder: Path) -> list[Path]:
    """Every file below an include folder, but for those of hidden folders and of bundles: what a build writes beside
    its manifest is no header of it."""
    return sorted(_files(folder))


def _files(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):
        if layout.INDEX in names and {"artifacts", "sources", "programs", "weights"} & set(folders):
            folders.clear()
            continue
        folders[:] = [each for each in folders if not each.startswith((".", "__pycache__"))]
        yield from (Path(path, name) for name in names)
