"""Arrays as plain bytes, which processes with and without torch hand to each other in a file."""

from __future__ import annotations

from typing import Any


class Flat:
    """An array as plain values; no dataclass, which arguments may hold as a container."""

    def __init__(self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], data: bytes) -> None:
        self.dtype, self.shape, self.strides, self.data = dtype, shape, strides, data


def bytes_of(value: Any) -> Any:
    """`value` with its tensors or arrays as `Flat`s."""
    from aotpack_runtime.format.tree import map_leaves
    from aotpack_runtime.host_arrays import read_array

    def flat(leaf: Any) -> Any:
        found = read_array(leaf)
        if found is None or found.array is None:
            return leaf
        array = found.array.twin()
        return Flat(array.dtype, array.shape, array.strides, bytes(array.owner.data.cast("B")) if array.size else b"")

    return map_leaves(value, flat)


def arrays_of(value: Any) -> Any:
    """What `bytes_of` made, with arrays in host memory in the place of its `Flat`s."""
    from aotpack_runtime import Array
    from aotpack_runtime.format.tree import map_leaves

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, Flat):
            return leaf
        memory = Array(bytearray(leaf.data), leaf.dtype)
        return Array.over(memory.address, leaf.dtype, leaf.shape, leaf.strides, memory)

    return map_leaves(value, array)


def tensors_of(value: Any) -> Any:
    """What `bytes_of` made, with tensors of torch."""
    import torch

    from aotpack_runtime.format.tree import map_leaves

    take = torch.utils.dlpack.from_dlpack
    return map_leaves(arrays_of(value), lambda leaf: take(leaf) if hasattr(leaf, "__dlpack__") else leaf)


def on_host(result: Any) -> Any:
    """`result` with its tensors in host memory."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)
