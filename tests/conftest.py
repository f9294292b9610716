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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests go first: workers take a file at a time, and one that begins last is waited for
    while the other workers have nothing to do."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
