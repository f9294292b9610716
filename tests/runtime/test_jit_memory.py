"""What a container's limits leave for a compile, read from control groups of both versions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotpack_runtime.errors import CompileError
from aotpack_runtime.jit import memory, service
from aotpack_runtime.jit.budget import Breaker
from aotpack_runtime.jit.memory import COMPILE_BYTES, left_bytes

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(folder: Path, names: tuple[str, str, str], limit: object, used: int, idle: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - idle}\n{names[2]} {idle}\n")


def left(folder: Path, own: str) -> int | None:
    (folder / "own").write_text(own)
    return left_bytes(folder / "groups", folder / "own")


def test_the_least_that_any_group_around_a_process_leaves(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "pods" / "server", V2, "max", 100, 0)
    assert left(tmp_path, "0::/pods/server\n") is None
    group(groups / "pods" / "server", V2, 1000, 300, 50)
    assert left(tmp_path, "0::/pods/server\n") == 750
    group(groups / "pods", V2, 2000, 1900, 20)
    assert left(tmp_path, "0::/pods/server\n") == 120
    group(groups / "pods", V2, 2000, 2300, 20)
    assert left(tmp_path, "0::/pods/server\n") == 0


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    group(tmp_path / "groups", V2, 1000, 300, 0)
    assert left(tmp_path, "0::/\n") == 700
    assert left(tmp_path, "0::/kubepods/pod7/c\n") == 700


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    group(tmp_path / "groups" / "memory", V1, 9223372036854771712, 300, 0)
    own = "9:name=systemd:/\n4:memory:/docker/c\n3:cpuset:/\n0::/\n"
    assert left(tmp_path, own) is None
    group(tmp_path / "groups" / "memory" / "docker" / "c", V1, 1000, 300, 100)
    assert left(tmp_path, own) == 800


@pytest.mark.parametrize("damage", ["limit", "used", "stat", "own"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, damage: str) -> None:
    group(tmp_path / "groups", V2, 1000, 300, 0)
    if damage == "own":
        assert left_bytes(tmp_path / "groups", tmp_path / "nowhere") is None
        return
    name = {"limit": "memory.max", "used": "memory.current", "stat": "memory.stat"}[damage]
    (tmp_path / "groups" / name).write_text("no number of bytes\n")
    assert left(tmp_path, "0::/\n") is None


@pytest.mark.parametrize(
    ("free", "why"),
    [
        (None, ""), (COMPILE_BYTES, ""),
        (300 << 20, "300 MiB of memory are left to this container, a compile beside its server needs 1024"),
    ],
)  # fmt: skip
def test_a_compile_is_not_begun_where_it_could_take_the_server_along(
    monkeypatch: pytest.MonkeyPatch, free: int | None, why: str
) -> None:
    monkeypatch.setattr(memory, "left_bytes", lambda: free)
    assert memory.shortage() == why


def test_a_shortage_does_not_use_up_the_one_try_of_an_open_breaker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody would say how that try ended, and nothing would be compiled in this session any more."""
    breaker = Breaker(clock=lambda: 1e6, opened=0.0)
    overlay = SimpleNamespace(
        root=tmp_path / "a" / "b" / "c", lock=lambda key: tmp_path / "lock", get=lambda *key: None,
        building=lambda key: nullcontext(tmp_path),
    )  # fmt: skip
    jit: Any = SimpleNamespace(
        breaker=breaker, bundle=SimpleNamespace(index=None), refuses=lambda key: "", _place=lambda: overlay,
        _closed=False, _compile=pytest.fail,
    )  # fmt: skip
    ask: Any = SimpleNamespace(key="key", request=SimpleNamespace(label="n8"))
    monkeypatch.setattr(service, "shortage", lambda: "300 MiB are left")
    with pytest.raises(CompileError, match="300 MiB are left"):
        service.Jit._found_or_made(jit, ask)
    assert breaker.ready()
