"""Keys are named parts: a digest decides, the parts say what changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: the same value gives the same bytes. NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(data: bytes) -> str:
    """Hex sha256."""
    return hashlib.sha256(data).hexdigest()


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Hex sha256 of named parts; the mapping's order does not matter."""
    return digest(canonical(dict(parts)))


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names of parts that differ: ["toolchain"] when only the compiler moved."""
    before, after = ({name: canonical(part) for name, part in parts.items()} for parts in (old, new))
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
