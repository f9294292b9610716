"""The ways in which a server with torch starts: each gives what is called then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotpack.bench.child.clock import Clock
from aotpack.bench.child.given import arguments_of, module_of, shapes_of, variants_of

Json = Any
Call = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def start(job: Json, clock: Clock) -> tuple[Any, Call]:
    """(the session of a bundle, or None; what is called), started as the job's mode says."""
    mode = job["mode"]
    if mode in ("bundle", "program"):
        return _session(job, clock)
    import torch

    if mode.startswith("package"):
        loaded = torch._inductor.aoti_load_package(job["package"])
        clock.end("load")
        return None, lambda args, kwargs: loaded(*args, **kwargs)
    if mode == "aot-compile":
        return None, _functions(job, clock)
    if mode == "compile-artifacts":
        with open(job["artifacts"], "rb") as file:
            torch.compiler.load_cache_artifacts(file.read())
    module = module_of(job)
    if job["device"] != "cpu":
        torch.cuda.synchronize()
    clock.end("load")
    called = torch.compile(module) if mode.startswith("compile") else module
    return None, lambda args, kwargs: called(*args, **kwargs)


def waiting(call: Call, device: str) -> Call:
    """The same, returning when the GPU has done what it was given."""
    if device == "cpu":
        return call
    import torch

    def called(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = call(args, kwargs)
        torch.cuda.synchronize()
        return result

    return called


def run_all(job: Json, clock: Clock) -> None:
    """Start, and call every case once."""
    import torch

    _, call = start(job, clock)
    with torch.no_grad():
        for case in job["cases"]:
            call(*arguments_of(job, case))


def _session(job: Json, clock: Clock) -> tuple[Any, Call]:
    import aotpack_runtime

    session = aotpack_runtime.load(job["bundle"], device=job["device"], mode="eager", source="never")
    entry: Any = session[job["entry"]]
    clock.end("verdict")
    if job["mode"] == "program":
        return session, _program(entry)
    first = variants_of(job)[job["cases"][0]["like"]]
    session._weight_set(first.weights)
    clock.end("weights")
    if first in entry.variants:
        entry.load(first)
    clock.end("load")
    return session, lambda args, kwargs: entry(*args, **kwargs)


def _program(entry: Any) -> Call:
    """The bundle's own exported program: the reference where there is no model."""
    from aotpack_runtime.arguments import describe, flatten_all
    from aotpack_runtime.dispatch import Dispatcher, Hit

    dispatcher = Dispatcher(entry.record.parameter_names, entry.programs)

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        trees, leaves = flatten_all(entry._bind(*args, **kwargs))
        decision = dispatcher.choose(describe(trees, leaves, entry.device))
        assert isinstance(decision, Hit), decision
        return entry.serve_for(decision.variant)(*leaves)

    return call


def _functions(job: Json, clock: Clock) -> Call:
    """Functions that `aot_compile` made of the model, one for each case, over the weights of the model itself; the
    first is loaded now, the others at their first call."""
    import torch

    module = module_of(job)
    loaded: dict[str, Any] = {}

    def function(name: str) -> Any:
        if name not in loaded:
            with open(f"{job['aot']}-{name}", "rb") as file:
                loaded[name] = torch.compiler.load_compiled_function(file)
        return loaded[name]

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return function(shapes_of(args, kwargs))(module, *args, **kwargs)

    args, kwargs = arguments_of(job, job["cases"][0])
    function(shapes_of(args, kwargs))
    clock.end("load")
    return call
