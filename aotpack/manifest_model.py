"""What a manifest may say: one frozen model for each mapping of it.

Rules of one mapping stand here; where a mistake is, and the rules that span mappings, are added in `manifest.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PrivateAttr, Tag, model_validator

from aotpack.devices import DEVICES, AttentionWay
from aotpack.manifest_devices import DeviceForm, find_device
from aotpack.manifest_inputs import (
    ClassInput,
    DictInput,
    FloatDtype,
    Input,
    IntInput,
    Linear,
    ListInput,
    RandintFill,
    TensorInput,
    TupleInput,
    ValueInput,
)
from aotpack.manifest_kernels import KernelEntry, NvrtcEntry, TritonEntry
from aotpack.manifest_values import (
    Bytes,
    Dim,
    Distinct,
    Identifier,
    Limit,
    Many,
    ModuleName,
    Name,
    Positive,
    Range,
    Scalar,
    SemVer,
    Size,
    Source,
    Specifier,
    Strict,
    matching,
    wrong,
)
from aotpack.suggest import describe, did_you_mean, nearest

__all__ = [
    "Build",
    "Bundle",
    "ClassInput",
    "CpuTarget",
    "CudaTarget",
    "DictInput",
    "Entry",
    "Input",
    "IntInput",
    "KernelEntry",
    "Linear",
    "ListInput",
    "Manifest",
    "NvrtcEntry",
    "OnMiss",
    "Point",
    "Precision",
    "RandintFill",
    "Range",
    "Runtime",
    "Target",
    "TensorInput",
    "TorchExportEntry",
    "TritonEntry",
    "TupleInput",
    "ValueInput",
    "Verify",
]


def _known_kind(*kinds: str) -> Callable[[object], object]:
    """One error for a kind that this version lacks, or that is not said, in place of one for every key that belongs
    to it."""

    def check(data: object) -> object:
        if not isinstance(data, dict) or data.get("kind") in kinds:
            return data
        if "kind" not in data:
            slip = nearest("kind", data)
            if slip is not None:
                raise wrong(f"unknown key {slip!r}; did you mean 'kind'?", slip, "[key]")
            raise wrong(f"missing key 'kind': {', '.join(kinds[:-1])} or {kinds[-1]}")
        kind = repr(data["kind"]) if isinstance(data["kind"], str) else describe(data["kind"])
        raise wrong(f"kind {kind} is not supported by this version; supported: {', '.join(kinds)}", "kind")

    return check


class CpuTarget(Strict):
    """Machine code for a level of processors; nothing is taken from the host that builds."""

    kind: Literal["cpu"] = Field(description="cpu or cuda")
    march: Annotated[str, matching(r"[\w.+-]+", "a name for gcc -march such as x86-64-v3")] = Field(
        default="x86-64-v3", description="for gcc -march; the default runs wherever there is AVX2"
    )
    simd: Literal["avx2", "avx512", "amx", "neon", "sve"] | None = Field(
        default=None, description="vectors that Inductor generates; default: what march offers"
    )


class CudaTarget(Strict):
    """Device code for NVIDIA GPUs; no architecture is ever assumed."""

    kind: Literal["cuda"] = Field(description="cpu or cuda")
    arch: Distinct[Annotated[str, matching(r"sm_[0-9]{2,3}[af]?", "an architecture such as sm_90")]] = Field(
        description="a list of architectures such as [sm_80, sm_90]"
    )
    ptx: Annotated[str, matching(r"compute_[0-9]{2,3}[af]?", "a PTX level such as compute_80")] | None = Field(
        default=None, description="also keep PTX of this level, for GPUs that are not listed"
    )
    device: (
        Annotated[
            Annotated[Name, Tag("<device>")] | Annotated[Distinct[Name], Tag("<devices>")],
            Discriminator(lambda value: "<devices>" if isinstance(value, list | tuple) else "<device>"),
        ]
        | None
    ) = Field(default=None, description="the GPU, such as h200, or one for each architecture: builds without one")

    @property
    def devices(self) -> tuple[str, ...]:
        """The names under `device`."""
        return (self.device,) if isinstance(self.device, str) else self.device or ()


def _target_tag(data: object) -> str:
    kind = data.get("kind") if isinstance(data, dict) else getattr(data, "kind", None)
    return "<cuda>" if kind == "cuda" else "<cpu>"


Target = CpuTarget | CudaTarget
TargetForm = Annotated[
    Annotated[CpuTarget, Tag("<cpu>")] | Annotated[CudaTarget, Tag("<cuda>")],
    Discriminator(_target_tag),
    BeforeValidator(_known_kind("cpu", "cuda")),
]


class Precision(Strict):
    """One dtype for the parameters, on one target."""

    params: FloatDtype
    target: Name


class Point(Strict):
    """Hot shapes to have ready: the dims of one point multiply."""

    name: Name = Field(default="", description="default: p0, p1, ... by place in the list")
    tier: Literal["hot", "warm", "rare"] = Field(
        default="hot", description="hot: loaded before ready; warm: loaded on first use; rare: left to on_miss"
    )
    weight: Limit | None = Field(default=None, description="share of the traffic, for bench; default: equal shares")
    dims: Mapping[Identifier, Dim] = Field(
        default={}, description="each dim that shapes name: a size, [sizes], {min, max, opt} or {ranges: [...]}"
    )


def _named(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The same with default names filled in; a name stands for one point."""
    names: set[str] = set()
    named = []
    for index, point in enumerate(points):
        name = point.name or f"p{index}"
        if name in names:
            raise wrong(f"a point before this one has the name {name!r} too; rename one", index)
        names.add(name)
        named.append(point.model_copy(update={"name": name}))
    return tuple(named)


