"""`come protocol`: benchmarks by name, in which everything that decides a number is fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from come.bench import RunFolder, board, protocols
from come.bench.cli.lists import list_
from come.bench.cli.options import Debug, Json, option
from come.errors import ComeError, InputError, printable

commands = typer.Typer(
    no_args_is_help=True,
    help="Show the protocols that [bold]come bench --protocol[/] follows, and submit what it found to the leaderboard.",
)


@commands.command(name="list")
def list_protocols(json_: Json = False, debug: Debug = False) -> None:
    """List the protocols, and what No Adapt must reach in each."""
    list_("protocols", json_)


@commands.command()
def show(
    name: Annotated[str, typer.Argument(help="A protocol.", autocompletion=protocols.names)], debug: Debug = False
) -> None:
    """Print a protocol as a paragraph for a paper."""
    typer.echo(protocols.get(name).paragraph())


@commands.command()
def submit(
    run: Annotated[Path, typer.Argument(help="A finished run folder of [bold]come bench --protocol[/].")],
    out: Annotated[Path, option("The file, such as results/board/NAME.json.")],
    name: Annotated[str, option("Who submits it.")],
    link: Annotated[str | None, option("The paper or the code: https://...")] = None,
    debug: Debug = False,
) -> None:
    """Write the file that the leaderboard takes: all rows of a finished run under a protocol."""
    if out.suffix != ".json":
        raise InputError(f"out must be a file that ends in .json, got {out}")
    found = board.submission(RunFolder.existing(run), name, link)
    found.save(out)
    typer.echo(f"{out}: {len(found.rows)} rows under protocol {found.protocol}, {out.stat().st_size / 1000:.1f} kB")


@commands.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Files of [bold]come protocol submit[/].")], debug: Debug = False
) -> None:
    """Check that submitted files are whole and come from a protocol; exit code 1 and a line for each problem if not."""
    wrong = False
    for path in files:
        try:
            found = board.load(path)
            lines = [f"{path}: {problem}" for problem in board.problems(found)]
        except ComeError as error:
            lines = [str(error)]
        for line in lines:
            typer.echo(printable(line), err=True)
        wrong |= bool(lines)
        if not lines:
            typer.echo(f"{path}: valid, {len(found.rows)} rows under protocol {found.protocol}")
    if wrong:
        raise typer.Exit(1)
