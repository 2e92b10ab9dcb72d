"""The command line: `come bench`, `report`, `compare`, `reproduce`, `protocol`, `serve`, `demo`, `list` and `doctor`."""

from __future__ import annotations

import inspect
import re
import sys
import warnings

import typer

from come.bench.cli import bench, demo, doctor, lists, protocol, reports, reproduce, serve
from come.bench.cli.app import app
from come.errors import ComeError, printable

__all__ = ["app", "main"]

for _module in (bench, reports, reproduce, protocol, serve, demo, lists, doctor):  # in the order of --help
    _module.add(app)
for _command in app.registered_commands:  # the terminal breaks the lines of --help, not the docstring
    _command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(_command.callback) or "")


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
    except ComeError as error:
        if debug:
            raise
        _fail(str(error), 2)
    except Exception as error:
        if debug:
            raise
        say = getattr(error, "format_message", None)  # typer's word on wrong options
        if say is not None:
            _fail(say(), 2)
        _fail(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; --debug shows more", 1)
    if code == 130:
        _fail("interrupted; finished cells are kept: run the same command to go on", 130)
    if code:
        sys.exit(code)


def _fail(message: str, code: int) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)
    sys.exit(code)
