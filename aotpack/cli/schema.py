"""`aotpack schema`: the JSON Schema of the manifest, for editors."""

from __future__ import annotations

import json

import typer


def command() -> None:
    """Print the JSON Schema of the manifest. manifests/schema.json is this."""
    from aotpack.manifest import manifest_schema

    typer.echo(json.dumps(manifest_schema(), indent=2, sort_keys=True))
