"""AOTPACK_LOG: which parts of the runtime say how much, in the words of TORCH_LOGS.

`AOTPACK_LOG=+dispatch,guards,jit`: a name alone says what happens, with `+` in full, with `-` errors only. A miss reads
as Dynamo's would: `expected x.shape[0] in [8, 64], actual 70`.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

from aotpack_runtime.errors import AotpackError

if TYPE_CHECKING:
    from logging import Logger

PARTS = ("bundle", "dispatch", "guards", "jit", "load")
"""What can be named: the loggers `aotpack.<part>`."""

INFO = 20
"""As logging has it."""

_RANGE = r"(?P<what>[^:]+): expected (?P<low>\d+)\.\.(?P<high>\d+), got (?P<seen>.+)"
_FROM = r"(?P<what>[^:]+): expected (?P<low>\d+) or more, got (?P<seen>.+)"
_ONE = r"(?P<what>[^:]+): expected (?P<one>.+), got (?P<seen>.+)"


def logger(part: str) -> Logger:
    """The logger `aotpack.<part>`. A start that has nothing to say does not import logging, which takes 4 ms."""
    import logging

    return logging.getLogger(f"aotpack.{part}")


def configure() -> None:
    """Set the levels that AOTPACK_LOG asks for, and send what they let through to stderr; AotpackError for a name that
    is none. Without the variable logging is left to the server."""
    text = os.environ.get("AOTPACK_LOG", "").strip()
    if not text:
        return
    import logging

    root = logging.getLogger("aotpack")
    for word in filter(None, (part.strip() for part in text.split(","))):
        name = word.lstrip("+-")
        if name not in (*PARTS, "all"):
            raise AotpackError(f"AOTPACK_LOG names {name!r}; expected some of {', '.join(PARTS)}, all")
        level = {"+": logging.DEBUG, "-": logging.ERROR}.get(word[0], logging.INFO)
        for part in PARTS if name == "all" else (name,):
            logging.getLogger(f"aotpack.{part}").setLevel(level)
    if not any(getattr(handler, "of_aotpack", False) for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.of_aotpack = True  # type: ignore[attr-defined]
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        root.addHandler(handler)
        root.propagate = False


def guard_failed(entry: str, reason: str, count: int) -> None:
    """Say what turned a call down: the first time, the second, the fourth, ... of its kind."""
    if count & (count - 1) == 0 and (guards := logger("guards")).isEnabledFor(INFO):
        guards.info("%s: miss %d of its kind: %s", entry, count, in_dynamos_words(reason))


def in_dynamos_words(reason: str) -> str:
    """`x.shape[0]: expected 8..64, got 70` -> `expected x.shape[0] in [8, 64], actual 70`."""
    if match := re.fullmatch(_RANGE, reason):
        return f"expected {match['what']} in [{match['low']}, {match['high']}], actual {match['seen']}"
    if match := re.fullmatch(_FROM, reason):
        return f"expected {match['what']} in [{match['low']}, inf], actual {match['seen']}"
    if match := re.fullmatch(_ONE, reason):
        return f"expected {match['what']} == {match['one']}, actual {match['seen']}"
    return reason
