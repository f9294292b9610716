"""CUDA C++ is compiled without a GPU by the NVRTC of our choice, and what fails says where and what to do."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from aotpack.compilers import nvrtc as compiler
from aotpack.compilers.cubin import read_cubin, read_ptx
from aotpack.compilers.nvrtc_library import load_nvrtc
from aotpack.compilers.nvrtc_source import describe
from aotpack_runtime.errors import CompileError, MissingDependency, SourceError
from aotpack_runtime.store import Store

Json = Any
SUPPORT = Path(__file__).resolve().parents[1] / "support"
EXPRESSIONS = ["reversed<float, 128>", "reversed<__half, 64>", "reversed<__nv_bfloat16, 64>", "spilling"]

try:
    load_nvrtc()
except MissingDependency as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def job(folder: Path = SUPPORT, source: str = "instantiated.cu", **more: Json) -> dict[str, Json]:
    base = {
        "kind": "nvrtc",
        "entry": "e",
        "variant": "e/v",
        "folder": str(folder),
        "source": source,
        "include_dirs": ["include", "@cuda"],
        "headers": {},
        "options": [],
        "expressions": EXPRESSIONS,
    }
    return base | ({} if "ptx" in more else {"arch": "sm_90"}) | more


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., dict[str, Json]]:
    """A job whose source is a text, with nothing beside it."""

    def write(text: str, **more: Json) -> dict[str, Json]:
        (tmp_path / "kernels").mkdir(exist_ok=True)
        (tmp_path / "kernels" / "k.cu").write_text(text)
        plain = {"include_dirs": [], "expressions": ["k"]}
        return job(tmp_path, "kernels/k.cu", **plain | more)

    return write


def kernel(body: str = "", before: str = "") -> str:
    return f'{before}\nextern "C" __global__ void k(int* x) {{ {body} }}\n'


def file(record: Json, store: Store) -> bytes:
    return store.object(record["file"]["sha256"]).read_bytes()


def refused(request: Mapping[str, Json], store: Store) -> CompileError:
    with pytest.raises(CompileError) as caught:
        compiler.compile(request, store)
    assert "\n" not in str(caught.value)
    return caught.value


# ------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_120"])
def test_the_record_is_what_the_cubin_says(store: Store, arch: str) -> None:
    record = compiler.compile(job(arch=arch, options=["--maxrregcount=64"]), store)
    cubin = read_cubin(file(record, store))
    assert (record["format"], record["arch"], cubin.architecture) == ("cubin", arch, arch)
    assert list(record["kernels"]) == EXPRESSIONS
    for facts in record["kernels"].values():
        kernel = cubin.kernels[facts["symbol"]]
        assert facts["params"] == [{"offset": param.offset, "bytes": param.size_bytes} for param in kernel.params]
        assert facts["registers"] == kernel.registers <= 64
    first = record["kernels"]["reversed<float, 128>"]
    assert [(param["offset"], param["bytes"]) for param in first["params"]] == [(0, 8), (8, 24), (32, 4)]
    assert (first["max_threads"], first["static_shared_bytes"], first["spill_bytes"]) == (128, 512, 0)
    assert record["kernels"]["spilling"]["spill_bytes"] > 0
    assert record["kernels"]["spilling"]["max_threads"] is None
    assert record["log"] == ""
    json.dumps(record)


def test_ptx_has_its_version_and_the_same_parameters(store: Store) -> None:
    record = compiler.compile(job(ptx="compute_80"), store)
    ptx = read_ptx(file(record, store).decode())
    assert (record["format"], record["arch"], record["ptx_version"], ptx.target) == (
        "ptx",
        "compute_80",
        ptx.version,
        "sm_80",
    )
    cubin = compiler.compile(job(arch="sm_80"), store)
    for name in EXPRESSIONS:
        assert record["kernels"][name]["params"] == cubin["kernels"][name]["params"]
        assert record["kernels"][name]["max_threads"] == cubin["kernels"][name]["max_threads"]


def test_a_parameter_of_many_bytes_is_read(store: Store, written: Callable[..., dict[str, Json]]) -> None:
    text = 'struct Big { char c[20000]; };\nextern "C" __global__ void k(Big b, int* x) { x[0] = b.c[x[1]]; }\n'
    record = compiler.compile(written(text), store)
    assert record["kernels"]["k"]["params"] == [{"offset": 0, "bytes": 20000}, {"offset": 20000, "bytes": 8}]


@pytest.mark.parametrize("data", [b"", b"\x7fELF", Path(sys.executable).read_bytes()[:4096], b"\x7fELF" + bytes(200)])
def test_what_is_no_cubin_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"cubin|ELF"):
        read_cubin(data)


def test_an_aligned_parameter_is_where_the_cubin_has_it(store: Store, written: Callable[..., dict[str, Json]]) -> None:
    """Not where a C struct would: it is the address that is aligned, and parameters start at 0x210 on sm_90."""
    text = 'struct alignas(64) Map { char c[128]; };\nextern "C" __global__ void k(int* x, Map m, int n) { x[n] = m.c[n]; }\n'
    record = compiler.compile(written(text), store)
    assert record["kernels"]["k"]["params"] == [
        {"offset": 0, "bytes": 8},
        {"offset": 48, "bytes": 128},
        {"offset": 176, "bytes": 4},
    ]


def test_two_processes_give_the_same_bytes_and_no_path_of_this_machine(tmp_path: Path) -> None:
    digests = []
    for number in (1, 2):
        folder, store = tmp_path / f"somewhere-{number}", Store(tmp_path / f"store-{number}")
        shutil.copytree(SUPPORT, folder, ignore=shutil.ignore_patterns("__pycache__"))
        text = (folder / "include" / "traits.h").read_text()
        (folder / "include" / "traits.h").write_text(
            text + "inline __device__ const char* file() { return __FILE__; }\n"
        )
        source = (folder / "instantiated.cu").read_text()
        (folder / "instantiated.cu").write_text(
            source + 'extern "C" __global__ void where(char* x) { *x = file()[threadIdx.x]; }\n'
        )
        code = (
            "import json, sys; from pathlib import Path; from aotpack.compilers.nvrtc import compile;"
            "from aotpack_runtime.store import Store;"
            "print(json.dumps(compile(json.loads(sys.argv[1]), Store(Path(sys.argv[2])))))"
        )
        request = job(folder, expressions=[*EXPRESSIONS, "where"])
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, json.dumps(request), str(store.root)],
            capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        )  # fmt: skip
        data = file(json.loads(done.stdout), store)
        assert b"include/traits.h" in data
        for path in (str(tmp_path), str(SUPPORT), "/tmp", sys.prefix):  # noqa: S108 - looked for, not used
            assert path.encode() not in data
        digests.append(hashlib.sha256(data).hexdigest())
    assert digests[0] == digests[1]


# ------------------------------------------------------------------------------------------------- case A34


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        pytest.param("cuda_fp16.h", "@cuda", id="fp16"),
        pytest.param("cuda_bf16.h", "@cuda", id="bf16"),
        pytest.param("cstdint", "NVRTC has no C++ standard library", id="cstdint"),
        pytest.param("vector", "NVRTC has no C++ standard library", id="vector"),
        pytest.param("a.h", "the source's own folder is not searched", id="private"),
    ],
)
def test_a34_a_missing_header_is_named_with_its_place_and_where_it_was_looked_for(
    tmp_path: Path, store: Store, written: Callable[..., dict[str, Json]], header: str, hint: str
) -> None:
    text = kernel(before=f'// first line\n#include "{header}"')
    (tmp_path / "inc").mkdir()
    for include_dirs, searched in (([], "no folder"), (["inc"], "searched inc")):
        error = refused(written(text, include_dirs=include_dirs), store)
        assert error.message.startswith(f"e/v: kernels/k.cu(2): there is no header '{header}'; ")
        assert searched in error.message
        assert hint in error.hint


def test_a34_headers_of_cuda_are_found_under_their_name(store: Store, written: Callable[..., dict[str, Json]]) -> None:
    text = kernel("x[0] = __half2int_rn(__int2half_rn(x[1]));", "#include <cuda_fp16.h>\n#include <cuda_bf16.h>")
    assert compiler.compile(written(text, include_dirs=["@cuda"]), store)["kernels"]["k"]["symbol"] == "k"


def test_a34_a_header_in_memory_is_used_and_is_part_of_the_digest(
    store: Store, written: Callable[..., dict[str, Json]]
) -> None:
    text = kernel("x[0] = A;", '#include "a.h"')
    digests = set()
    for number in (1, 2):
        request = written(text, headers={"a.h": f"#define A {number}\n"})
        digests |= {compiler.compile(request, store)["file"]["sha256"], describe(request, store)["digest"]}
    assert len(digests) == 4


IF_CONSTEXPR = kernel("if constexpr (sizeof(int) == 4) x[0] = 1;")
CONCEPT = kernel(before="template <class T> concept small = sizeof(T) < 8;\nstatic_assert(small<int>);")


@pytest.mark.parametrize(
    ("text", "options", "builds"),
    [
        pytest.param(IF_CONSTEXPR, [], True, id="if-constexpr-by-default"),
        pytest.param(IF_CONSTEXPR, ["--std=c++17"], True, id="if-constexpr-17"),
        pytest.param(IF_CONSTEXPR, ["-std=c++14"], False, id="if-constexpr-14"),
        pytest.param(CONCEPT, [], False, id="concept-by-default"),
        pytest.param(CONCEPT, ["--std=c++20"], True, id="concept-20"),
    ],
)
def test_a34_the_standard_is_17_unless_the_options_say_otherwise(
    store: Store, written: Callable[..., dict[str, Json]], text: str, options: Sequence[str], *, builds: bool
) -> None:
    request = written(text, options=options)
    if builds:
        compiler.compile(request, store)
    else:
        assert re.search(r"kernels/k.cu\([12]\): error", str(refused(request, store)))


def test_a34_printf_builds_and_warnings_are_shown(store: Store, written: Callable[..., dict[str, Json]]) -> None:
    record = compiler.compile(written(kernel('int unused; printf("%d", x[0]);')), store)
    assert record["log"].startswith('kernels/k.cu(2): warning #177-D: variable "unused" was declared')
    assert "ptxas" not in record["log"]
    assert read_cubin(file(record, store)).imports == ("vprintf",)


@pytest.mark.parametrize(
    ("text", "expressions", "message"),
    [
        pytest.param(kernel("x[0] = foo;"), ["k"], 'kernels/k.cu(2): error: identifier "foo" is undefined', id="name"),
        pytest.param(
            '\ntemplate <class T> __global__ void t(T* x) { static_assert(sizeof(T) == 4, "four"); }', ["t<float>", "t<double>"],
            'kernels/k.cu(2): error: static assertion failed with "four"', id="instantiation",
        ),
        pytest.param(kernel(), ["u<double>"], "kernels/k.cu: the name expression 'u<double>': identifier \"u\" is undefined", id="expression"),
        pytest.param("__device__ int k(int x) { return x; }", ["k"], "expression 'k': Name expression cannot form address of a non-__global__", id="no-kernel"),
    ],
)  # fmt: skip
def test_a34_the_first_error_is_the_message_and_the_rest_is_the_log(
    store: Store, written: Callable[..., dict[str, Json]], text: str, expressions: list[str], message: str
) -> None:
    assert message in str(refused(written(text, expressions=expressions), store))


# ------------------------------------------------------------------------------------------------- case A35

FENCE = kernel('asm volatile("wgmma.fence.sync.aligned;");')


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_a35_an_instruction_of_another_architecture_is_quoted(
    store: Store, written: Callable[..., dict[str, Json]], arch: str
) -> None:
    error = refused(written(FENCE, arch=arch), store)
    assert f"Instruction 'wgmma.fence' not supported on .target '{arch}'" in error.message
    assert "sm_90a" in error.hint


def test_a35_with_its_suffix_it_builds(store: Store, written: Callable[..., dict[str, Json]]) -> None:
    assert compiler.compile(written(FENCE, arch="sm_90a"), store)["arch"] == "sm_90a"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        pytest.param({"arch": "sm_999"}, "unknown architecture 'sm_999', known: sm_", id="sm_999"),
        pytest.param({"arch": "sm_80a"}, "unknown architecture 'sm_80a', known: sm_", id="sm_80a"),
        pytest.param({"arch": "compute_90"}, "unknown architecture 'compute_90', known: sm_", id="compute-for-cubin"),
        pytest.param({"ptx": "sm_90"}, "unknown architecture 'sm_90', known: compute_", id="sm-for-ptx"),
        pytest.param({"arch": None}, "one architecture is needed, the job has none", id="none"),
        pytest.param({"arch": "sm_90", "ptx": "compute_90"}, "one architecture is needed, the job has both", id="both"),
    ],
)
def test_a35_an_architecture_is_named_and_known(
    store: Store, written: Callable[..., dict[str, Json]], target: dict[str, Json], words: str
) -> None:
    message = str(refused(written(kernel(), **target), store))
    assert words in message
    if "sm_90a" in message:
        assert "sm_100f" in message


@pytest.mark.parametrize(
    "option", ["-Iinclude", "--include-path=x", "-arch=sm_80", "--gpu-architecture=sm_80", "-G", "-rdc=true", "-dlto"]
)
def test_an_option_that_is_not_for_the_manifest_is_refused(
    store: Store, written: Callable[..., dict[str, Json]], option: str
) -> None:
    assert f"the option '{option}' is not for the manifest: " in str(
        refused(written(kernel(), options=[option]), store)
    )


def test_an_unknown_option_is_named(store: Store, written: Callable[..., dict[str, Json]]) -> None:
    assert "unrecognized option --bogus" in str(refused(written(kernel(), options=["--bogus"]), store))


# ------------------------------------------------------------------------------------------------- description


def test_a_description_has_the_text_and_the_files_of_the_folder(store: Store) -> None:
    found = describe(job(), store)
    assert found["text"] == (SUPPORT / "instantiated.cu").read_text()
    assert list(found["depends"]["files"]) == ["include/traits.h", "instantiated.cu"]
    assert found["depends"]["distributions"]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda folder: (folder / "instantiated.cu").write_text("other"), id="source"),
        pytest.param(lambda folder: (folder / "include" / "traits.h").write_text("other"), id="header"),
        pytest.param(lambda folder: (folder / "include" / "new.h").write_text(""), id="new-header"),
        pytest.param(lambda folder: (folder / "include" / "traits.h").rename(folder / "include" / "t.h"), id="renamed"),
    ],
)
def test_the_digest_moves_with_every_file(tmp_path: Path, store: Store, edit: Callable[[Path], None]) -> None:
    folder = tmp_path / "source"
    shutil.copytree(SUPPORT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = describe(job(folder), store)["digest"]
    assert describe(job(SUPPORT), store)["digest"] == before
    edit(folder)
    assert describe(job(folder), store)["digest"] != before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"source": "none.cu"}, "none.cu: there is no such file; searched {folder}/none.cu", id="source"),
        pytest.param({"include_dirs": ["no"]}, "instantiated.cu: its include folder 'no' is not there; searched {folder}/no", id="folder"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_where_it_was_looked_for(
    store: Store, change: dict[str, Json], words: str
) -> None:
    for run in (describe, compiler.compile):
        with pytest.raises(SourceError) as caught:
            run(job(**change), store)
        assert words.format(folder=SUPPORT) in str(caught.value)
