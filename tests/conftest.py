"""What every test may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]
