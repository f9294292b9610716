"""Build aotpack bundles: read a manifest, plan its jobs, build it.

from aotpack import build, read_manifest

result = build(read_manifest(Path("manifest.yaml")))
"""

from __future__ import annotations

from aotpack.build import build
from aotpack.manifest import read_manifest
from aotpack.plan import make_plan

__version__ = "0.1.0"

__all__ = ["build", "make_plan", "read_manifest"]
