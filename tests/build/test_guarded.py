"""The process that compiles behind a miss, as the scheduler sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
from pathlib import Path
from aotpack.guarded import _step_back

_step_back({nice})
group = Path("/proc/self/autogroup")
last = Path("/proc/self/oom_score_adj").read_text().strip()
print(os.nice(0), os.sched_getscheduler(0), group.read_text().split()[-1] if group.exists() else {nice}, last)
"""


@pytest.mark.parametrize(("nice", "policy"), [(19, os.SCHED_IDLE), (7, os.SCHED_BATCH)])
def test_it_steps_back_behind_what_runs_in_other_sessions_too(nice: int, policy: int) -> None:
    """Where sessions are scheduled as groups, a nice process of a session of its own takes half of a CPU from a server."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(nice=nice)], start_new_session=True, capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.stdout.split() == [str(nice), str(policy), str(nice), "1000"]
