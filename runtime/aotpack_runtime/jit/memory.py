"""Host memory as a container has it: what the limits of this process's control groups leave.

Where a limit is reached the kernel may end all processes of a container, the server among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

COMPILE_BYTES = 1 << 30
"""A compile is not begun with less left: its worker takes half of it (a small model, torch 2.13, CPU), compilers and
their files the rest."""
NO_LIMIT = 1 << 60
"""Version 1 writes a number of this order where there is none."""


def shortage() -> str:
    """Why no compile is to be begun beside the server now, "" when one may."""
    left = left_bytes()
    if left is None or left >= COMPILE_BYTES:
        return ""
    needed = f"a compile beside its server needs {COMPILE_BYTES >> 20}"
    return f"{left >> 20} MiB of memory are left to this container, {needed}"


def left_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Memory that this process's control groups leave, counting what caches would give back; None without a limit."""
    found = []
    for folder, limit, used, idle in _folders(groups, own):
        with contextlib.suppress(OSError, ValueError):  # "max", or a group that is not seen from in here
            most = int((folder / limit).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if most < NO_LIMIT:
                found.append(max(most - int((folder / used).read_text()) + int(stat.get(idle, 0)), 0))
    return min(found, default=None)


def _folders(groups: Path, own: Path) -> Iterator[tuple[Path, str, str, str]]:
    """(a group that this process is in, its files for the limit and the use, the word for what caches would give back).
    The groups around a container's are not seen from inside, and its own is then at the top."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        place = Path(path.strip("/"))
        if number == "0":
            for folder in (place, *place.parents):
                yield groups / folder, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            for folder in (place, *place.parents):
                yield (
                    groups / "memory" / folder,
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                )
