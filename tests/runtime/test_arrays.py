"""Arguments of kernels by duck typing: what each kind of array and number is read as, and that nothing is kept or copied."""

from __future__ import annotations

import ctypes
import decimal
import enum
import fractions
import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aotpack_runtime.arrays import read_argument
from aotpack_runtime.format.tensor import Other, TensorMeta
from aotpack_runtime.host_arrays import read_array
from tests.support.dlpack import Exporter
from tests.support.fake_cuda import Array

P = 1 << 20


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server without torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def meta(value: Any) -> TensorMeta:
    leaf = read_argument(value).leaf
    assert isinstance(leaf, TensorMeta), leaf
    return leaf


def problem(value: Any) -> str:
    """Why an array cannot be read."""
    found = read_argument(value)
    assert isinstance(found.leaf, Other), found
    assert found.value is None
    return found.leaf.type_name


# ------------------------------------------------------------------------------------------------ the CUDA array interface


@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [
        ("<f2", "float16"), ("<f4", "float32"), ("<f8", "float64"), ("=f4", "float32"), ("|f4", "float32"), ("<i4", "int32"), ("|i1", "int8"),
        ("<i8", "int64"), ("|u1", "uint8"), ("<u8", "uint64"), ("|b1", "bool"), ("<c8", "complex64"), ("<c16", "complex128"),
    ],
)  # fmt: skip
def test_a_typestr_is_a_dtype(typestr: str, dtype: str) -> None:
    found = read_argument(Array(P + 4, typestr, (3, 5)))
    assert found.leaf == TensorMeta(dtype, "cuda", (3, 5), (5, 1), 4)
    assert (found.value, found.stream, found.is_torch) == (P + 4, None, False)


@pytest.mark.parametrize("typestr", ["|V16", "<M8", "<m8", "<U3", "|S4", "|O8", "<f16", "|t4"])
def test_a_typestr_of_something_else_is_no_dtype_of_a_kernel(typestr: str) -> None:
    from aotpack_runtime.format.tensor import ITEMSIZE_BYTES

    assert meta(Array(P, typestr, (3,), strides=(64,))).dtype not in ITEMSIZE_BYTES


@pytest.mark.parametrize(
    ("more", "shape", "strides"),
    [
        ({}, (4, 6), (6, 1)), ({"strides": None}, (4, 6), (6, 1)), ({"strides": (24, 4)}, (4, 6), (6, 1)), ({"strides": (4, 16)}, (4, 6), (1, 4)),
        ({"strides": (-24, 4)}, (4, 6), (-6, 1)), ({"strides": (0, 4)}, (4, 6), (0, 1)), ({}, (), ()), ({"strides": ()}, (), ()), ({}, (0, 6), (6, 1)),
        ({"version": 2}, (4, 6), (6, 1)), ({"version": 2, "strides": (48, 8)}, (4, 6), (12, 2)),
    ],
)  # fmt: skip
def test_strides_are_in_elements_and_row_major_when_not_given(more: Any, shape: Any, strides: Any) -> None:
    found = meta(Array(P, "<f4", shape, **more))
    assert (found.shape, found.strides, found.odd) == (shape, strides, "")


@pytest.mark.parametrize("strides", [(66, 4), (24, 6), (2, 1)])
def test_strides_between_elements_are_told(strides: tuple[int, int]) -> None:
    found = read_argument(Array(P, "<f4", (4, 6), strides=strides))
    assert isinstance(found.leaf, Other) or (isinstance(found.leaf, TensorMeta) and found.leaf.odd)


@pytest.mark.parametrize(
    ("more", "odd"),
    [
        ({"mask": object()}, "is masked"), ({"mask": None}, ""), ({"typestr": ">f4"}, "is big-endian"), ({"typestr": ">i8"}, "is big-endian"),
        ({"descr": [("", "<f4")]}, ""),
    ],
)  # fmt: skip
def test_what_a_kernel_cannot_see_is_told(more: Any, odd: str) -> None:
    array = Array(P)
    array.__cuda_array_interface__ |= more
    assert meta(array).odd == odd


@pytest.mark.parametrize("stream", [None, 1, 2, 0x7F0012345678])
def test_a_stream_is_kept_as_it_is_said(stream: int | None) -> None:
    assert read_argument(Array(P, stream=stream)).stream == stream


