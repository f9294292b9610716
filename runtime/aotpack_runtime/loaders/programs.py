"""Read an exported program without weights, and without unpickling anything.

The file is what `torch.export.save` writes, and `torch.export.load` reads it; but that may unpickle example inputs and
weights. A bundle's programs have neither, so only the program's own JSON is read here and its weights stand in as meta
tensors. `torch._export.serde` is private: `read_program` names the torch version when it has moved.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental import symbolic_shapes

from aotpack_runtime import forks
from aotpack_runtime.errors import ArtifactError

MEMBER = "program/models/model.json"

_lock = forks.lock(forks.LAST)


def read_program(path: str | Path) -> ExportedProgram:
    """The program at `path`, its weights as meta tensors; ArtifactError when torch cannot read it."""
    try:
        from torch._export.serde.serialize import SerializedArtifact, deserialize

        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            text = archive.read(MEMBER)
        state, constants = _meta_weights(json.loads(text))
        with _without_inductor():
            return deserialize(SerializedArtifact(text, state, constants, b""))  # type: ignore[arg-type]
    except Exception as error:
        raise ArtifactError(
            Path(path).name, f"torch {torch.__version__} cannot read this exported program: {error}"
        ) from error


@contextmanager
def _without_inductor() -> Iterator[None]:
    """torch looks up the user's line for each symbol, and imports all of Inductor to know which files are not the
    user's: 380 modules, a third of a first miss (torch 2.13)."""
    name = "uninteresting_files"
    with _lock:
        original = getattr(symbolic_shapes, name, None)
        setattr(symbolic_shapes, name, frozenset)
        try:
            yield
        finally:
            setattr(symbolic_shapes, name, original)


def _meta_weights(program: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Meta tensors for parameters and persistent buffers, and for the others, by the names the signature gives."""
    from torch._export.serde.schema import ScalarType
    from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

    module = program["graph_module"]
    values = module["graph"]["tensor_values"]
    state: dict[str, Any] = {}
    constants: dict[str, Any] = {}

    def meta(argument: Any) -> torch.Tensor:
        value = values[argument["name"]]
        sizes = [size["as_int"] for size in value["sizes"]]
        strides = [stride["as_int"] for stride in value["strides"]]
        dtype = _SERIALIZE_TO_TORCH_DTYPE[ScalarType(value["dtype"])]
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")

    for spec in module["signature"]["input_specs"]:
        match spec:
            case {"parameter": {"arg": argument, "parameter_name": name}}:
                state[name] = torch.nn.Parameter(meta(argument), requires_grad=False)
            case {"buffer": {"arg": argument, "buffer_name": name, "persistent": persistent}}:
                (state if persistent else constants)[name] = meta(argument)
            case {"tensor_constant": {"arg": argument, "tensor_constant_name": name}}:
                constants[name] = meta(argument)
    return state, constants


def move(graph_module: torch.fx.GraphModule, kind: str, device: torch.device) -> None:
    """Let a program that was traced on a device of this `kind` run on `device`: what its operators are told to make
    there, they make here."""

    def placed(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type == kind else value

    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), placed)
            module.recompile()
