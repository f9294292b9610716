"""Operators that entries need besides torch's own: their modules are imported and their schemas compared."""

from __future__ import annotations

import importlib

import torch

from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format.index import Entry


def require(entry: Entry) -> None:
    """Import what the entry names and check each operator's schema; ArtifactError says what is missing or changed."""
    for module in entry.imports:
        try:
            importlib.import_module(module)
        except Exception as error:
            needs = f"the entry needs {', '.join(entry.operators)}" if entry.operators else ""
            raise ArtifactError(
                entry.name, f"the module {module!r} of its `imports` cannot be imported: {error}", hint=needs
            ) from error
    for name, wanted in entry.operators.items():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        try:
            operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except AttributeError:
            raise ArtifactError(
                entry.name,
                f"needs the operator {name}, which no imported module registers",
                hint=f"name the module that defines it under `entries.{entry.name}.imports` in the manifest",
            ) from None
        found = str(operator._schema)
        if found != wanted:
            raise ArtifactError(
                entry.name, f"the operator {name} is {found} here, it was built with {wanted}", hint="build again"
            )