@pytest.mark.parametrize("address", [0, 1, P, 2**63, 2**64 - 1])
def test_an_address_is_taken_whole(address: int) -> None:
    found = read_argument(Array(address, shape=(0,)))
    assert (found.value, meta(Array(address, "|u1", (1,))).offset) == (address, address % 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": None}, "ValueError"), ({"data": (None, False)}, "ValueError"), ({"data": ()}, "IndexError"), ({"typestr": ""}, "ValueError"),
        ({"data": b"\x40\x01"}, "ValueError"), ({"shape": (-1,)}, "ValueError"), ({"shape": (2.0,)}, "TypeError"), ({"strides": (4, 4)}, "ValueError"),
        ({"typestr": None}, "ValueError"), ({"typestr": "f4"}, "ValueError"), ({"typestr": "|V0", "strides": (0,)}, "ZeroDivisionError"),
        ({"shape": None}, "TypeError"), ({"shape": 5}, "TypeError"), ({"strides": 4}, "TypeError"), ({"strides": ("a",)}, "TypeError"),
    ],
)  # fmt: skip
def test_a_broken_interface_is_told_in_one_line(change: Any, words: str) -> None:
    array = Array(P)
    array.__cuda_array_interface__ |= change
    assert problem(array).startswith(f"an array that cannot be read ({words}: ")
    del array.__cuda_array_interface__["shape"]
    assert problem(array).startswith("an array that cannot be read (")


@pytest.mark.parametrize("interface", [5, "abc", [], object()])
def test_an_interface_that_is_no_mapping_is_told(interface: Any) -> None:
    assert problem(SimpleNamespace(__cuda_array_interface__=interface)).startswith("an array that cannot be read (")


class Raising:
    """Whose attributes raise."""

    def __init__(self, error: type[BaseException], name: str) -> None:
        self.error, self.name = error, name

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, "__dict__")
        if found and name == found["name"]:
            raise found["error"]("no such\nthing")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError, MemoryError])
@pytest.mark.parametrize("name", ["__cuda_array_interface__", "__dlpack__", "__index__"])
def test_an_attribute_that_raises_is_a_reason(error: type[Exception], name: str) -> None:
    assert problem(Raising(error, name)).startswith(f"an array that cannot be read ({error.__name__}: ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_reason(error: type[BaseException]) -> None:
    with pytest.raises(error):
        read_argument(Raising(error, "__cuda_array_interface__"))


@pytest.mark.parametrize("name", ["__cuda_array_interface__", "__dlpack__", "__index__"])
def test_an_object_without_attributes_is_named_by_its_class(name: str) -> None:
    assert problem(Raising(AttributeError, name)) == f"an instance of {__name__}.Raising"


# ------------------------------------------------------------------------------------------------------------ DLPack


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, TensorMeta("float32", "cuda:0", (1024,), (1,), 0)),
        ({"device": (2, 3)}, TensorMeta("float32", "cuda:3", (1024,), (1,), 0)),
        ({"device": (13, 1)}, TensorMeta("float32", "cuda:1", (1024,), (1,), 0)),
        ({"device": (3, 0)}, TensorMeta("float32", "cpu", (1024,), (1,), 0)),
        ({"device": (1, 0)}, TensorMeta("float32", "cpu", (1024,), (1,), 0)),
        ({"offset": 20}, TensorMeta("float32", "cuda:0", (1024,), (1,), 4)),
        ({"shape": (3, 5)}, TensorMeta("float32", "cuda:0", (3, 5), (5, 1), 0)),
        ({"shape": (3, 5), "strides": (1, 3)}, TensorMeta("float32", "cuda:0", (3, 5), (1, 3), 0)),
        ({"shape": (3, 5), "strides": (-5, 0)}, TensorMeta("float32", "cuda:0", (3, 5), (-5, 0), 0)),
        ({"shape": ()}, TensorMeta("float32", "cuda:0", (), (), 0)),
        ({"type": (0, 8, 1)}, TensorMeta("int8", "cuda:0", (1024,), (1,), 0)),
        ({"type": (1, 64, 1)}, TensorMeta("uint64", "cuda:0", (1024,), (1,), 0)),
        ({"type": (2, 16, 1)}, TensorMeta("float16", "cuda:0", (1024,), (1,), 0)),
        ({"type": (4, 16, 1)}, TensorMeta("bfloat16", "cuda:0", (1024,), (1,), 0)),
        ({"type": (5, 64, 1)}, TensorMeta("complex64", "cuda:0", (1024,), (1,), 0)),
        ({"type": (6, 8, 1)}, TensorMeta("bool", "cuda:0", (1024,), (1,), 0)),
        ({"type": (10, 8, 1)}, TensorMeta("float8_e4m3fn", "cuda:0", (1024,), (1,), 0)),
        ({"type": (12, 8, 1)}, TensorMeta("float8_e5m2", "cuda:0", (1024,), (1,), 0)),
        ({"type": (2, 32, 4)}, TensorMeta("float32", "cuda:0", (1024,), (1,), 0, odd="has 4 lanes an element")),
        ({"type": (3, 64, 1)}, TensorMeta("dlpack type 364", "cuda:0", (1024,), (1,), 0, odd="has elements of dlpack type 364")),
        ({"type": (8, 8, 1)}, TensorMeta("float8_e4m3", "cuda:0", (1024,), (1,), 0, odd="has elements of float8_e4m3")),
        ({"type": (0, 4, 1)}, TensorMeta("int4", "cuda:0", (1024,), (1,), 0, odd="has elements of int4")),
    ],
)  # fmt: skip
def test_a_capsule_is_read_as_what_it_holds_and_given_back_once(more: Any, wanted: TensorMeta) -> None:
    exporter = Exporter(P, **more)
    found = read_argument(exporter)
    assert found.leaf == wanted
    assert found.value == P + more.get("offset", 0)
    assert (found.stream, found.is_torch) == (None, False)
    del found
    gc.collect()
    assert (exporter.made, exporter.freed) == (1, 1)


