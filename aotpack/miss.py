"""What a miss asks for: one variant, compiled from a bundle alone, held against its program, put in the overlay.

The same compiler as for the manifest's points, begun from the exported program. The variant is loaded by the public
runtime here, in a process of its own, and must give what the program gives: on copies of the arguments that missed, and
on made-up ones at the ends of its ranges. Code that crashes takes this process down, and the server never opens it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aotpack.compilers import aoti
from aotpack.compilers.compare import difference
from aotpack.compilers.flat import kept_results
from aotpack_runtime import load
from aotpack_runtime.errors import CompileError
from aotpack_runtime.format.codec import dump_guards, dump_outputs, parse_guards, parse_scalar
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.index import ArtifactRef, Example, File, Variant, WeightSet
from aotpack_runtime.format.target import Target
from aotpack_runtime.jit.overlay import Compiled, Overlay, Seconds
from aotpack_runtime.loaders.inputs import make_leaves
from aotpack_runtime.loaders.samples import load as load_sample
from aotpack_runtime.machine import untrusted
from aotpack_runtime.store import Store
from aotpack_runtime.torch_entry import TorchEntry

Json = Any
TIMED_S, TIMED_CALLS = 0.5, 20


def compile(job: Mapping[str, Json], store: Store) -> Json:
    """Compile and check the variant of `job` and put it in the overlay; the record says how long what took.

    CompileError when it cannot be compiled, or is not what the program is.
    """
    start = time.perf_counter()
    session = load(job["bundle"], device=job["device"], mode="eager", source="never", allow=job["allow"])
    if session.bundle.digest != job["digest"]:
        raise CompileError(job["variant"], f"the bundle at {job['bundle']} is another one by now")
    entry = session[job["entry"]]
    assert isinstance(entry, TorchEntry)
    program = next(item for item in entry.programs if item.id == job["program"])
    weights = session.bundle.index.weight_sets.get(program.weights, WeightSet({}))
    own = _job(job, entry, program, weights, store, session.bundle.files(program))
    record = aoti.compile(own, store, kept=_builders_store(Path(job["overlay"])))
    compile_s = time.perf_counter() - start
    variant = _variant(job, program, record)
    paths = {name: store.object(file.digest) for name, file in variant.artifact.files.items()}
    for name, path in paths.items():  # the runner looks beside the library for files of its name
        paths[name] = path.replace(path.with_name(name)) if len(paths) > 1 else path
    entry.adopt([variant], lambda _: {name: str(path) for name, path in paths.items()})
    checked, seconds = _check(job, entry, program, variant)
    made = Compiled(
        key=job["key"], entry=job["entry"], variant=variant, seconds=Seconds(compile_s, *seconds), parts=job["parts"],
        checked=checked,
    )  # fmt: skip
    Overlay(Path(job["overlay"])).put(made, paths)
    return {"seconds": [compile_s, *seconds], "bytes": variant.artifact.size_bytes}


def _builders_store(overlay: Path) -> Store | None:
    """The store of builds on this host, in the cache that the overlay is in: what all libraries share is there already,
    or is kept there for the next compile. None where it is not for this user to write."""
    root = overlay.parents[2] / "build"
    return None if untrusted(root) or not os.access(root, os.W_OK) else Store(root)


def _job(
    job: Mapping[str, Json],
    entry: TorchEntry,
    program: Variant,
    weights: WeightSet,
    store: Store,
    files: Mapping[str, str],
) -> Json:
    """The compiler's own job, from what the bundle says of the program."""
    assert program.recipe is not None
    (path,) = files.values()
    made = {
        "variant": job["variant"],
        "key": job["key"],
        "program": {
            "file": store.put_file(Path(path)),
            "guards": dump_guards(program.guards),
            "outputs": dump_outputs(program.outputs),
            "compiled_outputs": dump_outputs(program.recipe.outputs),
            "kept_results": kept_results(program.outputs, program.recipe.outputs),
            "tied": {name: ref.tensor for name, ref in weights.weights.items()},
            "leaves": job["leaves"],
        },
        "dims": job["dims"],
        "fills": entry.record.fills,
        "inductor": program.recipe.options,
        "folder": str(Path(job["bundle"])),
        "imports": entry.record.imports,
        **job["target"],
    }
    return json.loads(json.dumps(made))  # as jobs come to a worker: lists, no tuples


