"""Modules that the caller has imported: looked up, never imported here."""

from __future__ import annotations

import sys
from typing import Any


def imported(name: str) -> Any:
    """The module called `name`; None where nobody imported it, or while another thread still does: it has half of its
    names then."""
    module = sys.modules.get(name)
    unfinished = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if unfinished else module
