"""DLPack of both generations, taken and given: versions, flags, what a producer may get wrong, what a consumer may ask."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from aotpack_runtime import dlpack, streams
from aotpack_runtime.array import Array
from aotpack_runtime.arrays import read_argument
from aotpack_runtime.format.tensor import Other, TensorMeta
from aotpack_runtime.host_arrays import Given, read_array
from tests.support.dlpack import Exporter

FLOATS = struct.pack("6f", 1, 2, 3, 4, 5, 6)
READ_ONLY, COPIED, PADDED = 1, 2, 4


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server without torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def memory() -> Any:
    """Six floats that somebody keeps."""
    return ctypes.create_string_buffer(FLOATS, len(FLOATS))


def exporter(memory: Any, **more: Any) -> Exporter:
    return Exporter(ctypes.addressof(memory), **{"device": (1, 0), "shape": (2, 3), "version": (1, 0), **more})


def given(value: Any) -> Given:
    found = read_array(value)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------------- taken


@pytest.mark.parametrize(
    ("flags", "locked"),
    [(0, False), (READ_ONLY, True), (COPIED, True), (READ_ONLY | COPIED, True), (PADDED, False), (1 << 40, False)],
)
@pytest.mark.parametrize("version", [(1, 0), (1, 1), (1, 7)])
def test_a_versioned_capsule_is_read_with_its_flags_and_given_back_once(
    memory: Any,
    version: tuple[int, int],
    flags: int,
    locked: bool,  # noqa: FBT001 - a row
) -> None:
    one = exporter(memory, version=version, flags=flags)
    found = given(one)
    assert found.array is not None
    assert found.array.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert (found.meta.locked, found.array.read_only, found.meta.odd) == (locked, locked, "")
    argument = read_argument(one)
    assert (argument.value, argument.read_only) == (ctypes.addressof(memory), locked)
    del found, argument
    gc.collect()
    assert (one.made, one.freed) == (2, 2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        pytest.param({"version": (2, 0)}, "its capsule is of DLPack 2.0, expected 0.x or 1.x", id="newer"),
        pytest.param({"version": (0, 9)}, "its capsule is of DLPack 0.9, expected 0.x or 1.x", id="older"),
        pytest.param({"name": b"used_dltensor_versioned"}, "PyCapsule_GetPointer called with incorrect name", id="used"),
        pytest.param({"ndim": -1}, "it has -1 dims", id="negative-rank"),
        pytest.param({"ndim": 2**31 - 1}, "it has 2147483647 dims", id="no-rank"),
        pytest.param({"no_shape": True}, "it has 2 dims without sizes", id="no-sizes"),
        pytest.param({"shape": (2, -3)}, "its shape is [2, -3]", id="negative-size"),
        pytest.param({"shape": (2, 2**62), "strides": (0, 1)}, "its elements reach beyond 64 bits", id="no-such-memory"),
        pytest.param({"shape": (3,), "strides": (-(2**62),)}, "its elements reach beyond 64 bits", id="below-0"),
        pytest.param({"type": (6, 1, 1)}, "has elements of bool1", id="bits-as-bools"),
        pytest.param({"type": (6, 32, 1)}, "has elements of bool32", id="wide-bools"),
        pytest.param({"type": (12, 4, 1)}, "has elements of float8_e5m24", id="no-such-float"),
    ],
)  # fmt: skip
def test_what_a_producer_gets_wrong_is_told_and_its_capsule_given_back(
    memory: Any, more: dict[str, Any], words: str
) -> None:
    one = exporter(memory, **more)
    found = given(one)
    assert words in found.meta.odd
    assert found.array is None
    leaf = read_argument(one).leaf
    assert words in (leaf.type_name if isinstance(leaf, Other) else leaf.odd)  # type: ignore[union-attr]
    del found
    gc.collect()
    assert one.made == one.freed > 0


class Old(Exporter):
    """A producer of before DLPack 1.0: it knows no `max_version`."""

    def __dlpack__(self, stream: int | None = None) -> object:  # type: ignore[override] # that is the case
        return super().__dlpack__(stream=stream)


def test_a_producer_that_knows_no_versions_is_asked_as_before(memory: Any) -> None:
    one = Old(ctypes.addressof(memory), device=(1, 0), shape=(2, 3))
    found = given(one)
    assert found.array is not None
    assert (found.array.tolist(), found.array.read_only) == ([[1, 2, 3], [4, 5, 6]], False)
    assert one.asked == [{"stream": None}]


def test_a_producer_that_fails_for_a_reason_of_its_own_is_told() -> None:
    def broken(**how: Any) -> object:
        raise TypeError(f"no capsules today {sorted(how)}")

    found = given(SimpleNamespace(__dlpack__=broken, __dlpack_device__=lambda: (1, 0)))
    assert found.meta.odd == "cannot be read (TypeError: no capsules today [])"


def test_read_only_arrays_of_numpy_are_seen_through_dlpack_alone() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.frombuffer(FLOATS, numpy.float32)
    only = SimpleNamespace(__dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__)
    found = given(only)
    assert (found.meta.locked, found.meta.odd) == (True, "")
    argument = read_argument(array)
    assert argument.leaf == TensorMeta("float32", "cpu", (6,), (1,), array.ctypes.data % 16)
    assert argument.read_only


# ------------------------------------------------------------------------------------------------------------- given


def name_of(capsule: object) -> str:
    return repr(capsule).split('"')[1]


@pytest.mark.parametrize(
    ("max_version", "name"),
    [
        (None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned"), ((1, 9), "dltensor_versioned"),
        ((2, 0), "dltensor_versioned"),
    ],
)  # fmt: skip
def test_a_capsule_is_of_the_generation_that_its_consumer_knows(max_version: Any, name: str) -> None:
    assert name_of(Array(bytearray(FLOATS), "float32").__dlpack__(max_version=max_version)) == name


class Holder:
    """Gives away one capsule."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **how: Any) -> object:
        return self._capsule


