"""`come protocol`: benchmarks by name, in which everything that decides a number is fixed."""

from __future__ import annotations

from typing import Annotated

import typer

from come.bench import protocols
from come.bench.cli.lists import list_
from come.bench.cli.options import Debug, Json

commands = typer.Typer(no_args_is_help=True, help="Show the protocols that [bold]come bench --protocol[/] follows.")


@commands.command(name="list")
def list_protocols(json_: Json = False, debug: Debug = False) -> None:
    """List the protocols, and what No Adapt must reach in each."""
    list_("protocols", json_)


@commands.command()
def show(
    name: Annotated[str, typer.Argument(help="A protocol.", show_default=False, autocompletion=protocols.names)],
    debug: Debug = False,
) -> None:
    """Print a protocol as a paragraph for a paper."""
    typer.echo(protocols.get(name).paragraph())


def add(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(commands, name="protocol")
