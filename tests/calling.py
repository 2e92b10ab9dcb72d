"""The command line, called as a user would."""

from __future__ import annotations

import sys

from come.bench import cli


def call(monkeypatch, capsys, *arguments):
    """Exit code, output and errors of `come ARGUMENTS` in a terminal of 80 columns."""
    monkeypatch.setattr(sys, "argv", ["come", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    found = capsys.readouterr()
    return code, found.out, found.err