@pytest.mark.parametrize("max_version", [None, (1, 0)])
@pytest.mark.parametrize("taken", [False, True], ids=["left", "taken"])
def test_memory_is_kept_until_whoever_took_the_capsule_lets_go(
    max_version: Any,
    taken: bool,  # noqa: FBT001 - a row
) -> None:
    numpy = pytest.importorskip("numpy")
    before = len(dlpack._exported)
    capsule = Array(bytearray(FLOATS), "float32", (2, 3)).__dlpack__(max_version=max_version)
    held = numpy.from_dlpack(Holder(capsule)) if taken else None
    gc.collect()
    assert len(dlpack._exported) == before + 1
    assert held is None or held.tolist() == [[1, 2, 3], [4, 5, 6]]
    del held, capsule
    gc.collect()
    assert len(dlpack._exported) == before


def flags_of(capsule: object) -> int:
    return dlpack.look(capsule)[1]


def test_flags_say_what_was_given() -> None:
    fixed, open_ = Array(FLOATS, "float32"), Array(bytearray(FLOATS), "float32")
    new: Any = {"max_version": (1, 0)}
    assert flags_of(open_.__dlpack__(**new)) == 0
    assert flags_of(fixed.__dlpack__(**new)) == READ_ONLY
    assert flags_of(open_.__dlpack__(**new, copy=True)) == COPIED
    assert flags_of(fixed.__dlpack__(**new, copy=True)) == COPIED
    with pytest.raises(
        BufferError, match=r"read-only, which a legacy DLPack capsule does not say; ask for max_version"
    ):
        fixed.__dlpack__()


def test_numpy_and_torch_honour_what_our_arrays_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # torch is not imported twice
    numpy = pytest.importorskip("numpy")
    fixed, open_ = Array(FLOATS, "float32", (2, 3)), Array(bytearray(FLOATS), "float32", (2, 3))
    assert not numpy.from_dlpack(fixed).flags.writeable
    assert numpy.from_dlpack(fixed, copy=True).flags.writeable
    shared = numpy.from_dlpack(open_, device="cpu", copy=False)
    shared[0, 0] = 9
    assert open_.tolist()[0][0] == 9
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(open_)
    tensor[1, 2] = 7
    assert (open_.tolist()[1][2], torch.from_dlpack(fixed).tolist()) == (7, [[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("device", "asked", "words"),
    [
        ("cpu", {"dl_device": (2, 0)}, "the array is on cpu, not on DLPack's device (2, 0)"),
        ("cpu", {"stream": 5}, "the array is in host memory, where there is no stream 5"),
        ("cuda:1", {"dl_device": (2, 0)}, "the array is on cuda:1, not on DLPack's device (2, 0)"),
        ("cuda:1", {"copy": True}, "the array is on cuda:1, where no copy is made; cpu() is one"),
        ("cuda:1", {"dl_device": (1, 0), "copy": False}, "without a copy it is not in host memory"),
    ],
)
def test_what_cannot_be_given_is_a_buffer_error(device: str, asked: dict[str, Any], words: str) -> None:
    array = Array.over(1 << 20, "float32", (2,), (4,), None, device=device)
    with pytest.raises(BufferError) as caught:
        array.__dlpack__(max_version=(1, 0), **asked)
    assert words in str(caught.value)


def test_an_array_on_a_gpu_is_given_as_a_copy_in_host_memory_where_that_is_asked_for() -> None:
    host = Array(bytearray(FLOATS), "float32")
    array = Array.over(1 << 20, "float32", (6,), (4,), SimpleNamespace(to_host=lambda one: host), device="cuda:1")
    capsule = array.__dlpack__(max_version=(1, 0), dl_device=(1, 0))
    tensor, flags = dlpack.look(capsule)
    assert (tensor.data, tensor.device.type, flags) == (host.address, 1, COPIED)


@pytest.mark.parametrize(
    ("said", "stream", "waited"),
    [
        pytest.param(None, None, [], id="default"),
        pytest.param(None, 1, [], id="default-by-its-name"),
        pytest.param(None, -1, [], id="its-caller-knows"),
        pytest.param(7, 7, [], id="the-same"),
        pytest.param(7, 1, [(7, 1)], id="from-one-said-to-the-default"),
        pytest.param(None, 7, [(0, 1)], id="from-the-default-to-another"),
        pytest.param(7, -1, [], id="its-caller-knows-of-a-stream"),
    ],
)
def test_an_array_is_ready_on_the_stream_of_its_consumer(
    monkeypatch: pytest.MonkeyPatch, said: int | None, stream: int | None, waited: list[tuple[int, int]]
) -> None:
    found: list[tuple[int, int]] = []

    def wait_for(own: int, ordinal: int) -> int:
        found.append((own, ordinal))
        return 0

    monkeypatch.setattr(streams, "wait_for", wait_for)
    array = Array.over(1 << 20, "float32", (2,), (4,), None, device="cuda:1")
    if said is None:
        array.__dlpack__(stream=stream)
    else:
        with streams.use_stream(said):
            array.__dlpack__(stream=stream)
    assert found == waited


def test_work_that_failed_is_told_to_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "wait_for", lambda own, ordinal: 700)
    array = Array.over(1 << 20, "float32", (2,), (4,), None, device="cuda:1")
    with streams.use_stream(9), pytest.raises(BufferError, match="the stream 9 of cuda:1 has failed"):
        array.__dlpack__(stream=1)
