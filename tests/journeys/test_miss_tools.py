"""What is seen of the miss path, and done with what it made: `aotpack cache`, metrics, the miss log."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real builds")

import torch

import aotpack_runtime as apr
from tests.support import missing
from tests.support.bundles import edited

Json = Any
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def bundle() -> Path:
    return missing.bundle()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(tmp_path / "cache"))
    return missing.compiled_cache(tmp_path / "cache")


def aotpack(*words: str, code: int = 0) -> Json:
    command = [sys.executable, "-m", "aotpack", *words, "--json"]
    done = subprocess.run(
        command, cwd=missing.REPO, env=missing.environment(None), capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_the_cache_is_listed_trimmed_and_cleared(cache: Path, bundle: Path) -> None:
    found = aotpack("cache", "ls")
    (variant,) = found["variants"]
    assert variant["variant"].startswith("mlp/jit-7x8-")
    assert variant["guards"] == ["x: float32[7, 8] on cpu"]
    assert variant["seconds"]["compile"] > 0
    assert aotpack("cache", "gc", "--max-size", "1GiB")["removed"] == []
    assert aotpack("cache", "gc", "--max-size", "much", code=2)["ok"] is False
    assert aotpack("cache", "gc", "--max-size", "1kB")["removed"] == [variant["key"]]
    assert aotpack("cache", "ls")["variants"] == []
    assert aotpack("cache", "clear")["removed"] == []


def test_what_misses_compiled_is_promoted_into_a_new_bundle(cache: Path, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "promoted"
    made = aotpack("cache", "promote", str(bundle), "-o", str(out), "--version", "1.1.0")
    assert [name.rpartition("-")[0] for name in made["variants"]] == ["mlp/jit-7x8"]
    shutil.rmtree(cache)
    x = torch.randn(7, 8)
    with apr.load(out, mode="strict") as session, apr.load(bundle, mode="eager") as before:
        assert session.bundle.index.version == "1.1.0"
        assert session.bundle.digest == made["digest"] != before.bundle.digest
        torch.testing.assert_close(session["mlp"](x), before["mlp"](x))
        assert session["mlp"].counts()["hits_by_tier"] == {"bundle": 1, "overlay": 0}
        session.bundle.verify()
    again = aotpack("cache", "promote", str(bundle), "-o", str(tmp_path / "none"), code=1)
    assert "misses have compiled nothing for it on this host" in again["error"]["message"]


def test_a_damaged_variant_is_not_promoted(cache: Path, bundle: Path, tmp_path: Path) -> None:
    (library,) = cache.glob("overlay/*/*/artifacts/*/model.so")
    data = bytearray(library.read_bytes())
    data[1000] ^= 1
    library.write_bytes(data)
    aotpack("cache", "promote", str(bundle), "-o", str(tmp_path / "out"), code=1)
    assert not (tmp_path / "out").exists()


def test_a_bundle_is_not_promoted_onto_itself(cache: Path, bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "copy")
    seen = aotpack("cache", "promote", str(tmp_path / "copy"), "-o", str(tmp_path / "copy"), code=2)
    assert "is the bundle itself" in seen["error"]["message"]


def _sorted_labels(line: str) -> str:
    """A sample with its labels in the order of their names."""
    return re.sub(r"\{(.*)\}", lambda found: f"{{{','.join(sorted(found[1].split(',')))}}}", line)


def test_two_versions_side_by_side_are_told_apart_and_one_may_take_the_place_of_the_other(
    cache: Path, bundle: Path, tmp_path: Path
) -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="metrics are an extra")
    from aotpack_runtime.metrics import SessionCollector

    newer = edited(bundle, tmp_path / "newer", lambda index: index["bundle"].update(version="2.0.0"))
    registry = prometheus.CollectorRegistry(auto_describe=True)
    with apr.load(bundle, mode="eager") as old, apr.load(newer, mode="eager") as new:
        collector = SessionCollector(old, new)
        registry.register(collector)
        new.warmup()
        name = old.bundle.index.name

        def ready(version: str) -> float | None:
            labels = {"bundle": name, "version": version, "device": "cpu"}
            found: float | None = registry.get_sample_value("aotpack_ready", labels)
            return found

        assert (ready("1.0.0"), ready("2.0.0")) == (0.0, 1.0)
        collector.sessions = (new,)
        assert (ready("1.0.0"), ready("2.0.0")) == (None, 1.0)


def test_a_scrape_shows_what_the_status_says(cache: Path, bundle: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="metrics are an extra")
    from aotpack_runtime.metrics import SessionCollector

    with apr.load(bundle, mode="jit", on_miss={"when": "never"}) as session:
        for rows in (4, 4, 7, 5):
            session["mlp"](torch.randn(rows, 8))
        registry = prometheus.CollectorRegistry(auto_describe=True)
        registry.register(SessionCollector(session))
        page = prometheus.generate_latest(registry).decode()
    owner = f'bundle="{session.bundle.index.name}",device="cpu"'
    for line in (
        f'aotpack_dispatch_total{{{owner},entry="mlp",outcome="hit_bundle",version="1.0.0"}} 2.0',
        f'aotpack_dispatch_total{{{owner},entry="mlp",outcome="hit_overlay",version="1.0.0"}} 1.0',
        f'aotpack_dispatch_total{{{owner},entry="mlp",outcome="miss_program",version="1.0.0"}} 1.0',
        f'aotpack_guard_miss_total{{{owner},entry="mlp",reason="x.shape[0]",version="1.0.0"}} 1.0',
        f'aotpack_jit_compiles_total{{{owner},version="1.0.0"}} 0.0',
        f'aotpack_jit_breaker_open{{{owner},version="1.0.0"}} 0.0',
    ):
        assert line in [_sorted_labels(found) for found in page.splitlines()], page
    assert 'digest="' in page
    assert "8" not in [label for line in page.splitlines() if "shape" in line for label in line.split('"')[1::2]]


@pytest.mark.parametrize("mode", ["jit", "eager", "strict"])
def test_the_miss_log_tells_shapes_and_their_counts(
    mode: Any, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a miss does."""
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AOTPACK_MISS_LOG", str(tmp_path / "misses.jsonl"))
    with apr.load(bundle, mode=mode, on_miss={"when": "never"}) as session:
        for rows in (4, 5, 5, 5, 6):
            with pytest.raises(apr.GuardMiss) if mode == "strict" and rows != 4 else nullcontext():
                session["mlp"](torch.randn(rows, 8))
        assert session.status()["misses_per_1000"] == 800.0
    lines = [json.loads(line) for line in (tmp_path / "misses.jsonl").read_text().splitlines()]
    assert [(line["event"], line["leaves"][0]["shape"][0]) for line in lines] == [
        ("miss", 5), ("miss", 6), ("total", 5), ("total", 6),
    ]  # fmt: skip
    assert [line.get("calls") for line in lines] == [None, None, 3, 1]
    assert lines[0]["reason"].startswith("x.shape[0]: expected ")
