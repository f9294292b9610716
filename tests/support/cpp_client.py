"""The C++ client as tests have it: built by CMake, or by a compiler alone where there is no CMake."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.support.building import ROOT

SOURCE = Path(__file__).resolve().parents[2]
CLIENT, CALLS = SOURCE / "runtime" / "cpp", SOURCE / "tests" / "cpp" / "calls.cpp"
CXX = os.environ.get("CXX") or shutil.which("g++")


def built_client() -> Path:
    """The folder of `aotpack-serve`, `aotpack-judge` and `calls`, made again when their source changes."""
    files = sorted(path for path in CLIENT.rglob("*") if path.is_file())
    folder = ROOT / "cpp" / hashlib.sha256(b"".join(path.read_bytes() for path in [*files, CALLS])).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / "calls").exists():
            by_cmake(folder) if shutil.which("cmake") else by_compiler(folder)
    return folder


def by_cmake(folder: Path) -> None:
    run("cmake", "-S", CLIENT, "-B", folder)
    run("cmake", "--build", folder, "-j2")
    link(folder, CALLS, "calls", [folder / "libaotpack.a"])


def by_compiler(folder: Path) -> None:
    """As the first lines of CMakeLists.txt say, each file by itself and many at a time."""

    def compiled(source: Path) -> Path:
        run(CXX, "-std=c++20", "-O2", "-c", source, "-o", folder / f"{source.stem}.o")
        return folder / f"{source.stem}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted((CLIENT / "aotpack").glob("*.cpp"))))
        programs = {CLIENT / "serve.cpp": "aotpack-serve", CLIENT / "judge.cpp": "aotpack-judge", CALLS: "calls"}
        list(pool.map(lambda item: link(folder, item[0], item[1], objects), programs.items()))


def link(folder: Path, source: Path, name: str, others: Sequence[Path]) -> None:
    temporary = folder / f"{name}.new"
    run(CXX, "-std=c++20", "-O1", "-I", CLIENT, source, *others, "-o", temporary, "-ldl", "-pthread")
    temporary.rename(folder / name)


def run(*words: Any) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
