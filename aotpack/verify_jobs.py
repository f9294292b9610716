"""The jobs that verify a staged bundle, one a variant: what their outcome depends on, and which cannot be run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aotpack.compilers.toolchain import gpu_tools
from aotpack.revisions import VERIFY_REVISION
from aotpack_runtime.format.codec import dump_guards, dump_outputs
from aotpack_runtime.format.fingerprint import fingerprint
from aotpack_runtime.format.index import Entry, Index, Variant
from aotpack_runtime.format.launch import dump_launch
from aotpack_runtime.machine import this_machine

Json = Any


def verify_job(staged: Path, folder: Path, entry: str, variant: str) -> Json:
    """Compare a variant of the bundle at `staged` with its source, which is looked up in `folder` first."""
    return {"kind": "verify", "bundle": str(staged), "folder": str(folder), "entry": entry, "variant": variant}


def verify_key(index: Index, entry: str, variant: Variant) -> str:
    """Equal for variants that a comparison with their source, on the same inputs, says the same of."""
    record = index.entries[entry]
    return fingerprint(
        {
            "artifact": variant.artifact.digest,
            "examples": [list(example) for example in variant.examples],
            "weights": index.weights_file.digest if index.weights_file else "",
            "source": {
                "text": record.source.text,
                "args": dict(record.source.args),
                "files": dict(record.source.files),
            },
            "imports": list(record.imports),
            "settings": dict(record.verify),
            "fills": dict(record.fills),
            "guards": dump_guards(variant.guards),
            "outputs": dump_outputs(variant.outputs),
            "aotpack": VERIFY_REVISION,
            **({} if variant.launch is None else {"launch": dump_launch(variant.launch)}),
            **(gpu_tools() if variant.target.device == "cuda" and record.kernel is None else {}),
        }
    )


def not_verifiable(entry: Entry, variant: Variant, *, across: bool) -> str | None:
    """Why a variant is packed without having been run, None when it is to be run: a kernel for which this host has no
    GPU or the manifest no reference, and of models what was built `across`, without its GPU."""
    reason = variant.target.reject(this_machine())
    if entry.kernel is None:
        return reason if across else None
    if reason is None and not entry.verify.get("against"):
        return "the manifest gives no `verify`"
    return reason
