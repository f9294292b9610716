"""Triton kernels are compiled without a GPU, the record says how to launch them, and nonsense is refused in a line."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from aotpack.compilers import triton as compiler
from aotpack.compilers.cubin import read_cubin, read_ptx
from aotpack.compilers.triton_rules import problems, read_kernel
from aotpack.compilers.triton_source import describe as describe_here
from aotpack_runtime.errors import CompileError, SourceError
from aotpack_runtime.store import Store

Json = Any
SUPPORT = Path(__file__).resolve().parents[1] / "support"
FLOATS = {"x": "*fp32", "o": "*fp32", "n": "i32", "s": "i32"}
ADD = {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def job(kernel: str, signature: Mapping[str, str], constants: Mapping[str, Json], **more: Json) -> dict[str, Json]:
    return {
        "kind": "triton",
        "entry": "e",
        "variant": "e/v",
        "folder": str(SUPPORT),
        "source": f"kernel_cases:{kernel}",
        "signature": dict(signature),
        "constants": dict(constants),
        "divisible": [],
        "options": {},
        "arch": "sm_90",
        "ptx": False,
        **more,
    }


def file(record: Json, store: Store) -> bytes:
    return store.object(record["file"]["sha256"]).read_bytes()


def layout(record: Json) -> list[tuple[int, int]]:
    return [(param["offset"], param["bytes"]) for param in record["params"]]


def names(record: Json) -> list[str]:
    return [param["name"] or param["type"] for param in record["params"]]


# ------------------------------------------------------------------------------------------------- case A31


@pytest.mark.parametrize(
    ("free", "divisible", "width"),
    [
        pytest.param((), ["x", "o", "n"], 4, id="V1-stride-folded"),
        pytest.param(("s",), ["x", "o", "n"], 1, id="V2-stride-free"),
        pytest.param(("s",), [], 1, id="V3-nothing-known"),
    ],
)
def test_a31_what_is_known_of_arguments_decides_the_loads(
    store: Store, free: tuple[str, ...], divisible: list[str], width: int
) -> None:
    signature = {name: word for name, word in FLOATS.items() if name != "s" or free}
    constants = {"BLOCK": 1024} | ({} if free else {"s": 1})
    request = job("strided_copy", signature, constants, divisible=divisible, arch="sm_80", ptx=True)
    record = compiler.compile(request, store)
    text = file(record, store).decode()
    assert ("ld.global.v4.b32" in text) is (width == 4)
    assert ("st.global.v4.b32" in text) is bool(divisible)
    assert names(record) == [*signature, "scratch", "scratch"]


def test_a31_the_folded_argument_is_not_in_the_cubins_parameters(store: Store) -> None:
    signature = {name: word for name, word in FLOATS.items() if name != "s"}
    record = compiler.compile(job("strided_copy", signature, {"BLOCK": 1024, "s": 1}, divisible=["x", "o"]), store)
    assert record["symbol"] == "strided_copy"
    assert names(record) == ["x", "o", "n", "scratch", "scratch"]
    assert layout(record) == [(0, 8), (8, 8), (16, 4), (24, 8), (32, 8)]


# ------------------------------------------------------------------------------------------------- case A32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"constants": {"BLOCK": 1000}}, "add: constants: BLOCK is 1000; .* power of two from 1 to 1048576", id="BLOCK-1000"),
        pytest.param({"constants": {"BLOCK": 0}}, "BLOCK is 0; .* power of two from 1 to 1048576", id="BLOCK-0"),
        pytest.param({"constants": {"BLOCK": 2097152}}, "BLOCK is 2097152; .* from 1 to 1048576", id="BLOCK-2097152"),
        pytest.param({"constants": {"BLOCK": "x"}}, "BLOCK is 'x'", id="BLOCK-text"),
        pytest.param({"options": {"num_warps": 3}}, "num_warps is 3; it is 1, 2, 4, 8, 16 or 32", id="warps-3"),
        pytest.param({"options": {"num_warps": 0}}, "num_warps is 0; ", id="warps-0"),
        pytest.param({"options": {"num_warps": 64}}, "num_warps is 64; .* at most 1024 threads", id="warps-64"),
        pytest.param({"options": {"num_stages": 0}}, "num_stages is 0; it is a whole number from 1", id="stages-0"),
        pytest.param({"options": {"num_wraps": 4}}, "unknown option 'num_wraps'; known: num_warps", id="unknown-option"),
        pytest.param({"signature": {**ADD, "x": "*fp99"}}, r"x is '\*fp99', to the unknown type 'fp99'; known: i1, ", id="fp99"),
        pytest.param({"signature": {**ADD, "n": "int"}}, "n is 'int'; a type is a scalar", id="type-int"),
        pytest.param({"signature": {**ADD, "z": "i32"}}, "unknown argument 'z'; the kernel has: x, y, o, n, BLOCK", id="unknown-argument"),
        pytest.param({"constants": {}}, "missing constexpr 'BLOCK'", id="no-constexpr"),
        pytest.param({"signature": {"x": "*fp32", "y": "*fp32", "o": "*fp32"}}, "missing argument 'n'", id="no-argument"),
        pytest.param({"constants": {"BLOCK": 64, "n": 1}}, "'n' is both in signature and in constants", id="both"),
        pytest.param({"signature": {**ADD, "BLOCK": "i32"}, "constants": {}}, "'BLOCK' is a constexpr", id="constexpr-typed"),
        pytest.param({"divisible": ["q"]}, "divisible: unknown argument 'q'", id="divisible-unknown"),
        pytest.param({"arch": "sm_35"}, "unknown architecture 'sm_35', known: sm_75, sm_80", id="sm_35"),
        pytest.param({"arch": "sm_999"}, "unknown architecture 'sm_999', known: sm_75, sm_80", id="sm_999"),
        pytest.param({"arch": "sm_80", "options": {"num_ctas": 2}}, "num_ctas is 2; .* sm_90", id="clusters-before-90"),
        pytest.param({"ptx": True}, "PTX for sm_90 is sm_90a, .*; build PTX for compute_80 or compute_89", id="ptx-of-90"),
    ],
)  # fmt: skip
def test_a32_an_impossible_setting_is_refused_in_one_line(store: Store, change: dict[str, Json], words: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiler.compile(job("add", ADD, {"BLOCK": 64}) | change, store)
    assert "\n" not in str(caught.value)
    assert re.search(words, str(caught.value)), str(caught.value)


def test_a32_checks_need_the_text_of_the_kernel_only() -> None:
    text = "def add(x, y, o, n, BLOCK: tl.constexpr):\n    i = tl.arange(0, BLOCK)\n"
    kernel = read_kernel(text)
    assert problems(kernel, job("add", ADD, {"BLOCK": 64})) == []
    assert len(problems(kernel, job("add", ADD, {"BLOCK": 3}, arch="sm_1", divisible=["q"]))) == 4


def test_constants_may_be_named_in_the_signature_too(store: Store) -> None:
    plain = compiler.compile(job("add", ADD, {"BLOCK": 64}), store)
    assert compiler.compile(job("add", {**ADD, "BLOCK": "constexpr"}, {"BLOCK": 64}), store) == plain


def test_a32_what_triton_says_is_one_line_with_the_kernels_own(store: Store) -> None:
    with pytest.raises(CompileError) as caught:
        compiler.compile(job("wrong", {"x": "*fp32", "n": "i32"}, {}), store)
    line = next(
        n for n, text in enumerate((SUPPORT / "kernel_cases.py").read_text().splitlines(), 1) if "nothing" in text
    )
    assert f"e/v: wrong: kernel_cases.py:{line}: " in str(caught.value)
    assert "nothing" in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------- records


def test_the_record_is_what_the_cubin_says(store: Store) -> None:
    signature = {
        "a": "*fp16",
        "b": "*fp16",
        "c": "*fp16",
        "M": "i32",
        "N": "i32",
        "K": "i64",
        "alpha": "fp32",
        "negate": "i1",
    }
    request = job(
        "matmul",
        signature,
        {"BM": 64, "BN": 64, "BK": 64},
        divisible=["a", "b", "c", "N", "K"],
        options={"num_warps": 8},
    )
    record = compiler.compile(request, store)
    cubin = read_cubin(file(record, store))
    kernel = cubin.kernels["matmul"]
    assert record["arch"] == cubin.architecture == "sm_90a"
    assert layout(record) == [(param.offset, param.size_bytes) for param in kernel.params]
    assert record["block"] == [256, 1, 1] == list(kernel.block or ())
    assert (record["registers"], record["static_shared_bytes"], record["spill_bytes"]) == (kernel.registers, 0, 0)
    assert record["shared_bytes"] >= 2 * 64 * 64 * 2
    assert record["ptx_version"] is None
    json.dumps(record)


def test_every_scalar_has_the_size_that_the_cubin_gives_it(store: Store) -> None:
    signature = {
        "o": "*fp32",
        "a": "fp16",
        "b": "bf16",
        "c": "fp64",
        "d": "u8",
        "e": "i16",
        "f": "u32",
        "g": "u64",
        "h": "i8",
    }
    record = compiler.compile(job("scalars", signature, {}, arch="sm_80"), store)
    assert names(record) == [*signature, "scratch", "scratch"]


def test_ptx_names_its_version_and_its_target(store: Store) -> None:
    record = compiler.compile(job("add", ADD, {"BLOCK": 64}, arch="compute_80", ptx=True), store)
    ptx = read_ptx(file(record, store).decode())
    assert (record["format"], record["arch"], ptx.target) == ("ptx", "compute_80", "sm_80")
    assert record["ptx_version"] == ptx.version
    assert layout(record) == [(param.offset, param.size_bytes) for param in ptx.kernels["add"].params]


def test_blocks_of_a_cluster_are_recorded(store: Store) -> None:
    record = compiler.compile(job("add", ADD, {"BLOCK": 64}, options={"num_ctas": 2, "launch_pdl": True}), store)
    assert record["cluster"] == [2, 1, 1]
    assert record["pdl"] is True
    assert record["cooperative"] is False


def test_a_descriptor_is_a_tensor_map_with_sizes_and_strides(store: Store) -> None:
    signature = {"d": "tensordesc<fp16[64,64]>", "o": "*fp16", "n": "i32"}
    record = compiler.compile(job("descriptor_copy", signature, {}, divisible=["o"]), store)
    first, *rest = record["params"]
    tensor_map = {"block": [64, 64], "swizzle": 3, "element": 6}  # SWIZZLE_128B, FLOAT16
    # The address is a multiple of 64, and on sm_90 parameters start at 0x210.
    assert first == {"name": "d", "type": {"descriptor": tensor_map}, "offset": 48, "bytes": 128}
    assert [param["type"] for param in rest] == [
        {"sizes": 0}, {"sizes": 1}, {"strides": 0}, {"strides": 1}, "*fp16", "i32", "scratch", "scratch",
    ]  # fmt: skip
    assert len(record["descriptors"]) == 1


def test_there_are_no_tensor_maps_before_sm_90(store: Store) -> None:
    signature = {"d": "tensordesc<fp16[64,64]>", "o": "*fp16", "n": "i32"}
    with pytest.raises(
        CompileError, match=r"d is tensordesc.*; tensor maps exist from sm_90 on, so on sm_80 pass a pointer"
    ):
        compiler.compile(job("descriptor_copy", signature, {}, arch="sm_80"), store)


def test_scratch_memory_that_a_plain_launch_does_not_give_is_refused(store: Store) -> None:
    request = job("device_descriptor_copy", {"x": "*fp16", "o": "*fp16", "n": "i32"}, {}, divisible=["x", "o"])
    with pytest.raises(
        CompileError, match=r"device_descriptor_copy: needs \d+ bytes of global scratch .*global_scratch_size"
    ):
        compiler.compile(request, store)


def test_shared_memory_that_no_block_has_is_refused(store: Store) -> None:
    signature = {
        "a": "*fp16",
        "b": "*fp16",
        "c": "*fp16",
        "M": "i32",
        "N": "i32",
        "K": "i32",
        "alpha": "fp32",
        "negate": "i1",
    }
    request = job(
        "matmul",
        signature,
        {"BM": 128, "BN": 128, "BK": 64},
        divisible=["a", "b", "c", "N", "K"],
        arch="sm_86",
        options={"num_stages": 5},
    )
    with pytest.raises(CompileError, match=r"needs \d+ bytes of shared memory, a block on sm_86 has 101376"):
        compiler.compile(request, store)


# ------------------------------------------------------------------------------------------------- same bytes


def test_two_processes_give_the_same_bytes_and_no_path_of_this_machine(tmp_path: Path) -> None:
    digests = []
    for number in (1, 2):
        folder = tmp_path / f"somewhere-{number}"
        shutil.copytree(SUPPORT, folder, ignore=shutil.ignore_patterns("__pycache__"))
        request = job("add", ADD, {"BLOCK": 1024}, folder=str(folder))
        store = Store(tmp_path / f"store-{number}")
        code = (
            "import json, sys; from pathlib import Path; from aotpack.compilers.triton import compile;"
            "from aotpack_runtime.store import Store;"
            "print(json.dumps(compile(json.loads(sys.argv[1]), Store(Path(sys.argv[2])))))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(request), str(store.root)],
            capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path)), "TRITON_DEBUG": "1", "PTXAS_OPTIONS": "-O1" if number == 1 else "-O2"},
        )  # fmt: skip
        data = file(json.loads(done.stdout.splitlines()[-1]), store)
        digests.append(hashlib.sha256(data).hexdigest())
        for path in (str(tmp_path), str(SUPPORT), "kernel_cases", "/tmp", sys.prefix):  # noqa: S108 - looked for, not used
            assert path.encode() not in data
        assert not list((store.root / "build").iterdir())
    assert digests[0] == digests[1]


# ------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("kernel_cases:tuned", "wrapped by @triton.autotune", id="autotuned"),
        pytest.param(
            "kernel_cases:nothing", "there is no 'nothing', .* the module has: strided_copy, add", id="absent"
        ),
        pytest.param("kernel_cases:NOT_A_KERNEL", "'NOT_A_KERNEL' is a int, not a @triton.jit function", id="other"),
        pytest.param("no_such_module:k", "cannot be imported: ModuleNotFoundError", id="no-module"),
        pytest.param("kernel_cases", "names no kernel", id="no-name"),
    ],
)
def test_a_source_that_is_no_kernel_is_refused(store: Store, source: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        describe_here({"kind": "triton_source", "entry": "e", "source": source, "folder": str(SUPPORT)}, store)


def describe(folder: Path, store: Store, kernel: str = "uses_others") -> Json:
    """In a fresh process: the module is another one after each edit."""
    code = (
        "import json, sys; from pathlib import Path; from aotpack.compilers.triton_source import describe;"
        "from aotpack_runtime.store import Store;"
        "print(json.dumps(describe(json.loads(sys.argv[1]), Store(Path(sys.argv[2])))))"
    )
    request = {"kind": "triton_source", "entry": "e", "source": f"kernel_cases:{kernel}", "folder": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, json.dumps(request), str(store.root)],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_a_description_has_the_kernels_text_arguments_and_files(store: Store) -> None:
    found = describe(SUPPORT, store, "matmul")
    assert found["arguments"] == ["a", "b", "c", "M", "N", "K", "alpha", "negate", "BM", "BN", "BK"]
    assert found["constexprs"] == ["BM", "BN", "BK"]
    assert found["text"].startswith("def matmul(")
    assert {"kernel_cases.py", "kernel_constants.py"} <= found["depends"]["files"].keys()
    assert "triton" in found["depends"]["distributions"]


@pytest.mark.parametrize(
    ("edit", "moves"),
    [
        pytest.param(lambda f: swap(f / "kernel_cases.py", "x * SCALE", "x + SCALE"), True, id="a-function-it-calls"),
        pytest.param(lambda f: swap(f / "kernel_cases.py", "constexpr(2)", "constexpr(3)"), True, id="a-global"),
        pytest.param(lambda f: swap(f / "kernel_constants.py", "constexpr(1)", "constexpr(5)"), True, id="a-constant-of-a-module"),
        pytest.param(lambda f: swap(f / "kernel_cases.py", '"""Triton', '"""\n\nTriton'), False, id="only-its-line"),
    ],
)  # fmt: skip
def test_the_digest_moves_with_what_the_code_is_made_from(
    tmp_path: Path, store: Store, edit: Callable[[Path], None], *, moves: bool
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(SUPPORT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = digest(folder)
    edit(folder)
    assert (digest(folder) != before) is moves


def digest(folder: Path) -> str:
    """As `describe` gives it, without the two seconds in which a fresh process records its dependencies."""
    code = (
        "import sys; from pathlib import Path; from aotpack.compilers import triton_source as source;"
        "print(source._digest(source.load_kernel('kernel_cases:uses_others', Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(folder)],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )  # fmt: skip
    return done.stdout.strip()


def swap(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
