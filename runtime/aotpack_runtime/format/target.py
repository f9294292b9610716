"""What an artifact needs of a host, by name, and the rule that judges each need.

A requirement this reader does not know is a reason to refuse: it may be the one that matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

from aotpack_runtime.format.gpu import Gpu, reject_cubin, reject_ptx, reject_shared
from aotpack_runtime.record import Record


class Machine(Protocol):
    """The facts of a host that targets are judged by; `aotpack_runtime.machine` finds them, tests make them up."""

    @property
    def arch(self) -> str: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def cpu_flags(self) -> frozenset[str]: ...
    @property
    def torch(self) -> str | None: ...
    @property
    def torch_cuda(self) -> str | None: ...
    @property
    def glibc(self) -> str | None: ...
    @property
    def libstdcxx(self) -> str | None: ...
    @property
    def python(self) -> str: ...
    @property
    def gpu(self) -> Gpu | None: ...
    @property
    def gpus(self) -> tuple[Gpu, ...]: ...
    def on(self, index: int) -> Machine: ...


DEVICE = r"cpu|cuda(:\d{1,3})?"
"""What a session may be opened for, as a regular expression."""

X86_64_LEVELS = {
    "x86-64": "",
    "x86-64-v2": "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
"""Flags each level adds, as /proc/cpuinfo spells them (x86-64 psABI, table 3.1: lzcnt is `abm`, sse3 is `pni`)."""


class Target(Record):
    """`device` is cpu or cuda; `needs` maps a requirement's name to its value, as the builder recorded it."""

    device: str
    needs: Mapping[str, str]

    def reject(self, machine: Machine, allowed: frozenset[str] = frozenset()) -> str | None:
        """None when `machine` meets every need not in `allowed`, else the first that it does not, in one line."""
        if self.device not in machine.devices:
            return f"no {self.device.upper()} device"
        for name, value in self.needs.items():
            if name in allowed:
                continue
            rule = RULES.get(name)
            reason = (
                rule(value, machine) if rule else f"needs {name} {value!r}, which this aotpack-runtime cannot judge"
            )
            if reason:
                return reason
        return None


def cpu_flags(value: str) -> set[str]:
    """`x86-64-v3 avx512_vnni` -> all flags that the level and the names after it ask for."""
    flags: set[str] = set()
    for word in value.split():
        if word not in X86_64_LEVELS:
            flags.add(word.lower())
            continue
        for level, names in X86_64_LEVELS.items():
            flags |= set(names.split())
            if level == word:
                break
    return flags


def version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _needs_cpu(value: str, machine: Machine) -> str | None:
    missing = cpu_flags(value) - machine.cpu_flags
    if not missing:
        return None
    if not machine.cpu_flags:
        return f"built for CPU {value}, and /proc/cpuinfo does not say what this one is"
    return f"built for CPU {value}, this host lacks {' '.join(sorted(missing))}"


def _needs_torch(value: str, machine: Machine) -> str | None:
    """AOTInductor packages follow torch's minor version."""
    if machine.torch is None:
        return f"needs torch {value}.*, torch is not installed"
    wanted = version(value)[:2]
    if wanted and version(machine.torch)[:2] == wanted:
        return None
    return f"built with torch {value}, running {machine.torch}; rebuild, or allow it with AOTPACK_ALLOW=torch"


def _needs_cuda(value: str, machine: Machine) -> str | None:
    """A package calls the CUDA runtime that came with its torch, whose library is named by the major version."""
    have = machine.torch_cuda
    if have is not None and version(have)[:1] == version(value)[:1]:
        return None
    return f"needs a torch for CUDA {version(value)[0]}.x, this one is for {have or 'no CUDA'}"


def _at_least(name: str, found: Callable[[Machine], str | None]) -> Callable[[str, Machine], str | None]:
    def rule(value: str, machine: Machine) -> str | None:
        have, wanted = found(machine), version(value)
        if have is not None and wanted and version(have) >= wanted:
            return None
        return f"needs {name} {value} or newer, this host has {have or 'none'}"

    return rule


def _equals(name: str, found: Callable[[Machine], str | None]) -> Callable[[str, Machine], str | None]:
    def rule(value: str, machine: Machine) -> str | None:
        have = found(machine)
        return None if have == value else f"built for {name} {value}, this host has {have or 'none'}"

    return rule


def _on_gpu(judge: Callable[[str, Gpu], str | None]) -> Callable[[str, Machine], str | None]:
    def rule(value: str, machine: Machine) -> str | None:
        return "no CUDA device" if machine.gpu is None else judge(value, machine.gpu)

    return rule


RULES: Mapping[str, Callable[[str, Machine], str | None]] = {
    "arch": _equals("machine", lambda machine: machine.arch),
    "cpu": _needs_cpu,
    "cubin": _on_gpu(reject_cubin),
    "cuda": _needs_cuda,
    "glibc": _at_least("glibc", lambda machine: machine.glibc),
    "libstdcxx": _at_least("libstdc++ GLIBCXX", lambda machine: machine.libstdcxx),
    "ptx": _on_gpu(reject_ptx),
    "python": _equals("Python", lambda machine: machine.python),
    "shared": _on_gpu(reject_shared),
    "torch": _needs_torch,
    "torch_min": _at_least("torch", lambda machine: machine.torch),
}
