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
    none; with the line of a library's model that it led to, " at model.py:12 (in modeling_bert.py:430)". What is
    installed in an environment below the folder is not the user's."""
    root, inner = folder.resolve(), ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return f" at {path.relative_to(root)}:{frame.lineno}{inner}"
        if not inner and _is_of_a_model(path):
            inner = f" (in {path.name}:{frame.lineno})"
    return ""


def _is_of_a_model(path: Path) -> bool:
    """Is it a file of layers that is installed? Not one of what traces them."""
    parts = path.parts
    if "site-packages" not in parts:
        return False
    library = parts[parts.index("site-packages") + 1 :]
    if library[0] == "torch":
        return library[1] == "nn" and path.name != "module.py"
    return library[0] not in ("sympy", "triton")
