"""File systems for one test, where this process may mount them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path, options: str = "size=64m") -> Iterator[Path]:
    """`place`, made now, as a memory file system with these options; the test is skipped without root."""
    place.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    command = [str(mount), "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if not mount or not umount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield place
    finally:
        subprocess.run([umount, "-l", str(place)], check=True)
