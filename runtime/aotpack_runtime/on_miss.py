"""The words of a manifest's `on_miss` that a server may say anew: `load(..., on_miss={"background": False})`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aotpack_runtime.errors import AotpackError

_CHOICES: Mapping[str, tuple[str | bool, ...]] = {
    "policy": ("jit", "eager", "error"),
    "when": ("pays", "at_once", "never"),
    "background": (False, True),
}
_NUMBERS = {"max_jit": 0, "max_seconds": 1, "max_memory": 1}
"""The least that each may be; `max_memory` is in bytes."""


def checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`given`, once all its words and values are known ones; AotpackError for the first that is not. What pads, and
    whether a reference serves, the manifest alone says: it was verified when the bundle was built."""
    for word, value in given.items():
        if word in _CHOICES:
            choices = _CHOICES[word]
            if type(value) is not type(choices[0]) or value not in choices:
                raise AotpackError(f"on_miss: {word} is {value!r}; expected {_listed(choices)}")
        elif word in _NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= _NUMBERS[word]:
                raise AotpackError(f"on_miss: {word} is {value!r}; expected a number, {_NUMBERS[word]} or more")
        else:
            raise AotpackError(f"on_miss has the word {word!r}; expected {_listed([*_CHOICES, *_NUMBERS])}")
    return given


def _listed(words: Iterable[str | bool]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}"
