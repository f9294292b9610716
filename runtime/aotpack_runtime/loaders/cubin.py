"""Cubins and PTX, loaded through the CUDA driver: neither torch nor the compiler that made them is imported.

A library is loaded once a process, however many variants and sessions use it, and stays: a captured graph may launch
its kernels long after the session that loaded them was closed.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotpack_runtime.drivers import cuda
from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.launch import CODE_BYTES, DESCRIPTOR_BYTES, Descriptor, Extent, Parameter, Slot
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, TensorMeta
from aotpack_runtime.loaders import TORCH_LAUNCH, loader

Serve = Callable[..., object]

_libraries: dict[str, cuda.Library] = {}
_lock = threading.Lock()


class LaunchRefused(ArtifactError):
    """A kernel that is loaded cannot be launched with the numbers of one call; with others it can."""


class KernelExecutable:
    """A variant's kernel on one device."""

    def __init__(self, variant: Variant, library: cuda.Library, device: cuda.Device) -> None:
        assert variant.launch is not None
        self.variant, self.launch, self.device = variant, variant.launch, device
        sizes = [
            DESCRIPTOR_BYTES if isinstance(each, Descriptor) else CODE_BYTES[each.code]
            for each in self.launch.parameters
        ]
        self._function = library.function(self.launch.symbol, device, sizes)
        # Parameter blocks that no launch is using: each launch takes one, so that threads do not share.
        self._free: list[cuda.Block] = []
        self._plain = self.launch.cluster == (1, 1, 1) and not self.launch.cooperative and not self.launch.overlap
        plain = all(isinstance(parameter, Slot) for parameter in self.launch.parameters)
        self._values: list[int | bytes] = [0] * len(self.launch.parameters) if plain else []
        """What `_fixed` gives where no parameter is more than the value of an argument."""
        self._make = self._compile()
        self._make_torch: Callable[..., Serve] | None = None
        self._torch_cannot = False

    def prepare(
        self,
        numbers: Mapping[str, int],
        arguments: Sequence[tuple[TensorMeta | None, Any]],
        *,
        stream: Callable[[int], int],
        tick: Callable[[], object],
        through_torch: bool = False,
    ) -> Serve:
        """A function that launches with the values of one call, or of any that differs from it in addresses (of what
        is not passed by descriptor), floats and bools alone.

        `arguments` are the tensors and values of that call; `stream(ordinal)` is asked at each launch. `through_torch`
        lets torch's own launcher do it, where there is one and it can. LaunchRefused when the device cannot launch it
        with these numbers.
        """
        grid = tuple(extent(numbers) for extent in self.launch.grid)
        if 0 in grid:
            return _nothing_to_launch(tick)
        block, shared = tuple(extent(numbers) for extent in self.launch.block), self.launch.shared(numbers)
        return self.sized((*grid, *block, shared), arguments, stream=stream, tick=tick, through_torch=through_torch)

    def sized(
        self,
        sizes: Sequence[int],
        arguments: Sequence[tuple[TensorMeta | None, Any]] = (),
        *,
        stream: Callable[[int], int],
        tick: Callable[[], object],
        through_torch: bool,
    ) -> Serve:
        """The same for the values of grid, block and shared memory. `arguments` are looked at where tensors are passed
        by descriptor."""
        grid, block, shared = sizes[:3], sizes[3:6], sizes[6]
        if 0 in grid:
            return _nothing_to_launch(tick)
        try:
            self._function.allow_shared(shared)
            send = cuda.launch if self._plain else self._sender(grid, block, shared)
            fixed = self._values or [self._fixed(parameter, arguments) for parameter in self.launch.parameters]
        except cuda.DriverError as error:
            raise LaunchRefused(self.variant.id, error.message) from error
        serve: Serve = self._make(send, stream, tick, *grid, *block, shared, *fixed)
        if through_torch:
            serve = self._through_torch(serve, grid, block, shared, stream, tick)
        return serve if cuda.device_count() == 1 else _on_its_device(serve, self.device)

    def _through_torch(
        self,
        otherwise: Serve,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        stream: Callable[[int], int],
        tick: Callable[[], object],
    ) -> Serve:
        """The same launch by torch's launcher; `otherwise` where it cannot, and for what it refuses."""
        if self._torch_cannot:
            return otherwise
        torch_launch = loader(TORCH_LAUNCH)
        if self._make_torch is None:
            launch, types = torch_launch.launcher(), torch_launch.types(self.launch)
            if launch is None or types is None:
                self._torch_cannot = True
                return otherwise
            leaves = [p.leaf if isinstance(p, Slot) else None for p in self.launch.parameters]
            text = _TORCH_TEXT.format(
                values=", ".join(f"a{leaf}" for leaf in range(len(self.variant.guards.leaves))),
                packed="".join("0, " if leaf is None else f"a{leaf}, " for leaf in leaves),
                stream=f"_stream({self.device.ordinal})",
            )
            scope: dict[str, Any] = {"_function": int(self._function.handle), "_types": types, "_launch": launch}
            exec(compile(text, f"<aotpack kernel {self.variant.artifact.digest[:12]}>", "exec"), scope)  # noqa: S102
            self._make_torch = scope["make"]
        if not torch_launch.takes(grid, block):
            return otherwise
        made: Serve = self._make_torch(otherwise, stream, tick, *grid, block[0] // 32, shared)
        return made

    def _compile(self) -> Callable[..., Serve]:
        """Makes the function of `prepare` from what is fixed for it. The text is compiled once, and holds numbers and
        names of ours only."""
        layout = [(parameter.offset, _code(parameter)) for parameter in self.launch.parameters]
        values = ", ".join(f"a{leaf}" for leaf in range(len(self.variant.guards.leaves)))
        packed = [
            f"a{parameter.leaf}" if isinstance(parameter, Slot) and parameter.leaf is not None else f"m{place}"
            for place, parameter in enumerate(self.launch.parameters)
        ]
        stream = f"_stream({self.device.ordinal})"
        sizes = f"_function, gx, gy, gz, bx, by, bz, shared, {stream}, _block.pointers, 0"
        text = _TEXT.format(
            fixed="".join(f", m{place}" for place in range(len(layout))),
            values=values,
            packed=", ".join(packed),
            sent=f"_send({sizes})" if self._plain else f"_send({stream}, _block.pointers)",
        )
        scope: dict[str, Any] = {
            "_free": self._free, "_new": self._new_block, "_pack": cuda.packer(layout, self.launch.bytes),
            "_function": self._function.handle, "_narrow": self._narrow, "_lost": cuda.LOST_CONTEXT,
            "_Errors": (OverflowError, struct.error), "_device": self.device, "_failed": self._failed,
        }  # fmt: skip
        exec(compile(text, f"<aotpack kernel {self.variant.artifact.digest[:12]}>", "exec"), scope)  # noqa: S102
        made: Callable[..., Serve] = scope["make"]
        return made

    def _new_block(self) -> cuda.Block:
        return cuda.Block(self.launch.bytes, [parameter.offset for parameter in self.launch.parameters])

    def _sender(self, grid: Sequence[int], block: Sequence[int], shared: int) -> Callable[[int, int], Any]:
        """A launch that takes attributes."""
        launch = self.launch
        return self._function.launcher(
            grid, block, shared, cluster=launch.cluster, cooperative=launch.cooperative, overlap=launch.overlap
        )

    def _fixed(self, parameter: Parameter, arguments: Sequence[tuple[TensorMeta | None, Any]]) -> int | bytes:
        """What is packed for a parameter at every launch that `prepare` makes a function for; 0 for one that is the
        value of an argument."""
        match parameter:
            case Slot():
                return 0
            case Extent(leaf=leaf, what=what, axis=axis):
                meta = arguments[leaf][0]
                assert meta is not None
                return (meta.shape if what == "sizes" else meta.strides)[axis]
            case Descriptor():
                meta, address = arguments[parameter.leaf]
                assert meta is not None
                steps = [stride * ITEMSIZE_BYTES[meta.dtype] for stride in meta.strides[:-1]]
                return cuda.encode_tensor_map(
                    address, meta.shape, steps, parameter.block, element=parameter.element, swizzle=parameter.swizzle
                )

    def _narrow(self, values: Sequence[Any]) -> list[Any]:
        codes = [_code(parameter) for parameter in self.launch.parameters]
        return [_narrowed(value, code) for value, code in zip(values, codes, strict=True)]

    def _failed(self, status: Any) -> None:
        raise ArtifactError(self.variant.id, f"the driver refuses its launch: {status}")


_TEXT = """\
def make(_send, _stream, _tick, gx, gy, gz, bx, by, bz, shared{fixed}):
    def serve({values}):
        try:
            _block = _free.pop()
        except IndexError:
            _block = _new()
        try:
            _pack(_block.memory, 0, {packed})
        except _Errors:  # a number beyond its float, which C makes infinite
            _pack(_block.memory, 0, *_narrow([{packed}]))
        _status = {sent}[0]
        if _status:
            if _status in _lost:
                with _device.current():
                    _status = {sent}[0]
            if _status:
                _failed(_status)
        _free.append(_block)
        _tick()
    return serve
"""


_TORCH_TEXT = """\
def make(_otherwise, _stream, _tick, gx, gy, gz, warps, shared):
    def serve({values}):
        try:
            _launch(_function, gx, gy, gz, warps, shared, _types, ({packed}), {stream})
        except RuntimeError:  # a thread with another context, or an error that is to be told in our words
            return _otherwise({values})
        _tick()
    return serve
"""


def _code(parameter: Parameter) -> str:
    return f"{DESCRIPTOR_BYTES}s" if isinstance(parameter, Descriptor) else parameter.code


def _nothing_to_launch(tick: Callable[[], object]) -> Serve:
    """Of a grid without blocks."""

    def serve(*values: object) -> None:
        tick()

    return serve


FLOAT_LIMITS = {"f": 3.4028235677973366e38, "e": 65520.0}
"""Letter of a float -> the smallest number that rounds to infinity: its largest and half of its last bit's worth."""


def _narrowed(value: Any, code: str) -> Any:
    """A float as C converts it: beyond what it holds it is infinite."""
    if code not in (*FLOAT_LIMITS, "d"):
        return value
    try:
        number = float(value)
    except OverflowError:  # an int that no float holds
        return math.inf if value > 0 else -math.inf
    return math.copysign(math.inf, number) if abs(number) >= FLOAT_LIMITS.get(code, math.inf) else number


def _on_its_device(serve: Serve, device: cuda.Device) -> Serve:
    """With several GPUs another one may be current, and a launch on the default stream goes to the current one."""

    def serve_there(*values: Any) -> object:
        if device.is_current():
            return serve(*values)
        with device.current():
            return serve(*values)

    return serve_there


def load(variant: Variant, files: Mapping[str, str], ordinal: int) -> KernelExecutable:
    """Load the variant's file, unless the process has, and find its kernel on a device; ArtifactError says why not."""
    (path,) = files.values()
    with open(path, "rb") as file:
        data = file.read()
    digest = hashlib.sha256(data).hexdigest()  # of what is there: with check="off" the index is not asked
    try:
        with _lock:
            library = _libraries.get(digest)
            if library is None:
                library = _libraries[digest] = cuda.Library(data)
        return KernelExecutable(variant, library, cuda.device(ordinal))
    except cuda.DriverError as error:
        raise ArtifactError(variant.id, error.message) from error