def _variant(job: Mapping[str, Json], program: Variant, record: Json) -> Variant:
    assert program.recipe is not None
    files = {name: File(file["sha256"], file["bytes"]) for name, file in record["files"].items()}
    return Variant(
        id=job["variant"],
        point="jit",
        tier="warm",
        target=Target(program.target.device, record["needs"]),
        artifact=ArtifactRef("aoti", fingerprint({name: file.digest for name, file in files.items()}), files),
        guards=parse_guards(record["guards"]),
        outputs=program.recipe.outputs,
        weights=program.weights,
        constants=tuple((name, weight) for name, weight in record["constants"]),
        examples=tuple(
            tuple(tuple(size) if isinstance(size, list) else size for size in example) for example in record["examples"]
        ),
    )


def _check(job: Mapping[str, Json], entry: TorchEntry, program: Variant, variant: Variant) -> tuple[str, list[float]]:
    """(what it was held against, seconds of one call of the program and of the variant); CompileError where they do not
    give the same."""
    settings = entry.record.verify
    tolerance = {name: settings.get(name) for name in ("rtol", "atol")}
    weights = entry.weights(variant.weights)
    runs = [entry.serve_for(program), entry.serve_for(variant)]
    cases = list(_cases(job, entry, variant))
    for what, leaves in cases:
        state, seen = weights.snapshot(), []
        for serve in runs:
            given = [_copy(leaf) for leaf in leaves]
            torch.manual_seed(0)
            with torch.no_grad():
                result = serve(*given)
            seen.append((result, given, weights.snapshot()))
            weights.restore(state)
        for place, a, b in zip(("", "its arguments afterwards: ", "its state afterwards: "), *seen, strict=True):
            problem = difference(a, b, **tolerance, values=not settings.get("random"))
            if problem:
                raise CompileError(variant.id, f"disagrees with the bundle's program on {what}: {place}{problem}")
    state = weights.snapshot()
    seconds = [_seconds(serve, cases[0][1]) for serve in runs]
    weights.restore(state)
    return f"the bundle's program, on {', '.join(what for what, _ in cases)}", seconds


def _cases(job: Mapping[str, Json], entry: TorchEntry, variant: Variant) -> Sequence[tuple[str, list[Any]]]:
    """The call that missed first, then the variant's examples with made-up values."""
    cases: list[tuple[str, list[Any]]] = []
    if job.get("sample"):
        leaves = load_sample(job["sample"]["descriptor"], job["sample"]["leaves"])
        numbers = map(parse_scalar, job["sample"]["numbers"])
        whole = [
            number if leaf is None else leaf.to(entry.device) for leaf, number in zip(leaves, numbers, strict=True)
        ]
        cases.append(("the arguments that missed", whole))
    for seed, example in enumerate(variant.examples):
        made = make_leaves(variant.guards, example, entry.record.fills, seed=seed, device=entry.device)
        cases.append((f"sizes {_sizes(example)}", made))
    return cases


def _sizes(example: Example) -> list[Any]:
    return [list(size) if isinstance(size, tuple) else size for size in example if size is not None]


def _seconds(serve: Callable[..., object], leaves: Sequence[Any]) -> float:
    """The quickest of some calls: other work on this host makes calls slower, never quicker."""
    best, end = float("inf"), time.perf_counter() + TIMED_S
    for _ in range(TIMED_CALLS):
        given = [_copy(leaf) for leaf in leaves]
        _wait()
        start = time.perf_counter()
        with torch.no_grad():
            serve(*given)
        _wait()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def _wait() -> None:
    """A GPU has done all that was queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
