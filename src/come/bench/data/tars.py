"""Reads tar archives of others: their headers are not trusted, and nothing is unpacked to the disk."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from come.bench.data.reading import require_regular

LONG = 2**20  # bytes of a long name, or of what else a header says of the next file
READ_WHOLE = (b"L", b"K", b"x", b"g", b"X")
"""Types of headers about the next file, such as a long name; `tarfile` reads them whole."""


class Header(tarfile.TarInfo):
    """A header whose size is checked: a negative one would lead `tarfile` back, in an endless loop."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
        """Read a block of 512 bytes; a damaged one is an error, where `tarfile` takes it for the end of the archive."""
        try:
            found = super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from error
        if found.size < 0 or (found.type in READ_WHOLE and found.size > LONG):
            raise tarfile.ReadError(f"a file in it has {found.size} bytes")
        return found


def files_of_archive(path: str | Path, limit: int) -> dict[str, bytes]:
    """All files of a .tar.gz in memory, by their names without folders; at most `limit` bytes unpacked.

    Raises:
        OSError, EOFError, ValueError, tarfile.TarError, zlib.error: it cannot be read, or is too long. `reason` words it.
    """
    require_regular(path)
    found, left = dict[str, bytes](), limit
    with tarfile.open(path, "r:gz", tarinfo=Header) as archive:
        for member in archive:
            left -= tarfile.BLOCKSIZE + abs(member.size)
            if left < 0 or member.size < 0:  # negative in a pax header
                raise ValueError(f"it unpacks to more than {limit} bytes")
            if member.isfile() and (file := archive.extractfile(member)) is not None:
                found[os.path.basename(member.name)] = file.read()
    return found
