"""Shared libraries opened while other threads run.

The dynamic loader does one thing at a time, looking a function up included, and ctypes keeps the GIL while it asks it
(Python 3.13). So a thread that opened a small library, or took a function from one for the first time, while another is
at torch's would stop the whole process until that is done: 0.2 s. What is needed meanwhile is looked up before.
"""

from __future__ import annotations

import ctypes
import os

_dlopen = ctypes.CDLL(None).dlopen
_dlopen.restype, _dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)


def open_library(path: str) -> ctypes.CDLL:
    """The library at `path`, or of that name where the loader looks; OSError says why it cannot be opened."""
    _dlopen(os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL)
    return ctypes.CDLL(path)  # what the other said no to, this one says why
