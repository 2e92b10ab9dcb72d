"""The command line: `come bench`, `report`, `compare`, `reproduce`, `protocol`, `serve`, `demo`, `list` and `doctor`."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from typing import Annotated

import typer

import come
from come.bench.cli import bench, demo, doctor, lists, protocol, reports, reproduce, serve
from come.errors import ComeError, one_line, printable

__all__ = ["app", "main"]

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


for _command in (  # in the order of --help
    *(bench.bench, reports.report, reports.compare, reproduce.reproduce),
    *(serve.serve, demo.demo, lists.list_, doctor.doctor),
):
    # the terminal breaks the lines of --help, not the docstring
    _help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(_command) or "")
    app.command(name=_command.__name__.rstrip("_"), help=_help)(_command)
app.add_typer(protocol.commands, name="protocol")


def main() -> None:
    """Run the command line: exit code 1 if a cell failed, 2 and one line for what a user can fix, 130 for Ctrl-C."""
    debug = "--debug" in sys.argv
    try:
        with warnings.catch_warnings():  # on one line, without the place in our code
            warnings.showwarning = lambda message, *_, **__: print(
                f"warning: {printable(str(message))}", file=sys.stderr
            )
            code = app(prog_name="come", standalone_mode=False)
    except typer.Abort:
        code = 130
    except Exception as error:
        if debug:
            raise
        if isinstance(error, ComeError):
            _fail(str(error), 2)
        if hasattr(error, "format_message"):  # typer's word on wrong options
            _fail(error.format_message(), 2)
        _fail(f"{one_line(error, kind=True, first=True)}; --debug shows more", 1)
    if code == 130:
        _fail("interrupted; finished cells are kept: run the same command to go on", 130)
    if code:
        sys.exit(code)


def _fail(message: str, code: int) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)
    sys.exit(code)
