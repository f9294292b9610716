"""The user's source as a module ready to be exported: found, constructed, its weights and state taken stock of."""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aotpack_runtime.errors import AotpackError, SourceError
from aotpack_runtime.format.index import Default, Parameter
from aotpack_runtime.format.tree import Tree, flatten
from aotpack_runtime.loaders.programs import move
from aotpack_runtime.loaders.source import build_module

Json = Any


def load_source(source: str, args: Mapping[str, Json], folder: Path) -> torch.nn.Module:
    """The module that `source` names: `pkg.mod:name`, looked up in `folder` first, or a program saved by torch.export.

    SourceError says what failed and where in the user's file.
    """
    if source.endswith(".pt2"):
        path = folder / source
        try:
            program = torch.export.load(path)
            drop_detach(program.graph_module)
            return program.module(check_guards=False)
        except Exception as error:
            raise SourceError(source, f"cannot be read as a program of torch.export.save: {_line(error)}") from error
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return build_module(source, args)
    except AotpackError as error:
        raise SourceError(source, getattr(error, "problem", str(error))) from error
    except Exception as error:
        raise SourceError(
            source, f"raised {type(error).__name__}: {_line(error)}{user_place(error, folder)}"
        ) from error


def move_module(module: torch.nn.Module, device: str, before: str = "cpu") -> None:
    """`module.to(device)`; a saved program also makes there what it was traced to make on its device before."""
    if device == before:
        return
    module.to(device)
    if isinstance(module, torch.fx.GraphModule):
        move(module, before, torch.device(device))


def drop_detach(graph_module: torch.fx.GraphModule) -> None:
    """Take out `detach_`, which a trace leaves behind every `torch.tensor([...])`: it does nothing without autograd,
    and a program that holds it cannot be traced again ("can't detach views in-place", torch 2.13)."""
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.aten.detach_.default:
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def import_modules(names: Sequence[str], folder: Path) -> None:
    """Import modules that register operators, looked up in `folder` first; SourceError when one cannot be."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise SourceError(
                name, f"of `imports` cannot be imported: {type(error).__name__}: {_line(error)}"
            ) from error


def parameters_of(module: torch.nn.Module, source: str) -> tuple[Parameter, ...]:
    """The parameters of forward(), with defaults where they are scalars or containers of scalars."""
    found = []
    for parameter in inspect.signature(module.forward).parameters.values():
        default = None
        if parameter.default is not inspect.Parameter.empty:
            leaves: list[Any] = []
            tree = flatten(parameter.default, leaves)
            for leaf in leaves:
                if not isinstance(leaf, None | bool | int | float | complex | str):
                    raise SourceError(
                        source,
                        f"the default of forward({parameter.name}=...) is {type(leaf).__name__}, "
                        "which a bundle cannot hold",
                        hint="make the default None, a number, a string, or a tuple, list or dict of these",
                    )
            default = Default(tree, tuple(leaves))
        found.append(Parameter(parameter.name, parameter.kind.name.lower(), default))
    if isinstance(module, torch.fx.GraphModule):
        # A saved program takes each argument the way it was exported with, by position or by name.
        positional = len(module._in_spec.child(0).children())
        kinds = ["positional_or_keyword" if n < positional else "keyword_only" for n in range(len(found))]
        found = [replace(parameter, kind=kind) for parameter, kind in zip(found, kinds, strict=True)]
    return tuple(found)


def default_tree(parameter: Parameter, source: str) -> tuple[Tree, tuple[Any, ...]]:
    """What a parameter holds when the caller leaves it out; SourceError when it cannot be left out."""
    if parameter.kind == "var_positional":
        return ("tuple",), ()
    if parameter.kind == "var_keyword":
        return ("dict", ()), ()
    if parameter.default is None:
        raise SourceError(source, f"forward() needs the argument {parameter.name!r}", hint="describe it under `inputs`")
    return parameter.default.tree, parameter.default.leaves


def own_dense_weights(module: torch.nn.Module) -> None:
    """Give every parameter and buffer memory of its own without gaps; tied ones stay tied, views become copies.

    Constants outside a package are bound with the strides they were compiled with, so nothing may be expanded or a
    slice of something larger. Dense permuted layouts (channels-last weights) are kept.
    """
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    seen: dict[int, tuple[Any, ...]] = {}
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or (tensor.numel() and _is_dense(tensor) and _owns_memory(tensor, seen)):
                    continue
                key = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
                if key not in made:
                    made[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
                table[name] = (
                    torch.nn.Parameter(made[key], requires_grad=False)
                    if isinstance(tensor, torch.nn.Parameter)
                    else made[key]
                )


def overlapping(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> a name whose tensor shares memory with it without being tied to it: views, which become copies."""
    found: dict[str, str] = {}
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage.setdefault(_storage(tensor), []).append(name)
    for names in by_storage.values():
        for left, right in itertools.permutations(names, 2):
            a, b = tensors[left], tensors[right]
            if _place(a) != _place(b) and _first_byte(a) < _end_byte(b) and _first_byte(b) < _end_byte(a):
                found.setdefault(left, right)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tied tensors, of which one may be the other turned (a decoder's weight, its encoder's transposed)."""
    turned = tensor.permute(storage_order(tensor))
    return tensor.dtype, tensor.storage_offset(), turned.shape, turned.stride()


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _end_byte(tensor: torch.Tensor) -> int:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _first_byte(tensor) + (steps + 1) * tensor.itemsize


def storage_order(tensor: torch.Tensor) -> list[int]:
    """The dims of a tensor, outermost in memory first; 0, 1, 2... for a row-major one."""
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    strides, shape = tensor.stride(), tensor.shape
    return sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], -shape[axis]))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.permute(storage_order(tensor)).is_contiguous()


def _owns_memory(tensor: torch.Tensor, seen: dict[int, tuple[Any, ...]]) -> bool:
    """Is a tensor all of its memory, and tied to those in `seen` that lie there too?"""
    whole = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return whole and seen.setdefault(_storage(tensor), _place(tensor)) == _place(tensor)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, tied names included, non-persistent buffers included."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> the first name of the same memory."""
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = _storage(tensor) if tensor.numel() else name
        tied[name] = first.setdefault(key, name)
    return tied


def user_place(error: BaseException, folder: Path) -> str:
    """Such as " at model.py:12", for the last line of the user's files in the traceback, "" when there is none; with
    the line of a library's model that it led to, " at model.py:12 (in modeling_bert.py:430)"."""
    root, inner = str(folder.resolve()), ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(root) and "site-packages" not in frame.filename:
            return f" at {Path(frame.filename).relative_to(root)}:{frame.lineno}{inner}"
        if not inner and _is_of_a_model(frame.filename):
            inner = f" (in {Path(frame.filename).name}:{frame.lineno})"
    return ""


_TORCH = str(Path(torch.__file__).parent)


def _is_of_a_model(file: str) -> bool:
    """Is it a file of layers? Not one of what traces them, or of Python's own."""
    if file.startswith(_TORCH):
        return file.startswith(f"{_TORCH}/nn/") and Path(file).name != "module.py"
    return "site-packages" in file and "/sympy/" not in file


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def is_training(module: torch.nn.Module) -> Sequence[str]:
    """Names of submodules in train mode, "" for the module itself; none for a saved program, whose mode is fixed."""
    if isinstance(module, torch.fx.GraphModule):
        return []
    return [name for name, part in module.named_modules() if part.training]