class Verify(Strict):
    """How each variant is compared before it is packed."""

    against: Literal["eager"] = "eager"
    rtol: Limit | None = Field(default=None, description="relative tolerance; default: by dtype")
    atol: Limit | None = Field(default=None, description="absolute tolerance; default: by dtype")
    samples: Annotated[int, Field(ge=1, le=64)] = Field(default=3, description="calls to compare")


PadForm = Annotated[
    Annotated[Positive, Tag("<multiple>")] | Annotated[Many[Positive], Tag("<sizes>")],
    Discriminator(lambda value: "<sizes>" if isinstance(value, list | tuple) else "<multiple>"),
]


class OnMiss(Strict):
    """What serves a call that no variant fits."""

    policy: Literal["jit", "eager", "pad", "error"] = "jit"
    background: bool = Field(default=True, description="compile behind the call, which eager serves meanwhile")
    max_jit: Size = Field(default=4, description="variants that misses may add")
    when: Literal["pays", "at_once", "never"] = Field(
        default="pays", description="compile when it is expected to pay back, at the first miss, or never on this host"
    )
    max_seconds: Positive = Field(default=600, description="what one compile behind a miss may take")
    max_memory: Bytes | None = Field(
        default=None,
        description="for each process of such a compile; default: 8GiB (32GiB on a GPU) and three times the weights",
    )
    pad: Mapping[Identifier, PadForm] | None = Field(
        default=None, description="dim -> a multiple to pad to, or a list of sizes to pad to"
    )
    pad_values: Mapping[Identifier, Scalar] = Field(
        default={}, description="argument -> what to pad it with; default: 0"
    )


class TorchExportEntry(Strict):
    """A torch module that is exported and compiled ahead of time by AOTInductor."""

    kind: Literal["torch_export"] = Field(description="torch_export")
    source: Source = Field(description='"pkg.module:name" of what gives an nn.Module, or a path that ends in .pt2')
    args: Mapping[Identifier, Any] = Field(default={}, description="keyword arguments for the source")
    weights: Literal["external"] = Field(default="external", description="one file of weights for all variants")
    imports: Annotated[tuple[ModuleName, ...], Field(strict=False)] = Field(
        default=(), description="modules that the server imports first, such as those that register custom ops"
    )
    inputs: Mapping[Identifier, Input] = Field(description="arguments of forward() by name")
    outputs: Distinct[Name] | None = Field(
        default=None, description="names for a dict of outputs; default: eager's own structure"
    )
    precisions: Distinct[Precision] | None = Field(
        default=None, description="dtypes of the parameters; default: the source's own, on every target"
    )
    points: Annotated[Many[Point], AfterValidator(_named)] = Field(description="hot shapes")
    inductor: Mapping[str, Scalar] = Field(default={}, description="Inductor options, passed through")
    tuning: str | None = Field(
        default=None, description="table of measured kernels for builds without a GPU, such as tuning/encoder.json"
    )
    attention: Distinct[AttentionWay] | None = Field(
        default=None,
        description="operators that may serve attention on a GPU, the preferred one first; default: torch's choice",
    )
    verify: Verify = Verify()
    on_miss: OnMiss = OnMiss()
    targets: Distinct[Name] | None = Field(default=None, description="names of targets; default: all of them")
    training: bool = Field(default=False, description="allow a module that is in train mode")


