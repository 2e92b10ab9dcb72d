"""Reads files, folders and archives of others: regular files up to a size, and no link that leads out of the data folder."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from come.errors import InputError, one_line

IMAGE_ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
# Without O_NONBLOCK, opening a pipe that replaced the file after the check would block.
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

LONGEST_HEADER = 2**20  # bytes of a long name in a tar archive, or of what else a header says of the next file
READ_WHOLE = (b"L", b"K", b"x", b"g", b"X")
"""Types of tar headers about the next file, such as a long name; `tarfile` reads them whole."""


def read_regular(path: str | Path, limit: int) -> bytes:
    """The bytes of a regular file, at most `limit`; links are followed.

    Raises:
        OSError: it cannot be read, is not a regular file (a pipe, a device, a folder), or is too long. `reason` words it.
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
    """Raise `OSError` unless `path` is a regular file; nothing is opened."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a NUL in the name, or a lone surrogate
        raise OSError(str(error)) from error
    if not stat.S_ISREG(mode):
        raise OSError("it is not a regular file")


@contextmanager
def as_input_error(failure: str, repair: str) -> Iterator[None]:
    """Turn any error, since damaged files raise anything, into an `InputError` with the failure, the reason and the repair.

    Example:
        >>> with as_input_error("cannot read a.npy", "download it again"):
        ...     raise EOFError("it is cut off")
        Traceback (most recent call last):
        ...
        come.errors.InputError: cannot read a.npy: it is cut off; download it again
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{failure}: {one_line(error)}; {repair}") from error


def data_folder(path: str) -> Path:
    """The folder at `path`; `InputError` if there is none."""
    with as_input_error(f"cannot open the folder {path!r}", "give one that holds images"):
        root = Path(path).expanduser()
        if root.is_dir():
            return root
        state = "is not a folder" if root.exists() else "does not exist"
    raise InputError(f"{root} {state}; give the folder that holds the images")


def subfolders(folder: Path) -> list[str]:
    """Sorted names of the folders in a folder, without hidden ones."""
    return sorted(e.name for e in _entries(folder) if _answer(e.is_dir) and not e.name.startswith("."))


def images_below(root: Path, folder: str) -> list[Path]:
    """Images at any depth of a folder in `root`, relative to it; links to folders are skipped, they can form a circle."""
    found, waiting = [], [Path(folder)]
    while waiting:
        here = waiting.pop()
        for entry in _entries(root / here):
            if entry.is_dir(follow_symlinks=False):
                waiting.append(here / entry.name)
            elif Path(entry.name).suffix.lower() in IMAGE_ENDINGS and _answer(entry.is_file):
                found.append(here / entry.name)
    return sorted(found)


def stay_inside(path: Path, roots: Sequence[Path]) -> None:
    """Refuse a file that a name or a link places outside of all `roots`; the roots themselves may be links."""
    real = os.path.realpath(path)
    if not any(os.path.commonpath((real, home)) == home for home in map(os.path.realpath, roots)):
        raise ValueError(
            f"a link or a name in the data leads out of the data folder, to {real}; if you trust it, name the folder that "
            "really holds it"
        )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with (
        as_input_error(f"cannot list the folder {folder}", "make it readable, or remove it"),
        os.scandir(folder) as found,
    ):
        return list(found)


def _answer(check: Callable[[], bool]) -> bool:
    """Of `DirEntry.is_file` or `is_dir`; False for a link to itself."""
    try:
        return check()
    except OSError:
        return False


class TarHeader(tarfile.TarInfo):
    """A header whose size is checked: a negative one would lead `tarfile` back, in an endless loop."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> TarHeader:
        """Read a block of 512 bytes; a damaged one is an error, where `tarfile` takes it for the end of the archive."""
        try:
            found = super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from error
        if found.size < 0 or (found.type in READ_WHOLE and found.size > LONGEST_HEADER):
            raise tarfile.ReadError(f"a file in it has {found.size} bytes")
        return found


def files_of_archive(path: str | Path, limit: int) -> dict[str, bytes]:
    """All files of a .tar.gz in memory, by their names without folders; at most `limit` bytes unpacked.

    Raises:
        OSError, EOFError, ValueError, tarfile.TarError, zlib.error: it cannot be read, or is too long. `reason` words it.
    """
    require_regular(path)
    found, left = dict[str, bytes](), limit
    with tarfile.open(path, "r:gz", tarinfo=TarHeader) as archive:
        for member in archive:
            left -= tarfile.BLOCKSIZE + abs(member.size)
            if left < 0 or member.size < 0:  # negative in a pax header
                raise ValueError(f"it unpacks to more than {limit} bytes")
            if member.isfile() and (file := archive.extractfile(member)) is not None:
                found[os.path.basename(member.name)] = file.read()
    return found
