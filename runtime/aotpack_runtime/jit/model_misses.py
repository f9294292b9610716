"""Misses of a model: what a call asks for, from the program that serves it meanwhile; its arguments, copied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aotpack_runtime.dispatch import Miss
from aotpack_runtime.format.codec import dump_scalar
from aotpack_runtime.format.index import RecipeTarget, Variant
from aotpack_runtime.jit.ask import Sample
from aotpack_runtime.jit.decide import When
from aotpack_runtime.jit.gpu import free_bytes
from aotpack_runtime.jit.observed import Seen, Shape, words
from aotpack_runtime.jit.request import Request, exact, ranged, shape_key, why_not
from aotpack_runtime.jit.service import Jit, Served
from aotpack_runtime.loaders import SAMPLES, loader

log = logging.getLogger("aotpack.jit")

WEIGHTS_TIMES = 3
"""A child may take this many times the weights, beside what compilers need: zeros to compile with, and a copy."""
MEMORY_BYTES = {"cpu": 8 << 30, "cuda": 32 << 30}
"""Private memory of each process of a child. A CUDA context maps gigabytes that it never touches."""
DEVICE_BYTES, DEVICE_WEIGHTS_TIMES = 1 << 30, 2
"""Of a GPU a child takes its context and what is tried out, and of the weights zeros to compile with and a copy."""


class ModelMisses:
    """What is compiled is the program, for the exact shape or a range."""

    when: When = "pays"
    seconds = 600.0

    def __init__(self, jit: Jit, entry: Served) -> None:
        self._jit, self._entry = jit, entry
        self._samples: Any = None
        if jit.unavailable:
            jit.say(f"misses are served without compiling behind them: {jit.unavailable}")
        file = jit.bundle.index.weights_file
        self._weights_bytes = file.size_bytes if file else 0
        self.memory_bytes = MEMORY_BYTES[jit.device.partition(":")[0]] + WEIGHTS_TIMES * self._weights_bytes

    def seen(self, miss: Miss, program: Variant | None) -> Seen:
        """What names the call."""
        if program is None:  # the source serves it: only counted
            return Seen(key=words(miss.call), why="no program of the bundle reaches it")
        key, family, sizes = shape_key(program, miss.call)
        return Seen(key=key, family=family, program=program, sizes=sizes)

    def why_not(self, miss: Miss, program: Variant | None) -> str:
        """Why nothing is compiled for calls of the family of this one, "" when something may be."""
        if program is None:
            return ""
        reason = why_not(program, miss.call)
        if not reason and self._target(program) is None:
            reason = "this host meets none of the manifest's targets"
        return reason

    def request(self, shape: Shape, *, whole: bool) -> Request:
        """The range of what was seen of its family (`whole`, where one can be declared), or its exact shape."""
        program = shape.family.program
        assert program is not None
        target = self._target(program)
        assert target is not None
        name = self._entry.record.name
        wide = ranged(name, program, target, shape.call, shape.family.sizes) if whole else None
        return wide or exact(name, program, target, shape.call)

    def room(self) -> str:
        """Why there is no room for a child on the device now, "" when there is."""
        if self._entry.device == "cpu":
            return ""
        needed = DEVICE_BYTES + DEVICE_WEIGHTS_TIMES * self._weights_bytes
        free = free_bytes(self._entry.device)
        if free is None or free >= needed:
            return ""
        return f"{self._entry.device} has {free >> 20} MiB free, a compile beside it needs {needed >> 20}"

    def copied(self, leaves: Sequence[Any]) -> Callable[[], Sample | None]:
        """Copies the arguments; what puts the copies into memory that a child reads, None where made-up arguments are
        used instead."""
        try:
            self._samples = self._samples or loader(SAMPLES)
            save = self._samples.copy(leaves)
        except Exception as error:
            self._not_copied(error)
            save = None

        def sample() -> Sample | None:
            try:
                if save is not None:
                    descriptor, records = save()
                    pairs = zip(leaves, records, strict=True)
                    return Sample(
                        descriptor, records, [dump_scalar(leaf) if one is None else None for leaf, one in pairs]
                    )
            except Exception as error:
                self._not_copied(error)
            return None

        return sample

    def _not_copied(self, error: Exception) -> None:
        log.debug("%s: arguments are not copied: %s", self._entry.record.name, error)

    def _target(self, program: Variant) -> RecipeTarget | None:
        """The first target of the manifest that this host meets; on a GPU its code is for the one at hand."""
        targets = program.recipe.targets if program.recipe is not None else ()
        found = next((one for one in targets if one.target.reject(self._jit.machine, self._jit.allow) is None), None)
        gpu = self._jit.machine.gpu
        if found is None or program.target.device == "cpu" or gpu is None:
            return found
        return replace(found, job={**found.job, "arch": str(gpu)})
