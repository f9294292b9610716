"""AOTInductor packages for arrays: run through the C interfaces of the package and of libtorch, torch never imported.

Calls that guards judge alike take the same shapes, so what C is told of them is laid out once, in a `Plan`; a call sets
addresses and reads addresses. Results lie where the model put them, and are freed with the array that shows them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

from aotpack_runtime.array_kinds import Form, OwnKind
from aotpack_runtime.errors import ArtifactError
from aotpack_runtime.format.guard import IntGuard, TensorGuard
from aotpack_runtime.format.index import Variant
from aotpack_runtime.format.output import OutputLeaf, Result, View
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, Leaf, TensorMeta
from aotpack_runtime.loaders.array_weights import ArrayWeights
from aotpack_runtime.loaders.library_memory import memory_type, span_bytes
from aotpack_runtime.loaders.libtorch import WHOLE_LIBRARY, Libtorch, int64s, open_libtorch, row_major
from aotpack_runtime.loaders.model_container import RUN, RUN_SINGLE_THREADED, ModelContainer
from aotpack_runtime.streams import said_stream

LIBRARY = "model.so"

HEAD_BYTES = object.__basicsize__
"""Where a NumPy array has the address of its memory: first after the head of every object (PyArrayObject_fields in
ndarraytypes.h, part of NumPy's binary interface since 1.7). Checked against the array itself for every plan."""

Facts = tuple[str, tuple[int, ...], tuple[int, ...], str]
"""dtype, shape, strides in elements, and device of a result."""


class Misplaced(Exception):
    """An array of a judged call lies at an address, or on a device, that its plan does not take."""


class ArrayExecutable:
    """A loaded package. Its plans may run from many threads."""

    def __init__(self, variant: Variant, path: str, weights: ArrayWeights, *, concurrency: int) -> None:
        self.variant, self.weights = variant, weights
        self.library = open_libtorch()
        kind, _, index = weights.device.partition(":")
        self.kind, self.index = kind, int(index or 0)
        run_name = RUN if kind == "cpu" else RUN_SINGLE_THREADED
        with self._on_its_gpu():  # a container leaves its device as the current one
            try:
                self.container = ModelContainer(path, variant.id, concurrency, device=weights.device, run_name=run_name)
            except ArtifactError as error:
                if WHOLE_LIBRARY not in str(error):
                    raise
                self.library.open_whole()
                self.container = ModelContainer(path, variant.id, concurrency, device=weights.device, run_name=run_name)
        self._turn = threading.Lock()
        several = kind == "cuda" and self.library.gpu_count() > 1
        in_turn = self._in_turn_on_its_gpu if several else self._in_turn
        self.call = self.container.run_function if kind == "cpu" else in_turn
        self._constants = dict(variant.constants)
        missing = sorted(set(self.container.constant_names()) - self._constants.keys())
        if missing:
            raise ArtifactError(variant.id, f"asks for constants the index does not name: {', '.join(missing[:5])}")
        self._bound: list[dict[str, Any]] = []
        with weights.lock:
            weights.bind(self._rebind)

    def plan(self, leaves: Sequence[Leaf], numpy: Sequence[bool], kind: OwnKind) -> Plan:
        """What runs calls whose leaves are as these; `numpy` says which of them are NumPy arrays."""
        return Plan(self, leaves, numpy, kind)

    def _in_turn(self, *arguments: Any) -> int:
        """Queue the work of one call at a time, as `CudaContainer` does and says why."""
        with self._turn:
            status: int = self.container.run_function(*arguments)
            return status

    def _in_turn_on_its_gpu(self, *arguments: Any) -> int:
        with self._on_its_gpu():
            return self._in_turn(*arguments)

    def _on_its_gpu(self) -> AbstractContextManager[None]:
        return nullcontext() if self.kind == "cpu" else self.library.on_gpu(self.index)

    def stream(self) -> int:
        """The CUDA stream of a call: the one that `use_stream` says, else this thread's current one."""
        said = said_stream()
        return self.library.current_stream(self.index) if said is None else said

    def _rebind(self) -> None:
        """Bind the current weights without a copy. The package reads the set before until the call after."""
        tensors = self.weights.tensors(self._constants)
        if tensors:
            with self._on_its_gpu(), self._turn if self.kind != "cpu" else nullcontext():
                self.container.bind_handles({name: tensor.handle for name, tensor in tensors.items()})
        self._bound = [*self._bound[-1:], tensors]


def wait_for(stream: int) -> None:
    """Return when all that another library queued on its stream is done."""
    open_libtorch().wait_for(stream)


def load(variant: Variant, files: Mapping[str, str], weights: ArrayWeights) -> ArrayExecutable:
    """Open the library and bind the weights; ArtifactError with the library's own words, or why it takes torch."""
    reason = needs_torch(variant)
    if reason:
        raise ArtifactError(variant.id, reason)
    alone = weights.set.state or weights.device != "cpu"
    return ArrayExecutable(variant, files[LIBRARY], weights, concurrency=1 if alone else _concurrency())


def needs_torch(variant: Variant) -> str:
    """Why this package cannot run without torch's Python, "" when it can."""
    if variant.artifact.kind != "aoti":
        return f"is a {variant.artifact.kind!r} artifact, which torch runs"
    others = sorted(variant.artifact.files.keys() - {LIBRARY})
    if LIBRARY not in variant.artifact.files:
        return f"holds no {LIBRARY}"
    return f"has operators without a C shim ({others[0]}), which torch runs" if "model.json" in others else ""


def _concurrency() -> int:
    """Calls of one variant that run at a time; each takes a model object of a few kB."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


# ---------------------------------------------------------------------------------------------------------- a call


class Plan:
    """The way calls judged alike are run; an executable for `assemble`. `run` is replaced after the first call, which
    shows what the results are like."""

    def __init__(
        self, executable: ArrayExecutable, leaves: Sequence[Leaf], numpy: Sequence[bool], kind: OwnKind
    ) -> None:
        self._executable, self._kind = executable, kind
        self.view = kind.view
        self._inputs: list[_Input] = []
        for guard, leaf, is_numpy in zip(executable.variant.guards.leaves, leaves, numpy, strict=True):
            if isinstance(guard, TensorGuard) and isinstance(leaf, TensorMeta):
                reader = "nothing" if 0 in leaf.shape else "numpy" if is_numpy else "array"
                mask = 15 if guard.aligned else ITEMSIZE_BYTES[leaf.dtype] - 1
                self._inputs.append(_Input(executable.library, leaf, mask, reader))
            elif isinstance(guard, IntGuard) and isinstance(leaf, int):
                size = TensorMeta("float32", executable.weights.device, (leaf, 0), (1, 1))
                self._inputs.append(_Input(executable.library, size, 0, "nothing"))
        fixed = {
            out.index for leaf in executable.variant.outputs.leaves if (out := _result(leaf)) and out.shape is not None
        }
        self._fixed = [number in fixed for number in range(executable.container.outputs)]
        self._pool: list[Any] = []
        self.run: Callable[[list[Any]], Any] = self._first

    def size_tensor(self, size: int) -> int:
        """Stands for a symbolic int among the inputs; the plan knows its value."""
        return size

    def _first(self, arrays: list[Any]) -> Any:
        """Run, and lay out what the results of this call were like for those that come."""
        seen: list[Facts] = []
        results = self._function(None, seen)(arrays)
        known = [facts if fixed and 0 not in facts[1] else None for facts, fixed in zip(seen, self._fixed, strict=True)]
        self.run = self._function(known, None)
        return results

    def _function(self, known: Sequence[Any] | None, seen: list[Any] | None) -> Callable[[list[Any]], Any]:
        """The function that runs; `known` has the dtype, shape and strides of results that are always alike, `seen` is
        given those of a call."""
        executable, library = self._executable, self._executable.library
        quick, outputs = library.quick, executable.container.outputs
        code = _code(
            tuple(one.reader for one in self._inputs),
            tuple(bool(known and known[number]) for number in range(outputs)),
            cuda=executable.kind == "cuda",
        )
        scope: dict[str, Any] = {
            "_at": c_void_p.from_address, "_create": quick.aoti_torch_create_tensor_from_blob,
            "_pointer": quick.aoti_torch_get_data_ptr, "_call": executable.call,
            "_pop": self._pool.pop, "_push": self._pool.append, "_new": self._block, "_empty": IndexError,
            "_head": HEAD_BYTES, "_Misplaced": Misplaced,
            "_zero": c_int64(0), "_refuse": self._refuse,
            "_stream": executable.stream,
            "_read": lambda handle: self._read(handle, seen),
            "_closed": executable.weights.closed, "_wait": executable.weights.wait,
        }  # fmt: skip
        for number, one in enumerate(self._inputs):
            scope |= {f"_{name}{number}": value for name, value in one.scope().items()}
        for number, facts in enumerate(known or ()):
            if facts is not None:
                scope |= {
                    f"_memory{number}": memory_type(span_bytes(*facts[:3]), library),
                    f"_wrap{number}": self._wrap(facts),
                }
        exec(code, scope)  # noqa: S102 - the text is made of numbers only
        function: Callable[[list[Any]], Any] = scope["run"]
        return function

    def _block(self) -> Any:
        """What one call at a time may write to: addresses, handles in, handles out."""
        container = self._executable.container
        count, outputs = len(self._inputs), container.outputs
        handles_in, handles_out = (c_void_p * max(count, 1))(), (c_void_p * max(outputs, 1))()
        size = ctypes.sizeof(c_void_p)
        stream = c_void_p()
        call = (
            c_void_p(container.handle), handles_in, ctypes.c_size_t(count), handles_out, ctypes.c_size_t(outputs),
            stream, None,
        )  # fmt: skip
        block: list[Any] = [call, stream]
        for number in range(count):
            block += [c_void_p(), byref(handles_in, number * size)]
        for number in range(outputs):
            address = c_void_p()
            block += [c_void_p.from_buffer(handles_out, number * size), address, byref(address)]
        return tuple(block)

    def _refuse(self, status: int) -> None:
        if status == 1:
            words = self._executable.library.last_words() or "it said why on stderr"
            raise ArtifactError(self._executable.variant.id, f"libtorch: {words}")
        raise self._executable.container.refused()

    def _wrap(self, facts: Facts) -> Callable[[int, Any], Any]:
        return self._kind.wrapper(Form.of(*facts))

    def _read(self, handle: int, seen: list[Any] | None) -> Any:
        """A result whose shape is not known before the call."""
        library = self._executable.library
        # A model on a GPU may give some of its results on the host.
        device = "cpu" if self._executable.kind == "cpu" else library.device_of(handle)
        facts = (*library.describe(handle), device)
        if seen is not None:
            seen.append(facts)
        memory = memory_type(span_bytes(*facts[:3]), library)
        address = library.address(handle)
        if not address:
            library.delete(handle)
            return self._wrap(facts)(0, None)
        owner = memory.from_address(address)
        owner.handle = handle
        return self._wrap(facts)(address, owner)


class _Input:
    """One tensor of a plan: what C is told of it besides its address."""

    def __init__(self, library: Libtorch, meta: TensorMeta, mask: int, reader: str) -> None:
        """`mask` has the bits that its address must not have; `reader` says how that is found (`_code`)."""
        self.reader, self._mask, self._where = reader, mask, meta.device
        kind, _, index = meta.device.partition(":")
        self._device, self._index = c_int32(library.devices[kind]), c_int32(int(index or 0))
        self._rank, self._dtype = c_int64(len(meta.shape)), c_int32(library.dtypes[meta.dtype])
        self._sizes, self._strides = int64s(meta.shape), int64s(row_major(meta.shape, meta.strides))

    def scope(self) -> dict[str, Any]:
        return {
            "rank": self._rank, "sizes": self._sizes, "strides": self._strides, "dtype": self._dtype,
            "mask": self._mask, "where": self._where, "device": self._device, "index": self._index,
        }  # fmt: skip


@lru_cache(maxsize=256)
def _code(readers: tuple[str, ...], known: tuple[bool, ...], *, cuda: bool) -> Any:
    """The text of a plan's `run`: addresses in, one call of the model, addresses out."""
    numbers = range(len(readers))
    # A tensor without elements: on the CPU a blob at any address is made sooner, CUDA asks whose memory it is.
    nowhere = "0" if cuda else "16"
    lines = [f"    {''.join(f'a{n}, ' for n in numbers)}= arrays"] if readers else []
    for n, reader in enumerate(readers):
        where = {"numpy": f"_at(id(a{n}) + _head).value", "array": f"a{n}.address", "nothing": nowhere}[reader]
        lines.append(f"    p{n} = {where}")
    tests = [f"p{n} & _mask{n}" for n, reader in enumerate(readers) if reader != "nothing"]
    # Keys do not have the device: NumPy's arrays have none before 2.0, and lie in host memory.
    tests += [f"a{n}.device != _where{n}" for n, reader in enumerate(readers) if reader == "array"]
    if tests:
        lines += [f"    if {' or '.join(tests)}:", "        raise _Misplaced"]
    names = [
        "call",
        "stream",
        *[f"in{n}, slot{n}" for n in numbers],
        *[f"out{m}, at{m}, ref{m}" for m in range(len(known))],
    ]
    lines += ["    try:", "        block = _pop()", "    except _empty:", "        block = _new()"]
    lines.append(f"    {', '.join(names)} = block")
    for n in numbers:
        lines.append(f"    in{n}.value = p{n}")
        rest = f"_rank{n}, _sizes{n}, _strides{n}, _zero, _dtype{n}, _device{n}, _index{n}, slot{n}"
        lines += [f"    if _create(in{n}, {rest}):", "        _refuse(1)"]
    if cuda:
        lines.append("    stream.value = _stream()")
    lines += ["    if _closed:", "        _wait()"]
    lines += ["    if _call(*call):", "        _push(block)", "        _refuse(2)"]
    for m, is_known in enumerate(known):
        if is_known:
            lines += [
                f"    _pointer(out{m}, ref{m})",
                f"    m{m} = _memory{m}.from_address(at{m}.value)",
                f"    m{m}.handle = out{m}.value",
                f"    r{m} = _wrap{m}(at{m}.value, m{m})",
            ]
        else:
            lines.append(f"    r{m} = _read(out{m}.value)")
    lines += ["    _push(block)", f"    return ({''.join(f'r{m}, ' for m in range(len(known)))})"]
    return compile("\n".join(["def run(arrays):", *lines]), "<aotpack arrays>", "exec")


def _result(leaf: OutputLeaf) -> Result | None:
    if isinstance(leaf, View):
        return leaf.of if isinstance(leaf.of, Result) else None
    return leaf if isinstance(leaf, Result) else None