def test_a_capsule_without_memory_has_the_address_0() -> None:
    assert read_argument(Exporter(0, shape=(0, 4))).value == 0


def test_an_address_and_an_offset_beyond_64_bits_are_told() -> None:
    assert problem(Exporter(2**64 - 8, offset=64))


@pytest.mark.parametrize("make", [Array, Exporter])
def test_elements_at_the_address_0_are_told(make: Callable[[int], Any]) -> None:
    found = read_argument(make(0)).leaf
    assert isinstance(found, Other) or (isinstance(found, TensorMeta) and found.odd)


@pytest.mark.parametrize("name", [b"used_dltensor", b"dltensor_versioned", b"other"])
def test_a_capsule_that_is_not_ours_to_read_is_told_and_given_back(name: bytes) -> None:
    exporter = Exporter(P, name=name)
    assert problem(exporter).startswith("an array that cannot be read (ValueError: ")
    gc.collect()
    assert (exporter.made, exporter.freed) == (1, 1)


@pytest.mark.parametrize(
    ("device", "capsule"),
    [
        ((2, 0), None),
        ((2, 0), 5),
        ((2, 0), object()),
        (None, None),
        ((2,), None),
        (("cuda", 0), None),
        ((2, 0, 1), None),
    ],
)
def test_what_is_no_capsule_is_told(device: Any, capsule: Any) -> None:
    fake = SimpleNamespace(__dlpack_device__=lambda: device, __dlpack__=lambda **how: capsule)
    assert problem(fake).startswith("an array that cannot be read (")


@pytest.mark.parametrize(
    ("said", "device", "words"),
    [
        pytest.param(
            (8, 0), (8, 0), "it is on a device of DLPack's type 8, neither the host nor a GPU of CUDA", id="metal"
        ),
        pytest.param((10, 0), (10, 0), "it is on a device of DLPack's type 10", id="rocm"),
        pytest.param((2, -1), (2, -1), "it is on device -1", id="no-number"),
        pytest.param(
            (2, 0), (1, 0), "it said that it is on cuda:0, and its capsule is on cpu", id="host-said-to-be-a-gpu"
        ),
        pytest.param(
            (1, 0), (2, 0), "it said that it is on cpu, and its capsule is on cuda:0", id="gpu-said-to-be-the-host"
        ),
        pytest.param((2, 1), (2, 0), "it said that it is on cuda:1, and its capsule is on cuda:0", id="another-gpu"),
    ],
)
@pytest.mark.parametrize("of_model", [False, True], ids=["kernel", "model"])
def test_memory_of_another_device_than_is_said_is_not_read(
    said: tuple[int, int],
    device: tuple[int, int],
    words: str,
    of_model: bool,  # noqa: FBT001 - a row
) -> None:
    exporter = Exporter(P, device=device)
    exporter.device = said
    found = read_array(exporter) if of_model else None
    reason = found.meta.odd if found is not None else problem(exporter)
    assert words in reason
    assert found is None or found.array is None


def test_an_exporter_that_raises_is_told() -> None:
    def refuse(**how: Any) -> object:
        raise BufferError("it is read-only")

    fake = SimpleNamespace(__dlpack_device__=lambda: (2, 0), __dlpack__=refuse)
    assert problem(fake) == "an array that cannot be read (BufferError: it is read-only)"


