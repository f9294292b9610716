"""Kernel bundles made by hand, a fake driver that reads parameter blocks back, and tensors of a torch that is not there.

What runs on these is the runtime's own code from `load` to the launch; only the driver and the GPU are missing.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotpack_runtime import Session, load
from tests.support.bundles import file_record, sha256, write_bundle
from tests.support.fake_cuda import FakeDriver, Launched

Json = Any
TEXT = b"the text of a kernel, and never read as one"


def pointer(path: str, dtype: str = "float32", *, aligned: bool = False) -> Json:
    return {"path": path, "pointer": dtype, "device": "cuda"} | ({"aligned": True} if aligned else {})


def descriptor(path: str, dtype: str = "float32", rank: int = 2) -> Json:
    return {"path": path, "descriptor": dtype, "device": "cuda", "rank": rank}


def integer(path: str, low: int = -(2**31), high: int | None = 2**31 - 1) -> Json:
    return {"path": path, "int": [low, high]}


def literal(path: str, value: int) -> Json:
    return {"path": path, "value": value}


def number(path: str, kind: str = "float") -> Json:
    return {"path": path, "number": kind}


def kernel_variant(name: str, leaves: Sequence[Json], parameters: Sequence[Json], **more: Any) -> Json:
    """A variant record; `parameters` are (code, leaf) laid one after another as C does, or records as they are.

    `more`: grid, block, shared, bytes, cluster, cooperative, overlap, symbol of the launch; where; axes; needs, kind.
    """
    data, kind = binary(name), more.pop("kind", "cubin")
    laid, end = lay(parameters)
    launch: dict[str, Json] = {
        "symbol": more.pop("symbol", name), "parameters": laid, "bytes": more.pop("bytes", end),
        "grid": three(more.pop("grid", ("1",))), "block": three(more.pop("block", ("32",))), "shared": more.pop("shared", "0"),
        **{key: more.pop(key) for key in ("cluster", "cooperative", "overlap") if key in more},
    }  # fmt: skip
    record = {
        "id": name, "point": "", "tier": "hot",
        "target": {"device": "cuda", "needs": more.pop("needs", {"cubin": "sm_90a"})},
        "artifact": {"kind": kind, "digest": sha256(b"folder of " + data), "files": {f"kernel.{kind}": file_record(data)}},
        "guards": {"trees": ["*"] * len(leaves), "leaves": list(leaves), "where": list(more.pop("where", ()))},
        "outputs": {"tree": "*", "leaves": [{"value": None}]}, "weights": "", "constants": [], "examples": [],
        "axes": more.pop("axes", {}), "launch": launch,
    }  # fmt: skip
    assert not more, more
    return record


def lay(parameters: Sequence[Json]) -> tuple[list[Json], int]:
    laid, end = [], 0
    for each in parameters:
        if isinstance(each, tuple) and len(each) == 2:
            size = struct.calcsize(f"<{each[0]}")
            end += -end % size
            laid.append([end, *each])
            end += size
        else:
            laid.append(each)
            end = each["offset"] + 128 if isinstance(each, dict) else each[0] + struct.calcsize(f"<{each[1]}")
    return laid, end


def three(texts: Sequence[str]) -> list[str]:
    return [*texts, *["1"] * (3 - len(texts))]


def binary(name: str) -> bytes:
    """The file of the variant `name`."""
    return b"\x7fELF of " + name.encode()


def kernel_entry(variants: Sequence[Json], types: str, **more: Any) -> Json:
    """An entry record over `variants`, whose parameters are the leaves of the first; `types` are its words."""
    names = more.pop("names", [leaf["path"] for leaf in variants[0]["guards"]["leaves"]] if variants else [])
    only = more.pop("only", ())
    kernel = {
        "text": file_record(TEXT), "suffix": ".cu", "writes": list(more.pop("writes", ())), "types": types.split(),
        "operator": more.pop("operator", ""), "choice": more.pop("choice", {}),
    }  # fmt: skip
    record = {
        "parameters": [{"name": name, "kind": "keyword_only" if name in only else "positional_or_keyword"} for name in names],
        "variants": list(variants), "programs": [], "source": {"text": "k.cu", "args": {}, "files": {}}, "fills": {},
        "on_miss": {"policy": more.pop("policy", "error")}, "verify": {}, "imports": [], "operators": {},
        "output_names": None, "training": False, "kernel": kernel,
    }  # fmt: skip
    assert not more, more
    return record


def kernel_index(**entries: Json) -> Json:
    return {
        "format": 2, "bundle": {"name": "by-hand", "version": "1.0.0", "labels": {}}, "requires": {}, "entries": entries,
        "weights": {"file": None, "sets": {}}, "provenance": {"aotpack": "0.1.0", "python": "3.11", "tools": {}}, "settings": {},
    }  # fmt: skip


def kernel_files(index: Json) -> dict[str, bytes]:
    """The members of an index of kernels, by path."""
    files: dict[str, bytes] = {f"sources/{sha256(TEXT)}.cu": TEXT}
    for entry in index["entries"].values():
        for variant in entry["variants"]:
            artifact = variant["artifact"]
            files |= {f"artifacts/{artifact['digest']}/{name}": binary(variant["id"]) for name in artifact["files"]}
    return files


def write_kernels(folder: Path, **entries: Json) -> Path:
    index = kernel_index(**entries)
    return write_bundle(folder, index, kernel_files(index))


def open_kernels(bundle: Path, driver: FakeDriver, **more: Any) -> Session:
    return load(bundle, machine=driver.machine(), **{"device": "cuda", "mode": "strict", **more})


@dataclass(frozen=True)
class Read:
    """A launch, with the block read back: the offset and the value of each parameter."""

    symbol: str
    device: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    offsets: tuple[int, ...]
    values: tuple[Any, ...]


def reader(*entries: Json) -> Callable[[Launched], Read]:
    """For `FakeDriver.look`: launches with their blocks, as the layouts in `entries` say that they lie."""
    layouts: dict[str, list[str]] = {}
    for entry in entries:
        for variant in entry["variants"]:
            parameters = variant["launch"]["parameters"]
            layouts[variant["launch"]["symbol"]] = [
                "128s" if isinstance(each, dict) else each[1] for each in parameters
            ]

    def look(one: Launched) -> Read:
        codes = layouts[one.symbol]
        places = [one.address(place) for place in range(len(codes))]
        values = [
            struct.unpack(f"<{code}", one.raw(place, struct.calcsize(code)))[0] for place, code in enumerate(codes)
        ]
        offsets = tuple(place - places[0] for place in places)
        return Read(one.symbol, one.device, one.grid, one.block, one.shared, one.stream, offsets, tuple(values))

    return look


# ------------------------------------------------------------------------------------------------- torch's tensors


class Tensor:
    """A tensor as the runtime sees torch's: an address, a dtype, a device, sizes, and the bits that a kernel cannot see."""

    def __init__(
        self, address: int, dtype: str = "float32", *, device: int = 0, shape: Sequence[int] = (1024,),
        strides: Sequence[int] | None = None, bits: str = "",
    ) -> None:  # fmt: skip
        self.address, self.bits = address, bits
        self.dtype, self.device, self.ordinal = f"torch.{dtype}", f"cuda:{device}" if device >= 0 else "cpu", device
        self.shape = tuple(shape)
        steps, step = [], 1
        for size in reversed(self.shape):
            steps.append(step)
            step *= size
        self.strides = tuple(strides) if strides is not None else tuple(reversed(steps))

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.ordinal

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_neg(self) -> bool:
        return self.bits == "neg"

    def is_conj(self) -> bool:
        return self.bits == "conj"


class Parameter(Tensor):
    """torch.nn.Parameter: the one subclass whose memory is its own."""


class FakeTensor(Tensor):
    """torch's stand-in for a tensor while it traces: a device, and the address 0 (torch 2.13)."""


def install_torch(patch: pytest.MonkeyPatch, *, cuda: bool = True) -> None:
    """Put a torch of these tensors in the place of the real one; its current stream on device n is 100 + n."""
    gone = SimpleNamespace(launcher=lambda: None, types=lambda launch: None)
    fake = SimpleNamespace(
        Tensor=Tensor, nn=SimpleNamespace(Parameter=Parameter), __version__="2.13.0", cuda=SimpleNamespace(is_available=lambda: cuda),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: 100 + ordinal),
    )  # fmt: skip
    patch.setitem(sys.modules, "torch", fake)
    patch.setitem(sys.modules, "aotpack_runtime.loaders.torch_launch", gone)
