"""AOTInductor: an exported program -> a shared library, with nothing in it of the machine that builds.

torch would look at the build machine's CPU and try compilers out; here the target says what the code is for. What
differs between torch 2.11 and 2.13 is met here and nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram

from aotpack.compilers.interface import shared_interface
from aotpack.compilers.kernels import raising_kernels
from aotpack_runtime.errors import CompileError
from aotpack_runtime.jit.flight import held
from aotpack_runtime.store import Store

Json = Any

OPTIONS: Mapping[str, Json] = {
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.embed_kernel_binary": True,
    "aot_inductor.model_name_for_generated_files": "model",
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "freezing": False,
    "aot_inductor.emit_multi_arch_kernel": False,
    "aot_inductor.custom_ops_to_c_shims": {},
    "cpp.dynamic_threads": True,
    "cpp.threads": 8,
}
"""What the promise rests on, not for the manifest to change: weights outside and never read (without
`always_keep_tensor_constants` and `joint_graph_constant_folding`, 0-d and short tensors are inlined into the code), no
host paths, cubins inside the library and for one architecture each, custom operators called by their names (a C shim of
their own would be a symbol that some library of the server has to define), threads counted where the code runs.
`cpp.threads` is what loops are split for, not how many run them: by the builder's own count the code would be another
one on every machine."""


def package(
    exported: ExportedProgram,
    variant: str,
    inductor: Mapping[str, Json],
    cpu: Mapping[str, Json],
    folder: Path,
    *,
    shared: Store | None = None,
    headers: bool = False,
) -> tuple[Path, list[Path]]:
    """Run AOTInductor in `folder` with the options `inductor` and host code for the level `cpu`: the library, and what
    the runner looks for beside it (operators without a C shim).

    The interface that all libraries have comes from the store `shared`, where one is given, which the bytes of the
    library depend on; not on whether headers are precompiled, which pays for more compiles than `ALONE`. CompileError
    says what the toolchain said.
    """
    clash = sorted(inductor.keys() & OPTIONS.keys())
    if clash:
        raise CompileError(variant, f"the option inductor.{clash[0]} is not for the manifest to set")
    options = {
        "aot_inductor.precompile_headers": headers,
        **inductor,
        **_known(OPTIONS),
        "cpp.simdlen": cpu["simd_bits"] or 1,
    }
    with ExitStack() as stack:
        for patch in _patches(cpu, folder):
            stack.enter_context(patch)
        stack.enter_context(_headers_looked_at_once())
        stack.enter_context(raising_kernels())
        if shared is not None:
            stack.enter_context(shared_interface(shared))
        # Kernels of a GPU would name the file that they were generated in, and hold their PTX as a text.
        own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_DISABLE_LINE_INFO": "1", **_assembler()}
        stack.enter_context(mock.patch.dict(os.environ, own))
        try:
            made = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(folder / "model.pt2"), inductor_configs=options
            )
        except Exception as error:
            hint = (
                "with sizes in the place of its ranges it may compile: one, or a list"
                if exported.range_constraints
                else ""
            )
            raise CompileError(
                variant, f"AOTInductor: {type(error).__name__}: {_meaningful(error)}", hint=hint
            ) from error
    with zipfile.ZipFile(made) as archive:
        members = [name for name in archive.namelist() if "/data/aotinductor/" in name]
        for name in members:
            (folder / Path(name).name).write_bytes(archive.read(name))
    libraries = [Path(name).name for name in members if name.endswith(".so")]
    if len(libraries) != 1:
        raise CompileError(variant, f"AOTInductor made {len(libraries)} libraries, expected one")
    stem = libraries[0].removesuffix(".so")
    beside = [folder / f"{stem}.json"] if (folder / f"{stem}.json").exists() else []
    return folder / libraries[0], beside


def _assembler() -> dict[str, str]:
    """The variable by which torch has Triton use the ptxas that came with torch, where nobody named another. It sets it
    once a process, so that of the compiles of a worker only the first would have it (torch 2.11)."""
    ptxas = Path(torch.__file__).with_name("bin") / "ptxas"
    return {"TRITON_PTXAS_PATH": os.environ.get("TRITON_PTXAS_PATH", str(ptxas))} if os.access(ptxas, os.X_OK) else {}


@contextmanager
def _headers_looked_at_once() -> Iterator[None]:
    """torch preprocesses its headers before each compile to see whether they are the same; they are, in one process."""
    from torch._inductor import codecache

    make = codecache._precompile_header

    def header(name: str, command: str, **options: Any) -> str:
        level = torch._inductor.config.aot_inductor.compile_wrapper_opt_level  # which `command` leaves out
        key = repr((name, command, level, sorted(options.items())))
        if not os.path.exists(f"{_headers.get(key)}.gch"):
            _headers[key] = make(name, command, **options)
        return _headers[key]

    with mock.patch.object(codecache, "_precompile_header", header):
        yield


_headers: dict[str, str] = {}

ALONE = 3
"""For so many compiles no headers are precompiled. They and the interface that all share take 16 CPU seconds, and save
6 of 8 for each variant (g++ alone, the `mlp` of the tests, torch 2.13)."""


class _EnoughError(Exception):
    """Ends a compile that was made for its headers."""


def precompile_headers(
    exported: ExportedProgram,
    inductor: Mapping[str, Json],
    cpu: Mapping[str, Json],
    folder: Path,
    store: Store,
) -> None:
    """Let torch precompile its headers for these options, and compile what all libraries have in common, as any compile
    with them begins by doing, and no more. Headers are kept in TMPDIR."""
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder

    make, run = codecache._precompile_header, CppBuilder.build
    making = False

    def header(*args: Any, **kwargs: Any) -> str:
        nonlocal making
        making = True
        try:
            return make(*args, **kwargs)
        finally:
            making = False

    def build(self: Any) -> None:
        if not making:
            raise _EnoughError
        run(self)

    with (
        mock.patch.object(codecache, "_precompile_header", header),
        mock.patch.object(CppBuilder, "build", build),
        suppress(CompileError),
    ):
        package(exported, "headers", inductor, cpu, folder, shared=store, headers=True)


def _known(options: Mapping[str, Json]) -> dict[str, Json]:
    """Without those that this torch does not have: what they turn off was not there yet (line tables, torch 2.11)."""
    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


def _patches(cpu: Mapping[str, Json], folder: Path) -> Iterator[Any]:
    """Code for the named level, whatever the build machine has: torch would look at the machine and try compilers out.

    Also leaves out the checks that a variable of the server would turn on, and maps the folders of all builds and of
    torch out of the library, the paths that are left in it (torch 2.13). Not the job's own folder: the flags are part
    of the key under which torch keeps precompiled headers, which jobs share.
    """
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa
    from torch._inductor.codegen import cpp_wrapper_cpu

    base = {256: cpu_vec_isa.VecAVX2, 512: cpu_vec_isa.VecAVX512}.get(cpu["simd_bits"])
    isas = []
    if base is not None:
        # `__bool__` compiles and runs a probe on this machine; the target is another one.
        body = {"__bool__": lambda self: True, "__hash__": cpu_vec_isa.VecISA.__hash__}
        isas = [type(base.__name__, (base,), body)()]
    yield mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=isas)
    original = cpp_builder._get_optimization_cflags

    def flags(*args: Any, **kwargs: Any) -> Any:
        cflags, ldflags = original(*args, **kwargs)
        headers = Path(torch.__file__).parent
        own = [re.sub(r"march=native\b", f"march={cpu['march']}", flag) for flag in cflags]
        return [*own, f"ffile-prefix-map={folder.parent}=/aotpack", f"ffile-prefix-map={headers}=/torch"], ldflags

    yield mock.patch.object(cpp_builder, "_get_optimization_cflags", flags)

    def no_checks(wrapper: Any) -> None:
        prefix = wrapper.prefix
        getattr(prefix, "splice_aot", prefix.splice)(_NO_CHECKS)  # the first from torch 2.13 on

    yield mock.patch.object(cpp_wrapper_cpu.CppWrapperCpu, "generate_input_output_runtime_checks", no_checks)
    yield mock.patch.object(codecache, "convert_cubin_to_obj", _embedded, create=True)
    array_of = cpp_wrapper_cpu.CppWrapperCpu.codegen_int_array_var

    def array(wrapper: Any, sizes: str, writeline: Any, *args: Any, **kwargs: Any) -> Any:
        # Until torch 2.13 it remembers arrays by the address of a bound method that is made for each call: whether one
        # was met before, so which code comes out, was chance.
        kept = vars(wrapper).setdefault("_aotpack_writers", {})
        return array_of(
            wrapper, sizes, kept.setdefault(id(getattr(writeline, "__self__", writeline)), writeline), *args, **kwargs
        )

    yield mock.patch.object(cpp_wrapper_cpu.CppWrapperCpu, "codegen_int_array_var", array)


def _embedded(cubin: str, kernel: str, ld: str, objcopy: str) -> str:
    """The object file of a cubin, to be linked in; torch's own has symbols by the path of the build's folder first, and
    the linker orders them by that."""
    # The name of a kernel that fuses much is longer than that of a file may be.
    place = Path(f"{cubin}.{hashlib.sha256(kernel.encode()).hexdigest()}")
    place.mkdir()
    shutil.copyfile(cubin, place / "cubin")
    ends = [
        word for end in ("start", "end", "size") for word in ("--redefine-sym", f"_binary_cubin_{end}=__{kernel}_{end}")
    ]
    data = ["--rename-section", ".data=.rodata,alloc,load,readonly,data,contents"]
    for command in (
        [ld, "-r", "-b", "binary", "-z", "noexecstack", "-o", "cubin.o", "cubin"],
        [objcopy, *data, *ends, "cubin.o"],
    ):
        subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
    return str(place / "cubin.o")


_NO_CHECKS = """
static bool _check_aoti_runtime_check_inputs_env() { return false; }
static void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
"""
"""In place of torch's own checks, which the server's AOTI_RUNTIME_CHECK_INPUTS would turn on: they turn down sizes 0
and 1 and the strides of dims of 1, which guards let through."""


@contextmanager
def build_folder(store: Store, key: str) -> Iterator[Path]:
    """A folder of this job's own, gone afterwards. It is named after the job, so that two builds give the same bytes:
    whoever does the same job beside it waits."""
    folder = store.root / "build" / key[:32]
    lock = folder.with_name(f"{folder.name}.lock")
    with held(lock):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _meaningful(error: Exception) -> str:
    """The line of a toolchain's output that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if "error:" in line or line.startswith("LoweringException")]
    return (wanted or lines or ["no message"])[0][:400]
