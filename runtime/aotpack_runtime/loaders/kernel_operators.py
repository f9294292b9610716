"""Kernels as operators of torch: what makes them one node for `torch.compile` and `torch.export`.

An operator outlives sessions: torch cannot take one back. It calls the entry that was registered last under its name
and is open, so a server that loads a newer bundle goes on with the code it has compiled.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format.index import Entry


class KernelLike(Protocol):
    """A loaded kernel entry."""

    @property
    def record(self) -> Entry: ...
    @property
    def operator(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def __call__(self, *args: Any, **kwargs: Any) -> object: ...


_entries: dict[str, list[KernelLike]] = {}
_schemas: dict[str, str] = {}
_lock = threading.Lock()


def register(entry: KernelLike) -> None:
    """Define the operator of `entry`, or let the one that is defined call `entry`; ArtifactError when that name is
    taken, or stands for another schema."""
    name, schema = entry.operator, schema_of(entry)
    with _lock:
        known = _schemas.get(name)
        if known is not None and known != schema:
            raise ArtifactError(
                entry.record.name, f"the operator {name} is {known} in this process, this bundle has {schema}",
                hint="restart the server, or give the operator another name",
            )  # fmt: skip
        if known is None:
            _define(name, schema, entry)
            _schemas[name] = schema
        _entries[name] = [other for other in _entries.get(name, []) if not other.closed] + [entry]


def schema_of(entry: KernelLike) -> str:
    """Such as `(Tensor x, Tensor(a1!) y, SymInt n, *, SymInt rows) -> ()`."""
    kernel = entry.record.kernel
    assert kernel is not None
    parts: list[str] = []
    for place, (parameter, kind) in enumerate(zip(entry.record.parameters, kernel.types, strict=True)):
        if parameter.kind == "keyword_only" and "*" not in parts:
            parts.append("*")
        written = f"(a{place}!)" if parameter.name in kernel.writes else ""
        parts.append(f"{_SCHEMA_WORDS.get(kind, kind)}{written} {parameter.name}")
    return f"({', '.join(parts)}) -> ()"


_SCHEMA_WORDS = {"int": "SymInt"}
"""A size that is traced must not be made a constant."""


def _define(name: str, schema: str, entry: KernelLike) -> None:
    namespace, _, short = name.partition("::")
    if hasattr(getattr(torch.ops, namespace), short):
        raise ArtifactError(
            entry.record.name, f"the operator {name} is there already, made by something else than a bundle",
            hint="give it another name under `op` in the manifest",
        )  # fmt: skip

    def run(*args: Any, **kwargs: Any) -> None:
        entries = _entries[name]
        next((each for each in reversed(entries) if not each.closed), entries[-1])(*args, **kwargs)

    kernel = entry.record.kernel
    assert kernel is not None
    try:
        operator = torch.library.custom_op(name, run, mutates_args=kernel.writes, schema=schema, device_types="cuda")
    except Exception as error:
        problem = str(error).strip().splitlines()[0]
        raise ArtifactError(entry.record.name, f"torch does not take the operator {name}{schema}: {problem}") from error
    # It returns nothing and what it writes keeps its shape: there is nothing to compute of a fake tensor.
    operator.register_fake(lambda *args, **kwargs: None)
