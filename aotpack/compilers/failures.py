"""What torch.export says in pages, in one line with the user's own place and the next step."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from aotpack.compilers.shapes import LeafSpec, ValueLeaf
from aotpack.compilers.user_errors import first_line, user_place
from aotpack_runtime.errors import CompileError

Json = Any
__all__ = ["SPLIT", "export_error", "first_line", "quiet_export", "require_tensors"]


def export_error(variant: str, error: Exception, folder: Path, leaves: Sequence[LeafSpec]) -> CompileError:
    """An exporter's pages in one line, with the user's own line where there is one, and what to do about it."""
    text = _caller_names(str(error), leaves)
    place = user_place(error, folder)
    if "data-dependent" in text:
        problem = f"a branch or size depends on the values of a tensor{place}"
        hint = "use torch.cond or torch.where, or torch._check to say what holds"
    elif match := re.search(r"You marked (\w+) as dynamic but .* constant \((\d+)\)", text):
        problem = f"{match[1]!r} is declared as a range, but torch.export's trace holds for {match[2]} only{place}"
        hint = "give it one size, or a list of sizes, in the manifest"
    elif match := re.search(r"- (The values of .* must always be equal)", text):
        problem, hint = f"the model does not take these dims as they are declared: {match[1]}{place}", _ONE_NAME
    elif match := re.search(r"- Not all values of (\w+) = .* satisfy the generated guard (.+)", text):
        problem = f"the model treats the sizes of {match[1]!r} apart: this part of it needs {match[2]}{place}"
        hint = SPLIT
    elif "torch._C.Generator" in text:
        problem, hint = f"{_GENERATOR}{place}", _DEFAULT_GENERATOR
    elif match := re.search(r"__torch__\.torch\.classes\.(\S+) .*'__obj_flatten__'", text):
        problem = f"keeps weights in an object of C++ that torch.export cannot look into: {match[1]}{place}"
        hint = "modules of torch.ao.quantization do: quantize with torchao, or keep int8 weights and scales as buffers"
    elif "SymIntArrayRef expected to contain only concrete integers" in text:
        problem = f"an operator that takes fixed sizes only is given a dim that varies{place}"
        hint = "torch.rand() and the like are such with `generator=`: leave it out, or give the dim one size or a list"
    else:
        problem = f"cannot be exported{place}: {type(error).__name__}: {first_line(error)}"
        hint = _ONE_NAME if "must match the size" in text else ""
    return CompileError(variant, problem, hint=hint)


def require_tensors(variant: str, exported: ExportedProgram) -> None:
    """CompileError for a program that holds an object of Python's: torch 2.13 exports one, and cannot read it back."""
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.CUSTOM_OBJ:
            held = exported.constants.get(str(spec.target))
            if isinstance(held, torch.Generator):
                raise CompileError(variant, _GENERATOR, hint=_DEFAULT_GENERATOR)
            raise CompileError(
                variant, f"uses an object that a program cannot hold: {type(held).__name__} {spec.target}",
                hint="pass tensors and numbers to operators",
            )  # fmt: skip


_GENERATOR = "draws from a torch.Generator of its own, which a program cannot hold"
_DEFAULT_GENERATOR = "draw from torch's default generator, which the caller seeds with torch.manual_seed()"
_ONE_NAME = "dims that must be equal take one name in the manifest"


SPLIT = "split the dim there: `ranges: [{min, max}, ...]` in the manifest"


def _caller_names(text: str, leaves: Sequence[LeafSpec]) -> str:
    """torch's `L['leaves'][0].size()[1]` as `x.shape[1]`."""
    paths = [leaf.path for leaf in leaves if not isinstance(leaf, ValueLeaf)]
    return re.sub(
        r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]",
        lambda match: f"{paths[int(match[1])]}.shape[{match[2]}]",
        text,
    )


@contextmanager
def quiet_export() -> Iterator[None]:
    """torch warns about dims that come out fixed, which the guards say anyway."""
    loggers = [logging.getLogger(name) for name in ("torch._export", "torch.export", "torch.fx.experimental")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
