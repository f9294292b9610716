"""Where this host's overlay of a bundle is, and whether it can be used."""

from __future__ import annotations

import os
from pathlib import Path

from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.target import Machine
from aotpack_runtime.machine import untrusted

FREE_BYTES = 256 << 20
"""A compile is not begun with less room than this: its files and those that compilers write beside them."""


def facts(machine: Machine) -> dict[str, str]:
    """What a variant compiled on a host may depend on without saying so among its needs."""
    found = {
        "arch": machine.arch,
        "cpu": " ".join(sorted(machine.cpu_flags)),
        "torch": machine.torch or "",
        "python": machine.python,
        "glibc": machine.glibc or "",
        "libstdcxx": machine.libstdcxx or "",
    }
    if machine.gpu is not None:
        found["gpu"] = ".".join(map(str, machine.gpu.capability))
    return found


def overlay_root(bundle: str, machine: Machine, cache: Path) -> Path:
    """The overlay of the bundle with this digest, for hosts like `machine`."""
    return cache / "overlay" / bundle / fingerprint(facts(machine))[:32]


def distrusted(root: Path) -> str:
    """Why nothing may be read from the overlay at `root`, "" when it may: another user could have put it there."""
    for folder in (*reversed(root.parents[:3]), root):  # the cache, its overlays, those of the bundle
        if folder.is_dir() and (problem := untrusted(folder)):
            return problem
    return ""


def unwritable(root: Path) -> str:
    """Why nothing can be compiled into the overlay at `root`, "" when it can; it is made if it is not there."""
    for folder in (*reversed(root.parents[:3]), root):
        if problem := untrusted(folder):
            return problem
    if not os.access(root, os.W_OK):
        return f"{root}: cannot be written"
    try:
        status = os.statvfs(root)
    except OSError as error:
        return f"{root}: {error.strerror}"
    if status.f_flag & os.ST_RDONLY:
        return f"{root}: is on a file system mounted read-only"
    if status.f_flag & os.ST_NOEXEC:
        return f"{root}: is on a file system mounted noexec, from which no library is loaded"
    free = status.f_bavail * status.f_frsize
    if free < FREE_BYTES:
        return f"{root}: its file system is full ({free >> 20} MiB left, a compile needs {FREE_BYTES >> 20})"
    return ""
