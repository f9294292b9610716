"""`aotpack inspect BUNDLE`: what is in a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, result, size_text


def command(
    bundle: Path = typer.Argument(help="A bundle folder or archive."),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> None:
    """Show entries, variants with their guards in words, sizes, versions and digests. Needs no torch."""
    from aotpack_runtime.bundle import open_bundle

    opened = open_bundle(bundle)
    value = _value(opened)
    opened.close()
    result(value, as_json=as_json, text=_text(value))


def _value(bundle: Any) -> dict[str, Any]:
    index = bundle.index
    entries = {}
    for name, entry in index.entries.items():
        entries[name] = {
            "parameters": list(entry.parameter_names),
            "source": entry.source.text,
            "on_miss": dict(entry.on_miss),
            "training": entry.training,
            **({} if entry.kernel is None else {"kernel": _kernel(entry.kernel)}),
            "variants": [_variant(variant) for variant in entry.variants],
            "programs": [_variant(program) for program in entry.programs],
        }
    weights = index.weights_file
    return {
        "ok": True,
        "name": index.name,
        "version": index.version,
        "labels": dict(index.labels),
        "digest": bundle.digest,
        "provenance": dict(index.provenance),
        "requires": dict(index.requires),
        "weights": None if weights is None else {"sha256": weights.digest, "bytes": weights.size_bytes},
        "bytes": sum(file.size_bytes for file in index.members().values()),
        "entries": entries,
    }


def _kernel(kernel: Any) -> dict[str, Any]:
    rows = {arch: len(rows) for arch, rows in (kernel.choice.tables or {}).items()}
    return {
        "operator": kernel.operator or None,
        "writes": list(kernel.writes),
        "choice": {"rules": len(kernel.choice.rules), "tuned": rows},
    }


def _variant(variant: Any) -> dict[str, Any]:
    return {
        "id": variant.id,
        "tier": variant.tier,
        "kind": variant.artifact.kind,
        "sha256": variant.artifact.digest,
        "bytes": variant.artifact.size_bytes,
        "needs": {"device": variant.target.device, **variant.target.needs},
        "guards": variant.guards.words(),
        **({} if variant.launch is None else {"axes": dict(variant.axes), "launch": _launch(variant.launch)}),
    }


def _launch(launch: Any) -> dict[str, Any]:
    return {
        "symbol": launch.symbol,
        "grid": [extent.text for extent in launch.grid],
        "block": [extent.text for extent in launch.block],
        "shared_bytes": launch.shared.text,
        "parameter_bytes": launch.bytes,
        "cluster": list(launch.cluster),
    }


def _text(value: dict[str, Any]) -> str:
    across, attention = value["provenance"].get("cross", {}), value["provenance"].get("attention", {})
    lines = [
        f"{value['name']} {value['version']}  {size_text(value['bytes'])}  sha256 {value['digest']}",
        "built with "
        + ", ".join(f"{name} {text}" for name, text in sorted(value["provenance"].get("tools", {}).items())),
    ]
    if value["weights"]:
        lines.append(f"weights {size_text(value['weights']['bytes'])}, once for all variants")
    for name, entry in value["entries"].items():
        call, policy = f"{name}({', '.join(entry['parameters'])})", entry["on_miss"]["policy"]
        lines.append(f"\n{call}  from {entry['source']}, on a miss: {policy}")
        for variant in [*entry["variants"], *entry["programs"]]:
            needs = ", ".join(f"{key} {text}" for key, text in sorted(variant["needs"].items()))
            lines.append(
                f"  {variant['id']}  {variant['kind']}, {variant['tier']}, {size_text(variant['bytes'])}, needs {needs}"
            )
            lines += [f"      {words}" for words in variant["guards"]]
            if variant["id"] in across:
                said = across[variant["id"]]
                lines.append(f"      built without its GPU for a {said['device']}; verified: {said['verified']}")
            if variant["id"] in attention:
                said = attention[variant["id"]]
                taken = f"attention by {', '.join(said['taken'])}" if said["taken"] else "no call of attention"
                lines.append(f"      {taken}; the manifest names {', '.join(said['named'])}")
            if "launch" in variant:
                launch = variant["launch"]
                grid, block = ", ".join(launch["grid"]), ", ".join(launch["block"])
                lines.append(f"      {launch['symbol']}: grid {grid}; block {block}; shared {launch['shared_bytes']} B")
    return "\n".join(lines)
