"""Small files of others, read whole: regular ones only, and no more than a limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""A pipe that takes the place of the file between two looks does not block."""


def read_regular(path: str | Path, limit: int) -> bytes:
    """The bytes of a regular file; anything else is not opened.

    Args:
        path: of the file; links are followed.
        limit: how many bytes it may have.

    Raises:
        OSError: it cannot be read, is no regular file (a pipe, a device, a folder), or is too long. `reason` words it.

    Example:
        >>> read_regular(os.curdir, 100)
        Traceback (most recent call last):
        ...
        OSError: it is not a regular file
    """
    require_regular(path)
    with open(os.open(path, FLAGS), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not a regular file")
        if found.st_size > limit:
            raise OSError(f"it is longer than {limit} bytes")
        return file.read(found.st_size)


def require_regular(path: str | Path) -> None:
    """Raise `OSError` unless there is a regular file at `path`; nothing is opened."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a NUL in the name, or a lone surrogate
        raise OSError(str(error)) from error
    if not stat.S_ISREG(mode):
        raise OSError("it is not a regular file")


def reason(error: BaseException) -> str:
    """What went wrong, in one short printable line.

    Example:
        >>> reason(FileNotFoundError(2, "No such file or directory", "a.json")), reason(ValueError("no\\nway"))
        ('No such file or directory', 'no way')
    """
    text = getattr(error, "strerror", None) or " ".join(str(error).split())[:300] or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)