def _entry_tag(data: object) -> str:
    kind = data.get("kind") if isinstance(data, dict) else getattr(data, "kind", None)
    return f"<{kind}>" if kind in ("triton", "nvrtc") else "<torch>"


Entry = TorchExportEntry | TritonEntry | NvrtcEntry
EntryForm = Annotated[
    Annotated[TorchExportEntry, Tag("<torch>")]
    | Annotated[TritonEntry, Tag("<triton>")]
    | Annotated[NvrtcEntry, Tag("<nvrtc>")],
    Discriminator(_entry_tag),
    BeforeValidator(_known_kind("torch_export", "triton", "nvrtc")),
]


class Bundle(Strict):
    """What the bundle is called."""

    name: Name
    version: SemVer = Field(description="semantic version")
    labels: Mapping[str, str] = Field(default={}, description="annotations and metric labels")


def _always(value: object) -> object:
    if not value:
        raise wrong("every build is reproducible; leave it out")
    return value


class Build(Strict):
    """How to build."""

    jobs: Annotated[
        Annotated[Literal["auto"], Tag("<auto>")] | Annotated[Positive, Tag("<jobs>")],
        Discriminator(lambda value: "<auto>" if isinstance(value, str) else "<jobs>"),
    ] = Field(default="auto", description="processes; auto: one for each CPU that may be used")
    reproducible: Annotated[bool, AfterValidator(_always)] = Field(
        default=True, description="same input, same bytes; every build is"
    )


class Runtime(Strict):
    """Limits for the server."""

    cache_max_size: Bytes = Field(default=2 * 2**30, description="what JIT results may take on disk, such as 2GiB")


class Manifest(Strict):
    """An aotpack manifest: entries, the hot shapes to have ready, and the targets to build them for."""

    schema_version: Literal["aotpack.manifest/v1"] = Field(alias="schema", description="aotpack.manifest/v1")
    bundle: Bundle
    requires: Mapping[Annotated[str, matching(r"[A-Za-z0-9][\w.-]*", "a package name")], Specifier] = Field(
        default={}, description="package -> PEP 440 specifier, checked when built and when loaded"
    )
    targets: Mapping[Name, TargetForm] = Field(min_length=1, description="what to build for, by name")
    devices: Mapping[Name, DeviceForm] = Field(
        default={}, description="GPUs beside those that aotpack knows, by the names that targets use"
    )
    entries: Mapping[Name, EntryForm] = Field(min_length=1, description="what to build, by name")
    build: Build = Build()
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _one_operator(self) -> Self:
        owners: dict[str, str] = {}
        for name, entry in self.entries.items():
            operator = None if isinstance(entry, TorchExportEntry) else entry.op
            if operator is not None and owners.setdefault(operator, name) != name:
                raise wrong(
                    f"{operator} is the operator of {owners[operator]!r} too; rename one", "entries", name, "op"
                )
        return self

    @model_validator(mode="after")
    def _devices_of_archs(self) -> Self:
        """Each device of a target is known, and of one of its architectures."""
        known = {**DEVICES, **{name: form.device(name, DEVICES) for name, form in self.devices.items()}}
        for target_name, target in self.targets.items():
            if isinstance(target, CpuTarget):
                continue
            for name in target.devices:
                if name not in known:
                    raise wrong(f"unknown device {name!r}{did_you_mean(name, known)}", "targets", target_name, "device")
                if not any(find_device((name,), arch, self.devices) for arch in target.arch):
                    message = f"{name} is {known[name].arch}, which is not among the target's architectures"
                    raise wrong(message, "targets", target_name, "device")
        return self

    _path: Path = PrivateAttr(default=Path())

    @property
    def path(self) -> Path:
        """The file it was read from; sources are looked up beside it first."""
        return self._path
