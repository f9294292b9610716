"""What one process makes before the samples of a mode: filled caches, packages, inputs as bytes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

from aotpack.bench.child.clock import Clock
from aotpack.bench.child.flat import bytes_of, on_host
from aotpack.bench.child.given import arguments_of, entry_of, module_of, shapes_of, variants_of
from aotpack.bench.child.start import run_all

Json = Any


def caches(job: Json, clock: Clock) -> Json:
    """Compile every case, for the caches that it leaves."""
    run_all(job, clock)
    return {}


def artifacts(job: Json, clock: Clock) -> Json:
    """Compile every case, and keep what torch.compiler.save_cache_artifacts gives."""
    import torch

    run_all(job, clock)
    kept = torch.compiler.save_cache_artifacts()
    with open(job["artifacts"], "wb") as file:
        file.write(kept[0] if kept else b"")
    return {}


def arrays(job: Json, clock: Clock) -> Json:
    """The arguments of every case as bytes: what a process that does not import torch reads."""
    given = {case["name"]: bytes_of(on_host(tuple(arguments_of(job, case)))) for case in job["cases"]}
    with open(job["inputs"], "wb") as file:
        pickle.dump(given, file)
    return {}


def package(job: Json, clock: Clock) -> Json:
    """The package that torch makes of the same model by itself: dims that vary between cases are open."""
    import torch

    from aotpack_runtime.loaders.inputs import unflatten

    module = module_of(job)
    with torch.no_grad():
        if not os.path.exists(job["package"]):
            example = max(job["cases"], key=lambda case: _smallest(case["example"]))
            args, kwargs = arguments_of(job, example)
            variant = variants_of(job)[example["like"]]
            dims = [_open_dims(place, job["cases"]) for place in range(len(variant.guards.leaves))]
            names = entry_of(job).parameter_names
            shapes = {name: unflatten(tree, dims) for name, tree in zip(names, variant.guards.trees, strict=True)}
            program = torch.export.export(module, tuple(args), dict(kwargs), dynamic_shapes=shapes)
            torch._inductor.aoti_compile_and_package(program, package_path=job["package"])
        run_all(job, clock)
    return {}


def functions(job: Json, clock: Clock) -> Json:
    """What `aot_compile` makes of the model for each case, which takes no other shapes."""
    import torch

    config: Any = torch._dynamo.config
    config.enable_aot_compile = True  # off by default in torch 2.11
    module = module_of(job)

    def model(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    with torch.no_grad():
        for case in job["cases"]:
            args, kwargs = arguments_of(job, case)
            torch._dynamo.reset()
            compiled: Any = torch.compile(model, fullgraph=True, dynamic=False)
            made = compiled.aot_compile(((module, *args), dict(kwargs)))
            made.save_compiled_function(f"{job['aot']}-{shapes_of(args, kwargs)}")
    return {}


def _smallest(example: Json) -> int:
    return min((size for one in example if isinstance(one, list) for size in one), default=0)


def _open_dims(place: int, cases: Sequence[Json]) -> Any:
    """Dims of one leaf that differ between cases, as torch.export takes them; None for what is no tensor."""
    import torch

    examples = [case["example"][place] for case in cases]
    if not isinstance(examples[0], list):
        return None
    return {
        axis: torch.export.Dim.AUTO
        for axis in range(len(examples[0]))
        if len({example[axis] for example in examples}) > 1
    }
