"""`aotpack init`: a commented manifest to start from."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, note, result
from aotpack_runtime.errors import OutputError

TEMPLATE = """\
# What a release builds: entries, the shapes to have ready, and what they are for. `aotpack schema` has every key.
schema: aotpack.manifest/v1
bundle: {{name: {name}, version: 0.1.0}}

targets:
  cpu: {{kind: cpu, march: x86-64-v3}}     # AVX2; x86-64-v4 is AVX-512

entries:
  model:                                 # what a server calls: session["model"](x=...)
    kind: torch_export
    source: "model:build"                # build() in model.py beside this file returns an nn.Module in eval mode
    inputs:                              # the arguments of forward(); a word is a dim that varies
      x: {{shape: [batch, 256], dtype: float32}}
    points:                              # the shapes to have ready before the first request
      - name: online
        dims:
          batch: [1, 8]                  # a list: one variant for exactly each size
      - name: bulk
        tier: warm                       # loaded when first used
        dims:
          batch: {{min: 1, max: 256, opt: 32}}   # a range: one variant for all of it
    verify: {{against: eager}}             # nothing is packed before it was compared with eager
    on_miss: {{policy: jit}}               # jit | eager | error
"""


def command(
    path: Path = typer.Argument(Path("manifest.yaml"), help="Where to write it."),
    force: bool = typer.Option(False, "--force", help="Replace a file that is there."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> None:
    """Write a commented manifest to start from."""
    if path.exists() and not force:
        raise OutputError(f"{path}: exists", hint="name another file, or --force")
    name = re.sub(r"[^a-z0-9_.-]+", "-", path.absolute().parent.name.lower()).strip("-").lstrip(".-0123456789")
    path.write_text(TEMPLATE.format(name=name or "bundle"))
    note("next: write model.py with build(), then `aotpack plan` and `aotpack build`")
    result({"ok": True, "path": str(path)}, as_json=as_json, text=str(path))
