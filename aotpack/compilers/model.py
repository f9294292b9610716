"""The user's model made ready for an export: where it runs, in its precision, with stock taken of its tensors.

Parameters and buffers are its weights; tensors that a trace finds beside them become literals, named by their content.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from aotpack.compilers.flat import Flat
from aotpack.compilers.modules import (
    is_training,
    move_module,
    named_tensors,
    overlapping,
    own_dense_weights,
    parameters_of,
    storage_order,
    tied_names,
)
from aotpack.compilers.probing import kept_state
from aotpack.compilers.programs import Program, written_weights
from aotpack.compilers.sizes import flat_tensors
from aotpack_runtime.errors import SourceError
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.loaders.source import unwrap_weights
from aotpack_runtime.store import Store

Json = Any


class Model:
    """`module` for the export `job`. `training` names its modules that are in train mode, `parameters` the arguments of
    its forward(), `tied` the first name of what each tensor shares memory with, `state` what calls write.

    SourceError for one that is in train mode where the manifest does not say so.
    """

    def __init__(self, job: Mapping[str, Json], module: torch.nn.Module) -> None:
        self._job = job
        self.device = job.get("device", "cpu")
        if job["precision"]:
            module.to(getattr(torch, job["precision"]))
        move_module(module, self.device)
        unwrap_weights(module)
        self.training = [name or "the model itself" for name in is_training(module)]
        if self.training and not job["training"]:
            raise SourceError(
                job["source"],
                f"is in train mode ({self.training[0]}): dropout would drop and batch norm would learn in the server",
                hint="call .eval() before returning it, or set `training: true`",
            )
        self.overlapping = overlapping(named_tensors(module))
        own_dense_weights(module)
        self.module = module
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        self.tensors = named_tensors(module)
        self.tied = tied_names(self.tensors)
        self.literals: dict[str, torch.Tensor] = {}
        self.parameters = parameters_of(module, job["source"])
        self.state: list[str] = []

    def everything(self) -> dict[str, torch.Tensor]:
        """Weights and literals by name."""
        return {**self.tensors, **self.literals}

    def adopt_literals(self, exported: ExportedProgram) -> None:
        """Tensors that are neither parameters nor buffers (`torch.tensor([1.0])` in forward(), a plain attribute)
        become buffers named by their content: bound from outside like all weights, never baked into code."""
        for spec in exported.graph_signature.input_specs:
            if spec.kind != InputKind.CONSTANT_TENSOR:
                continue
            tensor = exported.constants[spec.target].detach().clone()
            content = hashlib.sha256(_bytes(tensor)).hexdigest()
            name = f"literal_{content[:16]}"
            self.literals[name] = tensor
            del exported.constants[spec.target]
            exported.constants[name] = tensor
            spec.kind, spec.target, spec.persistent = InputKind.BUFFER, name, False

    def check_state(self, programs: Sequence[Program]) -> None:
        """Find what calls write. SourceError for what cannot be kept as state."""
        places: dict[str, str] = {}
        for program in programs:
            places = dict.fromkeys(self._changed(program), "") | written_weights(program.exported) | places
        written = places.keys()
        plain = sorted(written - self.tensors.keys())
        if plain:
            tensor = self.literals[plain[0]]
            raise SourceError(
                self._job["source"],
                f"forward() writes a tensor that is neither a parameter nor a buffer{places[plain[0]]} "
                f"({tensor.dtype} of shape {list(tensor.shape)}), so its state cannot be shared",
                hint="register it with register_buffer()",
            )
        views = sorted(self.overlapping.keys() & written)
        if views:
            raise SourceError(
                self._job["source"],
                f"forward() writes {views[0]!r}, which shares memory with {self.overlapping[views[0]]!r}; "
                "a bundle keeps the two apart",
                hint="keep one of them as a buffer and take the other from it in forward()",
            )
        self.state = sorted({other for name in written for other in self.tied if self.tied[other] == self.tied[name]})

    def _changed(self, program: Program) -> set[str]:
        """Buffers that a run leaves with other values: batch norm's operator writes its own without saying so."""
        leaves = make_leaves(program.guards, program.example, self._job["fills"])
        flat = Flat(self.module, program.shape, self._job["outputs"])
        before = {name: _bytes(tensor) for name, tensor in self.module.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_state(self.module):
            flat(*flat_tensors(program.guards, leaves))
            return {name for name, tensor in self.module.named_buffers() if _bytes(tensor) != before[name]}

    def store_weights(self, store: Store) -> Json:
        """Write all weights as one safetensors file; the record of the weight set."""
        everything = self.everything()
        tied = {**self.tied, **{name: name for name in self.literals}}
        refs: dict[str, Json] = {}
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in everything.items():
            key = tied[name]
            order = storage_order(tensor)
            on_host = {"host": True} if self.device != "cpu" and tensor.device.type == "cpu" else {}
            refs[name] = {"tensor": key} | ({} if order == sorted(order) else {"order": order}) | on_host
            if key == name:
                stored[key] = tensor.permute(order).detach().cpu().contiguous()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "weights.safetensors")
            save_file(stored, path)
            file = store.put_file(path)
        return {"file": file, "weights": refs, "state": self.state, "dtype": self._job["precision"]}


def _bytes(tensor: torch.Tensor) -> bytes:
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return head + tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else head
