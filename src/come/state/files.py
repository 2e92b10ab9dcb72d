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

UNABLE = (errno.EACCES, errno.EINVAL, errno.ENOTSUP)  # of a system that cannot open or flush a folder


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; the file is flushed and renamed to `path` at the end of the block.

    If the block fails, `path` is unchanged and the temporary file is deleted. After the block the new file survives a power
    cut. A killed process leaves `.NAME.RANDOM.tmp` behind; nothing reads or deletes it, because on a shared folder nobody can
    know that its writer is dead.

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
    """The error for a file that cannot be written.

    >>> print(unwritable(Path("a"), PermissionError(13, "Permission denied")))
    cannot write a: Permission denied; choose a folder that exists, is writable and has free space
    """
    return StateError(
        f"cannot write {path}: {error.strerror}; choose a folder that exists, is writable and has free space"
    )


def write(path: Path, data: bytes) -> None:
    """Write a file atomically; raises `StateError` if it cannot be written."""
    try:
        with replacing(path) as beside:
            beside.write_bytes(data)
    except OSError as error:
        raise unwritable(path, error) from error


def settle(folder: Path) -> None:
    """Flush a folder to disk, so that renames in it survive a power cut; does nothing where the system cannot."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
