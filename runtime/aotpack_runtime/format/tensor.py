"""What guards may ask of one call: tensors as numbers, scalars as they are, and the state around them."""

from __future__ import annotations

from aotpack_runtime.format.tree import Tree
from aotpack_runtime.record import Record

ITEMSIZE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element, by torch's own dtype names."""

ALIGNMENT_BYTES = 16
"""What vectorised kernels assume of an address: the width torch's allocator, Triton and CUDA loads agree on."""

OVERRIDDEN = "functions of torch are overridden"
"""What stands in a reason that only the model itself can follow: programs know operators, not functions."""

SUBCLASS = "a subclass of torch.Tensor"
"""What the reason against such a tensor says."""

Scalar = None | bool | int | float | complex | str


class TensorMeta(Record):
    """One tensor of a call. `strides` count elements; `offset` is its address modulo 16 bytes.

    `odd` is "" for an ordinary strided tensor, else why compiled code must not see it ("is a FakeTensor", "has
    its conj bit set"). `needs_grad` means that autograd is recording and this tensor asks for it; `shared` that another
    tensor of the call lies in its memory; `locked` that it may not be written: it is read-only, a copy of the
    caller's, or was made in inference mode and is met outside of it.
    """

    dtype: str
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    odd: str = ""
    needs_grad: bool = False
    shared: bool = False
    locked: bool = False


class Other(Record):
    """An argument that is neither a tensor nor a scalar, by the name of its type."""

    type_name: str


Leaf = TensorMeta | Scalar | Other


class Call(Record):
    """One invocation as guards see it: a tree for each parameter, and the leaves of all of them in order.

    `state` holds what surrounds the call and changes its result, one line each ("autocast is on: cpu bfloat16");
    empty in the ordinary case.
    """

    trees: tuple[Tree, ...]
    leaves: tuple[Leaf, ...]
    state: tuple[str, ...] = ()


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of torch's channels_last (N, C, H, W) or channels_last_3d (N, C, D, H, W)."""
    order = (0, *range(2, len(shape)), 1)
    packed = contiguous_strides(tuple(shape[axis] for axis in order))
    strides = [0] * len(shape)
    for position, axis in enumerate(order):
        strides[axis] = packed[position]
    return tuple(strides)


def same_layout(shape: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Do two stride tuples address the same elements? The stride of a size-1 dim, or of no elements, means nothing."""
    if 0 in shape:
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, left, right, strict=True))
