"""The record that opens the gate for cross builds: it is of all entries or opens nothing, it is kept step by step, and a
second run goes on where the first ended. What is built and timed is a GPU's to show (tests/gpu)."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="what is built both ways is compared with torch")

from aotpack import prove as proving
from aotpack import prove_entry
from aotpack.compilers.cross import gate
from aotpack.jobs import Result
from aotpack.manifest import read_manifest
from aotpack.manifest_model import Manifest
from aotpack.prove import prove, record_of, write_record
from aotpack.workers import Workers
from aotpack_runtime.errors import CompileError, MissingDevice, UsageError
from aotpack_runtime.format.gpu import Gpu
from aotpack_runtime.store import Store

Json = Any
H200 = Gpu(capability=(9, 0), driver=(13, 0), name="NVIDIA H200")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Three entries for an H200, the third with two variants, and one for another GPU."""
    entry = 'kind: torch_export, source: "models:build", inputs: {x: {shape: [n, 8], dtype: float32}}'
    (tmp_path / "m.yaml").write_text(f"""
schema: aotpack.manifest/v1
bundle: {{name: both, version: 1.0.0}}
targets:
  h200: {{kind: cuda, arch: [sm_90], device: h200}}
  a100: {{kind: cuda, arch: [sm_80], device: a100}}
entries:
  a: {{{entry}, targets: [h200], points: [{{dims: {{n: 4}}}}]}}
  b: {{{entry}, targets: [h200], points: [{{dims: {{n: 4}}}}]}}
  c: {{{entry}, targets: [h200, a100], points: [{{dims: {{n: [4, 8]}}}}]}}
""")
    return read_manifest(tmp_path / "m.yaml")


