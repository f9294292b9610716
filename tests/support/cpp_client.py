"""The C++ client as tests have it: built by CMake, or by a compiler alone where there is no CMake."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.support.building import ROOT

SOURCE = Path(__file__).resolve().parents[2]
CLIENT, TESTS = SOURCE / "runtime" / "cpp", SOURCE / "tests" / "cpp"
CXX = os.environ.get("CXX") or shutil.which("g++")
FLAGS = os.environ.get("AOTPACK_TEST_CXXFLAGS", "").split()
"""Such as `-O1 -g -fsanitize=address,undefined -D_GLIBCXX_ASSERTIONS`."""
PROGRAMS = {
    "aotpack-serve": CLIENT / "serve.cpp", "aotpack-judge": CLIENT / "judge.cpp",
    "calls": TESTS / "calls.cpp", "readers": TESTS / "readers.cpp",
}  # fmt: skip


def built_client() -> Path:
    """The folder of PROGRAMS, made again when their source changes."""
    files = sorted(path for folder in (CLIENT, TESTS) for path in folder.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join([*(path.read_bytes() for path in files), *map(str.encode, FLAGS)]))
    folder = ROOT / "cpp" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / "built").exists():
            by_compiler(folder) if FLAGS or not shutil.which("cmake") else by_cmake(folder)
            (folder / "built").touch()
    return folder


def by_cmake(folder: Path) -> None:
    run("cmake", "-S", CLIENT, "-B", folder)
    run("cmake", "--build", folder, "-j2")
    link(folder, {name: path for name, path in PROGRAMS.items() if path.parent == TESTS}, [folder / "libaotpack.a"])


def by_compiler(folder: Path) -> None:
    """As the first lines of CMakeLists.txt say, each file by itself and many at a time."""

    def compiled(source: Path) -> Path:
        run(CXX, "-std=c++20", "-O2", *FLAGS, "-c", source, "-o", folder / f"{source.stem}.o")
        return folder / f"{source.stem}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted((CLIENT / "aotpack").glob("*.cpp"))))
    link(folder, PROGRAMS, objects)


def link(folder: Path, programs: Mapping[str, Path], others: Sequence[Path]) -> None:
    def linked(name: str) -> None:
        words = ["-std=c++20", "-O1", *FLAGS, "-I", CLIENT, programs[name], *others, "-o", folder / name]
        run(CXX, *words, "-ldl", "-pthread")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(linked, programs))


def run(*words: Any) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
