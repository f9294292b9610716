"""What Inductor does with constants by looking at their data: done without it, since they are fake here."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def same_fake_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are two constants one and the same? Fake ones have no address, but a storage of their own each."""
    same_look = (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    same_place = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_look and same_place and a.storage_offset() == b.storage_offset()


def folder_on_host(base: type[Any]) -> type[Any]:
    """`base` (UniformValueConstantFolder) makes tensors of one element on the device to learn their values: here it
    makes them in host memory, and takes weights to be unknown."""

    class Folder(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _OnHost(), mock.patch.object(torch.cuda, "_lazy_init", return_value=None):
                super().__init__(*args, **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> Any:
            with _OnHost():
                return super().run(*args, **kwargs)

        def _deduce_value(self, node: torch.fx.Node) -> Any:
            return self.unknown_value if node.op == "get_attr" else super()._deduce_value(node)

    return Folder


class _OnHost(TorchDispatchMode):
    """What is told to be made on a GPU is made in host memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def placed(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        args, kwargs = pytree.tree_map(placed, (args, kwargs or {}))
        return func(*args, **kwargs)
