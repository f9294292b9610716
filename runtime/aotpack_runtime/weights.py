"""The weights file of a bundle, mapped once: every tensor of every variant looks into the same pages.

The mapping is copy-on-write, so code that writes a weight changes this process only, and never the file.
The file is safetensors; its header is eight bytes of length and a JSON, checked here before any tensor is handed out.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from typing import Any

from aotpack_runtime.errors import MalformedBundle, SessionClosed
from aotpack_runtime.format.codec import no_duplicates
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES
from aotpack_runtime.record import Record

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""safetensors' dtype names -> torch's."""

MAX_HEADER_BYTES = 100_000_000
"""The limit safetensors itself sets."""


class StoredTensor(Record):
    """A tensor's bytes in the mapping, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


_mapped: dict[tuple[int, int, int, str], WeightsFile] = {}


def map_weights(fd: int, member: str) -> WeightsFile:
    """The weights file behind `fd`, mapped once in this process however often it is opened.

    It stays mapped: a package keeps every tensor that it was bound to until the process ends (torch 2.13), so a mapping
    for each session would only add up.
    """
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino, status.st_size, member)
    if key not in _mapped:
        _mapped[key] = WeightsFile(fd, member)
    return _mapped[key]


class WeightsFile:
    """A mapped safetensors file. Tensors made from it keep the mapping alive; there is nothing to close."""

    def __init__(self, fd: int, member: str) -> None:
        self._member = member
        size = os.fstat(fd).st_size
        if size < 8:
            raise MalformedBundle(member, f"is truncated: {size} bytes")
        self._map = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
        length = int.from_bytes(self._map[:8], "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise MalformedBundle(member, f"is truncated: a header of {length} bytes in a file of {size}")
        try:
            header: dict[str, Any] = json.loads(bytes(self._map[8 : 8 + length]), object_pairs_hook=no_duplicates)
            header.pop("__metadata__", None)
            self._start, self._header = 8 + length, header
            self._tensors = {name: self._stored(name) for name in header}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise MalformedBundle(member, " ".join(f"is not a safetensors file: {error}".split())[:300]) from None

    def __getitem__(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise MalformedBundle(self._member, f"holds no tensor {name!r}") from None

    def _stored(self, name: str) -> StoredTensor:
        record = self._header[name]
        dtype, shape = DTYPES[record["dtype"]], tuple(int(size) for size in record["shape"])
        begin, end = record["data_offsets"]
        wanted = ITEMSIZE_BYTES[dtype]
        for size in shape:
            wanted *= size
        if not 0 <= begin <= end <= len(self._map) - self._start or end - begin != wanted or min(shape, default=0) < 0:
            raise ValueError(f"tensor {name!r} does not lie inside the file")
        return StoredTensor(dtype, shape, self._map[self._start + begin : self._start + end])


class Gone(dict[str, Any]):
    """In the place of what a closed session had by name."""

    def __missing__(self, name: str) -> Any:
        raise SessionClosed("the session is closed", hint="load the bundle again")


def unknown_weight(name: str, known: Mapping[str, object]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=3)
    return f"no weight {name!r}; " + (f"did you mean {', '.join(near)}?" if near else f"there are {len(known)} others")
