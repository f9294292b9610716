"""Arguments of kernels by duck typing: torch's tensors, CUDA arrays, DLPack, the numbers of Python and NumPy.

What comes out is what guards judge and what a launch packs. Nothing is copied, nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aotpack_runtime.dlpack import ask, place_of
from aotpack_runtime.format.tensor import ALIGNMENT_BYTES, Leaf, Other, TensorMeta
from aotpack_runtime.imported import imported
from aotpack_runtime.interfaces import Seen, of_capsule, of_interface
from aotpack_runtime.record import Record
from aotpack_runtime.streams import check_stream, said_stream


class Argument(Record):
    """One argument: as guards see it, the number that is packed for it, and the stream it says it is ready on.

    `constant` when an argument that compares equal to it means the same. `held` is what keeps the memory alive.
    """

    leaf: Leaf
    value: Any
    stream: int | None = None
    is_torch: bool = False
    constant: bool = True
    read_only: bool = False
    held: Any = None


def read_argument(value: Any, stream: int = 0) -> Argument:
    """TypeErrors and ValueErrors of a broken array are told as a reason, not raised. `stream` is where the call is
    going, for arrays that wait for their producer (DLPack)."""
    kind = type(value)
    if kind in (int, float, bool) or value is None:
        return Argument(value, value)
    torch = imported("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            return _of_torch(value, torch)
        if (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
            return _of_interface(interface)
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and not hasattr(value, "__dlpack__"):
            return _of_numpy(value)
        if hasattr(value, "__dlpack__"):
            return _of_dlpack(value, stream)
        if hasattr(value, "__index__"):
            number = value.__index__()
            return Argument(number, number, constant=isinstance(value, int))
    except Exception as error:
        return Argument(Other(f"an array that cannot be read ({type(error).__name__}: {error})"), None, constant=False)
    return _other(value)


def _other(value: Any) -> Argument:
    kind = type(value)
    return Argument(Other(f"an instance of {kind.__module__}.{kind.__qualname__}"), None, constant=False)


def _of_numpy(value: Any) -> Argument:
    """A NumPy scalar as the Python number it is; complex numbers, texts and times are none."""
    match value.dtype.kind:
        case "i" | "u":
            number: Any = int(value)
        case "f":
            number = float(value)
        case "b":
            number = bool(value)
        case _:
            return _other(value)
    return Argument(number, number)


def _of_torch(tensor: Any, torch: Any) -> Argument:
    """What has no memory of its own (a fake, a wrapper) is at address 0, and is judged each time."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    dtype, device, odd, address = str(tensor.dtype).removeprefix("torch."), str(tensor.device), "", 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    try:
        address, shape, strides = tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
        if tensor.is_neg() or tensor.is_conj():
            odd = "has its conj or neg bit set, which a kernel does not see"
        elif not address and tensor.numel():
            odd = f"is a {type(tensor).__qualname__} without memory of its own"
    except Exception as error:
        odd = f"is a {type(tensor).__qualname__} without an address ({type(error).__name__})"
    if device.startswith("meta") or type(tensor).__name__ == "FakeTensor":
        odd = "has no data"
    meta = TensorMeta(dtype, device, shape, strides or (0,) * len(shape), address % ALIGNMENT_BYTES, odd)
    return Argument(meta, address, is_torch=True, constant=plain and bool(address) and not odd)


def _of_interface(interface: Any) -> Argument:
    """CUDA Array Interface, versions 2 and 3 (numba's documentation)."""
    seen = of_interface(interface)
    stream = interface.get("stream")
    if stream is not None:
        check_stream(stream)
    # Which device it is on, the interface does not say: the driver does, when there are several.
    return Argument(_meta(seen, "cuda"), seen.address, stream, constant=bool(seen.address), read_only=seen.read_only)


def _of_dlpack(array: Any, stream: int) -> Argument:
    """A capsule is only looked into, never consumed: it gives its tensor back when it is collected, so it is held."""
    kind, ordinal = array.__dlpack_device__()
    device = place_of(int(kind), int(ordinal))
    # 0 is not a stream for DLPack: 1 says the default one.
    capsule = ask(array, None if device == "cpu" else stream or 1)
    seen = of_capsule(capsule, device)
    known = bool(seen.address)
    return Argument(_meta(seen, device), seen.address, constant=known, read_only=seen.read_only, held=capsule)


def _meta(seen: Seen, device: str) -> TensorMeta:
    return TensorMeta(seen.dtype, device, seen.shape, seen.strides, seen.address % ALIGNMENT_BYTES, seen.odd)


def is_on_gpu(argument: Argument) -> bool:
    """Is it a tensor in the memory of a GPU?"""
    return isinstance(argument.leaf, TensorMeta) and argument.leaf.device.startswith("cuda")


def stream_of(arguments: Sequence[Argument]) -> int:
    """torch's current stream where a tensor of torch is among them; else as `streams` says."""
    for argument in arguments:
        if argument.is_torch and is_on_gpu(argument):
            ordinal = int(str(argument.leaf.device).partition(":")[2])  # type: ignore[union-attr]
            return int(torch_stream()(ordinal))
    said = said_stream()
    if said is not None:
        return said
    return next((argument.stream for argument in arguments if argument.stream is not None), 0)


def torch_stream() -> Callable[[int], int]:
    """What gives the handle of torch's current stream on a GPU."""
    torch = imported("torch")
    if torch is None or not torch.cuda.is_available():
        return lambda ordinal: said_stream() or 0
    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found
