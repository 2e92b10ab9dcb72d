"""States of streams in temporary files: one file each, in a folder of the fleet's own.

A file is written once and belongs to the object that wrote it: it is deleted with that object. So whatever still holds the
object, such as a copy of the fleet or a step that is rolled back, can read it. A process deletes no file of another process,
and none that a process forked from it may still read; these go with the folder. A killed process leaves its folder behind.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor

from come.errors import ConfigError, StateError
from come.state import saving
from come.state.files import unwritable

_forks = 0
"""Of this process, so far."""


def _forking() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forking)


class _Owned:
    """Something on disk that goes with this object; copies in this process are the object itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise StateError(
            "a fleet with a folder cannot be pickled: its files belong to this process; save() it and load() it"
        )


class SpillFolder(_Owned):
    """A folder inside of the user's.

    Example:
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = SpillFolder(Path(parent))
        ...     there = len(list(Path(parent).iterdir()))
        ...     del folder
        ...     there, len(list(Path(parent).iterdir()))
        (1, 0)
    """

    def __init__(self, parent: Path) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix="come-fleet-", dir=parent))
        except OSError as error:
            raise ConfigError(f"folder must be writable, got {str(parent)!r}: {error.strerror}") from error
        weakref.finalize(self, _remove, self.path, os.getpid())


class Spilled(_Owned):
    """The state of a stream on disk.

    Args:
        folder: where.
        data: the state, packed by `come.state.saving.packed`.
        health: counters and gauges, kept in memory because they are read more often than the file.
    """

    def __init__(self, folder: SpillFolder, data: bytes, health: dict[str, float]) -> None:
        self._health, self._folder = health, folder
        self._path = folder.path / f"{secrets.token_hex(8)}.safetensors"
        weakref.finalize(self, _delete, self._path, os.getpid(), _forks)
        try:
            self._path.write_bytes(data)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def health(self) -> dict[str, float]:
        """As they were when it was written."""
        return dict(self._health)

    def tensors(self, method: str) -> dict[str, Tensor]:
        """Read the state."""
        try:
            return saving.read(self._path, method)
        except StateError as error:
            raise StateError(f"the state of this stream on disk is lost: {error}; reset() the stream") from error


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _delete(file: Path, owner: int, forks: int) -> None:
    if (os.getpid(), _forks) == (owner, forks):
        file.unlink(missing_ok=True)
