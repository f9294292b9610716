"""The ways in which a server of kernels starts: each gives a function that binds a case to a launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import takewhile
from typing import Any

from aotpack.bench.child.clock import Clock
from aotpack.bench.child.flat import Flat, arrays_of, tensors_of
from aotpack.bench.child.given import entry_of, variants_of

Json = Any
Launch = Callable[[], object]
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Started:
    """`put` brings an array of the inputs to the GPU, `bind` makes a launch of a case and its values, `wait` waits for
    all launches, `session` is that of a bundle."""

    put: Callable[[Flat], Any]
    bind: Callable[[Json, Values], Launch]
    wait: Callable[[], object]
    session: Any = None


def start(job: Json, clock: Clock) -> Started:
    """Started as the job's mode says."""
    mode = job["mode"]
    if mode.startswith("triton"):
        return _triton(job, clock)
    if mode == "bundle-torch":
        return _bundle_torch(job, clock)
    return _lean(job, clock)


def _lean(job: Json, clock: Clock) -> Started:
    """A session without torch: of the bundle's own code, or of code that is compiled when it is first used."""
    import aotpack_runtime

    session = aotpack_runtime.load(job["bundle"], device=job["device"], mode="strict")
    entry: Any = session[job["entry"]]
    clock.end("verdict")
    from aotpack.bench.child.device import Gpu

    gpu = Gpu(_ordinal(job))
    bind = _bound_to(entry)
    if job["mode"] == "bundle":
        entry.load(variants_of(job)[job["cases"][0]["like"]])
    elif job["mode"] == "ptx":
        _keep_ptx(entry)
    else:
        bind = _compiling(job, entry, bind)
    clock.end("load")
    return Started(lambda flat: gpu.put(arrays_of(flat)), bind, gpu.wait, session)


def _keep_ptx(entry: Any) -> None:
    """Leave the entry with what the driver has to compile."""
    from aotpack_runtime.errors import ArtifactError

    for variant in entry.variants:
        if variant.artifact.kind != "ptx":
            entry.set_aside(variant, ArtifactError(variant.id, "is machine code, and PTX is measured"))


def _compiling(job: Json, entry: Any, bind: Callable[[Json, Values], Launch]) -> Callable[[Json, Values], Launch]:
    """The same launches, of code that NVRTC compiles at the first launch of each variant."""
    from aotpack.compilers.nvrtc import compile_program
    from aotpack_runtime.drivers import cuda
    from aotpack_runtime.loaders.cubin import KernelExecutable

    variants, device = variants_of(job), cuda.device(_ordinal(job))
    made: set[str] = set()

    def bind_compiling(case: Json, values: Values) -> Launch:
        name, launch = case["like"], bind(case, values)

        def launch_compiled() -> object:
            if name not in made:
                library = cuda.Library(compile_program(job["nvrtc"][name]).data)
                entry._executables[name] = KernelExecutable(variants[name], library, device)
                made.add(name)
                launch()
                assert entry._executables.keys() == made, "a launch took code of the bundle"
                return None
            return launch()

        return launch_compiled

    return bind_compiling


def _bundle_torch(job: Json, clock: Clock) -> Started:
    import torch

    clock.end("import_torch")
    import aotpack_runtime

    session = aotpack_runtime.load(job["bundle"], device=job["device"], mode="strict")
    entry: Any = session[job["entry"]]
    clock.end("verdict")
    entry.load(variants_of(job)[job["cases"][0]["like"]])
    clock.end("load")
    return Started(_to(job["device"]), _bound_to(entry), torch.cuda.synchronize, session)


def _triton(job: Json, clock: Clock) -> Started:
    """Triton's own JIT, with the grid and the configuration of the variant that the bundle takes."""
    import torch

    clock.end("import_torch")
    sys.path.insert(0, job["folder"])
    entry, variants = entry_of(job), variants_of(job)
    module, _, name = entry.source.text.partition(":")
    function: Any = import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    clock.end("load")

    def bind(case: Json, values: Values) -> Launch:
        variant = variants[case["like"]]
        numbers = {name: value for name, value in values.items() if isinstance(value, int)}
        grid = tuple(extent(numbers) for extent in variant.launch.grid)
        known = {**variant.axes, **_with_descriptors(entry, variant, values)}
        args = [known[name] for name in takewhile(known.__contains__, function.arg_names)]
        rest = {name: known[name] for name in function.arg_names[len(args) :] if name in known}
        rest |= {name: variant.axes[name] for name in _CONFIG if variant.axes.get(name) is not None}
        return lambda: function[grid](*args, **rest)

    return Started(_to(job["device"]), bind, torch.cuda.synchronize)


_CONFIG = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""What Triton is told of a configuration at a launch."""


def _with_descriptors(entry: Any, variant: Any, values: Values) -> dict[str, Any]:
    """`values` with those that are passed by descriptor as Triton's own host descriptors."""
    from aotpack_runtime.format.launch import Descriptor

    found = dict(values)
    for parameter in variant.launch.parameters:
        if isinstance(parameter, Descriptor):
            name = entry.parameter_names[parameter.leaf]
            made: Any = import_module("triton.tools.tensor_descriptor").TensorDescriptor
            found[name] = made.from_tensor(found[name], list(parameter.block))
    return found


def _bound_to(entry: Any) -> Callable[[Json, Values], Launch]:
    def bind(case: Json, values: Values) -> Launch:
        only = {one.name for one in entry.record.parameters if one.kind == "keyword_only"}
        args = [value for name, value in values.items() if name not in only]
        return partial(entry, *args, **{name: value for name, value in values.items() if name in only})

    return bind


def _to(device: str) -> Callable[[Flat], Any]:
    return lambda flat: tensors_of(flat).to(device)


def _ordinal(job: Json) -> int:
    return int(job["device"].partition(":")[2] or 0)