@pytest.mark.parametrize(
    ("device", "stream", "asked"),
    [
        pytest.param((2, 0), 0, {"stream": 1}, id="dlpacks-word-for-the-default-stream"),
        pytest.param((2, 0), 77, {"stream": 77}, id="the-stream-of-the-call"),
        pytest.param((13, 1), 2, {"stream": 2}, id="managed"),
        pytest.param((1, 0), 77, {}, id="on-the-cpu"),
    ],
)
def test_an_exporter_is_asked_to_be_ready_on_the_stream_of_the_call(
    device: tuple[int, int], stream: int, asked: dict[str, int]
) -> None:
    exporter = Exporter(P, device=device)
    read_argument(exporter, stream)
    assert exporter.asked == [{"max_version": (1, 1), **asked}]


def test_a_capsule_is_held_as_long_as_the_argument() -> None:
    exporter = Exporter(P)
    found = read_argument(exporter)
    gc.collect()
    assert exporter.freed == 0
    del found
    gc.collect()
    assert exporter.freed == 1


@pytest.mark.parametrize(("said", "read_only"), [(True, True), (False, False)])
def test_that_an_array_is_read_only_is_kept(said: bool, read_only: bool) -> None:  # noqa: FBT001 - a row
    array = Array(P)
    array.__cuda_array_interface__["data"] = (P, said)
    assert read_argument(array).read_only is read_only


def test_what_may_be_another_the_next_time_is_not_constant() -> None:
    assert read_argument(7).constant
    assert read_argument(Size.SMALL).constant
    assert not read_argument(Ordinal()).constant
    assert not read_argument(object()).constant


@pytest.mark.parametrize("make", [Array, Exporter])
def test_an_array_that_was_read_is_not_kept(make: Callable[[int], Any]) -> None:
    array = make(P)
    gone = weakref.ref(array)
    counts = sys.getrefcount(array)
    for _ in range(100):
        read_argument(array)
    assert sys.getrefcount(array) == counts
    del array
    gc.collect()
    assert gone() is None


def test_the_python_api_of_others_is_left_alone() -> None:
    shared = ctypes.pythonapi.PyCapsule_GetPointer
    before = shared.argtypes, shared.restype
    try:
        shared.argtypes, shared.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_size_t
        read_argument(Exporter(P))
        assert (shared.argtypes, shared.restype) == ([ctypes.c_void_p, ctypes.c_char_p], ctypes.c_size_t)
    finally:
        shared.argtypes, shared.restype = before


def test_arrays_of_numpy_are_on_the_cpu_and_given_back() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(24, dtype=numpy.float32).reshape(4, 6)
    counts = sys.getrefcount(array)
    for view, strides in (
        (array, (6, 1)),
        (array[:, ::2], (6, 2)),
        (array.T, (1, 6)),
        (array[::-1], (-6, 1)),
        (array[1:, 1:], (6, 1)),
    ):
        for _ in range(20):
            wanted = TensorMeta("float32", "cpu", view.shape, strides, view.ctypes.data % 16)
            assert read_argument(view).leaf == wanted
            assert read_argument(view).value == view.ctypes.data
    del view
    assert sys.getrefcount(array) == counts
    assert array.sum() == 276


@pytest.mark.parametrize("case", ["big-endian", "structured", "text", "objects", "dates"])
def test_arrays_of_numpy_that_have_no_dlpack_are_told(case: str) -> None:
    numpy = pytest.importorskip("numpy")
    array = {
        "big-endian": lambda: numpy.zeros(3, ">f4"),
        "structured": lambda: numpy.zeros(3, [("a", "<f4"), ("b", "<i4")]), "text": lambda: numpy.array(["a"]),
        "objects": lambda: numpy.array([None]), "dates": lambda: numpy.zeros(1, "<M8[s]"),
    }[case]()  # fmt: skip
    assert problem(array).startswith("an array that cannot be read (BufferError: ")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_arrays_of_numpy_of_any_shape_and_type(shape: tuple[int, ...]) -> None:
    numpy = pytest.importorskip("numpy")
    for name in ("bool", "int8", "uint16", "uint64", "float16", "float64", "complex64", "complex128"):
        found = meta(numpy.zeros(shape, name))
        assert (found.dtype, found.shape, found.odd) == (name, shape, "")


# ------------------------------------------------------------------------------------------------------------ numbers


class Size(enum.IntEnum):
    SMALL = 8


