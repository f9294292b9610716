"""What a user's source raised, as a message shows it: one line, and the place in the user's own files."""

from __future__ import annotations

import traceback
from pathlib import Path


def first_line(error: BaseException) -> str:
    """The first line that says something, at most 300 characters of it; else the kind of error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def user_place(error: BaseException, folder: Path) -> str:
    """Such as " at kernels/norm.py:12", for the last line of the traceback in a file below `folder`, "" when there is
    none. What is installed in an environment below it is not the user's."""
    root = folder.resolve()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return f" at {path.relative_to(root)}:{frame.lineno}"
    return ""
