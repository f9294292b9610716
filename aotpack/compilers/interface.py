"""What all libraries have in common, compiled once and linked into each.

AOTInductor puts the text of its C interface before the code of every model, and with it come the containers that run
it: most of what g++ does for a small variant (of 4.1 CPU seconds 3.0, at O0 with precompiled headers; torch 2.13, g++
12). It is the same text for all of them, so its object is kept in the store, and what is compiled for a variant is told
that these templates exist elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from aotpack.compilers.toolchain import compiler_version
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.jit.flight import held
from aotpack_runtime.store import Store

_BASE = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"


@contextmanager
def shared_interface(store: Store) -> Iterator[None]:
    """While inside, wrappers that begin with torch's interface are compiled without it, and its object, found in
    `store` or made now, is linked to theirs. What torch compiles otherwise is compiled as torch says."""
    from torch._inductor.cpp_builder import CppBuilder

    run = CppBuilder.build

    def build(self: Any) -> None:
        words = shlex.split(self.get_command_line())
        source = next((Path(word) for word in words if word.endswith(".wrapper.cpp")), None)
        parts = _split(source.read_text()) if source is not None and "-c" in words else None
        if source is None or parts is None:
            run(self)
            return
        interface, own = parts
        common = _object(interface, words, source, store)
        source.write_text(own)
        run(self)
        _join(words[0], Path(self.get_target_file_path()), common)

    with mock.patch.object(CppBuilder, "build", build):
        yield


def _split(text: str) -> tuple[str, str] | None:
    """(the interface with all that it includes, the model's own code); None where the text is not as it is known."""
    interface = _interface().strip()
    head, found, own = text.partition(interface)
    if not found or re.search(r"^(?!#include|//|\s*$)", head, re.MULTILINE):
        return None
    included = "".join(f"{line}\n" for line in interface.splitlines() if re.fullmatch(r"#include <\w+>", line))
    return f"{head}{interface}\n{_BASE}", f"{head}{included}extern {_BASE}{own}"


@functools.cache
def _interface() -> str:
    """The text that torch puts before every model."""
    return Path(torch.__file__).with_name("_inductor").joinpath("codegen", "aoti_runtime", "interface.cpp").read_text()


def _object(text: str, words: Sequence[str], wrapper: Path, store: Store) -> Path:
    """The object of the interface, compiled as `words` compile a wrapper."""
    source = wrapper.with_name("interface.cpp")
    source.write_text(text)
    rest = [word for word in words if word not in ("-c", str(wrapper))]
    del rest[rest.index("-o") : rest.index("-o") + 2]
    key = _key(text, rest, source)
    with held(store.root / "build" / f"interface-{key[:32]}.lock"):
        record = store.get_record("interface", key)
        found = store.checked(record) if record is not None else None  # it is linked into what servers run
        if found is None:
            made = source.with_suffix(".o")
            _run([*rest, "-c", str(source), "-o", str(made)], source.parent)
            record = store.put_file(made)
            store.put_record("interface", key, record)
            found = store.object(record["sha256"])
    return found


_keys: dict[tuple[str, ...], str] = {}


def _key(text: str, words: Sequence[str], source: Path) -> str:
    """What decides the object: the text with its headers as they are now, looked at once a process, and the flags.
    Whether headers are precompiled does not."""
    plain = list(words)
    if "-include" in plain:
        del plain[plain.index("-include") : plain.index("-include") + 2]
    asked = (text, *plain)
    if asked not in _keys:
        read = _run([*plain, "-E", "-P", str(source)], source.parent)
        seen = ("-D", "-I", "-ffile-prefix-map=")  # in the text already
        flags = [word for word in plain if word.startswith("-") and not word.startswith(seen)]
        parts = {"text": hashlib.sha256(read).hexdigest(), "flags": flags, "cxx": compiler_version()}
        _keys[asked] = fingerprint(parts)
    return _keys[asked]


def _join(compiler: str, wrapper: Path, common: Path) -> None:
    """Make `wrapper` hold the other object too: what links it knows of one file."""
    joined = wrapper.with_suffix(".joined.o")
    _run([compiler, "-r", "-nostdlib", "-o", str(joined), str(wrapper), str(common)], wrapper.parent)
    os.replace(joined, wrapper)


def _run(command: Sequence[str], folder: Path) -> bytes:
    """What the command gives; the error of torch's own compiles where it fails."""
    from torch._inductor.exc import CppCompileError

    done = subprocess.run(list(command), cwd=folder, capture_output=True, check=False)
    if done.returncode:
        raise CppCompileError(list(command), (done.stdout + done.stderr).decode(errors="replace"))
    return done.stdout
