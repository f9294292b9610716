"""Misses on a GPU, as far as they are decided without one: what a child sees, whether there is room, what is asked for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aotpack_runtime.drivers.captures import beside_captures
from aotpack_runtime.format.gpu import Gpu
from aotpack_runtime.format.index import Recipe, RecipeTarget
from aotpack_runtime.format.target import Target
from aotpack_runtime.format.tensor import TensorMeta
from aotpack_runtime.jit import model_misses
from aotpack_runtime.jit.gpu import visible
from aotpack_runtime.jit.model_misses import ModelMisses
from aotpack_runtime.jit.request import exact, why_not
from tests.runtime.test_jit_request import call, program

ON_GPU = RecipeTarget(target=Target("cuda", {"cpu": "x86-64"}), job={"device": "cuda", "arch": "sm_80"})


@pytest.mark.parametrize(
    ("device", "variable", "seen"),
    [
        ("cpu", "", None),
        ("cuda:0", "", "0"),
        ("cuda:1", "", "1"),
        ("cuda", "3,5", "3"),
        ("cuda:1", "3, 5", "5"),
        ("cuda:1", "GPU-aa,GPU-bb", "GPU-bb"),
    ],
)
def test_a_child_sees_the_caller_s_gpu_and_no_other(
    device: str, variable: str, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible(device) == ({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen})


def misses(device: str, weights_bytes: int = 0) -> ModelMisses:
    machine = SimpleNamespace(gpu=Gpu((9, 0), (13, 0)), devices=("cpu", "cuda"), cpu_flags=frozenset())
    index = SimpleNamespace(weights_file=SimpleNamespace(size_bytes=weights_bytes))
    jit: Any = SimpleNamespace(
        bundle=SimpleNamespace(index=index), device=device, machine=machine, allow=frozenset({"cpu"}), unavailable=""
    )
    entry: Any = SimpleNamespace(device=device, record=SimpleNamespace(name="e"))
    return ModelMisses(jit, entry)


@pytest.mark.parametrize(
    ("device", "free", "why"),
    [
        ("cpu", 0, ""),
        ("cuda:0", None, ""),
        ("cuda:0", 9 << 30, ""),
        ("cuda:1", (9 << 30) - 1, "cuda:1 has 9215 MiB free, a compile beside it needs 9216"),
    ],
)
def test_a_compile_is_begun_where_its_context_and_twice_the_weights_fit(
    device: str, free: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_misses, "free_bytes", lambda where: free)
    assert misses(device, 4 << 30).room() == why


def on_gpu() -> Any:
    made = program()
    given: list[Any] = list(made.guards.leaves)
    leaves = tuple(replace(leaf, device="cuda") if hasattr(leaf, "device") else leaf for leaf in given)
    recipe = Recipe(outputs=made.outputs, options={}, targets=(ON_GPU,))
    return replace(made, guards=replace(made.guards, leaves=leaves), recipe=recipe, target=Target("cuda", {}))


def test_what_is_compiled_is_for_the_gpu_at_hand_whatever_the_target_names() -> None:
    target = misses("cuda:0")._target(on_gpu())
    assert target is not None
    assert target.job == {"device": "cuda", "arch": "sm_90"}
    made = exact("e", on_gpu(), target, call(70))
    assert [leaf.get("device") for leaf in made.leaves] == ["cuda", "cuda", None, None]


def test_nothing_is_compiled_for_what_lies_askew_on_a_gpu() -> None:
    given = call(70, device="cuda:0")
    x, y, *rest = (leaf for leaf in given.leaves)
    assert isinstance(x, TensorMeta) and isinstance(y, TensorMeta)
    leaves = (replace(x, device="cuda"), replace(y, device="cuda"), *rest)
    assert why_not(on_gpu(), replace(given, leaves=leaves)) == ""
    askew = (replace(x, device="cuda", offset=4), *leaves[1:])
    assert "expected an address divisible by 16" in why_not(on_gpu(), replace(given, leaves=askew))


def test_without_a_driver_nothing_is_done_about_captures() -> None:
    with beside_captures("cuda:0"), beside_captures("cpu"):
        pass
