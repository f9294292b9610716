"""The builder as a child process: jobs come in as lines of JSON, results go out as lines of JSON.

A job that crashes its toolchain takes this process down and nothing else. `python -m aotpack.worker STORE` reads jobs
from stdin until it is closed; results go to the file descriptor that stdout was, while everything that libraries print
goes to stderr, which the parent keeps as the log of the job.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from aotpack_runtime.errors import AotpackError
from aotpack_runtime.store import Store

JOBS = {
    "export": "aotpack.compilers.exported",
    "aoti": "aotpack.compilers.aoti",
    "verify": "aotpack.verify",
}
"""Kind of job -> the module whose `compile(job, store)` does it."""


def main(root: str) -> int:
    """Serve jobs until stdin ends; returns the exit status."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = Store(Path(root))
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line), store)), file=results, flush=True)
    return 0


def _run(job: dict[str, Any], store: Store) -> dict[str, Any]:
    try:
        sys.path[:] = [path for path in sys.path if path != job.get("folder")]
        return {"result": importlib.import_module(JOBS[job["kind"]]).compile(job, store)}
    except AotpackError as error:
        return {"error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}}
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        message = f"{job.get('variant') or job.get('entry')}: {type(error).__name__}: {text[0] if text else ''}"
        return {"error": {"type": "CompileError", "message": message, "hint": "run with --debug for the log"}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
