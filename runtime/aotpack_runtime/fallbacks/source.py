"""Serve a miss from the entry's own source, where it can be imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotpack_runtime import forks
from aotpack_runtime.dispatch import Miss
from aotpack_runtime.errors import AotpackError
from aotpack_runtime.fallbacks import Context, Prepared
from aotpack_runtime.format.index import Parameter
from aotpack_runtime.loaders import SOURCE, loader


class Fallback:
    """The source is imported at the first miss that needs it; a source that cannot be stays out for good."""

    tier = "source"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = forks.lock(forks.ENTRY)
        self._executable: Any = None
        self._problem = ""

    def prepare(self, miss: Miss, values: tuple[object, ...]) -> Prepared | str:
        context = self._context
        if context.source_policy == "never":
            return "its source is not to be used (source='never')"
        executable = self._load()
        if executable is None:
            return self._problem
        args, kwargs = split_arguments(context.record.parameters, values)
        tick, state_lock = context.counter(self.tier), executable.state_lock

        def serve(*leaves: object) -> object:
            if state_lock is None:
                result = executable(args, kwargs)
            else:
                with state_lock:
                    result = executable(args, kwargs)
            tick()
            return result

        return Prepared(serve, remember=False)

    def _load(self) -> Any:
        context = self._context
        with self._lock:
            if self._executable is None and not self._problem:
                if not context.programs and not context.variants:
                    self._problem = "it holds nothing for this device"
                    return None
                weight_set = (context.variants or context.programs)[0].weights
                try:
                    self._executable = loader(SOURCE).load(context.record, context.weights(weight_set))
                except AotpackError as error:
                    self._problem = f"its source cannot serve: {error}"
            return self._executable


def split_arguments(parameters: Sequence[Parameter], values: Sequence[Any]) -> tuple[list[object], dict[str, object]]:
    """Bound values -> args and kwargs as a caller gives them to forward(): what has a default by name.

    A decorator of forward() need not know what stands at a position: those of transformers add `use_cache` by name, and
    clash with a None at its place. What a `*args` follows goes by position, since nothing else is possible.
    """
    args: list[object] = []
    kwargs: dict[str, object] = {}
    followed = any(parameter.kind == "var_positional" for parameter in parameters)
    for parameter, value in zip(parameters, values, strict=True):
        match parameter.kind:
            case "var_positional":
                args.extend(value)
            case "var_keyword":
                kwargs.update(value)
            case "keyword_only":
                kwargs[parameter.name] = value
            case "positional_or_keyword" if parameter.default is not None and not followed:
                kwargs[parameter.name] = value
            case _:
                args.append(value)
    return args, kwargs
