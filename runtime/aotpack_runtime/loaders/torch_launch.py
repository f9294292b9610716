"""torch's own launcher of compiled kernels: parameters go from a tuple to the driver inside one call of C++.

It is what Inductor launches its Triton kernels with, and private: LAUNCHER_GATE says for which torch versions its call
was read (tried: 2.11). It is faster than packing here and launching through cuda.bindings (H200, torch 2.11: 3.9 us
against 4.6), and holds the GIL meanwhile, as it does for Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotpack_runtime.format.launch import Launch, Slot

LAUNCHER_GATE = ((2, 11), (2, 15))
"""First torch minor version that the call is known for, and the first that it is not."""

MAX_GRID = 2**31 - 1
"""The launcher multiplies a grid's dims as 32-bit ints, and launches nothing when the product overflows."""

_TYPES = {"Q": "K", "q": "l", "i": "i", "I": "I", "h": "h", "H": "H", "b": "b", "B": "B", "?": "B", "f": "f", "d": "d"}
"""`struct`'s letters -> the launcher's."""


def launcher() -> Callable[..., Any] | None:
    """`launch(function, grid x y z, warps, shared bytes, types, parameters, stream)`, where this torch has it."""
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    held = getattr(torch._C, "_StaticCudaLauncher", None)
    if held is None or not LAUNCHER_GATE[0] <= found < LAUNCHER_GATE[1]:
        return None
    launch: Callable[..., Any] | None = getattr(held, "_launch_kernel", None)
    return launch


def types(launch: Launch) -> str | None:
    """The launcher's letters for the parameters of a kernel; None for one that it cannot launch."""
    if launch.cluster != (1, 1, 1) or launch.cooperative or launch.overlap or not launch.parameters:
        return None
    if not all(isinstance(parameter, Slot) and parameter.code in _TYPES for parameter in launch.parameters):
        return None
    return "".join(_TYPES[parameter.code] for parameter in launch.parameters if isinstance(parameter, Slot))


def takes(grid: Sequence[int], block: Sequence[int]) -> bool:
    """Blocks are whole warps in one dim, and the grid's product fits."""
    return block[0] % 32 == 0 and tuple(block[1:]) == (1, 1) and grid[0] * grid[1] * grid[2] <= MAX_GRID
