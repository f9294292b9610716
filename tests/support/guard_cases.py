"""The zoo `guard_cases`: one small model for each way in which a call can differ from what a variant was built for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from aotpack_runtime import GuardMiss, load
from tests.support.building import build_zoo, entry, zoo_module

MODELS = """
import torch
from torch import nn


def affine():
    return Plain(lambda x: x * 2 + 1)


def total():
    return Plain(lambda x: x.sum(0))


def mean():
    return Plain(lambda x: x.mean(0))


def hundreds():
    return Plain(lambda x: x.reshape(100, -1) + 1)


def conv():
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).eval()


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 2).eval()


def squeezes():
    return Plain(lambda x: (x.squeeze(0) * 2, x.squeeze() + 1, x.squeeze()))


def rest():
    return Plain(lambda x: (x * 2)[1:, ::2])


def halves():
    return Plain(lambda x: x[: x.shape[0] // 2] * 2)


def counts_dims():
    return Plain(lambda x: (x * 2, x.squeeze().dim()))


def flattens():
    return Plain(lambda x: x.reshape(-1) + x.contiguous().view(-1))


def asks_layout():
    return Plain(lambda x: x + 1 if x.is_contiguous() else x - 1)


def writes():
    return Plain(lambda x: x.mul_(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.eval()


class Plain(Model):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Folds(Model):
    def forward(self, x, y):
        return x.view(y.shape[0], -1) * 2


class Adds(Model):
    def forward(self, x, y):
        return x + y


class Apart(Model):
    def forward(self, x, y):
        return x.sum() * 2 + y.sum()


class Affine(Model):
    def forward(self, x, k, flag=True, alpha=0.5):
        return x * k + alpha if flag else x * k - alpha


class Narrows(Model):
    def forward(self, x, n):
        return x.narrow(0, 0, n).sum()


class Cuts(Model):
    def forward(self, x, n):
        return x[:n].squeeze()


class Branches(Model):
    def forward(self, x):
        if x.shape[0] % 8 == 0:
            return x.reshape(-1, 8).sum(1)
        return x - 1


class Conditions(Model):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Selects(Model):
    def forward(self, x):
        return x[x > 0]


class Counts(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("c", torch.zeros(4))

    def forward(self, x):
        y = torch.cond(self.c.sum() > 2, lambda x: x * 10, lambda x: x * 1, (x,))
        self.c.add_(1)
        return y


class Nested(Model):
    def forward(self, batch, pair):
        a, b = pair
        return {"ids": [batch["left"] + a, batch["right"][0] * b], "sizes": (batch["left"].shape[0], None, "ok")}


class LooksUp(Model):
    def forward(self, x, mask):
        if not torch.compiler.is_compiling() and bool((mask == 1).all()):
            return x * 2
        return x * 2 * mask[torch.arange(x.shape[0])]


class Scales(Model):
    def forward(self, x, s):
        return x * s
"""


def floats(*shape: Any, **more: Any) -> dict[str, Any]:
    """An input of float32."""
    return {"shape": list(shape), "dtype": "float32", **more}


def dims(*points: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"dims": point} for point in points]


ENTRIES: dict[str, dict[str, Any]] = {
    "affine": entry("affine", {"x": floats(4, 8)}),
    "affine_rows": entry("affine", {"x": floats("b", 8)}, dims({"b": {"min": 1, "max": 16}})),
    "gap": entry("affine", {"x": floats(4, 1, 5)}),
    "sum_rows": entry("total", {"x": floats("b", 8)}, dims({"b": {"min": 2, "max": 16}})),
    "mean_rows": entry("mean", {"x": floats("b", 8)}, dims({"b": {"min": 0, "max": 16}})),
    "hundreds": entry("hundreds", {"x": floats("n")}, dims({"n": {"min": 100, "max": 400, "opt": 200}})),
    "folds": entry(
        "Folds",
        {"x": floats("n"), "y": floats("m")},
        dims({"n": {"min": 0, "max": 64, "opt": 12}, "m": {"min": 0, "max": 64, "opt": 3}}),
    ),
    "adds": entry("Adds", {"x": floats("n"), "y": floats("n")}, dims({"n": {"min": 2, "max": 16, "opt": 4}})),
    "apart": entry("Apart", {"x": floats("n"), "y": floats("n")}, dims({"n": {"min": 1, "max": 16, "opt": 4}})),
    "outer": entry(
        "Adds",
        {"x": floats("s", 1), "y": floats(1, "t")},
        dims({"s": {"min": 1, "max": 8}, "t": {"min": 1, "max": 8}}),
    ),
    "derived": entry(
        "Apart",
        {"x": floats("2*n"), "y": floats("n+1")},
        dims({"n": {"min": 1, "max": 16, "opt": 4}}),
    ),
    "linear": entry("linear", {"input": floats("b", 6)}, dims({"b": {"min": 1, "max": 8, "opt": 1}})),
    "linear_one": entry("linear", {"input": floats("b", 6)}, dims({"b": {"min": 1, "max": 1}})),
    "linear_empty": entry("linear", {"input": floats("b", 6)}, dims({"b": {"min": 0, "max": 8}})),
    "open_end": entry("affine", {"x": floats("n")}, dims({"n": {"min": 2, "max": None}})),
    "conv": entry("conv", {"input": floats(1, 3, 8, 8)}),
    "conv_last": entry(
        "conv", {"input": floats("b", 3, 8, 8, layout="channels_last")}, dims({"b": {"min": 1, "max": 4}})
    ),
    "scalars": entry("Affine", {"x": floats(3), "k": {"value": 3}}),
    "narrow": entry("Narrows", {"x": floats(64), "n": {"dtype": "int", "range": [1, 64]}}),
    "cuts": entry("Cuts", {"x": floats(20), "n": {"dtype": "int", "range": [1, 16]}}),
    "rest": entry("rest", {"x": floats("n", 8)}, dims({"n": {"min": 2, "max": 16}})),
    "halves": entry("halves", {"x": floats("n")}, dims({"n": {"min": 4, "max": 16}})),
    "scalar_tensor": entry("Scales", {"x": floats("n"), "s": floats()}, dims({"n": {"min": 1, "max": 8}})),
    "squeezes": entry("squeezes", {"x": floats("n", 5)}, dims({"n": {"min": 1, "max": 8}})),
    "counts_dims": entry("counts_dims", {"x": floats("n", 5)}, dims({"n": {"min": 1, "max": 8}})),
    "flattens": entry("flattens", {"x": floats("n", 5)}, dims({"n": {"min": 1, "max": 8}})),
    "asks_layout": entry("asks_layout", {"x": floats("n", 5)}, dims({"n": {"min": 1, "max": 8}})),
    "writes": entry("writes", {"x": floats(4, 8)}),
    "branches": entry("Branches", {"x": floats("n")}, dims({"n": {"min": 1, "max": 64, "opt": 16}})),
    "cond": entry("Conditions", {"x": floats("n")}, dims({"n": {"min": 1, "max": 8}})),
    "selects": entry("Selects", {"x": floats("n")}, dims({"n": {"min": 1, "max": 8}})),
    "counts": entry("Counts", {"x": floats("n")}, dims({"n": {"min": 1, "max": 8}})),
    "nested": entry(
        "Nested",
        {
            "batch": {"dict": {"left": floats("n"), "right": {"list": [floats("n")]}}},
            "pair": {"tuple": [floats("n"), {"value": 3}]},
        },
        dims({"n": {"min": 1, "max": 8}}),
    ),
    "looks_up": entry(
        "LooksUp",
        {"x": floats("b", 4), "mask": floats("b", 4, fill="ones")},
        dims({"b": {"min": 2, "max": 16, "opt": 8}}),
    ),
    "complex": entry("affine", {"x": {"shape": ["n"], "dtype": "complex64"}}, dims({"n": {"min": 1, "max": 8}})),
}


def bundle() -> Path:
    """The zoo's bundle, built at most once however many test processes ask."""
    return build_zoo("guard_cases", MODELS, ENTRIES)


Tier = Literal["hit", "program", "source"]


class Cases:
    """The bundle's entries beside the models themselves: eager, to compare with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = load(path, mode="eager")
        self.strict = load(path, mode="strict")
        self._zoo = zoo_module(path)

    def eager(self, name: str) -> Any:
        """The model of an entry, constructed anew."""
        return getattr(self._zoo, ENTRIES[name]["source"].partition(":")[2])()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        """The entry's result, and what served the call: "hit", "program" or "source"."""
        entry = self.session[name]
        before = tiers(entry.counts())
        with torch.no_grad():
            result = entry(*args, **kwargs)
        return result, list((tiers(entry.counts()) - before).elements())

    def check(self, name: str, *args: Any, tier: Tier, **kwargs: Any) -> Any:
        """Our result: eager's in every leaf, and served by `tier` the first time and again when it is remembered."""
        with torch.no_grad():
            wanted = self.eager(name)(*args, **kwargs)
        found: Any = None
        for _ in range(3):
            found, served = self.call(name, *args, **kwargs)
            assert served == [tier], (served, str(self.session[name].explain(*args, **kwargs)))
            assert_same(found, wanted)
        return found

    def agree(self, name: str, *args: Any, tier: Tier | None = None, **kwargs: Any) -> Any:
        """`check` where eager takes the call, `refuses` where it does not; any tier unless one is given."""
        try:
            with torch.no_grad():
                wanted = self.eager(name)(*args, **kwargs)
        except Exception:
            assert tier is None
            return self.refuses(name, *args, **kwargs)
        found, served = self.call(name, *args, **kwargs)
        assert len(served) == 1
        assert tier is None or served == [tier]
        assert_same(found, wanted)
        return found

    def refuses(self, name: str, *args: Any, **kwargs: Any) -> Exception:
        """What we raise for a call that eager refuses: the same error."""
        with pytest.raises(Exception) as theirs, torch.no_grad():  # noqa: PT011 - any error of eager's
            self.eager(name)(*args, **kwargs)
        with pytest.raises(type(theirs.value)) as ours, torch.no_grad():
            self.session[name](*args, **kwargs)
        assert str(ours.value) == str(theirs.value)
        return ours.value

    def miss(self, name: str, *args: Any, **kwargs: Any) -> str:
        """What a strict session says of a call that no variant takes."""
        with pytest.raises(GuardMiss) as error:
            self.strict[name](*args, **kwargs)
        return str(error.value)


def tiers(counts: Mapping[str, Any]) -> Counter[str]:
    """Calls by what served them."""
    return Counter({"hit": counts["hits"], **counts["misses_by_tier"]})


@contextmanager
def opened() -> Iterator[Cases]:
    """The cases, with `zoo` importable: the source tier looks it up by that name, which other zoos have as well."""
    path = bundle()
    mine = sys.modules.pop("zoo", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        cases = Cases(path)
        try:
            yield cases
        finally:
            cases.session.close()
            cases.strict.close()
            sys.modules.pop("zoo", None)
            if mine is not None:
                sys.modules["zoo"] = mine


def assert_same(found: Any, wanted: Any) -> None:
    """Equal in every leaf: type, dtype, shape, layout, strides, and value."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert found.layout == wanted.layout
        assert found.device == wanted.device
        if wanted.layout is torch.strided and wanted.device.type != "meta" and 0 not in wanted.shape:
            steps = [
                (a, b) for size, a, b in zip(wanted.shape, found.stride(), wanted.stride(), strict=True) if size > 1
            ]
            assert all(a == b for a, b in steps), (found.stride(), wanted.stride())
        if wanted.device.type != "meta":
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)
    else:
        assert found == wanted


def in_child(path: Path, code: str, **environment: str) -> str:
    """What `code` prints in a process of its own, which has to end normally; `session` is there."""
    text = f"import torch, aotpack_runtime\nsession = aotpack_runtime.load({str(path)!r}, mode='eager')\n"
    done = subprocess.run(
        [sys.executable, "-c", text + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(path.parent), **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout
