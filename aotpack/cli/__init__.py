"""The command line: one command a file, each parse, call, print.

stdout carries the result only; progress and messages go to stderr. Exit codes: 0 done, 1 build or verification failed,
2 wrong usage, 3 manifest invalid, 4 tool or dependency missing, 5 some variants failed under --keep-going, 6 bundle
does not fit this host, 7 integrity, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

app = typer.Typer(
    name="aotpack",
    help="Move compilation of PyTorch models out of server starts: build bundles, look into them, check, verify them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS = (
    "build",
    "plan",
    "inspect",
    "explain",
    "check",
    "verify",
    "tune",
    "prove_cross",
    "bench",
    "export",
    "schema",
    "env",
    "init",
)

for _name in _COMMANDS:
    _module = import_module(f"aotpack.cli.{_name}")
    app.command(name=_name.replace("_", "-"))(_module.command)
app.add_typer(import_module("aotpack.cli.cache").app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        from aotpack import __version__

        typer.echo(f"aotpack {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; the exit status is the command's."""
    from aotpack.cli.output import run

    sys.exit(run(app))
