"""One sample, in this process: run as a script, it reads a job on stdin and prints what it measured.

Time counts from before the parent started the process (`began`, on the clock that all processes share). It is a script
and not a module of the package, so that nothing but the standard library is imported before what the mode imports.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Json = Any
Call = Callable[[Sequence[Any], Mapping[str, Any]], Any]

STEADY_SECONDS = 0.3
STEADY_CALLS = (3, 50)
HEAVY = ("torch._inductor", "torch._dynamo", "sympy", "triton")
"""What a hit of a bundle must not import."""


class Clock:
    """Seconds of each phase, one after another."""

    def __init__(self, began: float) -> None:
        self._last = self._began = began
        self.phases: dict[str, float] = {}

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._began


def main() -> None:
    job = json.loads(sys.stdin.readline())
    clock = Clock(job["began"])
    clock.end("interpreter")
    sys.stdout.write(json.dumps(JOBS[job["do"]](job, clock)) + "\n")


def sample(job: Json, clock: Clock) -> Json:
    """Start as the mode says, then call every case twice and each until its time is steady."""
    if job["mode"] == "bundle-arrays":
        return _sample_arrays(job, clock)
    import torch

    clock.end("import_torch")
    if job["mode"] == "import-torch":
        return _measured(job, clock, [], {})
    session, start = _start(job, clock)
    call = _to_end(start, job["device"])
    with torch.no_grad():
        calls, results = _calls(job, clock, call, lambda case: _arguments(job, case), HEAVY)
    torch.save(_on_host(results), job["results"])
    return _measured(job, clock, calls, {} if session is None else session.status())


def _sample_arrays(job: Json, clock: Clock) -> Json:
    """The same with torch not imported: inputs lie in a file, results go to one."""
    import aotpack_runtime
    from aotpack_runtime.format.tree import map_leaves

    session = aotpack_runtime.load(job["bundle"], device=job["device"], mode="eager", source="never", tensors="array")
    entry = session[job["entry"]]
    clock.end("load")
    with open(job["inputs"], "rb") as file:
        given = pickle.load(file)  # noqa: S301 - written by our own child a moment ago
    own = aotpack_runtime.Array
    inputs = {
        name: map_leaves(_arrays(one), lambda leaf: session.put(leaf) if type(leaf) is own else leaf)
        for name, one in given.items()
    }

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return map_leaves(entry(*args, **kwargs), lambda leaf: leaf.cpu() if type(leaf) is own else leaf)

    calls, results = _calls(job, clock, call, lambda case: inputs[case["name"]], ("torch", *HEAVY))
    measured = _measured(job, clock, calls, session.status())
    with open(job["results"], "wb") as out:
        pickle.dump({name: _bytes(one) for name, one in results.items()}, out)
    return measured


def _calls(
    job: Json, clock: Clock, call: Call, arguments: Callable[[Json], tuple[Any, Any]], heavy: Sequence[str]
) -> tuple[list[Json], dict[str, Any]]:
    """What each case took, and the result of its first call; `heavy` is what must not be imported then."""
    calls, results = [], {}
    for number, case in enumerate(job["cases"]):
        args, kwargs = arguments(case)
        if number == 0:
            clock.end("inputs")
        results[case["name"]], first = _timed(call, args, kwargs)
        if number == 0:
            clock.end("first_call")
        resident_bytes = _resident_bytes()
        _, second = _timed(call, args, kwargs)
        steady = _steady(call, args, kwargs) if job["steady"] else None
        seconds = {"first_s": first, "second_s": second, "steady_s": steady}
        # What is imported so far: a miss may import more than a hit.
        imported = [name for name in heavy if name in sys.modules]
        calls.append(
            {"case": case["name"], "kind": case["kind"], "heavy": imported, "rss_bytes": resident_bytes, **seconds}
        )
    return calls, results


def _arrays(value: Any) -> Any:
    """Arguments as `_bytes` made them, as arrays."""
    from aotpack_runtime import Array
    from aotpack_runtime.format.tree import map_leaves

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, Flat):
            return leaf
        memory = Array(bytearray(leaf.data), leaf.dtype)
        return Array.over(memory.address, leaf.dtype, leaf.shape, leaf.strides, memory)

    return map_leaves(value, array)


def _bytes(value: Any) -> Any:
    """`value` with its tensors or arrays as plain bytes."""
    from aotpack_runtime.format.tree import map_leaves
    from aotpack_runtime.host_arrays import read_array

    def flat(leaf: Any) -> Any:
        found = read_array(leaf)
        if found is None or found.array is None:
            return leaf
        array = found.array.twin()
        return Flat(array.dtype, array.shape, array.strides, bytes(array.owner.data.cast("B")) if array.size else b"")

    return map_leaves(value, flat)


class Flat:
    """An array as plain values; no dataclass, which arguments may hold as a container."""

    def __init__(self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], data: bytes) -> None:
        self.dtype, self.shape, self.strides, self.data = dtype, shape, strides, data


def fill_arrays(job: Json, clock: Clock) -> Json:
    """The arguments of every case as bytes: what a process that does not import torch reads."""
    given = {case["name"]: _bytes(_on_host(tuple(_arguments(job, case)))) for case in job["cases"]}
    with open(job["inputs"], "wb") as file:
        pickle.dump(given, file)
    return {}


def _results(path: str) -> Any:
    """Results by case, of tensors or of arrays."""
    import torch

    from aotpack_runtime.format.tree import map_leaves

    try:
        with open(path, "rb") as file:
            given = pickle.load(file)  # noqa: S301 - written by our own child a moment ago
    except pickle.UnpicklingError:
        return torch.load(path, weights_only=False)
    take = torch.utils.dlpack.from_dlpack
    return map_leaves(_arrays(given), lambda leaf: take(leaf) if hasattr(leaf, "__dlpack__") else leaf)


def fill_artifacts(job: Json, clock: Clock) -> Json:
    """Compile every case, and keep what torch.compiler.save_cache_artifacts gives."""
    import torch

    _run_all(job, clock)
    kept = torch.compiler.save_cache_artifacts()
    with open(job["artifacts"], "wb") as file:
        file.write(kept[0] if kept else b"")
    return {}


def fill_package(job: Json, clock: Clock) -> Json:
    """The package that torch makes of the same model by itself: dims that vary between cases are open."""
    import torch

    from aotpack_runtime.loaders.inputs import unflatten

    module = _module(job)
    with torch.no_grad():
        if not os.path.exists(job["package"]):
            variants = _variants(job)
            example = max(job["cases"], key=lambda case: _smallest(case["example"]))
            args, kwargs = _arguments(job, example)
            variant = variants[example["like"]]
            dims = [_open_dims(place, job["cases"]) for place in range(len(variant.guards.leaves))]
            names = _entry(job).parameter_names
            shapes = {name: unflatten(tree, dims) for name, tree in zip(names, variant.guards.trees, strict=True)}
            program = torch.export.export(module, tuple(args), dict(kwargs), dynamic_shapes=shapes)
            torch._inductor.aoti_compile_and_package(program, package_path=job["package"])
        _run_all(job, clock)
    return {}


def fill_aot(job: Json, clock: Clock) -> Json:
    """What `aot_compile` makes of the model for each case, which takes no other shapes."""
    import torch

    config: Any = torch._dynamo.config
    config.enable_aot_compile = True  # off by default in torch 2.11
    module = _module(job)

    def model(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    with torch.no_grad():
        for case in job["cases"]:
            args, kwargs = _arguments(job, case)
            torch._dynamo.reset()
            compiled: Any = torch.compile(model, fullgraph=True, dynamic=False)
            made = compiled.aot_compile(((module, *args), dict(kwargs)))
            made.save_compiled_function(f"{job['aot']}-{_shapes(args, kwargs)}")
    return {}


def fill_compile(job: Json, clock: Clock) -> Json:
    """Compile every case, for the caches that it leaves."""
    _run_all(job, clock)
    return {}


def check(job: Json, clock: Clock) -> Json:
    """For each file of results, the first difference from the reference's in one line, or null."""
    import torch

    from aotpack.compilers.compare import difference

    wanted = torch.load(job["reference"], weights_only=False)  # written by our own child a moment ago
    found: dict[str, str | None] = {}
    for name, path in job["results"].items():
        results = _results(path)
        problems = [
            f"{case}: {problem}"
            for case in wanted
            if (problem := difference(wanted[case], results[case], rtol=job["rtol"], atol=job["atol"]))
        ]
        found[name] = problems[0] if problems else None
    return found


