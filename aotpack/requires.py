"""What a manifest's `requires` says of the packages that build it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from aotpack_runtime.errors import MissingDependency


def check_requires(requires: Mapping[str, str]) -> None:
    """MissingDependency for the first requirement of the manifest that this environment does not meet."""
    from packaging.specifiers import SpecifierSet

    for name, wanted in requires.items():
        try:
            found = _nvrtc_version() if name == "nvrtc" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise MissingDependency(name, needed_for="this manifest (requires)", install=f"'{name}{wanted}'") from None
        if not SpecifierSet(wanted).contains(found, prereleases=True):
            raise MissingDependency(
                f"{name}{wanted}",
                needed_for=f"this manifest (requires; {found} is installed)",
                install=f"'{name}{wanted}'",
            )


def _nvrtc_version() -> str:
    """What the library says of itself: its package's metadata may be another's."""
    from aotpack.compilers.nvrtc_library import load_nvrtc

    return load_nvrtc().name
