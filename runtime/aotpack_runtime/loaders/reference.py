"""A kernel's reference in torch as what a call does: written arguments get what the reference gives for them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from aotpack_runtime.bundle import file_of
from aotpack_runtime.errors import ArtifactError, SourceError
from aotpack_runtime.format.index import Entry


def load(record: Entry) -> Callable[..., None]:
    """A function of the entry's arguments in order, all its tensors torch's. SourceError when the reference cannot be
    imported, or is not the one that the bundle was built with."""
    assert record.kernel is not None
    source, names, writes = str(record.verify.get("against")), record.parameter_names, record.kernel.writes
    reference = import_reference(source, record.source.files)

    def run(*values: Any) -> None:
        given = dict(zip(names, values, strict=True))
        foreign = [name for name, value in given.items() if not isinstance(value, torch.Tensor | int | float)]
        if foreign:
            raise ArtifactError(record.name, f"its reference takes torch's tensors, {foreign[0]} is none")
        with torch.no_grad():
            found = reference(**{name: widened(value) for name, value in given.items()})
            wanted = (found,) if isinstance(found, torch.Tensor) else tuple(found)
            shapes = [list(one.shape) for one in wanted]
            if shapes != [list(given[name].shape) for name in writes]:
                raise ArtifactError(record.name, f"its reference gives {shapes} for {', '.join(writes)}")
            for name, one in zip(writes, wanted, strict=True):
                given[name].copy_(one)

    return run


def import_reference(source: str, files: Mapping[str, str]) -> Callable[..., Any]:
    """What `source` names ("module:name"); `files` are the digests that its modules must have."""
    module, _, attribute = source.partition(":")
    for name, digest in files.items():
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.origin or file_of(Path(spec.origin)).digest != digest:
            raise SourceError(source, f"{name} is not there, or not the file that the bundle was built with")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise SourceError(source, f"cannot be imported: {type(error).__name__}: {error}") from error
    return found  # type: ignore[no-any-return]


def widened(value: Any) -> Any:
    """An argument as a reference takes it: floats in float64, all of it a copy."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype.is_floating_point else value.clone()
    return value
