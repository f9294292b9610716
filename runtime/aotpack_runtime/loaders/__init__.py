"""Artifact -> executable, one artifact kind a file. The table holds dotted names: listing kinds imports none.

Every loader has `load(variant, files, weights) -> Executable`, where `files` are checked paths by name and `weights`
the `TorchWeights` that all variants of a weight set share.
"""

from __future__ import annotations

from collections.abc import Mapping

LOADERS: Mapping[str, str] = {
    "aoti": "aotpack_runtime.loaders.aoti",
    "exported": "aotpack_runtime.loaders.exported",
}
WEIGHTS = "aotpack_runtime.loaders.tensors"
SOURCE = "aotpack_runtime.loaders.source"
