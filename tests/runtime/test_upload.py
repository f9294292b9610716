"""Weights on their way to a GPU: what lies side by side goes in one copy, and every byte to its own place."""

from __future__ import annotations

import itertools
import random

from aotpack_runtime.loaders.upload import _joined


def test_joined_copies_move_the_same_bytes_as_single_ones() -> None:
    draw = random.Random(1)
    for _ in range(200):
        parts, to, source = [], 0, draw.randrange(1000)
        for _ in range(draw.randrange(12)):
            size = draw.choice([0, 3, 8, 8, 8])
            parts.append((to, source, size))
            to += size + draw.choice([0, 0, 5])
            source += size + draw.choice([0, 0, 5])
        pieces = list(_joined(parts))
        assert _moves(pieces) == _moves(parts)
        gaps = sum(1 for a, b in itertools.pairwise(parts) if (b[0] - a[0], b[1] - a[1]) != (a[2], a[2]))
        assert len([piece for piece in pieces if piece[2]]) <= gaps + 1


def _moves(parts: list[tuple[int, int, int]]) -> dict[int, int]:
    return {to + n: source + n for to, source, size in parts for n in range(size)}
