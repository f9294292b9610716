"""Whatever a caller passes, an entry does what eager does: random calls of small models of many families.

Calls are made in a process of their own, which writes each down before it makes it: a crash is a failure that names
the call. `tests/property/calls.py` says how calls are planned and compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="random calls are made of torch models")

from tests.property.zoo import ENTRIES, property_models

QUICK, THOROUGH = 90, 1250
"""Calls of each model: 1,530 and 21,250 in all."""
ARRAY_CALLS = 300
"""The same with arrays: 5,100."""


@dataclass(frozen=True)
class Played:
    """What a process saw of each entry that it came to the end of, and where it ended if that was not by itself."""

    entries: dict[str, dict[str, Any]]
    crash: str


@pytest.fixture(scope="module")
def bundle() -> Path:
    return property_models()


@pytest.fixture(scope="module")
def quick(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(bundle, tmp_path_factory.mktemp("calls"), list(ENTRIES), seed=0, calls=QUICK)


@pytest.mark.parametrize("entry", ENTRIES)
def test_random_calls_do_what_eager_does(quick: Played, entry: str) -> None:
    check(quick, entry, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_many_random_calls_do_what_eager_does(bundle: Path, tmp_path: Path, entry: str) -> None:
    seed = int(os.environ.get("AOTPACK_TEST_SEED", "1"))
    check(play(bundle, tmp_path, [entry], seed=seed, calls=THOROUGH), entry, THOROUGH)


@pytest.fixture(scope="module")
def quick_arrays(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("array_calls")
    return play(bundle, folder, list(ENTRIES), seed=0, calls=ARRAY_CALLS, program="array_calls")


@pytest.mark.parametrize("entry", ENTRIES)
def test_random_calls_with_arrays_give_the_bits_that_tensors_give(quick_arrays: Played, entry: str) -> None:
    check_arrays(quick_arrays, entry, ARRAY_CALLS)


def check_arrays(played: Played, entry: str, calls: int) -> None:
    assert entry in played.entries, played.crash
    found = played.entries[entry]
    assert not found["failed"], f"{found['failed']} of {calls} calls differ:\n" + "\n".join(found["failures"])
    tally = Counter(found["tally"])
    assert tally["hit"] >= 0.15 * calls, tally
    assert tally["raised"] >= 0.05 * calls, tally
    assert tally["returned"] - tally["hit"] >= 0.02 * calls, tally
    assert min(tally[kind] for kind in ("numpy", "own", "dlpack", "interface", "buffer")) >= 0.05 * calls, tally


def play(
    bundle: Path, folder: Path, entries: Sequence[str], *, seed: int, calls: int, program: str = "calls"
) -> Played:
    log = folder / "call"
    options: list[str | Path] = ["--seed", str(seed), "--calls", str(calls), "--log", log]
    done = subprocess.run(
        [sys.executable, "-m", f"tests.property.{program}", bundle, *entries, *options],
        cwd=Path(__file__).parents[2],
        # One OpenMP thread: models are small, and threads that wait for each other take the time of other tests.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    crash = ""
    if done.returncode:
        under_way = log.read_text().strip() if log.exists() else "no call"
        crash = f"exit status {done.returncode}, under way: {under_way}\n{done.stderr[-4000:]}"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return Played({each["entry"]: each for each in found}, crash)


def check(played: Played, entry: str, calls: int) -> None:
    assert entry in played.entries, played.crash
    found = played.entries[entry]
    assert not found["failed"], f"{found['failed']} of {calls} calls differ from eager:\n" + "\n".join(
        found["failures"]
    )
    tally = Counter(found["tally"])
    # Calls that are all hits, all misses or all errors would show nothing.
    assert tally["hit"] >= 0.15 * calls, tally
    assert tally["program"] + tally["source"] >= 0.05 * calls, tally
    assert tally["raised"] >= 0.05 * calls, tally
    assert tally["returned"] + tally["raised"] == calls
