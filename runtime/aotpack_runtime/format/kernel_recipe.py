"""A kernel's recipe as it is written, and its terms: what in the manifest's entry decides which variants may be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from aotpack_runtime.format.choice import Axes
from aotpack_runtime.format.codec import no_duplicates
from aotpack_runtime.format.expression import Expression, parse
from aotpack_runtime.format.gpu import parse_arch
from aotpack_runtime.format.index import KernelRecipe
from aotpack_runtime.format.launch import BLOCK_LIMIT, GRID_LIMITS
from aotpack_runtime.format.plain import dump_file, parse_file, text
from aotpack_runtime.format.words import Word, c_word, triton_word
from aotpack_runtime.record import Record

Json = Any
MOST_FILES = 512
"""A source with more files than this (a library of headers) is not carried."""

_PART = re.compile(r"[A-Za-z0-9_+@=-][A-Za-z0-9_+@=. -]{0,127}")
_AXIS = re.compile(r"\{(\w+)\}")
_WORDS: Mapping[str, Callable[[str], Word]] = {"triton": triton_word, "nvrtc": c_word}


class Terms(Record, kw_only=True):
    """Parameters as templates over axes, the values of axes and how they are spelled in templates where that differs,
    the configs, and what must hold: `where` between numbers of a variant, `guards` and `limits` (an expression and its
    bounds) at a call."""

    kind: Literal["triton", "nvrtc"]
    params: Mapping[str, str]
    axes: Mapping[str, tuple[int | str, ...]]
    spelled: Mapping[str, Mapping[str, str]]
    configs: tuple[Axes, ...]
    where: tuple[Expression, ...]
    guards: tuple[Expression, ...]
    limits: tuple[tuple[Expression, int, int], ...]

    def word(self, text: str) -> Word:
        """A parameter's word; ValueError when it is none."""
        return _WORDS[self.kind](text)

    def spelling(self, axis: str, value: int | str, new: Mapping[str, str]) -> str:
        """What stands for a value of an axis in templates; `new` spells values that the manifest does not have."""
        known = self.spelled.get(axis)
        return str(value) if known is None else known.get(str(value)) or new[str(value)]


def axes_in(template: str) -> tuple[str, ...]:
    """Axes that stand in a parameter's template: {dtype}."""
    return tuple(dict.fromkeys(_AXIS.findall(template)))


def filled(template: str, spelling: Mapping[str, str]) -> str:
    """A template with its axes spelled out. Not `str.format`: the text is a bundle's."""
    return _AXIS.sub(lambda match: spelling[match[1]], template)


def terms_of(recipe: KernelRecipe) -> Terms:
    """ValueError, TypeError or KeyError for what is no entry of a manifest."""
    entry = recipe.manifest
    kind = entry["kind"]
    if kind not in _WORDS:
        raise ValueError(f"a kernel of kind {str(kind)[:40]!r}")
    axes = entry["axes" if kind == "triton" else "template"]
    for name, template in entry["params"].items():
        if unknown := set(axes_in(text(template))) - axes.keys():
            raise ValueError(f"the parameter {name!r} follows {min(unknown)!r}, which is no axis")
    extents = [*zip(entry["grid"], (0, 0, 0), GRID_LIMITS, strict=False)]
    extents += [(extent, 1, BLOCK_LIMIT) for extent in entry.get("block", ())]
    return Terms(
        kind=kind,
        params={name: text(template) for name, template in entry["params"].items()},
        axes={name: tuple(map(_value, values)) for name, values in axes.items()},
        spelled={name: dict(values) for name, values in axes.items() if isinstance(values, Mapping)},
        configs=tuple({name: _value(one) for name, one in config.items()} for config in entry.get("configs", ())),
        where=tuple(parse(text(relation)) for relation in entry["where"]),
        guards=tuple(parse(text(relation)) for relation in entry["guards"]),
        limits=tuple((parse(text(extent)), low, high) for extent, low, high in extents),
    )


def dump_kernel_recipe(recipe: KernelRecipe) -> Json:
    return {
        "manifest": json.dumps(recipe.manifest, separators=(",", ":")),  # as text: parameters and axes have an order
        "files": {path: dump_file(file) for path, file in recipe.files.items()},
        "archs": list(recipe.archs),
    }


def parse_kernel_recipe(value: Json) -> KernelRecipe:
    for path in value["files"]:
        check_path(path)
    if len(value["files"]) > MOST_FILES:
        raise ValueError(f"a source of {len(value['files'])} files, at most {MOST_FILES}")
    recipe = KernelRecipe(
        manifest=dict(json.loads(text(value["manifest"]), object_pairs_hook=no_duplicates)),
        files={path: parse_file(file) for path, file in value["files"].items()},
        archs=tuple(parse_arch(text(arch)).text for arch in value["archs"]),
    )
    terms_of(recipe)
    return recipe


def check_path(path: str) -> None:
    """ValueError for a path that is not inside of the manifest's folder, plainly named."""
    if not all(_PART.fullmatch(part) for part in path.split("/")):
        raise ValueError(f"{path[:80]!r} is no path beside a manifest")


def _value(value: Json) -> int | str:
    if not isinstance(value, int | str):
        raise TypeError(f"a value of an axis is {str(value)[:40]!r}")
    return value
