"""Example inputs for a variant: what warm-up, verification and the bench feed it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from aotpack_runtime.format.guard import Guards, TensorGuard, ValueGuard
from aotpack_runtime.format.tensor import channels_last_strides

Json = Any


def make_leaves(
    guards: Guards,
    example: tuple[tuple[int, ...] | int | None, ...],
    fills: Mapping[str, Json],
    *,
    seed: int = 0,
    device: str = "",
) -> list[Any]:
    """Leaves of a call with the sizes of `example`, filled as the manifest says; one seed gives the same values, on
    every device. `device` ("cuda:1") is meant where a guard names its kind only."""
    leaves: list[Any] = []
    for guard, size in zip(guards.leaves, example, strict=True):
        if isinstance(guard, TensorGuard) and isinstance(size, tuple):
            place = device if device.partition(":")[0] == guard.device else guard.device
            leaves.append(make_tensor(guard, size, fills.get(guard.path), seed=seed).to(place))
        else:
            leaves.append(guard.value if isinstance(guard, ValueGuard) else size)
    return leaves


def make_tensor(guard: TensorGuard, shape: tuple[int, ...], fill: Json, *, seed: int) -> torch.Tensor:
    """One tensor in host memory; `fill` is "randn", "rand", "ones", "zeros", or {"randint": [low, high]} below high."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{guard.path} {seed}".encode()))
    dtype = getattr(torch, guard.dtype)
    drawn = dtype if dtype.is_complex else torch.float32  # a number that is real hides a conj() that is missing
    match fill:
        case {"randint": [low, high]}:
            values = torch.randint(int(low), int(high), shape, generator=generator)
        case "ones":
            values = torch.ones(shape)
        case "zeros":
            values = torch.zeros(shape)
        case "rand":
            values = torch.rand(shape, generator=generator, dtype=drawn)
        case _:
            values = torch.randn(shape, generator=generator, dtype=drawn)
    tensor = values.to(dtype)
    if guard.layout == "channels_last" and tensor.numel():
        strided = torch.empty_strided(shape, channels_last_strides(shape), dtype=dtype)
        return strided.copy_(tensor)
    return tensor


def unflatten(tree: Any, leaves: list[Any]) -> Any:
    """Arguments from a tree and its leaves (taken from the front); a class is imported by its name."""
    match tree:
        case ("tuple", *items):
            return tuple(unflatten(item, leaves) for item in items)
        case ("list", *items):
            return [unflatten(item, leaves) for item in items]
        case ("dict", keys, *items):
            return {key: unflatten(item, leaves) for key, item in zip(keys, items, strict=True)}
        case ("class", name, names, *items):
            return import_class(name)(
                **{field: unflatten(item, leaves) for field, item in zip(names, items, strict=True)}
            )
    return leaves.pop(0)


def import_class(name: str) -> Any:
    """The class called `pkg.mod:Outer.Name`."""
    import importlib

    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
