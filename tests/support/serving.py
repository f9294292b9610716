"""Calls of a loaded bundle: which tier served, and is the result what eager gives, leaf for leaf."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from aotpack_runtime import Entry

Call = Callable[..., object]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them: no compiled variant takes it, an exported program does."""
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]


def wider(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another dtype: beyond variants and programs, the source serves."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int32)


def deeper(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a dim more: beyond variants and programs, the source serves."""
    return tensor[None]


def wanting_gradients(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, whose gradients are asked for: no compiled variant takes it, an exported program does."""
    return tensor.clone().requires_grad_()


Way = Callable[[torch.Tensor], torch.Tensor]
WAYS: Mapping[str, Way] = {"hit": torch.clone, "program": strided, "source": wider}
"""Tier -> how to change a tensor that hits so that this tier serves it."""
WEIGHTED: Mapping[str, Way] = {**WAYS, "source": deeper}
"""The same for a model whose weights take tensors of their own dtype only."""
ONE_ELEMENT: Mapping[str, Way] = {**WAYS, "program": wanting_gradients}
"""The same for a tensor of one element, which has no gaps."""


def served(entry: Entry, *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """(tier, result) of one call: `hit`, or the name of the fallback that served it."""
    before = entry.counts()
    result = entry(*args, **kwargs)
    after = entry.counts()
    if after["hits"] > before["hits"]:
        return "hit", result
    tiers = [tier for tier, count in after["misses_by_tier"].items() if count > before["misses_by_tier"].get(tier, 0)]
    (tier,) = tiers
    return tier, result


def assert_same(wanted: Any, found: Any, place: str = "result") -> None:
    """Equal as eager's result is: containers and their types, key order, types of numbers, dtypes, shapes, values."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{place}: expected a tensor, got {found!r}"
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), place
        tolerance: Any = {"rtol": 2e-2, "atol": 1e-2} if wanted.dtype in (torch.bfloat16, torch.float16) else {}
        torch.testing.assert_close(found, wanted.detach(), equal_nan=True, msg=lambda m: f"{place}: {m}", **tolerance)
        return
    assert type(found) is type(wanted), f"{place}: expected {type(wanted)}, got {type(found)}"
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), place
        for key, value in wanted.items():
            assert_same(value, found[key], f"{place}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), place
        for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
            assert_same(a, b, f"{place}[{number}]")
    else:
        assert found == wanted, place


@contextmanager
def imported(folder: Path, name: str = "zoo") -> Iterator[ModuleType]:
    """The module `name` of `folder` under its own name, as a server has it; gone afterwards."""
    previous = sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    try:
        yield import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)
        if previous is not None:
            sys.modules[name] = previous


def in_process(code: str, *path: Path, timeout_s: float = 120) -> str:
    """What `code` prints in a fresh Python process with `path` on its import path; it must end well, and in time."""
    root = Path(__file__).parents[2]
    folders = [*path, root / "runtime", root]
    watched = f"import faulthandler\nfaulthandler.dump_traceback_later({timeout_s}, exit=True)\n{code}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", watched],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True, text=True, timeout=timeout_s + 60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
