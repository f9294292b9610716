"""AOTPACK_MISS_LOG: one line of JSON for each shape that misses, to choose the points of the next manifest by."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from aotpack_runtime.format.tensor import Call, TensorMeta
from aotpack_runtime.jit.observed import Shapes

log = logging.getLogger("aotpack.jit")

Json = Any
MOST_BYTES = 64 << 20
"""The file is not written any more when it has this size."""


class MissLog:
    """Appends to the file that the variable names; without it, or when it cannot be written, does nothing.

    Lines hold dtypes and shapes and ints, never what tensors or strings hold. Each is one write, so processes may share
    a file.
    """

    def __init__(self) -> None:
        self._path = os.environ.get("AOTPACK_MISS_LOG", "")

    def __bool__(self) -> bool:
        return bool(self._path)

    def write(self, entry: str, event: str, call: Call, **more: Json) -> None:
        """One line: `event` is "miss" (a shape is new), "asked", "compiled", or "total" (its counts, at the end)."""
        if not self._path:
            return
        record = {"time": round(time.time(), 3), "pid": os.getpid(), "entry": entry, "event": event}
        line = json.dumps(record | {"leaves": [_leaf(leaf) for leaf in call.leaves]} | more) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size + len(line) > MOST_BYTES:
                    raise OSError(f"has its {MOST_BYTES >> 20} MiB")
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("AOTPACK_MISS_LOG: %s is not written any more: %s", self._path, error)
            self._path = ""

    def totals(self, entry: str, shapes: Shapes) -> None:
        """A line for each shape that is remembered."""
        for shape in shapes.all() if self._path else ():
            self.write(
                entry, "total", shape.call,
                calls=shape.calls, seconds=round(shape.seconds, 6), state=shape.state or shape.why,
            )  # fmt: skip


def _leaf(leaf: object) -> Json:
    if isinstance(leaf, TensorMeta):
        return {"dtype": leaf.dtype, "shape": list(leaf.shape)}
    return leaf if isinstance(leaf, bool | int | float) else type(leaf).__name__
