"""Bundles made by hand, which need neither torch nor a compiler, and bundles with their index changed."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotpack_runtime.format.gpu import Gpu

Json = Any
LIBRARY = b"\x7fELF no library, and never opened as one"
PROGRAM = b"PK no program, and never read as one"


@dataclass(frozen=True)
class Host:
    """A machine that exists in tests only."""

    arch: str = "x86_64"
    devices: tuple[str, ...] = ("cpu",)
    cpu_flags: frozenset[str] = frozenset()
    torch: str | None = "2.13.0"
    torch_cuda: str | None = None
    glibc: str | None = "2.36"
    libstdcxx: str | None = "3.4.30"
    python: str = "cp311"
    gpu: Gpu | None = None
    gpus: tuple[Gpu, ...] = ()

    def on(self, index: int) -> Host:
        return self


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def safetensors(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """A weights file: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


WEIGHTS = safetensors({"scale": ("F32", [4], bytes(16))})


def file_record(data: bytes) -> Json:
    return {"sha256": sha256(data), "bytes": len(data)}


def variant_record(name: str, kind: str, low: Json, data: bytes) -> Json:
    file = "model.so" if kind == "aoti" else "program.pt2"
    digest = sha256(data) if kind == "exported" else sha256(b"folder of " + data)
    return {
        "id": name,
        "point": "online",
        "tier": "hot",
        "target": {"device": "cpu", "needs": {}},
        "artifact": {"kind": kind, "digest": digest, "files": {file: file_record(data)}},
        "guards": {
            "trees": ["*"],
            "leaves": [{"path": "x", "dtype": "float32", "dims": [low, 4], "device": "cpu"}],
            "where": [],
        },
        "outputs": {"tree": "*", "leaves": [{"result": 0, "dtype": "float32", "shape": ["x.shape[0]", "4"]}]},
        "weights": "encoder",
        "constants": [["c0", "scale"]],
        "examples": [[[2, 4]]],
    }


_INDEX: Json = {
    "format": 1,
    "bundle": {"name": "by-hand", "version": "1.0.0", "labels": {}},
    "requires": {},
    "entries": {
        "encoder": {
            "parameters": [{"name": "x", "kind": "positional_or_keyword"}],
            "variants": [variant_record("encoder/batch2/cpu", "aoti", 2, LIBRARY)],
            "programs": [variant_record("encoder/program0", "exported", [0, None], PROGRAM)],
            "source": {"text": "nowhere:build", "args": {}, "files": {}},
            "fills": {"x": "randn"},
            "on_miss": {"policy": "eager"},
            "verify": {"rtol": None, "atol": None, "samples": 1, "random": False},
            "imports": [],
            "operators": {},
            "output_names": None,
            "training": False,
        }
    },
    "weights": {
        "file": file_record(WEIGHTS),
        "sets": {"encoder": {"weights": {"scale": {"tensor": "scale"}}, "state": [], "dtype": ""}},
    },
    "provenance": {"aotpack": "0.1.0", "python": "3.11", "tools": {}},
    "settings": {},
}


def index_record() -> Json:
    """The index of a small bundle, new each time: one entry with a variant and a program, one weight."""
    return copy.deepcopy(_INDEX)


def members() -> dict[str, bytes]:
    """The members that `index_record` names, by path."""
    entry = index_record()["entries"]["encoder"]
    library, program = (entry[key][0]["artifact"]["digest"] for key in ("variants", "programs"))
    return {
        f"artifacts/{library}/model.so": LIBRARY,
        f"programs/{program}.pt2": PROGRAM,
        f"weights/{sha256(WEIGHTS)}.safetensors": WEIGHTS,
    }


def write_bundle(folder: Path, index: Json | bytes | None = None, files: Mapping[str, bytes] | None = None) -> Path:
    """A bundle folder of `index` (a record, or the bytes of index.json) and `files`, by default a good one."""
    data = index if isinstance(index, bytes) else json.dumps(index or index_record()).encode()
    for name, content in {"index.json": data, **(members() if files is None else files)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_zip(path: Path, files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """A zip of `files`, in their order."""
    path.write_bytes(zip_bytes(files, method))
    return path


def zip_bytes(files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def edited(bundle: Path, folder: Path, change: Callable[[Json], object]) -> Path:
    """A copy of `bundle` at `folder` whose index was changed."""
    shutil.copytree(bundle, folder)
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def set_need(index: Json, variant: Json, name: str, value: Json) -> None:
    """Let one variant of an index need something else; its target may be the number of a shared one."""
    target = variant["target"]
    target = index["shared"][target] if type(target) is int else target
    variant["target"] = {**target, "needs": {**target["needs"], name: value}}


def with_member(bundle: Path, folder: Path, member: str, data: bytes) -> Path:
    """A copy of `bundle` whose `member` has other bytes, and whose index agrees: what a hostile builder can write."""
    old = sha256((bundle / member).read_bytes())
    shutil.copytree(bundle, folder)
    text = (folder / "index.json").read_text()
    index = json.loads(text.replace(old, sha256(data)))
    _set_sizes(index, sha256(data), len(data))
    (folder / "index.json").write_text(json.dumps(index))
    (folder / member).unlink()
    (folder / member.replace(old, sha256(data))).write_bytes(data)
    return folder


def _set_sizes(value: Json, digest: str, size: int) -> None:
    if isinstance(value, dict):
        if value.get("sha256") == digest:
            value["bytes"] = size
        for item in value.values():
            _set_sizes(item, digest, size)
    elif isinstance(value, list):
        for item in value:
            _set_sizes(item, digest, size)
