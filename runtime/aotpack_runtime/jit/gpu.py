"""A GPU as the misses see it: is a stream of it being captured, which one a child may use, how much memory is free."""

from __future__ import annotations

import os

from aotpack_runtime.imported import imported


def is_capturing() -> bool:
    """Is this thread's CUDA stream being captured into a graph? torch is asked only where it has begun with CUDA."""
    torch = imported("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def visible(device: str) -> dict[str, str]:
    """The variables with which a process sees the GPU of `device` as its only one, and none where that is the CPU.

    What this process sees may be named by number or by UUID; its own order is kept.
    """
    if device == "cpu":
        return {}
    ordinal = int(device.partition(":")[2] or 0)
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return {"CUDA_VISIBLE_DEVICES": seen[ordinal] if ordinal < len(seen) else str(ordinal)}


def free_bytes(device: str) -> int | None:
    """Memory of the device that nobody has taken, torch's cache in this process included; None where torch is not in
    use, or does not say."""
    torch = imported("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        return int(torch.cuda.mem_get_info(device)[0])
    except RuntimeError:
        return None
