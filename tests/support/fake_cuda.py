"""A CUDA driver that loads nothing and writes down every launch: what is packed is read back from the block's memory.

It stands in for `aotpack_runtime.drivers.cuda` where there is no GPU; the GPU tests run the same calls on the real one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from aotpack_runtime.drivers import cuda, probe
from aotpack_runtime.format.gpu import Gpu
from aotpack_runtime.machine import Machine, this_machine


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch: of which symbol on which device, how large, and the parameters as the driver would read them."""

    symbol: str
    device: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    parameters: int

    def read(self, place: int, kind: Any) -> Any:
        """Parameter number `place`; only while the launch is made is its memory its own."""
        return kind.from_address(self.address(place)).value

    def address(self, place: int) -> int:
        """Where parameter number `place` lies."""
        return ctypes.c_void_p.from_address(self.parameters + 8 * place).value or 0

    def raw(self, place: int, size: int) -> bytes:
        """`size` bytes of parameter number `place`."""
        return ctypes.string_at(self.address(place), size)


class Array:
    """An array on a GPU that is not there: an address and what the CUDA array interface says of it."""

    def __init__(self, address: int, typestr: str = "<f4", shape: tuple[int, ...] = (1024,), **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "typestr": typestr, "shape": shape, "version": 3, **more,
        }  # fmt: skip


@dataclass
class FakeDriver:
    """`seen` gets what `look` makes of each launch; `loads` the files that were loaded, or tried: `broken` ones do not
    load. `parameters` are the sizes, in bytes, that a symbol's kernel takes, where they are known; `attributes` what
    each launch that has some was prepared with."""

    gpus: tuple[Gpu, ...]
    look: Callable[[Launched], Any] = lambda launched: launched
    seen: list[Any] = field(default_factory=list)
    loads: list[bytes] = field(default_factory=list)
    broken: set[bytes] = field(default_factory=set)
    shared_limit: int = 232448
    parameters: dict[str, list[int]] = field(default_factory=dict)
    attributes: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def machine(self) -> Machine:
        machine = this_machine()
        machine.__dict__.update(devices=("cpu", "cuda"), gpus=self.gpus)
        return machine

    def launch(self, handle: tuple[str, int], *numbers: int) -> tuple[int]:
        gx, gy, gz, bx, by, bz, shared, stream, parameters, extra = numbers
        assert extra == 0
        launched = Launched(handle[0], handle[1], (gx, gy, gz), (bx, by, bz), shared, stream, parameters)
        found = self.look(launched)
        with self.lock:
            self.seen.append(found)
        return (0,)


@dataclass
class _Device:
    ordinal: int
    handle: int = 0
    context: int = 0

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def is_current(self) -> bool:
        return True


def install(patch: pytest.MonkeyPatch, capabilities: Sequence[tuple[int, int]] = ((9, 0),)) -> FakeDriver:
    """Put the fake in the driver's place for as long as `patch` holds."""
    from aotpack_runtime.loaders import cubin

    driver = FakeDriver(tuple(Gpu(one, (13, 0), "a fake GPU") for one in capabilities))

    class Library:
        def __init__(self, data: bytes) -> None:
            driver.loads.append(data)
            assert len(driver.loads) < 1000, "tried for ever"
            if data in driver.broken:
                raise cuda.DriverError("the driver does not load it: CUDA_ERROR_INVALID_IMAGE")

        def function(self, symbol: str, on: _Device, parameters: Sequence[int]) -> Function:
            known = driver.parameters.get(symbol)
            if known is not None and list(parameters) != known:
                raise cuda.DriverError(f"{symbol} takes parameters of {known} bytes, the index says {list(parameters)}")
            return Function(symbol, on)

    class Function:
        def __init__(self, symbol: str, on: _Device) -> None:
            self.handle, self.device = (symbol, on.ordinal), on

        def allow_shared(self, size_bytes: int) -> None:
            if size_bytes > driver.shared_limit:
                raise cuda.DriverError(f"cuFuncSetAttribute: no {size_bytes} bytes")

        def launcher(
            self, grid: Sequence[int], block: Sequence[int], shared: int, **attributes: Any
        ) -> Callable[[int, int], tuple[int]]:
            driver.attributes.append(attributes)
            return lambda stream, pointers: driver.launch(self.handle, *grid, *block, shared, stream, pointers, 0)

    patch.setattr(cuda, "Library", Library)
    patch.setattr(cuda, "device", _Device)
    patch.setattr(cuda, "device_count", lambda: len(driver.gpus))
    patch.setattr(probe, "device_of_address", lambda address: address >> 40 if address else None)
    patch.setattr(cuda, "launch", driver.launch)
    patch.setattr(cubin, "_libraries", {})
    return driver
