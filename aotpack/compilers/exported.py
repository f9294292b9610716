"""The user's source -> the record of an export: programs without weights, their guards, and the weights.

Programs are the fallback of the entry and what `compilers/aoti.py` compiles, here and behind a miss.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aotpack.compilers.compare import difference
from aotpack.compilers.dependencies import dependencies, recording, source_modules
from aotpack.compilers.exporter import Exporter
from aotpack.compilers.flat import Flat
from aotpack.compilers.model import Model
from aotpack.compilers.modules import import_modules, load_source
from aotpack.compilers.probing import kept_state
from aotpack.compilers.programs import Program, custom_operators_of, operators_of, store_program
from aotpack.compilers.sizes import flat_tensors
from aotpack_runtime.errors import SourceError
from aotpack_runtime.format.entry_json import dump_parameter
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.store import Store

Json = Any


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Export `job` and put programs and weights in `store`; the record says what is where.

    SourceError and CompileError name the entry, the user's line, and the next step.
    """
    folder = Path(job["folder"])
    with recording() as recorder:
        import_modules(job["imports"], folder)
        known = frozenset(torch._C._dispatch_get_all_op_names())
        model = Model(job, load_source(job["source"], job["args"], folder))
        programs, of_variant = Exporter(job, model, folder).run()
        depends = dependencies(recorder, folder)
    operators = _custom_operators(programs)
    _require_imported(job, operators, known)
    weights = model.store_weights(store)
    return {
        "programs": [store_program(program, model.tied, store) for program in programs],
        "program_of_variant": of_variant,
        "parameters": [dump_parameter(parameter) for parameter in model.parameters],
        "weights": weights,
        "operators": operators,
        "random": _is_random(job, model.module, programs),
        "training": bool(model.training),
        "source_files": source_modules(folder),
        "depends": depends,
    }


def _require_imported(job: Mapping[str, Json], operators: Iterable[str], known: Collection[str]) -> None:
    """SourceError for an operator that only the source registers: whoever reads the program back does not import it."""
    for name in operators:
        if name not in known:
            module = _defining_module(name)
            raise SourceError(
                job["source"],
                f"uses the operator {name}, which no module of `imports` registers",
                hint=f"name the module that defines it{module} under `entries.{job['entry']}.imports` in the manifest",
            )


def _defining_module(name: str) -> str:
    """Such as ", models.ops,"; "" where torch does not know of it."""
    made = torch._library.custom_ops.OPDEFS.get(name)
    if made is not None:
        return f", {made._init_fn.__module__},"
    files = set(re.findall(r"registered at (.+\.py):\d+", torch._C._dispatch_dump(name)))
    found = [known for known, module in sorted(sys.modules.items()) if getattr(module, "__file__", None) in files]
    return f", {found[0]}," if found else ""


def _custom_operators(programs: Sequence[Program]) -> dict[str, str]:
    """Operators that are not torch's own -> their schemas."""
    targets = [target for program in programs for target in custom_operators_of(program.exported)]
    return dict(sorted({target.name(): str(target._schema) for target in targets}.items()))


def _is_random(job: Mapping[str, Json], module: torch.nn.Module, programs: Sequence[Program]) -> bool:
    """Do results follow the random seed? Only asked where an operator says that it may draw numbers."""
    for program in programs:
        if not any(torch.Tag.nondeterministic_seeded in target.tags for target in operators_of(program.exported)):
            continue
        leaves = make_leaves(program.guards, program.example, job["fills"])
        tensors = flat_tensors(program.guards, leaves)
        flat = Flat(module, program.shape, job["outputs"])
        runs = []
        for seed in (1, 2):
            with torch.no_grad(), torch.random.fork_rng(devices=[]), kept_state(module):
                torch.manual_seed(seed)
                runs.append(tuple(flat(*[tensor.clone() for tensor in tensors])))
        if difference(runs[0], runs[1], rtol=0, atol=0) is not None:
            return True
    return False
