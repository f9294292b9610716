"""GPUs as targets see them, and which compiled code runs on which.

Sources: CUDA C++ Programming Guide, "Binary compatibility" (same major version and not an older minor one, on the
desktop; not on Tegra, nor between the two) and "Family-specific features" (`a`: that capability alone, `f`: its
family), and the release notes of PTX ISA (the version each CUDA driver reads).
"""

from __future__ import annotations

import re

from aotpack_runtime.record import Record

_PTX_OF_CUDA = {
    (12, 0): (8, 0), (12, 1): (8, 1), (12, 2): (8, 2), (12, 3): (8, 3), (12, 4): (8, 4), (12, 5): (8, 5),
    (12, 6): (8, 5), (12, 7): (8, 6), (12, 8): (8, 7), (12, 9): (8, 8), (13, 0): (9, 0), (13, 1): (9, 1),
    (13, 2): (9, 2),
}  # fmt: skip
"""CUDA version of a driver -> newest PTX ISA that it reads."""

FAMILIES = {
    (10, 0): {(10, 0), (10, 3)}, (10, 3): {(10, 3)}, (12, 0): {(12, 0), (12, 1)}, (12, 1): {(12, 1)},
}  # fmt: skip
"""Capability of an `f` target -> those it runs on; of one that is not here, itself alone."""

TEGRA = {(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)}

NEWEST_CUDA = max(_PTX_OF_CUDA)

SHARED_BYTES = {
    (7, 0): 98304, (7, 2): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376,
    (9, 0): 232448, (10, 0): 232448, (10, 3): 232448, (11, 0): 232448, (12, 0): 101376, (12, 1): 101376,
}  # fmt: skip
"""Capability -> shared memory that one block may have, static and dynamic (technical specifications per capability)."""
SHARED_EVERYWHERE = 48 * 1024

_ARCH = r"(sm|compute)_(\d+)(\d)([af]?)"


class Gpu(Record):
    """One device: its compute capability, and the CUDA version that its driver implements."""

    capability: tuple[int, int]
    driver: tuple[int, int]
    name: str = ""

    def __str__(self) -> str:
        major, minor = self.capability
        return f"sm_{major}{minor}"


class Arch(Record):
    """`sm_90a` (machine code) or `compute_80` (PTX): a capability, exact with the suffix a, of its family with f."""

    text: str
    capability: tuple[int, int]
    suffix: str

    @property
    def ptx(self) -> bool:
        return self.text.startswith("compute_")


def parse_arch(text: str) -> Arch:
    """ValueError when `text` is not of the form sm_90, sm_90a, sm_100f, compute_80."""
    match = re.fullmatch(_ARCH, text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not an architecture such as sm_90")
    return Arch(text, (int(match[2]), int(match[3])), match[4])


def reject_cubin(value: str, gpu: Gpu) -> str | None:
    """Why a cubin for `value` does not run on `gpu`."""
    arch = parse_arch(value)
    if arch.suffix == "a":
        return None if gpu.capability == arch.capability else f"{value} runs on that capability alone, this is {gpu}"
    if arch.suffix == "f":
        return None if _family(arch, gpu) else f"{value} runs on its family alone, this is {gpu}"
    if gpu.capability != arch.capability and TEGRA & {gpu.capability, arch.capability}:
        return f"{value} does not run on {gpu}: machine code of Tegra and of other GPUs is for one capability alone"
    if gpu.capability[0] == arch.capability[0] and gpu.capability[1] >= arch.capability[1]:
        return None
    return f"{value} runs on {arch.capability[0]}.x from {arch.capability[1]} on, this is {gpu}"


def reject_ptx(value: str, gpu: Gpu) -> str | None:
    """Why the driver of `gpu` cannot compile PTX of `value`, such as "compute_80 8.8" (its level and ISA version)."""
    name, _, isa = value.partition(" ")
    arch = parse_arch(name)
    if arch.suffix == "a" and gpu.capability != arch.capability:
        return f"PTX for {name} is for that capability alone, this is {gpu}"
    if arch.suffix == "f" and not _family(arch, gpu):
        return f"PTX for {name} is for its family alone, this is {gpu}"
    if gpu.capability < arch.capability:
        return f"PTX for {name} needs that capability or a newer one, this is {gpu}"
    version = tuple(int(part) for part in isa.split("."))
    reads = max((ptx for cuda, ptx in _PTX_OF_CUDA.items() if cuda <= gpu.driver), default=(0, 0))
    if version <= reads:
        return None
    needed = next((cuda for cuda, ptx in _PTX_OF_CUDA.items() if ptx >= version), None)
    least = f"{needed[0]}.{needed[1]}" if needed else "a newer version"
    return f"PTX {isa} needs a driver of CUDA {least} or newer, this one is of CUDA {gpu.driver[0]}.{gpu.driver[1]}"


def reject_shared(value: str, gpu: Gpu) -> str | None:
    """Why a block with that many bytes of shared memory does not run on `gpu`; of one that is not known, it may."""
    most = SHARED_BYTES.get(gpu.capability)
    if most is None or int(value) <= most:
        return None
    return f"needs {value} bytes of shared memory a block, {gpu} has {most}"


def _family(arch: Arch, gpu: Gpu) -> bool:
    return gpu.capability in FAMILIES.get(arch.capability, {arch.capability})


def check_need(name: str, value: str) -> None:
    """ValueError when a need of a GPU is not of the form that its rule reads."""
    if name == "cubin":
        parse_arch(value)
    elif name == "ptx":
        level, _, isa = value.partition(" ")
        if not parse_arch(level).ptx or not re.fullmatch(r"\d{1,3}\.\d{1,3}", isa):
            raise ValueError(f"ptx is {value[:40]!r}, expected such as 'compute_80 8.8'")
    elif name == "shared" and not re.fullmatch(r"\d{1,9}", value):
        raise ValueError(f"shared is {value[:40]!r}, expected a number of bytes")