class Host:
    """A host with an H200 whose builds give results at once, or what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: list[tuple[str, bool]] = []
        self.timed: list[tuple[str, Sequence[Any]]] = []
        self.failing: dict[tuple[str, bool], Exception] = {}
        self.lost: dict[str, str] = {}
        self._lock = threading.Lock()
        monkeypatch.setattr(proving, "this_machine", lambda: SimpleNamespace(gpu=H200))
        monkeypatch.setattr(proving, "build_plan", self.build)
        monkeypatch.setattr(proving, "latency", self.latency)
        monkeypatch.setattr(prove_entry, "_kernels", lambda pair, name: {"cross": 3, "native": 3, "same": 2})

    def build(self, plan: Any, out: Path, workers: Workers, store: Store, *, across: bool, **rest: Any) -> Result:
        (entry,) = plan.entries
        with self._lock:
            self.built.append((entry.entry, across))
        if (entry.entry, across) in self.failing:
            raise self.failing[entry.entry, across]
        seen = {"cases": 3, "largest_error": 0.25, "refused": []}
        names = [variant.id for variant in entry.variants if variant.id not in self.lost]
        verified: dict[str, Any] = {
            **dict.fromkeys(names, seen),
            f"{entry.entry}/program0": {**seen, "refused": [[0, 8]]},
        }
        return Result(
            out, f"digest of {entry.entry} {across}", steps=[("export", "x", 1.5)], verified=verified,
            failures={name: why for name, why in self.lost.items() if name.startswith(entry.entry)},
        )  # fmt: skip

    def latency(self, pair: Any, name: str, folder: Path, at: Sequence[Any]) -> list[Json]:
        self.timed.append((name, at))
        return [{"variant": name, "sizes": [[4, 8]], "eager_us": 30.0, "native_us": 10.0, "cross_us": 10.5}]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_a_record_of_all_entries_passes(manifest: Manifest, host: Host, tmp_path: Path) -> None:
    record = prove(manifest, store=Store(tmp_path / "s"), at={"b": [{"0": 4, "1": 8}]})
    assert (record["passed"], record["whole"], record["missing"], record["failures"]) == (True, True, [], [])
    assert sorted(host.built) == [(name, across) for name in "abc" for across in (False, True)]
    assert sorted(host.timed) == [("a", ()), ("b", [{"0": 4, "1": 8}]), ("c", ())]
    assert record["latency_ratio"] == {"worst": 1.05, "median": 1.05}
    entry = record["entries"]["a"]
    assert entry["seconds"] == {"cross": {"export": 1.5}, "native": {"export": 1.5}}
    assert entry["kernels"] == {"a/n4/h200": {"cross": 3, "native": 3, "same": 2}}
    assert entry["verified"]["a/program0"]["cross"] == {"cases": 3, "largest_error": 0.25, "refused": [[0, 8]]}
    path = write_record(record, tmp_path / "out")
    assert [proof.passed for proof in gate.proofs_in(tmp_path / "out")] == [True]
    assert path.name.endswith("-sm_90.json")


@pytest.mark.parametrize("only", ["a", "c/n4/*"])
def test_a_record_of_some_entries_or_variants_opens_no_gate(
    manifest: Manifest, host: Host, tmp_path: Path, only: str
) -> None:
    record = prove(manifest, store=Store(tmp_path / "s"), only=only)
    assert (record["passed"], record["whole"], record["failures"]) == (False, False, [])
    assert write_record(record, tmp_path / "out").name.endswith(".partial.json")
    assert [proof.passed for proof in gate.proofs_in(tmp_path / "out")] == [False]
    opened = json.loads(json.dumps({**record, "passed": True}))
    write_record(opened, tmp_path / "out")
    assert [proof.passed for proof in gate.proofs_in(tmp_path / "out")] == [False]  # whatever it says of itself


def test_what_cannot_be_built_one_way_is_a_failure_of_its_entry_alone(
    manifest: Manifest, host: Host, tmp_path: Path
) -> None:
    host.failing["b", False] = CompileError("both", "no variant could be built: AOTInductor: no")
    host.lost["c/n8/h200"] = "c/n8/h200: disagrees with eager"
    record = prove(manifest, store=Store(tmp_path / "s"))
    assert record["failures"] == [
        "native: b/n4/h200: both: no variant could be built: AOTInductor: no",
        "cross: c/n8/h200: c/n8/h200: disagrees with eager",
        "native: c/n8/h200: c/n8/h200: disagrees with eager",
    ]
    assert not record["passed"]
    assert record["entries"]["a"]["latency"]
    assert record["entries"]["a"]["failures"] == []


def test_what_was_not_compared_with_eager_is_a_failure(manifest: Manifest, tmp_path: Path) -> None:
    pair = {way: Result(tmp_path, "d", unverified={"a/n4/h200": "no CUDA device"}) for way in prove_entry.WAYS}
    found = prove_entry.what_was_built(pair, ["a/n4/h200", "a/n8/h200"])
    assert found["failures"] == [
        f"{way}: a/{name}" for way in prove_entry.WAYS
        for name in ("n4/h200: no CUDA device", "n8/h200: was not compared with eager")
    ]  # fmt: skip
    assert found["kernels"] == {}


def test_an_entry_that_was_not_timed_is_missing(host: Host) -> None:
    built: Json = {"failures": [], "verified": {}, "kernels": {}, "seconds": {}}
    row = {"native_us": 1.0, "cross_us": 1.0}
    entries = {"a": {**built, "latency": [row]}, "b": built, "c": {**built, "latency": []}}
    record = record_of(entries, ["a", "b", "c", "d"], H200, whole=True)
    assert (record["missing"], record["whole"], record["passed"]) == (["b", "c", "d"], False, False)
    assert not record_of({}, [], H200, whole=True)["passed"]


def test_what_is_known_is_kept_after_each_step_and_never_passes_before_the_last(
    manifest: Manifest, host: Host, tmp_path: Path
) -> None:
    kept: list[Json] = []
    prove(manifest, store=Store(tmp_path / "s"), keep=lambda record: kept.append(json.loads(json.dumps(record))))
    assert [len(record["entries"]) for record in kept] == [1, 2, 3, 3, 3, 3]
    assert [len(record["missing"]) for record in kept] == [3, 3, 3, 2, 1, 0]
    assert [record["passed"] for record in kept] == [False] * 5 + [True]


def test_an_interrupted_run_leaves_what_it_has_and_the_next_goes_on(
    manifest: Manifest, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = Store(tmp_path / "s"), tmp_path / "out"
    measure = host.latency

    def interrupted(pair: Any, name: str, folder: Path, at: Sequence[Any]) -> list[Json]:
        if len(host.timed) == 2:
            raise KeyboardInterrupt
        return measure(pair, name, folder, at)

    monkeypatch.setattr(proving, "latency", interrupted)

    def keep(record: Json) -> None:
        write_record({**record, "whole": False}, out)

    with pytest.raises(KeyboardInterrupt):
        prove(manifest, store=store, keep=keep)
    (path,) = out.iterdir()
    left = json.loads(path.read_text())
    assert path.name.endswith(".partial.json")
    assert (len(left["entries"]), len(left["missing"]), left["passed"]) == (3, 1, False)
    assert [proof.passed for proof in gate.proofs_in(out)] == [False]
    monkeypatch.setattr(proving, "latency", measure)
    before = [name for name, _ in host.timed]
    record = prove(manifest, store=store)
    assert [name for name, _ in host.timed if name not in before] == left["missing"]
    assert len(host.timed) == 3
    assert record["passed"]
    write_record(record, out)
    assert [item.name.endswith("-sm_90.json") for item in out.iterdir()] == [True]


def test_builds_end_when_the_run_is_interrupted(manifest: Manifest, host: Host, tmp_path: Path) -> None:
    """Their processes are ended, so that nobody waits for what they were at."""
    begun, ended = threading.Event(), threading.Event()
    plain = host.build

    def waiting(plan: Any, out: Path, workers: Workers, store: Store, **rest: Any) -> Result:
        if plan.entries[0].entry == "a":
            return plain(plan, out, workers, store, **rest)
        begun.set()
        try:
            workers._pool.submit(threading.Event().wait, 0.2).result()
            while True:
                workers._pool.submit(threading.Event().wait, 0.2).result()
        finally:
            ended.set()

    def stop(record: Json) -> None:
        begun.wait()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proving, "build_plan", waiting)
        with pytest.raises(KeyboardInterrupt):
            prove(manifest, store=Store(tmp_path / "s"), keep=stop)
    assert ended.is_set()


def test_without_a_gpu_or_an_entry_for_it_there_is_nothing_to_prove(
    manifest: Manifest, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "this_machine", lambda: SimpleNamespace(gpu=Gpu((10, 0), (13, 0), "NVIDIA B200")))
    with pytest.raises(UsageError, match="no torch entry of the manifest is for sm_100"):
        prove(manifest)
    monkeypatch.setattr(proving, "this_machine", lambda: SimpleNamespace(gpu=None))
    with pytest.raises(MissingDevice):
        prove(manifest)


def test_an_interrupted_command_names_what_it_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aotpack.cli import output

    def app(**options: Any) -> None:
        output.leave(Path("out/x.partial.json"))
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "_left", [])
    monkeypatch.setattr("sys.argv", ["aotpack", "prove-cross"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert output.run(cast("Any", app)) == output.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "interrupted; out/x.partial.json has what was done so far" in capsys.readouterr().err
