"""A session among what else goes on in a server's process: interpreters, tasks, threads that close it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aotpack_runtime import bundle as room
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.errors import SessionClosed
from aotpack_runtime.streams import said_stream, use_stream
from tests.support.bundles import members, write_bundle

SUBINTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

code = '''
import sys
sys.path[:0] = %r
import aotpack_runtime as apr
try:
    apr.load(%r)
except apr.AotpackError as error:
    print(error, flush=True)
'''
for how in ({}, {"isolated": False}):
    try:
        made = interpreters.create(**how)
    except TypeError:  # newer Pythons have other words for it
        continue
    interpreters.run_string(made, code % (sys.path, sys.argv[1]))
    interpreters.destroy(made)
"""


def test_a_subinterpreter_is_told_that_nothing_is_served_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUBINTERPRETER, str(write_bundle(tmp_path / "bundle"))],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    said = "a bundle is served in Python's main interpreter, and this is another one"
    assert done.stdout.count(said) >= 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_stream_is_said_for_one_task_of_an_event_loop() -> None:
    seen: dict[str, list[int | None]] = {"says": [], "other": []}

    async def says(handle: int) -> None:
        with use_stream(handle):
            await asyncio.sleep(0)
            seen["says"].append(said_stream())
            seen["says"].append(await asyncio.to_thread(said_stream))

    async def other() -> None:
        for _ in range(3):
            seen["other"].append(said_stream())
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(says(7), other(), says(9))

    asyncio.run(both())
    assert sorted(seen["says"], key=str) == [7, 7, 9, 9]
    assert seen["other"] == [None] * 3
    assert said_stream() is None


def test_a_bundle_that_is_closed_while_its_files_are_read_reads_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a file that was closed is the next that is opened."""
    opened = open_bundle(write_bundle(tmp_path / "bundle"))
    (variant,) = opened.index.entries["encoder"].variants
    (member,) = variant.artifact.members()
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    taken: list[int] = []
    hash_of = room._hash

    def closed_meanwhile(descriptor: int) -> str:
        opened.close()
        taken.extend(os.open(other, os.O_RDONLY) for _ in range(8))
        os.rename(tmp_path / "bundle", tmp_path / "replaced")  # so that the file is given by its number
        return hash_of(descriptor)

    monkeypatch.setattr(room, "_hash", closed_meanwhile)
    try:
        assert Path(opened.path(member)).read_bytes() == members()[member]
    finally:
        for number in taken:
            os.close(number)
    with pytest.raises(SessionClosed):
        opened.path(member)


def test_a_closed_bundle_gives_its_files_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    opened = open_bundle(write_bundle(tmp_path / "bundle"))
    assert len(os.listdir("/proc/self/fd")) == before + len(members())
    opened.close()
    opened.close()
    assert len(os.listdir("/proc/self/fd")) == before
