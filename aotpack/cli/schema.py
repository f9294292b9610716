"""`aotpack schema`: the JSON Schema of the manifest, for editors."""

from __future__ import annotations

import json

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, result


def command(as_json: bool = JSON_OPTION, debug: bool = DEBUG_OPTION) -> None:
    """Print the JSON Schema of the manifest. manifests/schema.json is this."""
    from aotpack.manifest import manifest_schema

    schema = manifest_schema()
    result(schema, as_json=as_json, text=json.dumps(schema, indent=2, sort_keys=True))