JOBS: Mapping[str, Callable[[Json, Clock], Json]] = {
    "sample": sample,
    "compile-cold": fill_compile,
    "artifacts": fill_artifacts,
    "arrays": fill_arrays,
    "package": fill_package,
    "aot": fill_aot,
    "check": check,
}


# --------------------------------------------------------------------------------------------------------- starting


def _start(job: Json, clock: Clock) -> tuple[Any, Call]:
    """(the session of a bundle, what is called)."""
    mode = job["mode"]
    if mode in ("bundle", "program"):
        import aotpack_runtime

        session = aotpack_runtime.load(job["bundle"], device=job["device"], mode="eager", source="never")
        entry = session[job["entry"]]
        clock.end("verdict")
        if mode == "program":
            return session, _program(entry)
        first = _variants(job)[job["cases"][0]["like"]]
        session._weight_set(first.weights)
        clock.end("weights")
        if first in entry.variants:
            entry.load(first)
        clock.end("load")
        return session, lambda args, kwargs: entry(*args, **kwargs)
    import torch

    if mode.startswith("package"):
        loaded = torch._inductor.aoti_load_package(job["package"])
        clock.end("load")
        return None, lambda args, kwargs: loaded(*args, **kwargs)
    if mode == "aot-compile":
        return None, _aot_compiled(job, clock)
    if mode == "compile-artifacts":
        with open(job["artifacts"], "rb") as file:
            torch.compiler.load_cache_artifacts(file.read())
    module = _module(job)
    if job["device"] != "cpu":
        torch.cuda.synchronize()
    clock.end("load")
    called = torch.compile(module) if mode.startswith("compile") else module
    return None, lambda args, kwargs: called(*args, **kwargs)


