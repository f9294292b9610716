"""What every test may ask for."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

# Test workers and the processes they start share the cores: threads that spin for the next piece of work would take
# them from one another. Before anything loads OpenMP, and for all child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]


LONGEST = (
    "guard_neighbours", "random_calls", "cli", "state_cases", "kernel_builds", "publish_cases", "manifests",
    "array_calls", "misses", "host_cases", "cpp_client", "miss_hosts", "bench", "cross_builds", "miss_forks",
)  # fmt: skip
"""Files that take longest, mostly since they build, the longest first; those that build the same zoo not side by side."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first, then those with the most slow tests: workers take a file at a time, in this order, and one
    that begins last is waited for while the other workers have nothing to do."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path.name, len(places)), -slow[item.path]))
