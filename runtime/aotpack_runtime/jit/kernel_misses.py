"""Misses of a kernel: what a call asks for, from the bundle's source of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib.util import find_spec
from typing import Any

from aotpack_runtime.dispatch import Miss
from aotpack_runtime.format.index import Entry, Variant
from aotpack_runtime.jit.ask import Sample
from aotpack_runtime.jit.compile import unavailable
from aotpack_runtime.jit.decide import When
from aotpack_runtime.jit.kernel_request import KernelRequest, call_key, kernel_request
from aotpack_runtime.jit.model_misses import MEMORY_BYTES
from aotpack_runtime.jit.observed import Seen, Shape, words
from aotpack_runtime.jit.service import Jit, Served

TOOLS = {"triton": "triton", "nvrtc": "cuda.bindings"}
"""Kind of a kernel -> the module that its compiler comes in. Whether NVRTC's library is there, the child finds out."""
MOST_KNOWN = 512


class KernelMisses:
    """A launch says nothing of how long a kernel takes, so nothing is weighed: what may be compiled is, at once.

    Arguments are addresses: what lies behind them is not copied.
    """

    when: When = "at_once"
    seconds, memory_bytes = 120.0, MEMORY_BYTES["cuda"]

    def __init__(self, jit: Jit, entry: Served) -> None:
        self._jit, self._entry = jit, entry
        self._tool = no_compiler(entry.record)
        self._known: dict[Hashable, KernelRequest | str] = {}

    def seen(self, miss: Miss, program: Variant | None) -> Seen:
        """What names the call, and whether something may be compiled for it."""
        machine = self._jit.machine.on(self._ordinal(miss))
        if self._tool or machine.gpu is None:
            return Seen(key=words(miss.call), why=self._tool or "there is no GPU to compile for")
        key = (str(machine.gpu), call_key(miss.call))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = kernel_request(self._entry.record, miss.call, machine.gpu)
        if isinstance(found, str):
            return Seen(key=found, why=found)
        own = found.key(self._jit.bundle.digest, self._jit.device)
        return Seen(key=own, family=own, request=found)

    def why_not(self, miss: Miss, program: Variant | None) -> str:
        return ""

    def request(self, shape: Shape, *, whole: bool) -> KernelRequest:
        found: KernelRequest = shape.request
        return found

    def room(self) -> str:
        return ""

    def copied(self, leaves: Sequence[Any]) -> Callable[[], Sample | None]:
        return lambda: None

    def _ordinal(self, miss: Miss) -> int:
        """Of the GPU that the call is for: its arrays say so, or the session."""
        devices = [str(getattr(leaf, "device", "")) for leaf in miss.call.leaves]
        own = [device for device in devices if device.startswith("cuda:")] or [self._entry.device]
        return int(own[0].partition(":")[2] or 0)


def no_compiler(record: Entry) -> str:
    """Why kernels of this entry cannot be compiled here, "" where they can: looked up, nothing is imported."""
    recipe = record.kernel.recipe if record.kernel is not None else None
    if recipe is None:
        return (
            "the bundle holds no source to compile it from: it is of an older format, or its source reaches beyond it"
        )
    kind = recipe.manifest["kind"]
    if _is_there(TOOLS[kind]):
        return unavailable()
    return f"{'Triton' if kind == 'triton' else 'NVRTC'} is not installed: pip install 'aotpack[{kind}]'"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False
