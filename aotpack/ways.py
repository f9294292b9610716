"""How a plan for a GPU is built on this host: natively, across, or not at all, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from aotpack.compilers.cross.gate import proof_of, refusal
from aotpack.compilers.toolchain import missing_for_gpu
from aotpack.kernel_plan import KernelPlan
from aotpack.plan import EntryPlan, Plan
from aotpack_runtime.machine import this_machine


@dataclass(frozen=True, slots=True)
class Way:
    """`reason` is why it is this one; of one that is impossible, what is missing."""

    kind: Literal["native", "cross", "impossible"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.kind != "native" else "native"


def way_of(entry: EntryPlan, *, across: bool = False) -> Way:
    """The way of a torch entry. A GPU at hand is used where it can be, or not at all where `across` is wanted."""
    if entry.device != "cuda":
        return Way("native", "for a CPU")
    missing = missing_for_gpu(entry.arch)
    if missing is None and not across:
        return Way("native", f"this host has a {getattr(this_machine().gpu, 'name', '')}")
    if entry.gpu is None:
        why = "a target that names its `device` is built without one"
        return Way("impossible", f"{missing}; {why}" if missing else why)
    refused = refusal(entry.arch, entry.compile["inductor"])
    if refused:
        native = f"build natively on a GPU of {entry.arch}: aotpack build --target {entry.target}"
        return Way("impossible", f"{missing}; {refused}; {native}" if missing else f"{refused}; {native}")
    return Way("cross", f"for a {entry.gpu.name}, {proof_of(entry.arch)}")


def on_its_way(plan: Plan, *, across: bool = False, tables: bool = True) -> Plan:
    """The plan as this host builds it, without tables of measured kernels if they are not wanted."""

    def entry_of(entry: EntryPlan | KernelPlan) -> EntryPlan | KernelPlan:
        if isinstance(entry, KernelPlan) or way_of(entry, across=across).kind != "cross":
            return entry
        return replace(entry, across=True, compile={**entry.compile, **({} if tables else {"tuning": None})})

    return replace(plan, entries=tuple(map(entry_of, plan.entries)))


def impossible(entry: EntryPlan | KernelPlan) -> str | None:
    """Why a torch entry cannot be built on this host; kernels compile anywhere."""
    if isinstance(entry, KernelPlan) or entry.across:
        return None
    way = way_of(entry)
    return way.reason if way.kind == "impossible" else None
