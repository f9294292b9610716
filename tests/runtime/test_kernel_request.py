"""What a kernel's miss asks for: which axes and words take the call, for which GPU. No compiler, no GPU, no bundle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aotpack_runtime.format.choice import Choice, Rule, Timed
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.gpu import Gpu
from aotpack_runtime.format.index import Entry, File, Kernel, KernelRecipe, Parameter, Source
from aotpack_runtime.format.kernel_recipe import dump_kernel_recipe, parse_kernel_recipe
from aotpack_runtime.format.tensor import Call, TensorMeta
from aotpack_runtime.format.tree import LEAF
from aotpack_runtime.jit.kernel_request import KernelRequest, kernel_request

Json = Any
H100 = Gpu((9, 0), (13, 0))
FILE = File("0" * 64, 10)
TRITON = {
    "kind": "triton", "params": {"x": "*{dtype}:{align}", "n": "i32", "step": "1", "BLOCK": "constexpr"},
    "axes": {"dtype": ["fp16", "bf16"], "align": [16], "BLOCK": [128, 64]},
    "configs": [{"num_warps": 4, "num_stages": 3, "num_ctas": 1}, {"num_warps": 8, "num_stages": 3, "num_ctas": 1}],
    "where": [], "guards": ["n <= BLOCK", "n > 0"], "grid": ["count"],
}  # fmt: skip
NVRTC = {
    "kind": "nvrtc", "params": {"x": "const {T}*:16", "n": "int", "step": "long long"},
    "template": {"T": {"float32": "float"}, "K": [8, 16]}, "where": [], "guards": ["n % K == 0"],
    "grid": ["ceil_div(count, K)"], "block": ["K"],
}  # fmt: skip


def entry(manifest: Json, choice: Choice | None = None, archs: tuple[str, ...] = ("sm_90",)) -> Entry:
    recipe = KernelRecipe(manifest=manifest, files={"k.py": FILE}, archs=archs)
    names = ("x", "n", "step", "count")
    return Entry(
        name="e", parameters=tuple(Parameter(name, "positional_or_keyword") for name in names), variants=(), programs=(),
        source=Source("k", {}, {}), fills={}, on_miss={}, verify={},
        kernel=Kernel(text=FILE, suffix=".py", writes=("x",), types=("Tensor", "int", "int", "int"),
                      choice=choice or Choice(), recipe=recipe),
    )  # fmt: skip


def call(dtype: str = "float16", n: Any = 100, step: Any = 1, count: Any = 3, *, offset: int = 0) -> Call:
    leaves = (TensorMeta(dtype, "cuda:0", (300,), (1,), offset), n, step, count)
    return Call((LEAF,) * 4, leaves)


def asked(manifest: Json, given: Call, gpu: Gpu = H100, **more: Any) -> KernelRequest:
    found = kernel_request(entry(manifest, **more), given, gpu)
    assert isinstance(found, KernelRequest), found
    return found


@pytest.mark.parametrize(
    ("given", "axes", "words"),
    [
        pytest.param(
            call(), {"BLOCK": 128, "dtype": "fp16", "align": 16}, {"x": "*fp16:16", "step": "1"}, id="another-gpu"
        ),
        pytest.param(call("bfloat16", 10), {"BLOCK": 64, "dtype": "bf16"}, {"x": "*bf16:16"}, id="smallest"),
        pytest.param(call(n=129), {"BLOCK": 256}, {"n": "i32"}, id="next-power"),
        pytest.param(call("float32"), {"dtype": "fp32", "align": 16}, {"x": "*fp32:16"}, id="dtype"),
        pytest.param(call(offset=2), {"align": 1}, {"x": "*fp16:1"}, id="hint"),
        pytest.param(call(step=7), {"BLOCK": 128}, {"step": "i32"}, id="no-literal"),
        pytest.param(call(step=1 << 40), {"BLOCK": 128}, {"step": "i64"}, id="wide"),
    ],
)
def test_what_a_call_of_a_triton_kernel_asks_for(given: Call, axes: Json, words: Json) -> None:
    request = asked(TRITON, given)
    assert {name: request.axes[name] for name in axes} == axes
    assert {name: request.words[name] for name in words} == words
    assert request.words["BLOCK"] == "constexpr"
    assert request.axes["num_warps"] == 4


@pytest.mark.parametrize(
    ("given", "axes", "words"),
    [
        pytest.param(call("float32", 32), {"T": "float32", "K": 8}, {"x": "const float*:16"}, id="another-gpu"),
        pytest.param(call("float64", 16), {"T": "float64", "K": 8}, {"x": "const double*:16"}, id="type"),
        pytest.param(call("float32", 12), {"K": 1}, {"n": "int"}, id="number"),
    ],
)
def test_what_a_call_of_a_template_asks_for(given: Call, axes: Json, words: Json) -> None:
    request = asked(NVRTC, given)
    assert {name: request.axes[name] for name in axes} == axes
    assert {name: request.words[name] for name in words} == words
    assert request.spelled == ({"T": "double"} if axes.get("T") == "float64" else {})


@pytest.mark.parametrize(
    ("manifest", "given", "reason"),
    [
        pytest.param(TRITON, call(n=0), "the manifest's guard does not hold: n > 0", id="guard"),
        pytest.param(TRITON, call(n=1 << 21), "the manifest's guard does not hold: n <= BLOCK", id="no-such-block"),
        pytest.param(TRITON, call(n=True), "n: expected an int, got True", id="bool"),
        pytest.param(TRITON, call(step=1 << 70), "step: 1180591620717411303424 is beyond 64 bits", id="beyond-64"),
        pytest.param(TRITON, call(count=1 << 31), "expected count in [0, 2147483647], actual 2147483648", id="grid"),
        pytest.param(NVRTC, call("float32", 32, offset=4), "x: expected an address divisible by 16", id="promise"),
        pytest.param(
            NVRTC, call("complex64", 32), "x.dtype: expected float32, as its C++ says, got complex64", id="type"
        ),
        pytest.param(NVRTC, call("float32", 1 << 31), "n: expected -2147483648 to 2147483647", id="c-int"),
    ],
)
def test_what_nothing_is_compiled_for(manifest: Json, given: Call, reason: str) -> None:
    found = kernel_request(entry(manifest), given, H100)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_what_is_odd_about_a_tensor_is_the_reason() -> None:
    given = call()
    odd = replace(given.leaves[0], odd="is read-only, and is written")  # type: ignore[type-var]
    found = kernel_request(entry(TRITON), Call(given.trees, (odd, *given.leaves[1:])), H100)
    assert found == "x is read-only, and is written"


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        pytest.param(Choice(), {"BLOCK": 128, "num_warps": 4}, id="smallest"),
        pytest.param(Choice(rules=(Rule(parse("n > 50"), {"num_warps": 8}),)), {"num_warps": 8}, id="rule"),
        pytest.param(
            Choice(tables={"sm_90": (Timed({"n": 128}, {}, {"num_warps": 8, "BLOCK": 128}),)}),
            {"num_warps": 8, "BLOCK": 128}, id="table",
        ),
    ],
)  # fmt: skip
def test_the_entry_s_choice_picks_among_equals(choice: Choice, wanted: Json) -> None:
    request = asked(TRITON, call(), choice=choice)
    assert {name: request.axes[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("gpu", "archs", "arch"),
    [
        (H100, ("sm_90a", "sm_80"), "sm_90a"),
        (Gpu((9, 0), (13, 0)), ("sm_80", "compute_80"), "sm_90"),
        (Gpu((12, 1), (13, 0)), ("sm_90a",), "sm_121"),
    ],
)
def test_the_gpu_is_named_as_a_target_names_it(gpu: Gpu, archs: tuple[str, ...], arch: str) -> None:
    assert asked(TRITON, call(), gpu, archs=archs).arch == arch


def test_a_key_is_of_what_comes_out_and_not_of_the_call() -> None:
    """300 and 301 columns ask for one variant, another source for another."""
    keys = {asked(TRITON, call(n=n)).key("bundle", "cuda") for n in (300, 301, 512)}
    assert len(keys) == 1
    assert asked(TRITON, call(n=513)).key("bundle", "cuda") not in keys
    assert asked(TRITON, call(n=300)).key("another", "cuda") not in keys


def test_a_recipe_is_read_back_in_the_manifest_s_order() -> None:
    recipe = KernelRecipe(manifest=TRITON, files={"kernels/k.py": FILE}, archs=("sm_90",))
    found = parse_kernel_recipe(dump_kernel_recipe(recipe))
    assert found == recipe
    assert list(found.manifest["params"]) == list(TRITON["params"])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"files": {"../k.py": {"sha256": "0" * 64, "bytes": 1}}}, id="up"),
        pytest.param({"files": {"/etc/k.py": {"sha256": "0" * 64, "bytes": 1}}}, id="absolute"),
        pytest.param({"files": {"a//k.py": {"sha256": "0" * 64, "bytes": 1}}}, id="empty-part"),
        pytest.param({"files": {"k\n.py": {"sha256": "0" * 64, "bytes": 1}}}, id="newline"),
        pytest.param({"files": {str(n): {"sha256": "0" * 64, "bytes": 1} for n in range(600)}}, id="many"),
        pytest.param({"archs": ["sm_90; rm"]}, id="arch"),
        pytest.param({"manifest": "[]"}, id="list"),
        pytest.param({"manifest": "{"}, id="no-json"),
        pytest.param({"manifest": '{"kind": "hip"}'}, id="kind"),
        pytest.param({"manifest": '{"kind": "triton", "kind": "nvrtc"}'}, id="twice"),
        pytest.param({"manifest": '{"kind": "triton", "params": {"x": "*{T}"}, "axes": {}, "grid": []}'}, id="no-axis"),
        pytest.param({"manifest": '{"kind": "triton", "params": {"x": 1}, "axes": {}, "grid": []}'}, id="word"),
    ],
)
def test_a_recipe_that_is_none_is_refused(change: Json) -> None:
    record = dump_kernel_recipe(KernelRecipe(manifest=TRITON, files={"k.py": FILE}, archs=("sm_90",)))
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_kernel_recipe({**record, **change})