class Flag(enum.IntFlag):
    BOTH = 3


class Ordinal:
    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**31, 2**63, 2**64 + 1, -(2**64) - 1, 10**400, True, False, 0.0, -0.0, 1e308, 5e-324, float("inf"), None],
)
def test_pythons_numbers_are_themselves(value: Any) -> None:
    found = read_argument(value)
    assert found.leaf is found.value is value
    assert (found.stream, found.is_torch) == (None, False)


@pytest.mark.parametrize(("value", "number"), [(Size.SMALL, 8), (Flag.BOTH, 3), (Ordinal(), 7)])
def test_what_says_that_it_is_an_int_is_that_int(value: Any, number: int) -> None:
    found = read_argument(value)
    assert (type(found.leaf), found.leaf, found.value) == (int, number, number)


@pytest.mark.parametrize(
    ("name", "given", "kind", "number"),
    [
        ("int8", -128, int, -128), ("uint8", 255, int, 255), ("int64", -(2**63), int, -(2**63)), ("uint64", 2**63 + 1, int, 2**63 + 1),
        ("uint64", 2**64 - 1, int, 2**64 - 1), ("float16", 0.5, float, 0.5), ("float32", 0.25, float, 0.25), ("float64", 0.1, float, 0.1),
        ("longdouble", 0.5, float, 0.5), ("bool_", True, bool, True), ("bool_", False, bool, False), ("float32", float("inf"), float, float("inf")),
    ],
)  # fmt: skip
def test_numpys_scalars_are_numbers_of_python(name: str, given: Any, kind: type, number: Any) -> None:
    numpy = pytest.importorskip("numpy")
    found = read_argument(getattr(numpy, name)(given))
    assert type(found.value) is kind or name == "float64"  # which is a float of Python
    assert found.leaf == found.value == number


@pytest.mark.parametrize(
    ("name", "args"), [("complex64", (1 + 2j,)), ("str_", ("3.5",)), ("bytes_", (b"3.5",)), ("timedelta64", (5,))]
)
def test_a_scalar_of_numpy_that_is_no_real_number_is_none(name: str, args: tuple[Any, ...]) -> None:
    numpy = pytest.importorskip("numpy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's own, of the part that is lost
        assert isinstance(read_argument(getattr(numpy, name)(*args)).leaf, Other)


@pytest.mark.parametrize(
    "value",
    ["4", b"4", [4], (4,), {4}, {}, 4j, decimal.Decimal(4), fractions.Fraction(4), object(), print, range(4)],
)
def test_anything_else_is_named_by_its_class(value: Any) -> None:
    assert problem(value) == f"an instance of {type(value).__module__}.{type(value).__qualname__}"


def test_a_class_is_no_instance_of_itself() -> None:
    """Its `__index__` is a function of instances."""
    assert "cannot be read" in problem(Ordinal)


# --------------------------------------------------------------------------------- torch's own, of which real ones are on the CPU


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, no_torch: None) -> Any:
    monkeypatch.undo()
    return pytest.importorskip("torch")


def test_a_tensor_of_torch_is_read_as_it_lies(torch: Any) -> None:
    base = torch.arange(24, dtype=torch.float32)
    for view in (base, base.reshape(4, 6).T, base[1:].reshape(23, 1), base[5:5], base[3]):
        found = read_argument(view)
        wanted = TensorMeta("float32", "cpu", tuple(view.shape), view.stride(), view.data_ptr() % 16)
        assert (found.leaf, found.value, found.is_torch, found.stream) == (wanted, view.data_ptr(), True, None)


def test_a_tensor_that_a_kernel_cannot_see_is_told(torch: Any) -> None:
    from torch._subclasses import FakeTensorMode

    number = torch.ones(4, dtype=torch.complex64)
    with FakeTensorMode():
        fake = torch.empty(4)
    for tensor, odd in [
        (number.conj(), "has its conj or neg bit set"), (number.conj().imag, "has its conj or neg bit set"), (torch.empty(4, device="meta"), "has no data"),
        (fake, "has no data"), (torch.ones(4).to_sparse(), "without an address"),
    ]:  # fmt: skip
        assert odd in meta(tensor).odd


def test_a_wrapper_without_memory_of_its_own_is_told(torch: Any) -> None:
    class Wrapper(torch.Tensor):  # type: ignore[misc]
        @staticmethod
        def __new__(cls: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    assert meta(Wrapper()).odd


def test_a_tensor_whose_shape_raises_is_told(torch: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert meta(nested).odd
