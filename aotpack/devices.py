"""GPUs that people serve on, as a compiler sees them: what it would ask of the device if it were there.

Sizes per capability (registers, threads, shared memory) are those of the CUDA C++ Programming Guide's table of
technical specifications; the rest is of the source that a record names. A manifest may add records under `devices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aotpack_runtime.format.gpu import SHARED_BYTES, parse_arch

Json = Any
AttentionWay = Literal["cudnn", "flash", "efficient", "math"]
"""Operators that torch has for `scaled_dot_product_attention` on a GPU."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
SHARED_KEPT_BYTES = KIB
"""Of each block's shared memory the system keeps 1 KiB (capability 8.0 and newer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU. `clock_mhz` is its boost clock, `bandwidth_gb_s` that of its memory; `source` says where the figures are
    published."""

    name: str
    arch: str
    multiprocessors: int
    shared_per_multiprocessor_bytes: int
    l2_bytes: int
    memory_bytes: int
    clock_mhz: int
    bandwidth_gb_s: int
    threads_per_multiprocessor: int = 2048
    registers_per_multiprocessor: int = 65536
    source: str = ""

    @property
    def shared_per_block_bytes(self) -> int:
        """What a block may have when it asks for it."""
        known = SHARED_BYTES.get(parse_arch(self.arch).capability)
        return known or self.shared_per_multiprocessor_bytes - SHARED_KEPT_BYTES

    def properties(self) -> dict[str, Json]:
        """By the names of `torch.cuda.get_device_properties`; what no code generator asks for is left out."""
        major, minor = parse_arch(self.arch).capability
        return {
            "name": self.name,
            "major": major,
            "minor": minor,
            "multi_processor_count": self.multiprocessors,
            "total_memory": self.memory_bytes,
            "warp_size": 32,
            "regs_per_multiprocessor": self.registers_per_multiprocessor,
            "max_threads_per_multi_processor": self.threads_per_multiprocessor,
            "max_threads_per_block": 1024,
            "shared_memory_per_block": 48 * KIB,
            "shared_memory_per_block_optin": self.shared_per_block_bytes,
            "shared_memory_per_multiprocessor": self.shared_per_multiprocessor_bytes,
            "L2_cache_size": self.l2_bytes,
            "clock_rate": self.clock_mhz * 1000,
            "is_integrated": 0,
            "is_multi_gpu_board": 0,
            "gcnArchName": "",
        }


DEVICES: Mapping[str, Device] = {
    "a10": Device(
        name="NVIDIA A10", arch="sm_86", multiprocessors=72, shared_per_multiprocessor_bytes=100 * KIB,
        l2_bytes=6 * MIB, memory_bytes=24 * GIB, clock_mhz=1695, bandwidth_gb_s=600, threads_per_multiprocessor=1536,
        source="NVIDIA A10 datasheet; NVIDIA Ampere GA102 GPU Architecture whitepaper",
    ),
    "a100": Device(
        name="NVIDIA A100", arch="sm_80", multiprocessors=108, shared_per_multiprocessor_bytes=164 * KIB,
        l2_bytes=40 * MIB, memory_bytes=80 * GIB, clock_mhz=1410, bandwidth_gb_s=2039,
        source="NVIDIA A100 80GB datasheet; NVIDIA A100 Tensor Core GPU Architecture whitepaper",
    ),
    "l4": Device(
        name="NVIDIA L4", arch="sm_89", multiprocessors=58, shared_per_multiprocessor_bytes=100 * KIB,
        l2_bytes=48 * MIB, memory_bytes=24 * GIB, clock_mhz=2040, bandwidth_gb_s=300, threads_per_multiprocessor=1536,
        source="NVIDIA L4 datasheet; NVIDIA Ada GPU Architecture whitepaper",
    ),
    "l40s": Device(
        name="NVIDIA L40S", arch="sm_89", multiprocessors=142, shared_per_multiprocessor_bytes=100 * KIB,
        l2_bytes=96 * MIB, memory_bytes=48 * GIB, clock_mhz=2520, bandwidth_gb_s=864, threads_per_multiprocessor=1536,
        source="NVIDIA L40S datasheet; NVIDIA Ada GPU Architecture whitepaper",
    ),
    "h100": Device(
        name="NVIDIA H100 80GB HBM3", arch="sm_90", multiprocessors=132, shared_per_multiprocessor_bytes=228 * KIB,
        l2_bytes=50 * MIB, memory_bytes=80 * GIB, clock_mhz=1980, bandwidth_gb_s=3350,
        source="NVIDIA H100 datasheet (SXM5); NVIDIA H100 Tensor Core GPU Architecture whitepaper",
    ),
    "h200": Device(
        name="NVIDIA H200", arch="sm_90", multiprocessors=132, shared_per_multiprocessor_bytes=228 * KIB,
        l2_bytes=60 * MIB, memory_bytes=150_754_820_096, clock_mhz=1980, bandwidth_gb_s=4800,
        source="NVIDIA H200 datasheet (SXM); memory and L2 as torch 2.11 reads them from one",
    ),
    "b200": Device(
        name="NVIDIA B200", arch="sm_100", multiprocessors=148, shared_per_multiprocessor_bytes=228 * KIB,
        l2_bytes=126 * MIB, memory_bytes=180 * GIB, clock_mhz=1965, bandwidth_gb_s=8000,
        source="NVIDIA DGX B200 datasheet; NVIDIA Blackwell Tuning Guide",
    ),
    "rtx4090": Device(
        name="NVIDIA GeForce RTX 4090", arch="sm_89", multiprocessors=128, shared_per_multiprocessor_bytes=100 * KIB,
        l2_bytes=72 * MIB, memory_bytes=24 * GIB, clock_mhz=2520, bandwidth_gb_s=1008, threads_per_multiprocessor=1536,
        source="NVIDIA Ada GPU Architecture whitepaper",
    ),
    "rtx5090": Device(
        name="NVIDIA GeForce RTX 5090", arch="sm_120", multiprocessors=170, shared_per_multiprocessor_bytes=100 * KIB,
        l2_bytes=96 * MIB, memory_bytes=32 * GIB, clock_mhz=2407, bandwidth_gb_s=1792, threads_per_multiprocessor=1536,
        source="NVIDIA RTX Blackwell GPU Architecture whitepaper",
    ),
}  # fmt: skip
"""By the names that manifests use."""
