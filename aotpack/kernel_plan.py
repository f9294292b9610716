"""A kernel entry of a manifest -> its variants: axes x configs x architectures. Pure, as `plan` is.

Variants are in the order in which calls try them: machine code before PTX, the newest architecture first, then the most
specialised parameters (an aligned pointer before any pointer), then the smallest numbers of the axes, then the order of
the manifest. Of several that fit a call, the entry's choice takes one.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aotpack.manifest_kernels import KernelEntry, NvrtcEntry, TritonEntry
from aotpack.manifest_model import CudaTarget, Manifest
from aotpack_runtime.errors import ManifestError, Problem
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.gpu import parse_arch
from aotpack_runtime.format.words import Word

Json = Any
Axes = Mapping[str, int | str]

CONFIG_FIELDS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariant:
    """One kernel to compile for one architecture: `axes` with the whole config, and each parameter's word."""

    id: str
    axes: Axes
    words: Mapping[str, Word]
    arch: str
    """`sm_90` for machine code, `compute_80` for PTX."""
    expression: str = ""
    """Of a C++ kernel: its name expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """One kernel entry for one target."""

    entry: str
    target: str
    kind: str
    variants: tuple[KernelVariant, ...]
    record: KernelEntry
    device: str = "cuda"


def plan_kernel(manifest: Manifest, name: str, entry: KernelEntry) -> Iterator[KernelPlan]:
    """Its variants for each of its targets; ManifestError when two of them would have one id."""
    targets = entry.targets or tuple(key for key, target in manifest.targets.items() if isinstance(target, CudaTarget))
    combinations = list(entry.combinations())
    for target_name in targets:
        target = manifest.targets[target_name]
        assert isinstance(target, CudaTarget)
        archs = sorted(target.arch, key=lambda text: parse_arch(text).capability, reverse=True)
        variants = [
            _variant(entry, name, axes, arch, target_name)
            for arch in (*archs, *([target.ptx] if target.ptx else []))
            for axes in combinations
        ]
        twice = [one for one, count in Counter(variant.id for variant in variants).items() if count > 1]
        if twice:
            message = f"two values give the id {twice[0]!r}; rename one"
            raise ManifestError([Problem(str(manifest.path), 1, 1, f"entries.{name}.{entry.axis_field()}", message)])
        places = {arch: place for place, arch in enumerate((*archs, target.ptx))}
        variants.sort(key=lambda variant: (places[variant.arch], -_special(variant), _numbers(entry, variant)))
        yield KernelPlan(entry=name, target=target_name, kind=entry.kind, variants=tuple(variants), record=entry)


def tuned_axes(entry: KernelEntry) -> tuple[str, ...]:
    """Axes that a table picks: what no argument decides. Of Triton the constexprs and the config, of C++ the numbers of
    the template."""
    if isinstance(entry, TritonEntry):
        own = [axis for axis in entry.axes if entry.params.get(axis) == "constexpr"]
        return (*own, *entry.configs[0])
    return tuple(axis for axis, values in entry.axis_values().items() if all(isinstance(one, int) for one in values))


def candidates(entry: KernelEntry) -> list[dict[str, int | str]]:
    """What a table picks among, each once, in the manifest's order."""
    names, found = tuned_axes(entry), []
    for axes in entry.combinations():
        pick = {name: axes[name] for name in names}
        if pick not in found:
            found.append(pick)
    return found


def _variant(entry: KernelEntry, name: str, axes: Axes, arch: str, target: str) -> KernelVariant:
    spelled = {axis: entry.spelling(axis, axes[axis]) for axis in entry.axis_values()}
    words = {parameter: entry.word(text.format(**spelled)) for parameter, text in entry.params.items()}
    expression = entry.name_expression.format(**spelled) if isinstance(entry, NvrtcEntry) else ""
    label = "-".join(_label(entry, axes)) or "only"
    return KernelVariant(id=f"{name}/{label}/{target}/{arch}", axes=axes, words=words, arch=arch, expression=expression)


def _label(entry: KernelEntry, axes: Axes) -> Iterator[str]:
    """The axes in order, then what configs differ in."""
    for axis in entry.axis_values():
        yield f"{axis}{axes[axis]}" if isinstance(axes[axis], int) else str(axes[axis]).replace(" ", "")
    if isinstance(entry, TritonEntry):
        for field in entry.configs[0]:
            if len({config[field] for config in entry.configs}) > 1:
                yield f"{field}{axes[field]}"


def _special(variant: KernelVariant) -> int:
    """How much its compiler was told about arguments."""
    return sum((word.divisor > 1) + 2 * (word.kind in ("literal", "descriptor")) for word in variant.words.values())


def _numbers(entry: KernelEntry, variant: KernelVariant) -> tuple[int, ...]:
    """Numbers of the axes, smallest first; words, and configs among each other, keep the manifest's order."""
    place = []
    for axis, values in entry.axis_values().items():
        value = variant.axes[axis]
        place.append(value if isinstance(value, int) else values.index(value))
    return tuple(place)


def folded(text: str, axes: Axes) -> str:
    """An expression with the numbers of the axes in place of their names."""
    tree = _Fold({name: value for name, value in axes.items() if isinstance(value, int)}).visit(
        ast.parse(text, mode="eval")
    )
    return parse(ast.unparse(tree)).text


class _Fold(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._values.get(node.id)
        return node if value is None else ast.copy_location(ast.Constant(value), node)
