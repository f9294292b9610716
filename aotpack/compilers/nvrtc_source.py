"""CUDA C++ source -> its text, the headers that it may include, and a digest of all that is compiled."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotpack.compilers.dependencies import named, stamp
from aotpack.compilers.headers import header_files
from aotpack.compilers.nvrtc_library import CUDA, header_folder, load_nvrtc
from aotpack_runtime.errors import SourceError
from aotpack_runtime.store import Store

Json = Any


def describe(job: Mapping[str, Json], store: Store) -> Json:
    """The source that `job` names, what a build of it depends on, and a digest of all that is compiled.

    SourceError names what is missing and where it was looked for. A header that is new in a folder is in the digest,
    but is not in `depends`: ask again rather than compare.
    """
    folder, source, nvrtc = Path(job["folder"]), job["source"], load_nvrtc()
    text = read_source(source, folder)
    paths = [folder / source]
    parts = [("source", text), ("nvrtc", nvrtc.name)]
    distributions = [nvrtc.distribution] if nvrtc.distribution else []
    for name in job["include_dirs"]:
        if name == CUDA:
            distributions.append(header_folder(nvrtc, source)[1])
            continue
        for path in headers_in(name, source, folder):
            paths.append(path)
            parts.append((f"file {path.relative_to(folder / name).as_posix()} of {name}", _sha256(path)))
    parts += [(f"header {name}", header) for name, header in sorted(job["headers"].items())]
    versions = {name: importlib.metadata.version(name) for name in sorted({*distributions, "cuda-bindings"})}
    digest = hashlib.sha256()
    for part in (*parts, *((name, version) for name, version in versions.items() if name != "cuda-bindings")):
        for piece in part:
            digest.update(len(piece.encode()).to_bytes(8, "little") + piece.encode())
    files = {named(path, folder): stamp(path) for path in paths}
    return {
        "digest": digest.hexdigest(),
        "text": text,
        "depends": {"files": dict(sorted(files.items())), "distributions": versions},
    }


def read_source(source: str, folder: Path) -> str:
    path = folder / source
    try:
        return path.read_text()
    except FileNotFoundError:
        raise SourceError(source, f"there is no such file; searched {path}") from None
    except (OSError, ValueError) as error:
        raise SourceError(source, f"cannot be read: {error}") from error


def headers_in(name: str, source: str, folder: Path) -> list[Path]:
    """The files of an include folder."""
    path = folder / name
    if not path.is_dir():
        raise SourceError(source, f"its include folder {name!r} is not there; searched {path}")
    return header_files(path)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
