"""How hypothesis runs here: no deadlines, since machines are shared; the same examples each time, but for `thorough`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("quick", deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)
settings.register_profile("thorough", deadline=None, max_examples=2000, suppress_health_check=QUIET)
settings.load_profile(os.environ.get("AOTPACK_TEST_PROFILE", "quick"))
