"""Run as a script: read a job on stdin, do it in this process, and print what came of it.

Time counts from before the parent started the process (`began`, on the clock that all processes share).
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

JOBS = {
    "sample": "sample:sample",
    "compile-cold": "fills:caches",
    "artifacts": "fills:artifacts",
    "arrays": "fills:arrays",
    "package": "fills:package",
    "aot": "fills:functions",
    "check": "answers:check",
    "kernel": "kernel_sample:sample",
    "kernel-inputs": "kernel_fills:inputs",
    "triton": "kernel_fills:triton",
    "kernel-check": "answers:check_kernel",
}
"""Job -> the room and the function that does it."""


def main() -> None:
    job = json.loads(sys.stdin.readline())
    _without_builder()
    clock = import_module("aotpack.bench.child.clock").Clock(job["began"])
    room, _, function = JOBS[job["do"]].partition(":")
    do = getattr(import_module(f"aotpack.bench.child.{room}"), function)
    clock.end("interpreter")
    sys.stdout.write(json.dumps(do(job, clock)) + "\n")


def _without_builder() -> None:
    """Let rooms be imported without running the packages' own `__init__`: `import aotpack` imports the whole builder,
    which no server has."""
    here = Path(__file__).resolve().parent
    for name, folder in (("aotpack", here.parents[1]), ("aotpack.bench", here.parent)):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


if __name__ == "__main__":
    main()
