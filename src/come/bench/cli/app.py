"""The command itself, and options that several subcommands share."""

from __future__ import annotations

from typing import Annotated

import typer

import come

app = typer.Typer(
    name="come",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Test-time adaptation that knows what it does not know.\n\n"
    "Start with [bold]come bench[/]: in two minutes, on two cores and without a network, it shows how Tent, EATA and SAR "
    "fare under corruption with entropy minimization (em) and with COME.",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"come {come.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
