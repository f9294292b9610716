"""Build aotpack bundles: read a manifest, plan its jobs, build it.

from aotpack import build, read_manifest

result = build(read_manifest(Path("manifest.yaml")))

Each name is fetched when it is first used (PEP 562): reading manifests takes a third of a second to import, which
neither workers nor commands that look at a bundle need.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotpack.build import build as build
    from aotpack.manifest import read_manifest as read_manifest
    from aotpack.plan import make_plan as make_plan

__version__ = "0.1.0"

__all__ = ["build", "make_plan", "read_manifest"]


_ELSEWHERE = {"make_plan": "aotpack.plan", "read_manifest": "aotpack.manifest"}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """`build` names a function of this package and the module that it is in. It is the function here, whoever imports
    the module."""

    @property
    def build(self) -> Any:
        return import_module("aotpack.build").build

    @build.setter
    def build(self, module: ModuleType) -> None:
        """What Python does when it has imported the module."""


sys.modules[__name__].__class__ = _Package
