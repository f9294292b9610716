"""`aotpack verify BUNDLE`: digests, then every variant against eager within the manifest's tolerance."""

from __future__ import annotations

from pathlib import Path

import typer

from aotpack.cli.output import DEBUG_OPTION, JSON_OPTION, note, result, table


def command(
    bundle: Path = typer.Argument(help="A bundle folder or archive."),
    source: Path = typer.Option(
        Path(), "--source", exists=True, file_okay=False, help="Folder in which the model's source is looked up first."
    ),
    as_json: bool = JSON_OPTION,
    debug: bool = DEBUG_OPTION,
) -> int:
    """Check every digest and run every variant against eager.

    Eager is the source where it can be imported, else the bundle's own program.
    """
    from aotpack_runtime.errors import MissingDependency

    try:
        from aotpack.verify import verify_bundle
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency("torch", needed_for="running variants", install="'aotpack[torch]'") from error

    seen, skipped = verify_bundle(str(bundle), source, note)
    rows = []
    for name, found in seen.items():
        if isinstance(found, str):
            rows.append((name, "FAILED", found))
        else:
            values = (
                f"largest error {found.largest_error:.2g}" if found.compared_values else "random: values not compared"
            )
            refused = (
                f"; {found.reference} itself refuses sizes {', '.join(map(str, found.refused))}"
                if found.refused
                else ""
            )
            rows.append((name, "ok", f"{found.cases} cases against {found.reference}, {values}{refused}"))
    rows += [(name, "skipped", reason) for name, reason in skipped.items()]
    good = {name.partition("/")[0] for name, word, _ in rows if word == "ok"}
    devices = _devices(bundle) if skipped else {}
    kernels = {name for name in skipped if devices[name] == "cuda"}
    # A kernel is built for several architectures: those of other GPUs are not missing here.
    failed = [
        name
        for name, word, _ in rows
        if word == "FAILED" or (word == "skipped" and not (name in kernels and name.partition("/")[0] in good))
    ]
    value = {"ok": not failed, "variants": {name: {"verdict": word, "detail": detail} for name, word, detail in rows}}
    result(value, as_json=as_json, text=table(rows, ("variant", "verdict", "detail")))
    if any(word == "FAILED" for _, word, _ in rows):
        return 1
    return 6 if failed else 0


def _devices(bundle: Path) -> dict[str, str]:
    """Variant -> the kind of device it is for."""
    from aotpack_runtime.bundle import open_bundle

    opened = open_bundle(bundle)
    opened.close()
    return {variant.id: variant.target.device for variant in opened.index.variants()}
