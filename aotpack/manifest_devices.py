"""GPUs that a manifest describes itself: with a record of its own, or as a known device with changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from aotpack.devices import DEVICES, KIB, Device
from aotpack.manifest_values import Bytes, Name, Positive, Strict, matching, wrong
from aotpack.suggest import did_you_mean
from aotpack_runtime.format.gpu import parse_arch

__all__ = ["DeviceForm", "find_device"]


class DeviceForm(Strict):
    """A GPU as a compiler sees it. What is not given is that of the device `like`."""

    like: Name | None = Field(default=None, description="a known device that this one differs from")
    arch: Annotated[str, matching(r"sm_[0-9]{2,3}", "an architecture such as sm_90")] | None = None
    multiprocessors: Positive | None = Field(default=None, description="SMs that are switched on")
    shared_memory: Bytes | None = Field(default=None, description="of one multiprocessor, such as 228KiB")
    l2: Bytes | None = Field(default=None, description="cache, such as 50MiB")
    memory: Bytes | None = Field(default=None, description="of the device, such as 80GiB")
    clock_mhz: Positive | None = Field(default=None, description="boost clock")
    bandwidth_gb_s: Positive | None = Field(default=None, description="of its memory")
    threads: Positive | None = Field(default=None, description="that a multiprocessor holds")
    registers: Positive | None = Field(default=None, description="of a multiprocessor")

    def device(self, name: str, known: Mapping[str, Device]) -> Device:
        """The record called `name`; a problem of the manifest when something is missing."""
        given: dict[str, Any] = {
            "arch": self.arch, "multiprocessors": self.multiprocessors, "l2_bytes": self.l2,
            "shared_per_multiprocessor_bytes": self.shared_memory, "memory_bytes": self.memory,
            "clock_mhz": self.clock_mhz, "bandwidth_gb_s": self.bandwidth_gb_s,
            "threads_per_multiprocessor": self.threads, "registers_per_multiprocessor": self.registers,
        }  # fmt: skip
        given = {key: value for key, value in given.items() if value is not None}
        if self.shared_memory is not None and self.shared_memory < 48 * KIB:
            raise wrong("a multiprocessor has 48KiB of shared memory or more", "devices", name, "shared_memory")
        if self.like is not None:
            if self.like not in known:
                raise wrong(f"unknown device {self.like!r}{did_you_mean(self.like, known)}", "devices", name, "like")
            return replace(known[self.like], **given, name=name, source=f"the manifest, like {self.like}")
        needed = ("arch", "multiprocessors", "shared_memory", "l2", "memory", "clock_mhz", "bandwidth_gb_s")
        missing = [key for key in needed if getattr(self, key) is None]
        if missing:
            raise wrong(f"a device that is `like` no other needs {', '.join(missing)}", "devices", name)
        return Device(**given, name=name, source="the manifest")


def find_device(names: tuple[str, ...], arch: str, own: Mapping[str, DeviceForm]) -> Device | None:
    """The one of the devices `names` whose capability is that of `arch`; None when they are all others."""
    for name in names:
        device = own[name].device(name, DEVICES) if name in own else DEVICES[name]
        if parse_arch(device.arch).capability == parse_arch(arch).capability:
            return device
    return None
