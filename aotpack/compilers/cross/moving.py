"""The export for a CPU -> the programs of a GPU that is not here, with the same weights.

A model may do something else on a GPU: ask where its arguments are, or make a tensor in a place of its own. So it is
called with fake tensors in both places, and what it calls of torch is compared: another sequence of calls, or a result
that stays in host memory, is refused, since a program that was traced on a CPU would not be what eager is there. So is
a model that cannot be called without values. Of `torch.cond` and `while_loop` every branch is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda.amp import common
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode, resolve_name

from aotpack.compilers.aoti import parse_leaf
from aotpack.compilers.cross.program import DEVICE, let_views_copy, on_fake_gpu
from aotpack.compilers.exporter import Exporter
from aotpack.compilers.flat import Flat, Shape
from aotpack.compilers.model import Model
from aotpack.compilers.modules import import_modules, load_source
from aotpack.compilers.programs import Program, custom_operators_of, operators_of, store_program
from aotpack.compilers.shapes import LeafSpec, TensorLeaf
from aotpack.compilers.sizes import distinct, flat_tensors
from aotpack.compilers.user_errors import first_line, user_place
from aotpack_runtime.errors import SourceError
from aotpack_runtime.format.codec import parse_guards, parse_outputs
from aotpack_runtime.format.guard import Guards, TensorGuard
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.loaders.programs import read_program
from aotpack_runtime.store import Store

Json = Any


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """The record of an export, of programs on a GPU; each keeps under `origin` the one that it was made from.

    SourceError for a model that is another one on a GPU.
    """
    export, folder = job["export"], Path(job["folder"])
    import_modules(job["imports"], folder)
    programs = [read_program(store.object(record["file"]["sha256"])) for record in export["programs"]]
    _require_not_recurrent(job, programs)
    model = Model(job, load_source(job["source"], job["args"], folder))
    exporter = Exporter(job, model, folder)
    for absent in distinct(tuple(variant["absent"]) for variant in job["variants"]):
        numbers = {job["program_of_variant"][v["id"]] for v in job["variants"] if tuple(v["absent"]) == absent}
        for number in sorted(numbers):
            _require_alike(job, model.module, exporter.shape(absent), export["programs"][number])
    return {
        **{name: value for name, value in export.items() if name != "depends"},
        "programs": [_moved(*pair, store) for pair in zip(export["programs"], programs, strict=True)],
        "program_of_variant": job["program_of_variant"],
    }


def _moved(record: Json, exported: ExportedProgram, store: Store) -> Json:
    exported = on_fake_gpu(exported)
    let_views_copy(exported.graph_module)
    leaves = tuple(placed_leaf(parse_leaf(leaf), "cuda") for leaf in record["leaves"])
    guards = placed(parse_guards(record["guards"]), "cuda")
    program = Program(
        exported=exported,
        guards=_as_traced(guards, leaves) if any(custom_operators_of(exported)) else guards,
        outputs=parse_outputs(record["outputs"]),
        compiled_outputs=parse_outputs(record["compiled_outputs"]),
        shape=Shape((), tuple("*" for _ in leaves), leaves),
        examples=tuple(tuple(tuple(e) if isinstance(e, list) else e for e in item) for item in record["examples"]),
    )
    return {**store_program(program, record["tied"], store), "origin": record["file"]}


def _as_traced(guards: Guards, leaves: Sequence[LeafSpec]) -> Guards:
    """`guards` for arguments as they lay when the program was traced: other layouts were tried with a CPU's kernels
    of custom operators, and a trace drops `x.contiguous()`."""
    traced = {leaf.path: leaf.layout for leaf in leaves if isinstance(leaf, TensorLeaf)}
    kept = [
        replace(leaf, layout=traced[leaf.path]) if isinstance(leaf, TensorGuard) and leaf.layout == "any" else leaf
        for leaf in guards.leaves
    ]
    return replace(guards, leaves=tuple(kept))


def placed(guards: Guards, device: str) -> Guards:
    """`guards` for arguments on a device of this kind."""
    leaves = [replace(leaf, device=device) if isinstance(leaf, TensorGuard) else leaf for leaf in guards.leaves]
    return replace(guards, leaves=tuple(leaves))


def placed_leaf(leaf: LeafSpec, device: str) -> LeafSpec:
    return replace(leaf, device=device) if isinstance(leaf, TensorLeaf) else leaf


# ------------------------------------------------------------------------------------- is it the same model there?


_RECURRENT = frozenset({"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"})


def _require_not_recurrent(job: Mapping[str, Json], programs: Sequence[ExportedProgram]) -> None:
    """SourceError for what cuDNN computes: it asks the CUDA driver while it is traced."""
    for program in programs:
        for operator in operators_of(program):
            name = operator.name().partition(".")[0]
            if name in _RECURRENT:
                problem = (
                    f"its {name.removeprefix('aten::')} is cuDNN's on a GPU, which asks the CUDA driver for itself"
                )
                raise SourceError(job["source"], problem, hint="build this target on a GPU")


def _require_alike(job: Mapping[str, Json], module: torch.nn.Module, shape: Shape, record: Json) -> None:
    guards = parse_guards(record["guards"])
    example = tuple(tuple(item) if isinstance(item, list) else item for item in record["examples"][0])
    tensors = flat_tensors(guards, make_leaves(guards, example, job["fills"]))
    flat = Flat(module, shape, job["outputs"])
    try:
        here, _ = _calls(flat, tensors, "cpu")
    except Exception as error:
        problem = (
            f"what it does on a GPU cannot be looked at without values: {type(error).__name__}: {first_line(error)}"
        )
        raise SourceError(job["source"], problem, hint="build this target on a GPU") from error
    try:
        there, results = _calls(flat, tensors, DEVICE)
    except Exception as error:
        if "CUDA driver" in str(error) or "NVIDIA driver" in str(error):
            place = user_place(error, Path(job["folder"]))
            problem = f"an operator of it asks the CUDA driver while it is traced, which takes a GPU{place}"
            raise SourceError(job["source"], problem, hint="build this target on a GPU") from error
        raise _another_model(job, f"fails on a GPU: {type(error).__name__}: {first_line(error)}") from error
    for number, (mine, other) in enumerate(zip(here, there, strict=False)):
        if mine != other:
            raise _another_model(job, f"does otherwise on a GPU than on a CPU: call {number} is {other}, not {mine}")
    if len(here) != len(there):
        raise _another_model(job, f"does otherwise on a GPU than on a CPU: {len(there)} calls, not {len(here)}")
    for number, result in enumerate(results):
        nothing = isinstance(result.numel(), int) and not result.numel()  # it stands in for no result at all
        if result.device.type == "cpu" and not nothing:
            raise _another_model(job, f"returns a tensor in host memory when it is on a GPU (result {number})")


def _another_model(job: Mapping[str, Json], problem: str) -> SourceError:
    return SourceError(
        job["source"], problem,
        hint="make tensors on the device of the arguments and ask nothing of it, or build this target on a GPU",
    )  # fmt: skip


def _calls(flat: Flat, tensors: list[torch.Tensor], device: str) -> tuple[list[str], list[torch.Tensor]]:
    """(every call of torch that the model makes, with the dtypes and shapes that it gives; its results), with fake
    tensors on `device`. It is told that it is exported, as it was: nn.TransformerEncoder goes another way then."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made[id(tensor)]

    with torch.no_grad(), mode, _autocast(), _every_branch(), _compiling_state_context():
        owned = {
            **dict(flat.named_parameters(remove_duplicate=False)),
            **dict(flat.named_buffers(remove_duplicate=False)),
        }
        weights = {name: fake(tensor) for name, tensor in owned.items()}
        arguments = tuple(fake(tensor) if tensor.numel() or tensor.dim() != 2 else tensor for tensor in tensors)
        with _Calls() as calls:
            results = torch.func.functional_call(flat, weights, arguments, tie_weights=False)
    return calls.seen, list(results)


@contextmanager
def _autocast() -> Iterator[None]:
    """torch would turn autocast for a GPU off where there is none."""
    there = mock.patch.object(common, "amp_definitely_not_available", return_value=False)
    with there, mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        yield


@contextmanager
def _every_branch() -> Iterator[None]:
    """Control flow that values decide calls each of its functions once, one after another."""

    def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
        results = [branch(*operands) for branch in (true_fn, false_fn)]
        return results[0]

    def while_loop(
        cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Sequence[Any]
    ) -> tuple[Any, ...]:
        cond_fn(*carried_inputs)
        return tuple(body_fn(*carried_inputs))

    import torch._higher_order_ops as operators
    from torch._higher_order_ops import while_loop as _  # noqa: F401 - a module of the name of its function

    with ExitStack() as stack:
        for owner, name, function in (
            (torch, "cond", cond), (operators, "cond", cond), (operators, "while_loop", while_loop),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


class _Calls(TorchFunctionMode):
    """Notes each call of torch from the model's own code, by its name and what it gives but not where."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append(f"{resolve_name(func) or getattr(func, '__name__', func)} -> {_look(result)}")
        return result


def _look(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_look, value))})"
    return type(value).__name__
