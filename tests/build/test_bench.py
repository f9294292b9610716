"""The bench's own rules: which calls are timed, what samples say, when a gate breaks, and that wrong answers have none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aotpack.bench import report, stats
from aotpack.bench.cases import Case, make_cases
from aotpack.bench.gate import parse_gate, read_baseline
from aotpack.bench.harness import Harness, Runs
from aotpack.bench.modes import MODES, unmeasurable
from aotpack_runtime.errors import UnknownEntry, UsageError
from aotpack_runtime.format import index, index_json
from tests.support.building import build_zoo, entry

MODEL = """
import torch

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)

def mlp():
    torch.manual_seed(0)
    return Mlp().eval()
"""


def figures(first_output: float, *, load: float = 0.01, size_bytes: int = 100) -> dict[str, Any]:
    bundle = {
        "first_output_s": {"median": first_output}, "phases_s": {"first_call": 0.1, "load": load},
        "calls": [{"steady_s": {"median": 0.002}}], "peak_rss_bytes": 5e8,
    }  # fmt: skip
    return {"modes": {"bundle": bundle}, "bundle": {"bytes": size_bytes}}


# ------------------------------------------------------------------------------------------------------- statistics


def test_an_estimate_is_the_median_with_an_interval_that_holds_it_and_is_the_same_each_time() -> None:
    found = stats.estimate([1.0, 1.1, 0.9, 5.0, 1.0])
    assert found.median == 1.0
    assert 0.9 <= found.low <= found.median <= found.high <= 5.0
    assert found.low < found.high
    assert stats.estimate([1.0, 1.1, 0.9, 5.0, 1.0]) == found
    assert stats.estimate([2.0]) == stats.Estimate(2.0, 2.0, 2.0, 1)


@pytest.mark.parametrize(
    ("compile_s", "generic", "special", "calls"),
    [(10.0, 0.2, 0.1, 100), (10.0, 0.1, 0.1, None), (10.0, 0.1, 0.2, None), (-1.0, 0.2, 0.1, 0)],
)
def test_a_compile_pays_after_the_calls_that_earn_it_back(
    compile_s: float, generic: float, special: float, calls: float | None
) -> None:
    found = stats.calls_to_pay(compile_s, generic, special)
    assert found is None if calls is None else found == pytest.approx(calls)


# ------------------------------------------------------------------------------------------------------------ gates


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("first_output>1.10x", True), ("first_output>1.30x", False), ("first_output > 1.0", True), ("load>=0.01", True),
        ("load<0.01", False), ("bytes>1x", False), ("steady>0.001", True), ("peak_rss>1e9", None), ("nope>1", None),
        ("first_output", None), ("first_output>x", None),
    ],
)  # fmt: skip
def test_a_gate_is_a_metric_a_sign_and_a_limit(text: str, *, broken: bool | None) -> None:
    if broken is None:
        with pytest.raises(UsageError, match="metrics: first_output"):
            parse_gate(text)
        return
    found = parse_gate(text).broken(figures(1.2), figures(1.0))
    assert (found is not None) is broken
    assert found is None or found.startswith(f"{text}: ")


def test_a_relative_gate_needs_a_baseline() -> None:
    with pytest.raises(UsageError, match="needs --baseline"):
        parse_gate("first_output>1.1x").broken(figures(1.0), None)
    with pytest.raises(UsageError, match="--baseline did not measure load"):
        parse_gate("load>1.1x").broken(figures(1.0), {"modes": {}, "bundle": {}})


@pytest.mark.parametrize("text", [None, "not JSON", "[]", '{"modes": {}}'])
def test_what_is_no_report_is_refused_before_anything_is_measured(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "old.json").write_text(text)
    with pytest.raises(UsageError, match=r"--baseline .*old\.json: ") as refused:
        read_baseline(tmp_path / "old.json")
    assert refused.value.hint == "give the JSON of an older run"


# ------------------------------------------------------------------------------------------------- modes and answers


def test_a_mode_whose_compiler_is_missing_is_not_measurable_rather_than_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    found = {name: unmeasurable(mode, record("pkg.mod:build"), {}) for name, mode in MODES.items()}
    assert {name for name, reason in found.items() if reason} == {name for name, mode in MODES.items() if mode.compiler}
    assert found["compile-cold"] == "g++ is missing"
    problem = unmeasurable(MODES["eager"], record("saved.pt2"), {})
    assert problem == "the source is a saved program, which has no eager model"


def record(source: str) -> index.Entry:
    return index.Entry(
        name="e", parameters=(), variants=(), programs=(), source=index.Source(source, {}, {}), fills={}, on_miss={},
        verify={},
    )  # fmt: skip


def sample(seconds: float, **more: Any) -> dict[str, Any]:
    call = {"case": "8", "kind": "hot", "heavy": [], "rss_bytes": 1, "first_s": 0.1, "second_s": 0.1, "steady_s": 0.1}
    return {
        "first_output_s": seconds, "phases_s": {"load": 0.1}, "calls": [call], "peak_rss_bytes": 1, "peak_gpu_bytes": None, "compiles": 0,
        "hits": 2, "misses": 0, **more,
    }  # fmt: skip


def made(runs: Runs) -> dict[str, Any]:
    case = Case("8", "hot", "v", ((8,),))
    found: dict[str, Any] = report.make_report(
        runs,
        [case],
        modes=MODES,
        bundle={"name": "b", "version": "1", "digest": "d"},
        entry="e",
        size_bytes=1,
        version="2",
    )
    return found


def test_a_mode_that_answers_wrong_has_no_figure_and_the_report_is_not_ok() -> None:
    runs = Runs(samples={"bundle": [sample(1.0)], "eager": [sample(0.5)]}, wrong={"eager": "8: output differs"})
    found = made(runs)
    assert not found["ok"]
    assert "first_output_s" not in found["modes"]["eager"]
    assert "eager: WRONG: 8: output differs" in report.table(found)
    assert made(Runs(samples={"bundle": [sample(1.0)]}))["ok"]
    assert not made(Runs(unmeasured={"bundle": "its process died"}))["ok"]


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        pytest.param({"hits": 0}, "hit 0 times in 2 calls of hot shapes or more", id="never-hit"),
        pytest.param({"calls": [{"kind": "hot", "heavy": ["sympy"]}]}, "a hit imported sympy", id="compiler"),
    ],
)
def test_a_bundle_that_never_hit_or_imported_a_compiler_has_no_figure(
    changed: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    class Offline(Harness):
        def _child(self, do: str, caches: Path, **more: Any) -> Any:
            return {"bundle": None}

    case = Case("8", "hot", "v", ((8,),))
    harness = Offline(
        tmp_path, record("m:b"), [case], device="cpu", folder=tmp_path, dtype="", steady=False, report=lambda line: None
    )
    runs = Runs(samples={"bundle": [sample(1.0, **changed)]})
    harness._check(tmp_path, runs, tmp_path / "reference.pt")
    assert runs.wrong == {"bundle": wrong}


# -------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def bundle() -> Path:
    inputs = {"x": {"shape": ["batch", 8], "dtype": "float32"}}
    points = [{"dims": {"batch": [2, 4]}}]
    return build_zoo("bench", MODEL, {"mlp": entry("mlp", inputs, points)})


def test_the_calls_are_the_hot_shapes_and_one_that_no_variant_takes(bundle: Path) -> None:
    for record in index_json.parse((bundle / "index.json").read_bytes()).entries.values():
        cases = make_cases(record)
        hot = [case for case in cases if case.kind == "hot"]
        assert [case.example for case in hot] == [((2, 8),), ((4, 8),)]
        assert len(cases) == 3
        assert len({case.example for case in cases}) == len(cases)
        assert [case.kind for case in cases] == ["hot"] * len(hot) + ["unseen"] * (len(cases) - len(hot))
        variants = {variant.id for variant in record.variants}
        assert all((case.like in variants) == (case.kind == "hot") for case in cases)


@pytest.mark.slow
def test_a41_samples_are_fresh_processes_that_leave_the_users_caches_alone(bundle: Path, tmp_path: Path) -> None:
    user = tmp_path / "user"
    for name in ("inductor", "triton", "tmp", "home"):
        (user / name).mkdir(parents=True)
    environment = {
        **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(user / "inductor"), "TRITON_CACHE_DIR": str(user / "triton"),
        "HOME": str(user / "home"), "TMPDIR": str(user / "tmp"),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "aotpack", "bench", str(bundle), "--source", str(bundle.parent),
        "--modes", "bundle,bundle-arrays,import-torch", "--samples", "2", "--no-steady", "--json", "--html", str(tmp_path / "p.html"),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert found["schema"] == report.SCHEMA
    measured = found["modes"]["bundle"]
    assert len(measured["samples_s"]) == 2
    assert measured["hits"] >= 2
    assert measured["compiles"] == 0
    lean = found["modes"]["bundle-arrays"]
    assert "import_torch" not in lean["phases_s"]
    assert lean["first_rss_bytes"] < measured["first_rss_bytes"]
    assert lean["first_output_s"]["median"] < measured["first_output_s"]["median"]
    assert 0 < found["modes"]["import-torch"]["first_output_s"]["median"] < measured["first_output_s"]["median"] * 2
    assert sum(measured["phases_s"].values()) == pytest.approx(measured["first_output_s"]["median"], rel=0.5)
    left = [path for name in ("inductor", "triton", "tmp") for path in (user / name).rglob("*") if path.is_file()]
    assert left == []
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 2
    assert not re.search(r"<(script|link|img)\b", page)


def test_an_unknown_mode_or_entry_is_one_line(bundle: Path) -> None:
    from aotpack.bench.run import run_bench

    with pytest.raises(UsageError, match="no mode 'warp'; there are: bundle"):
        run_bench(bundle, modes=["warp"])
    with pytest.raises(UnknownEntry, match="mlp"):
        run_bench(bundle, entry="nope")


def test_the_tables_of_figures_are_what_the_files_of_results_say(repo: Path) -> None:
    command = [sys.executable, "bench/contract_table.py", "--check"]
    assert subprocess.run(command, cwd=repo, check=False).returncode == 0, "run bench/contract_table.py"


def test_steady_calls_are_compared_with_the_compilers_over_processes() -> None:
    def steady(*seconds: float) -> list[dict[str, Any]]:
        return [{**sample(1.0), "calls": [{"case": "8", "kind": "hot", "steady_s": one, "first_s": 1.0,
                                           "second_s": 1.0, "rss_bytes": 1, "heavy": []}]} for one in seconds]  # fmt: skip

    runs = Runs(
        samples={"bundle": steady(0.9, 1.0, 1.1), "compile-cold": steady(1.9, 2.0, 2.1), "eager": steady(4, 4, 4)}
    )
    found = made(runs)["steady"]
    assert (found["against"], found["of"]) == ("compile-cold", "steady_s")
    ratios = found["cases"][0]["ratios"]
    assert (ratios["bundle"]["median"], ratios["eager"]["median"]) == (0.5, 2.0)
    assert 0.9 / 2.1 <= ratios["bundle"]["low"] < 0.5 < ratios["bundle"]["high"] <= 1.1 / 1.9
    assert parse_gate("steady_ratio>1.02").broken(made(runs), None) is None
    assert "steady call, x compile-cold:" in report.table(made(runs)).splitlines()
    assert made(Runs(samples={"bundle": steady(1.0)}))["steady"] is None
    with pytest.raises(UsageError, match="this run did not measure steady_ratio"):
        parse_gate("steady_ratio>1.02").broken(made(Runs(samples={"bundle": steady(1.0)})), None)
    wrong = made(Runs(samples=runs.samples, wrong={"compile-cold": "8: differs"}))
    assert wrong["steady"] is None
