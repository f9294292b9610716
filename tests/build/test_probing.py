"""What is known of a size once it was tried."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="programs are tried with torch")

from aotpack.compilers.probing import _fixed
from aotpack.compilers.sizes import named_sizes
from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard


@pytest.mark.parametrize(("name", "closed"), [("x.shape[0]", 5), ("keep", Range(5, 5))])
def test_a_size_that_may_not_vary_is_fixed_whatever_it_is_a_size_of(name: str, closed: int | Range) -> None:
    wide = Range(2, 9)
    x = TensorGuard(path="x", dtype="float32", device="cpu", dims=(wide, wide))
    guards = Guards(trees=(), leaves=(x, IntGuard(path="keep", dim=wide)))
    before, after = dict(named_sizes(guards)), dict(named_sizes(_fixed(guards, name, 5)))
    assert after == {**before, name: closed}
