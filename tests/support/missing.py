"""Models whose misses are compiled in tests, a cache in which one of them has been, and servers that miss.

python -m tests.support.missing BUNDLE ROWS [WORDS]     a server: 4 threads call `mlp` with ROWS rows, JSON on stdout
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.support.building import ROOT, build_zoo, entry

Json = Any
REPO = Path(__file__).parents[2]
CXX = str(Path(__file__).parent / "cxx" / "g++")
"""A compiler that remembers what it made, for tests that are not about it."""
AT_ONCE = {"when": "at_once", "background": False, "max_jit": 64}

MODELS = """
import torch


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return torch.softmax(self.b(torch.nn.functional.gelu(self.a(x))) + x, -1)


class Series(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.zeros(4))

    def forward(self, x, scale):
        self.h.mul_(0.5).add_(x.sum(0))
        scale.add_(1)
        return {"h": self.h * scale, "rows": x.shape[0], "x": x}


def mlp():
    torch.manual_seed(0)
    return Mlp().eval()


def series():
    return Series().eval()
"""


def bundle() -> Path:
    """`mlp` compiled for 4 rows, and `series`, which writes its state and an argument, for 2."""
    entries = {
        "mlp": entry("mlp", {"x": {"shape": ["rows", 8], "dtype": "float32"}}, [{"dims": {"rows": [4]}}]),
        "series": entry(
            "series",
            {"x": {"shape": ["rows", 4], "dtype": "float32"}, "scale": {"shape": [4], "dtype": "float32"}},
            [{"dims": {"rows": [2]}}],
        ),
    }
    return build_zoo("misses", MODELS, entries)


def compiled_cache(folder: Path, rows: int = 7) -> Path:
    """A cache at `folder` in whose overlay `mlp` is compiled for 7 rows: compiled once, for all test runs."""
    digest = hashlib.sha256((bundle() / "index.json").read_bytes()).hexdigest()
    made = ROOT / "misses_cache" / digest[:16]
    with FileLock(ROOT / "misses_cache.lock"):
        seen = serve(bundle(), rows, made, threads=1)
        assert seen["ok"], seen
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


def environment(cache: Path | None, **more: str) -> dict[str, str]:
    """A server's environment; its compiles do not step back behind other tests."""
    path = os.pathsep.join([str(REPO / "runtime"), str(REPO)])
    found = {**os.environ, "PYTHONPATH": path, "AOTPACK_JIT_NICE": "0", **more}
    return found if cache is None else found | {"AOTPACK_CACHE_DIR": str(cache)}


def start(bundle: Path, rows: int, cache: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.missing", str(bundle), str(rows), *words]
    return subprocess.Popen(
        command, cwd=REPO, env=environment(cache, **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def serve(bundle: Path, rows: int, cache: Path, *, threads: int = 4, **more: str) -> Json:
    """What a server that was run to its end says."""
    process = start(bundle, rows, cache, f"threads={threads}", **more)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(output) | {"stderr": errors}


class Server:
    """A server like that of `start`, forked from a process that has imported torch already: 3 seconds of two cores
    less. Its result, and what it says on stderr, are there when it has ended."""

    def __init__(self, bundle: Path, rows: int, cache: Path, *words: str, **more: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._result, result = context.Pipe(duplex=False)
        self._errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - as long as the server is looked at
        variables = environment(cache, **{"CXX": CXX, **more})
        arguments = (result, self._errors.name, variables, (str(bundle), str(rows), *words))
        self._process = context.Process(target=_serve_forked, args=arguments)
        self._process.start()
        result.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.is_alive()

    def wait_ready(self, seconds: float = 120) -> None:
        """Until it stands at its gate."""
        assert self._result.poll(seconds), self.stderr()
        assert self._result.recv() == "ready"

    def result(self, seconds: float = 300) -> Json:
        """What it says when it has ended well."""
        self._process.join(seconds)
        assert self._process.exitcode == 0, self.stderr()
        found: Json = json.loads(self._result.recv())
        return found | {"stderr": self.stderr()}

    def stderr(self) -> str:
        return Path(self._errors.name).read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


PRELOADED = ["torch", "aotpack_runtime", "aotpack_runtime.loaders.aoti", "aotpack_runtime.loaders.exported"]


def _serve_forked(result: Any, errors: str, variables: Mapping[str, str], words: tuple[str, ...]) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.clear()
    os.environ.update(variables)
    result.send(json.dumps(called(*words, ready=lambda: result.send("ready"))))


def main(*words: str) -> None:
    """The server of `start`."""

    def ready() -> None:
        sys.stderr.write("ready\n")
        sys.stderr.flush()

    sys.stdout.write(json.dumps(called(*words, ready=ready)))


def called(path: str, rows: str, *words: str, ready: Callable[[], object]) -> Json:
    """Call `mlp` from several threads at once; what became of it."""
    import torch

    import aotpack_runtime as apr

    settings = {"threads": "4", "calls": "1", "gate": "", "background": "", **dict(word.split("=") for word in words)}
    on_miss: Mapping[str, Json] = AT_ONCE | ({"background": True} if settings["background"] else {})
    session = apr.load(path, mode="jit", on_miss=on_miss, source="never")
    reference = apr.load(path, mode="eager", source="never")["mlp"]
    shapes = [int(one) for one in rows.split(",")]
    inputs = [torch.randn(one, 8, generator=torch.Generator().manual_seed(one)) for one in shapes]
    wanted = [reference(x) for x in inputs]
    right: list[bool] = []

    def call() -> None:
        for _ in range(int(settings["calls"])):
            for x, result in zip(inputs, wanted, strict=True):
                right.append(torch.allclose(session["mlp"](x), result, atol=1e-5))

    if settings["gate"]:
        ready()
        while not os.path.exists(settings["gate"]):
            time.sleep(0.01)
    threads = [threading.Thread(target=call) for _ in range(int(settings["threads"]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = session.status()
    ok = all(right) and len(right) == len(threads) * len(shapes) * int(settings["calls"])
    session.close()
    return {"ok": ok, "jit": status["jit"], "mlp": status["entries"]["mlp"]}


if __name__ == "__main__":
    main(*sys.argv[1:])