def _module(job: Json) -> Any:
    """The model as a server without aotpack has it, with only the outputs that the manifest names."""
    import torch

    from aotpack_runtime.loaders.source import build_module, select_outputs

    sys.path.insert(0, job["folder"])
    entry = _entry(job)
    module = build_module(entry.source.text, entry.source.args).train(entry.training)
    if job["dtype"]:
        module = module.to(getattr(torch, job["dtype"]))
    module = module.to(job["device"])
    if entry.output_names:
        names = entry.output_names
        module.register_forward_hook(lambda module, args, result: select_outputs(result, names))
    return module


def _aot_compiled(job: Json, clock: Clock) -> Call:
    """Functions that `aot_compile` made of the model, one for each case, over the weights of the model itself; the
    first is loaded now, the others at their first call."""
    import torch

    module = _module(job)
    loaded: dict[str, Any] = {}

    def function(name: str) -> Any:
        if name not in loaded:
            with open(f"{job['aot']}-{name}", "rb") as file:
                loaded[name] = torch.compiler.load_compiled_function(file)
        return loaded[name]

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return function(_shapes(args, kwargs))(module, *args, **kwargs)

    args, kwargs = _arguments(job, job["cases"][0])
    function(_shapes(args, kwargs))
    clock.end("load")
    return call


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    given = [one for one in (*args, *kwargs.values()) if hasattr(one, "shape")]
    return "-".join("x".join(map(str, one.shape)) for one in given)


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


def _run_all(job: Json, clock: Clock) -> None:
    import torch

    _, call = _start(job, clock)
    with torch.no_grad():
        for case in job["cases"]:
            call(*_arguments(job, case))


# ------------------------------------------------------------------------------------------------------------ calls


def _arguments(job: Json, case: Json) -> tuple[list[Any], dict[str, Any]]:
    from aotpack_runtime.fallbacks.source import split_arguments
    from aotpack_runtime.loaders.inputs import make_leaves, unflatten

    entry, variant = _entry(job), _variants(job)[case["like"]]
    example = tuple(tuple(one) if isinstance(one, list) else one for one in case["example"])
    leaves = make_leaves(variant.guards, example, entry.fills, device=job["device"])
    values = [unflatten(tree, leaves) for tree in variant.guards.trees]
    return split_arguments(entry.parameters, values)


def _to_end(call: Call, device: str) -> Call:
    """The same, returning when the GPU has done what it was given."""
    if device == "cpu":
        return call
    import torch

    def waiting(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = call(args, kwargs)
        torch.cuda.synchronize()
        return result

    return waiting


def _on_host(result: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)


def _timed(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
    start = time.monotonic()
    result = call(args, kwargs)
    return result, time.monotonic() - start


def _steady(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The median of a few calls."""
    times: list[float] = []
    end = time.monotonic() + STEADY_SECONDS
    while len(times) < STEADY_CALLS[0] or (len(times) < STEADY_CALLS[1] and time.monotonic() < end):
        times.append(_timed(call, args, kwargs)[1])
    return sorted(times)[len(times) // 2]


_opened: dict[str, Any] = {}


def _entry(job: Json) -> Any:
    """The entry's record. Read from the index itself: no session is opened for modes that do without one."""
    if "index" not in _opened:
        from aotpack_runtime.bundle import open_bundle

        bundle = open_bundle(job["bundle"])
        bundle.close()
        _opened["index"] = bundle.index
    return _opened["index"].entries[job["entry"]]


def _variants(job: Json) -> dict[str, Any]:
    entry = _entry(job)
    return {variant.id: variant for variant in (*entry.variants, *entry.programs)}


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


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _measured(job: Json, clock: Clock, calls: list[Json], status: Json) -> Json:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return {
        "first_output_s": clock.total,
        "phases_s": clock.phases,
        "calls": calls,
        "peak_gpu_bytes": _gpu_bytes(job["device"]),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "compiles": 0 if dynamo is None else int(dynamo.counters["stats"].get("unique_graphs", 0)),
        "hits": status.get("hits"),
        "misses": status.get("misses"),
    }


def _gpu_bytes(device: str) -> int | None:
    """What torch's allocator had from the GPU at most."""
    if device == "cpu":
        return None
    import torch

    return torch.cuda.max_memory_reserved()


if __name__ == "__main__":
    main()
