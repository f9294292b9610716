"""A program that was traced in host memory, as it would be on a GPU: devices changed, tensors fake."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

DEVICE = "cuda:0"


def on_fake_gpu(exported: ExportedProgram) -> ExportedProgram:
    """`exported` on a GPU, in place: weights, constants and example inputs are fake tensors there. Weights that share
    memory still do."""
    mode = detect_fake_mode([node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"])
    storages: dict[int, torch.UntypedStorage] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # The key of a storage is its own address, and `exported` keeps the real one alive meanwhile.
        key = value.untyped_storage()._cdata
        if key not in storages:
            bytes_of = value.untyped_storage().nbytes()
            storages[key] = torch.empty(bytes_of, dtype=torch.uint8, device=DEVICE).untyped_storage()
        made = torch.empty(0, dtype=value.dtype, device=DEVICE)
        made.set_(storages[key], value.storage_offset(), value.shape, value.stride())
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(value, torch.nn.Parameter) else made

    assert mode is not None, "a program has its own mode of fake tensors"
    before = (dict(exported._state_dict), dict(exported._constants), exported.example_inputs)
    with mode:
        for table in (exported._state_dict, exported._constants):
            for name in table:
                table[name] = fake(table[name])
        exported._example_inputs = pytree.tree_map(fake, exported.example_inputs)
        moved = move_to_device_pass(exported, DEVICE)
    del before
    return moved


def let_views_copy(graph_module: torch.fx.GraphModule) -> None:
    """A trace makes nothing of `contiguous()` where a CPU's operator gave that layout. A GPU's may give another (of
    attention: batches first), and the view behind it copies there, as eager does."""
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is torch.ops.aten.view.default:
                    node.target = torch.ops.aten.reshape.default
            module.recompile()
