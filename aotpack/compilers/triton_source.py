"""A Triton kernel's source -> what it is, all that its code is made from, and the environment that it is read in."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

from aotpack.compilers.dependencies import dependencies, recording
from aotpack.compilers.triton_rules import read_kernel
from aotpack.compilers.user_errors import first_line, user_place
from aotpack_runtime.errors import MissingDependency, SourceError
from aotpack_runtime.store import Store

Json = Any


def describe(job: Mapping[str, Json], store: Store) -> Json:
    """What the kernel that `job` names is: its text and arguments, what it depends on, and a digest of all that its
    code is made from.

    SourceError says what is in its place.
    """
    folder = Path(job["folder"])
    with own_environment(store), recording(native=False) as recorder:
        function = load_kernel(job["source"], folder)
        depends = dependencies(recorder, folder)
        kernel = read_kernel(function.src)
        return {
            "digest": _digest(function),
            "text": function.src,
            "arguments": list(function.arg_names),
            "constexprs": [name for name in function.arg_names if name in kernel.constexprs],
            "depends": depends,
        }


def load_kernel(source: str, folder: Path) -> Any:
    """The JITFunction that `source` names, looked up in `folder` first."""
    _import_triton()
    module_name, _, name = source.partition(":")
    if not name:
        raise SourceError(source, "names no kernel", hint="write it as module:kernel")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        problem = f"cannot be imported: {type(error).__name__}: {first_line(error)}{user_place(error, folder)}"
        raise SourceError(source, problem) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return _jit_function(found, source, name, module)


def _jit_function(found: Any, source: str, name: str, module: ModuleType) -> Any:
    jit = importlib.import_module("triton.runtime.jit")
    autotuner = importlib.import_module("triton.runtime.autotuner")
    if isinstance(found, autotuner.Autotuner | autotuner.Heuristics):
        decorator = "autotune" if isinstance(found, autotuner.Autotuner) else "heuristics"
        raise SourceError(
            source,
            f"is wrapped by @triton.{decorator}, which chooses when it is launched; a bundle holds what was built",
            hint="write its configs in the manifest, and name the kernel under the decorator",
        )
    if type(found).__name__ == "InterpretedFunction":
        raise SourceError(source, "was imported for Triton's interpreter", hint="unset TRITON_INTERPRET")
    if not isinstance(found, jit.JITFunction):
        kernels = [key for key, value in vars(module).items() if isinstance(value, jit.JITFunction)]
        what = f"there is no {name!r}" if found is None else f"{name!r} is a {type(found).__name__}"
        raise SourceError(source, f"{what}, not a @triton.jit function; the module has: {', '.join(kernels) or 'none'}")
    if found.is_gluon():
        raise SourceError(source, "is a Gluon kernel; only @triton.jit kernels can be built")
    return found


def _digest(function: Any) -> str:
    """Of the kernel's text, of every function it calls and of every value outside it that it names.

    Not Triton's `cache_key`: that moves with the line on which a kernel starts, and does not see a constant that is
    read through its module (`sizes.BLOCK`).
    """
    digest = hashlib.sha256()
    for line in sorted(set(_uses(function, set()))):
        digest.update(line.encode())
        digest.update(b"\0")
    digest.update(str(importlib.import_module("triton").__version__).encode())
    return digest.hexdigest()


def _uses(value: Any, seen: set[int]) -> Iterator[str]:
    """What `value` is, and what it makes use of, a line each. More than is used rather than less."""
    function = getattr(value, "fn", value)  # of a JITFunction or a constexpr_function
    if not isinstance(function, FunctionType):
        yield _text_of(value)
        return
    if id(function) in seen or function.__module__.partition(".")[0] == "triton":
        return
    seen.add(id(function))
    settings = {key: getattr(value, key, None) for key in ("noinline", "do_not_specialize", "debug")}
    source = getattr(value, "raw_src", None) or inspect.getsourcelines(function)[0]
    yield f"{function.__qualname__} {settings} {''.join(source)} {inspect.signature(function)}"
    names = set(_names(function.__code__))
    outside = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for name in sorted(names & outside.keys()):
        found = outside[name]
        if isinstance(found, ModuleType):
            if found.__name__.partition(".")[0] != "triton":
                for attribute in sorted(names & vars(found).keys()):
                    yield from _labelled(f"{name}.{attribute}", vars(found)[attribute], seen)
        else:
            yield from _labelled(name, found, seen)


def _labelled(name: str, value: Any, seen: set[int]) -> Iterator[str]:
    yield from (f"{name} = {line}" for line in _uses(value, seen))


def _names(code: Any) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def _text_of(value: Any) -> str:
    """A value as text that is the same in every process; a class as its source."""
    if isinstance(value, type):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return value.__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# -------------------------------------------------------------------------------------------------- environment

_TOOLS = frozenset({"TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH"})
_LOOSE = frozenset({"PTXAS_OPTIONS", "DISABLE_PTXAS_OPT", "NVPTX_ENABLE_DUMP"})


@contextlib.contextmanager
def own_environment(store: Store, *, line_info: bool = False) -> Iterator[None]:
    """A cache of this job's own, gone afterwards, and no variable by which a shell changes what Triton makes.

    Those that say where its tools are stay: on some systems the ones it carries do not run.
    """
    root = store.root / "build"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="triton-", dir=root) as folder:
        drop = {name for name in os.environ if name.startswith("TRITON_")} - _TOOLS | _LOOSE
        own = {
            "TRITON_CACHE_DIR": f"{folder}/cache",
            "TRITON_ALWAYS_COMPILE": "1",
            "TRITON_DUMP_PTXAS_LOG": "1",
            **({} if line_info else {"TRITON_DISABLE_LINE_INFO": "1"}),
        }
        kept = {name: value for name, value in os.environ.items() if name not in drop}
        with mock.patch.dict(os.environ, kept | own, clear=True):
            if "triton" in sys.modules:
                library = importlib.import_module("triton._C.libtriton")
                for name in library.get_cache_invalidating_env_vars().keys() - own.keys():
                    del os.environ[name]
            yield


def _import_triton() -> None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise MissingDependency("triton", needed_for="triton entries") from error
