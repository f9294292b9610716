"""The part of torch's C++ that all libraries share: cut out of each wrapper, compiled once, linked to all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the text is torch's")

from aotpack.build import build
from aotpack.compilers import interface
from aotpack.compilers.inductor import ALONE, _embedded
from aotpack.manifest import read_manifest
from aotpack.miss import _builders_store
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.store import Store
from tests.support.building import ROOT
from tests.support.guard_cases import bundle

HEAD = "\n#include <torch/csrc/inductor/aoti_include/cpu.h>\n"
OWN = "\nnamespace torch::aot_inductor { /* a model */ }\n"


def test_a_wrapper_is_its_own_code_and_the_interface_whose_templates_exist_elsewhere() -> None:
    parts = interface._split(HEAD + interface._interface() + OWN)
    assert parts is not None
    common, own = parts
    template = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
    assert common.startswith(HEAD)
    assert "AOTInductorModelContainerRun(" in common
    assert common.endswith(template)
    assert "a model" not in common
    assert own.startswith(HEAD)
    assert f"extern {template}" in own
    assert own.endswith(OWN)
    assert "AOTInductorModelContainerRun(" not in own


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(HEAD + OWN, id="another-interface"),
        pytest.param("#define MORE 1\n" + HEAD + "@" + OWN, id="code-before-it"),
        pytest.param(HEAD + "struct More {};\n@" + OWN, id="code-after-the-headers"),
    ],
)
def test_a_wrapper_that_is_not_as_it_is_known_is_left_whole(text: str) -> None:
    assert interface._split(text.replace("@", interface._interface())) is None


class Compiles:
    """The commands that would be run, with what the compiler gives for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words: list[list[str]] = []
        self.headers = b"as they are"
        monkeypatch.setattr(interface, "_run", self)
        monkeypatch.setattr(interface, "_keys", {})

    def __call__(self, command: list[str], folder: Path) -> bytes:
        self.words.append(list(command))
        if "-E" in command:
            return self.headers
        Path(command[command.index("-o") + 1]).write_bytes(b"object")
        return b""

    def count(self) -> int:
        return sum("-c" in words for words in self.words)


def test_its_object_is_made_once_for_the_same_text_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles, store = Compiles(monkeypatch), Store(tmp_path / "store")

    def made(*flags: str, text: str = "text") -> bytes:
        folder = tmp_path / str(len(compiles.words))
        folder.mkdir(exist_ok=True)
        source = folder / "model.wrapper.cpp"
        words = ["g++", str(source), *flags, "-c", "-o", str(folder / "model.wrapper.o")]
        return interface._object(text, words, source, store).read_bytes()

    assert made("-O1", "-march=x86-64-v3") == b"object"
    assert compiles.count() == 1
    made("-O1", "-march=x86-64-v3")
    made("-O1", "-march=x86-64-v3", "-D", "MACRO", "-I/elsewhere", "-include", "/made/header.h")
    made("-O1", "-march=x86-64-v3", "-ffile-prefix-map=/proc/7/fd/3/build=/aotpack")
    assert compiles.count() == 1, "macros, folders and precompiled headers are in the text"
    made("-O2", "-march=x86-64-v3")
    made("-O1", "-march=x86-64-v4")
    assert compiles.count() == 3
    interface._keys.clear()
    compiles.headers = b"another release of torch"
    made("-O1", "-march=x86-64-v3")
    assert compiles.count() == 4


def test_an_object_that_is_not_what_was_kept_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles, store = Compiles(monkeypatch), Store(tmp_path / "store")
    source = tmp_path / "model.wrapper.cpp"
    words = ["g++", str(source), "-c", "-o", str(tmp_path / "model.wrapper.o")]
    kept = interface._object("text", words, source, store)
    for damage in (b"objecT", b"", b"object, and more"):
        kept.write_bytes(damage)
        assert interface._object("text", words, source, store).read_bytes() == b"object"
    kept.unlink()
    assert interface._object("text", words, source, store).read_bytes() == b"object"
    assert compiles.count() == 5


def test_a_miss_uses_the_store_of_builds_where_nobody_else_can_write_it(tmp_path: Path) -> None:
    overlay = tmp_path / "cache" / "overlay" / "bundle" / "host"
    found = _builders_store(overlay)
    assert found is not None
    assert found.root == tmp_path / "cache" / "build"
    found.root.chmod(0o777)
    assert _builders_store(overlay) is None
    found.root.chmod(0o700)
    found.root.rmdir()
    found.root.write_text("no folder")
    assert _builders_store(overlay) is None


@pytest.mark.slow
def test_a_zoo_of_variants_has_one() -> None:
    """And each of them carries it: a library without would not load."""
    from elftools.elf.elffile import ELFFile

    libraries = sorted(bundle().glob("artifacts/*/model.so"))
    assert len(libraries) > 10 * ALONE
    store = Store(ROOT / "store")
    assert 0 < store.count_records("interface") < store.count_records("aoti") / 4
    with libraries[0].open("rb") as file:
        symbols: Any = ELFFile(file).get_section_by_name(".dynsym")
        (run,) = symbols.get_symbol_by_name("AOTInductorModelContainerRun")
        assert run.entry.st_shndx != "SHN_UNDEF"


MODEL = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU()).eval()
"""
MANIFEST = """
schema: aotpack.manifest/v1
bundle: {{name: tiny, version: 0.1.0}}
targets: {{cpu: {{kind: cpu, march: x86-64-v3}}}}
entries:
  e:
    kind: torch_export
    source: "tiny_model:build"
    inputs: {{input: {{shape: [n, 8], dtype: float32}}}}
    points: [{{dims: {{n: {sizes}}}}}]
"""


@pytest.mark.slow
def test_a_variant_is_the_same_bytes_whatever_else_is_compiled(tmp_path: Path) -> None:
    """Headers are precompiled for many and not for few."""

    def library(sizes: list[int]) -> bytes:
        folder = tmp_path / str(len(sizes))
        folder.mkdir()
        (folder / "tiny_model.py").write_text(MODEL)
        (folder / "m.yaml").write_text(MANIFEST.format(sizes=sizes))
        made = build(read_manifest(folder / "m.yaml"), folder / "out", store=Store(folder / "store"), jobs=2)
        (first,) = [v for v in open_bundle(made.path).index.entries["e"].variants if v.id == "e/n5/cpu"]
        (member,) = first.artifact.members()
        return Path(made.path, member).read_bytes()

    assert library([5]) == library([5, 6, 7, 8][: ALONE + 1])


def test_a_cubin_is_linked_in_however_long_the_name_of_its_kernel(tmp_path: Path) -> None:
    """Inductor names a kernel after all that it fuses: T5's bias of positions has 240 letters."""
    cubin, kernel = tmp_path / f"c{'x' * 50}.cubin", "model_triton_poi_" + "fused_" * 60
    cubin.write_bytes(b"code")
    linked = Path(_embedded(str(cubin), kernel, "ld", "objcopy"))
    assert f"__{kernel}_start".encode() in linked.read_bytes()
