"""Atomic file writes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from come.errors import StateError

UNABLE = (errno.EACCES, errno.EINVAL, errno.ENOTSUP)
"""What a system says that cannot open or flush a folder."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write to; at the end of the block the file there takes its place, by rename.

    If the block fails, what stood at `path` is untouched and nothing is left beside it. Once the block has ended, the new
    file survives a power cut. A killed process leaves its temporary file behind, `.NAME.RANDOM.tmp`: nothing reads it, and
    nothing deletes it either, because on a shared folder nobody can know that its writer is dead.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "a.txt") as beside:
        ...         _ = beside.write_text("whole")
        ...     [p.name for p in Path(folder).iterdir()]
        ['a.txt']
    """
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        yield beside
        with open(beside, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        settle(path.parent)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def unwritable(path: Path, error: OSError) -> StateError:
    """Build the error for a file that cannot be written.

    >>> print(unwritable(Path("a"), PermissionError(13, "Permission denied")))
    cannot write a: Permission denied; choose a folder that exists and is writable, and has room
    """
    return StateError(
        f"cannot write {path}: {error.strerror}; choose a folder that exists and is writable, and has room"
    )


def settle(folder: Path) -> None:
    """Flush the names in a folder to disk: a rename that a power cut undoes was not one. Does nothing where that cannot be."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
