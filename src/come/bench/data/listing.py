"""What is in a folder of data. Links in it are not trusted: none is followed out of it, or in a circle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from come.bench.data.reading import reason
from come.errors import InputError

IMAGE_ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


def data_folder(path: str) -> Path:
    """The folder at `path`, if there is one."""
    try:
        root = Path(path).expanduser()
        if root.is_dir():
            return root
        state = "is not a folder" if root.exists() else "does not exist"
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, a ~user who is not there
        raise InputError(f"cannot open the folder {path!r}: {reason(error)}; give one that holds images") from error
    raise InputError(f"{root} {state}; give the folder that holds the images")


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    return sorted(entry.name for entry in _entries(folder) if _is(entry, "folder") and not entry.name.startswith("."))


def images_below(folder: Path) -> list[Path]:
    """All images, at any depth; links to folders are not gone into, since they can lead in a circle."""
    found, waiting = [], [folder]
    while waiting:
        here = waiting.pop()
        for entry in _entries(here):
            if _is(entry, "folder", follow=False):
                waiting.append(here / entry.name)
            elif Path(entry.name).suffix.lower() in IMAGE_ENDINGS and _is(entry, "file"):
                found.append(here / entry.name)
    return sorted(found)


def stay_inside(path: Path, roots: Sequence[Path]) -> None:
    """Refuse a file that is in none of `roots`, by its name or a link; where a root itself leads is the user's choice."""
    real = os.path.realpath(path)
    if not any(os.path.commonpath((real, home)) == home for home in map(os.path.realpath, roots)):
        raise ValueError(
            f"a link or a name in the data leads out of the data folder, to {real}; if you trust it, name the folder that "
            "really holds it"
        )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        raise InputError(f"cannot list the folder {folder}: {reason(error)}; make it readable, or remove it") from error


def _is(entry: os.DirEntry[str], kind: Literal["file", "folder"], *, follow: bool = True) -> bool:
    try:
        return entry.is_file(follow_symlinks=follow) if kind == "file" else entry.is_dir(follow_symlinks=follow)
    except OSError:  # a link to itself
        return False
