"""Arguments of models without torch: memory that is said by a buffer, and what would be read beyond its end."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aotpack_runtime.array import Array
from aotpack_runtime.array_kinds import OWN, kind_of
from aotpack_runtime.host_arrays import Given, in_numpy, read_array
from aotpack_runtime.imported import imported

FLOATS = struct.pack("6f", 1, 2, 3, 4, 5, 6)


def shown(**interface: Any) -> Any:
    """An object with an array interface, of six floats in a buffer unless it says otherwise."""
    return SimpleNamespace(
        __array_interface__={"version": 3, "typestr": "<f4", "shape": (2, 3), "data": FLOATS, **interface}
    )


def given(value: Any) -> Given:
    found = read_array(value)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("interface", "values"),
    [
        pytest.param({}, [[1, 2, 3], [4, 5, 6]], id="as-pillow-shows-an-image"),
        pytest.param({"data": bytearray(FLOATS)}, [[1, 2, 3], [4, 5, 6]], id="writable"),
        pytest.param({"offset": 8, "shape": (2, 2)}, [[3, 4], [5, 6]], id="from-an-offset"),
        pytest.param({"shape": (3, 2), "strides": (4, 12)}, [[1, 4], [2, 5], [3, 6]], id="turned"),
        pytest.param({"offset": 20, "shape": (6,), "strides": (-4,)}, [6, 5, 4, 3, 2, 1], id="backwards"),
    ],
)
def test_an_interface_may_say_its_memory_by_a_buffer(interface: dict[str, Any], values: Any) -> None:
    found = given(shown(**interface))
    assert found.array is not None
    assert found.array.tolist() == values
    assert found.meta.locked is isinstance(interface.get("data", FLOATS), bytes)


@pytest.mark.parametrize(
    "interface",
    [
        {"shape": (7,)}, {"offset": 4}, {"offset": -4, "shape": (1,)}, {"shape": (2,), "strides": (24,)},
        {"shape": (2,), "strides": (-4,)}, {"data": b"", "shape": (1,)},
    ],
)  # fmt: skip
def test_elements_beyond_the_buffer_are_told(interface: dict[str, Any]) -> None:
    found = given(shown(**interface))
    assert found.array is None
    assert "its elements reach beyond its buffer" in found.meta.odd


def test_a_buffer_of_an_array_cannot_be_made_larger_while_it_is_read() -> None:
    memory = bytearray(FLOATS)
    for value in (memory, shown(data=memory)):
        found = given(value)
        with pytest.raises(BufferError):
            memory.extend(bytes(1 << 20))
        del found
    memory.extend(b"1")


def test_a_format_of_another_size_than_its_elements_is_told() -> None:
    class Long(ctypes.Structure):
        _fields_ = (("number", ctypes.c_long),)

    assert given(memoryview((ctypes.c_long * 2)(1, 2))).meta.dtype == "int64"
    assert given(memoryview((Long * 2)())).meta.odd.startswith("has elements of the format")


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_an_array_over_a_buffer_without_elements(shape: tuple[int, ...]) -> None:
    numpy = pytest.importorskip("numpy")
    array = Array(numpy.empty(shape, numpy.float32), "float32", shape)
    assert (array.shape, array.tobytes()) == (shape, b"")


def test_an_array_over_a_buffer_that_is_not_row_major_is_refused() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(ValueError, match="not row-major"):
        Array(numpy.zeros((4, 4), numpy.float32)[:, ::2], "float32", (4, 2))


def test_a_size_of_an_array_is_an_int() -> None:
    for shape in ((1.5,), ("6",), (None,), (6.0,)):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            Array(FLOATS, "float32", shape)  # type: ignore[arg-type] # that is the case


@pytest.mark.parametrize("shape", [(2**63,), (2**64 + 6,), (0, 2**70)])
def test_sizes_that_an_interface_says_beyond_64_bits_are_told(shape: tuple[int, ...]) -> None:
    found = given(shown(shape=shape, data=(1 << 20, True)))
    assert (found.array, "are beyond 64 bits" in found.meta.odd) == (None, True)


def test_steps_backwards_are_copied_for_torch_and_others_are_not() -> None:
    numpy = pytest.importorskip("numpy")
    numbers = numpy.arange(6, dtype=numpy.float32)
    backwards, forwards = given(numbers[::-1]).array, given(numbers).array
    assert backwards is not None and forwards is not None
    assert backwards.forwards().tolist() == [5, 4, 3, 2, 1, 0]
    assert forwards.forwards() is forwards
    elsewhere = Array.over(1 << 20, "float32", (2,), (-4,), None, device="cuda:0")
    with pytest.raises(ValueError, match="take a copy"):
        elsewhere.forwards()


def test_our_own_arrays_keep_dlpacks_promises() -> None:
    numpy = pytest.importorskip("numpy")
    array = Array(bytearray(FLOATS), "float32")
    copy = numpy.from_dlpack(array, copy=True)
    array.data[0] = 9
    assert (copy[0], numpy.from_dlpack(array)[0]) == (1, 9)
    with pytest.raises(BufferError, match="not on DLPack's device"):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="read-only"):
        Array(FLOATS, "float32").__dlpack__()
    assert numpy.from_dlpack(Array(FLOATS, "float32"), copy=True)[1] == 2


@pytest.mark.parametrize("make", [lambda: Array, lambda: int, lambda: type("New", (), {"__dlpack__": None})])
def test_a_class_is_no_array(make: Callable[[], type]) -> None:
    assert read_array(make()) is None
    assert kind_of([make()]) is OWN


def test_a_module_that_another_thread_is_importing_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = ModuleType("numpy")
    unfinished.__spec__ = SimpleNamespace(_initializing=True)  # type: ignore[assignment] # as importlib marks it
    monkeypatch.setitem(sys.modules, "numpy", unfinished)
    assert imported("numpy") is None
    assert in_numpy("ndarray") == ()
    assert given(bytearray(8)).meta.dtype == "uint8"
    assert kind_of([b""]) is OWN
