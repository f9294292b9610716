"""Serve a miss of a kernel from its reference in torch, where the manifest says so: `on_miss: {reference: true}`.

The reference was compared with the kernel for contiguous tensors of the shapes that the manifest gives them at the
numbers of a call, and is used for those alone: what it makes of others, nobody has looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from aotpack_runtime.dispatch import Miss
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.fallbacks import Context, Prepared
from aotpack_runtime.format.expression import Expression, parse
from aotpack_runtime.format.tensor import TensorMeta, contiguous_strides, same_layout
from aotpack_runtime.loaders import REFERENCE, loader


class Fallback:
    """The reference is imported at the first miss that it may serve; one that cannot be stays out for good."""

    tier = "reference"

    def __init__(self, context: Context) -> None:
        self._context = context
        shapes: Mapping[str, Any] = context.record.verify.get("shapes") or {}
        self._shapes: dict[str, list[Expression]] = {name: list(map(parse, dims)) for name, dims in shapes.items()}
        self._lock = threading.Lock()
        self._run: Callable[..., None] | None = None
        self._problem = ""

    def prepare(self, miss: Miss, values: tuple[object, ...]) -> Prepared | str:
        problem = self._problem or self._unlike(miss)
        if problem:
            return problem
        if self._context.source_policy == "never":
            return "its reference is not to be used (source='never')"
        run = self._load()
        if run is None:
            return self._problem
        tick = self._context.counter(self.tier)

        def serve(*given: object) -> None:
            run(*given)
            tick()

        return Prepared(serve, remember=False)

    def _unlike(self, miss: Miss) -> str:
        """How the call differs from what the reference was compared for, "" when it does not."""
        if miss.call.state:
            return miss.call.state[0]
        names = self._context.record.parameter_names
        numbers = {name: leaf for name, leaf in zip(names, miss.call.leaves, strict=True) if type(leaf) is int}
        for name, leaf in zip(names, miss.call.leaves, strict=True):
            if not isinstance(leaf, TensorMeta):
                continue
            if leaf.odd or not leaf.device.startswith("cuda"):
                return f"{name} is not a tensor that its reference takes"
            dims = self._shapes.get(name)
            try:
                wanted = None if dims is None else tuple(dim(numbers) for dim in dims)
            except (KeyError, ZeroDivisionError):
                wanted = None
            if leaf.shape != wanted or not same_layout(leaf.shape, leaf.strides, contiguous_strides(leaf.shape)):
                shape = "none" if wanted is None else str(list(wanted))
                return f"its reference is for contiguous tensors of the manifest's shapes: {name} of {shape}"
        return ""

    def _load(self) -> Callable[..., None] | None:
        with self._lock:
            if self._run is None and not self._problem:
                try:
                    self._run = loader(REFERENCE).load(self._context.record)
                except AotpackError as error:
                    self._problem = f"its reference cannot serve: {error}"
            return self._run
