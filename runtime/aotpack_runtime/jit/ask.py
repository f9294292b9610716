"""A compile that was asked for: what is wanted, the arguments to try it with, and what became of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from aotpack_runtime.jit.compile import Limits
from aotpack_runtime.jit.overlay import Compiled, Overlay

Json = Any


class Requested(Protocol):
    """What is compiled for a miss, of a model or of a kernel."""

    @property
    def entry(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def dims(self) -> Mapping[str, Any]: ...
    def key(self, bundle: str, device: str) -> str: ...
    def parts(self, bundle: str, device: str) -> dict[str, Json]: ...
    def job(self) -> dict[str, Json]: ...


@dataclass(eq=False)
class Ask:
    """One compile that was asked for. `made` is set when `done` is, if there is a variant."""

    request: Requested
    key: str
    sample: Sample | None
    limits: Limits
    done: threading.Event = field(default_factory=threading.Event)
    made: tuple[Compiled, Overlay] | None = None
    problem: str = ""


@dataclass(slots=True)
class Sample:
    """Arguments of a call in a descriptor of memory."""

    descriptor: int
    leaves: list[Json]
    numbers: list[Json]

    def record(self) -> Json:
        return {"descriptor": self.descriptor, "leaves": self.leaves, "numbers": self.numbers}

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
