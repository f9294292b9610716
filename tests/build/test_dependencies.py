"""Which files a job depends on: the user's, wherever they lie, and neither Python's own nor an environment's."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from aotpack.compilers import dependencies
from aotpack.compilers.dependencies import Recorder, source_modules


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> object:
    """Makes an imported module whose file is the given one."""

    def make(name: str, file: str | Path) -> None:
        made = types.ModuleType(name)
        made.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, made)

    return make


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n")
    return path


def test_only_the_users_modules_beside_the_manifest_are_sources(
    module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment in the project's folder holds thousands of modules that are not the project's."""
    packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    monkeypatch.setattr(dependencies, "_installed", lambda: [packages])
    module("mine_a", written(tmp_path / "mine_a.py"))
    module("mine_b.deep", written(tmp_path / "mine_b" / "deep.py"))
    module("theirs", written(packages / "theirs.py"))
    module("elsewhere", written(tmp_path.parent / "elsewhere.py"))
    assert {name for name in source_modules(tmp_path) if name in {"mine_a", "mine_b.deep", "theirs", "elsewhere"}} == {
        "mine_a",
        "mine_b.deep",
    }


def test_a_module_whose_file_is_no_whole_path_is_none_of_the_users(
    module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.ops has "_ops.py": looked up from the manifest's folder, it would be a file there that does not exist."""
    monkeypatch.chdir(tmp_path)
    module("like_torch_ops", "_like_torch_ops.py")
    assert "like_torch_ops" not in source_modules(tmp_path)


@pytest.mark.parametrize("below", ["src/app", "opt/model"])
def test_a_project_under_the_prefix_of_python_is_the_users(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix of a system's Python is /usr, and /usr/src/app is where many images put a project."""
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    mine, standard = written(tmp_path / below / "weights.txt"), written(tmp_path / "lib" / "python3.11" / "json.txt")
    recorder = Recorder(opened={str(mine), str(standard)})
    files = dependencies.dependencies(recorder, mine.parent)["files"]
    assert mine.name in files
    assert os.fspath(standard) not in files


def test_what_python_imports_as_it_starts_is_no_source(module: Any, tmp_path: Path) -> None:
    """Debian keeps a sitecustomize.py under /etc, outside of all of Python's folders."""
    module("sitecustomize", written(tmp_path / "etc" / "sitecustomize.py"))
    module("mine", written(tmp_path / "project" / "mine.py"))
    files = dependencies.dependencies(Recorder(), tmp_path / "project")["files"]
    assert "mine.py" in files
    assert not any("sitecustomize" in name for name in files)
