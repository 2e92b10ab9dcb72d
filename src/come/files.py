"""Atomic file writes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNABLE = (errno.EACCES, errno.EINVAL, errno.ENOTSUP)
"""What a system says that cannot open or flush a folder."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write to; at the end of the block the file there takes its place, by rename.

    If the block fails, what stood at `path` is untouched and nothing is left beside it; what a killed process has left there
    is removed. Once the block has ended, the new file outlives a power cut.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "a.txt") as beside:
        ...         _ = beside.write_text("whole")
        ...     [p.name for p in Path(folder).iterdir()]
        ['a.txt']
    """
    host = re.sub(r"[^\w-]", "_", socket.gethostname())
    sweep(path.parent, host)
    beside = path.with_name(f".{path.name}.{host}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield beside
        with open(beside, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        settle(path.parent)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def sweep(folder: Path, host: str) -> None:
    """Remove half-written files of processes of this machine that are no longer alive."""
    mine = re.compile(rf"\..+\.{re.escape(host)}\.(\d+)\.\d+")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            found = mine.fullmatch(name)
            if found and not _alive(int(found[1])):
                with contextlib.suppress(OSError):
                    (folder / name).unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


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
