"""The folder where tenants' states are kept: one file each, written atomically by the one server that owns it.

A tenant belongs to part sha256(name) mod `parts`. A server owns one part and holds its lock while it lives, so two servers
never write the same tenant. The system frees the lock of a killed process. The number of parts can only change while no
server uses the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from come.errors import ConfigError, StateError, require_int
from come.state import saving
from come.state.files import settle, write

INDEX, FORMAT = "serve.json", "come-serve-1"
SUFFIX = ".safetensors"


def key_of(name: str) -> str:
    """The file of a tenant without its ending: of the same length for every name, and distinct where case is ignored."""
    return hashlib.sha256(name.encode()).hexdigest()


def part_of(name: str, parts: int) -> int:
    """The part that a tenant belongs to.

    Example:
        >>> part_of("north", 4) == part_of("north", 4) < 4
        True
    """
    return int(key_of(name)[:16], 16) % parts


class States:
    """The files of one part of a state folder, and its lock.

    Args:
        folder: it must exist, and be one that all servers see.
        part: which of the parts, from 0.
        parts: how many servers share the folder.
        wait: seconds to wait for a lock, e.g. of a server that is just ending.
    """

    def __init__(self, folder: Path, part: int = 0, parts: int = 1, wait: float = 5.0) -> None:
        require_int("parts", parts, 1)
        require_int("part", part, 0)
        if part >= parts:
            raise ConfigError(f"part must be smaller than parts={parts}, got {part}")
        if not folder.is_dir():
            raise ConfigError(f"the state folder {folder} does not exist; create it first")
        self.folder, self.part, self.parts = folder, part, parts
        self._lock = self._lock_of(part)
        try:
            self._lock.acquire(timeout=wait)
        except Timeout:
            raise ConfigError(
                f"part {part} of the state folder {folder} is in use by another server; end that one, or choose another "
                "folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot lock the state folder {folder}: {error.strerror}; choose another") from error
        try:
            with FileLock(folder / ".start.lock"):
                self._agree_on_parts()
        except BaseException:
            self._lock.release()
            raise
        for left in folder.glob(f".*{SUFFIX}.*.tmp"):  # of a killed server: the part is ours alone now
            if self._is_mine(left.name[1:65]):
                left.unlink(missing_ok=True)

    def _lock_of(self, part: int) -> FileLock:
        return FileLock(self.folder / f".part-{part}.lock", thread_local=False)

    def _agree_on_parts(self) -> None:
        """All servers of a folder must have the same number of parts; only a server that is alone may change it."""
        index, before = self.folder / INDEX, 0
        if index.exists():
            try:
                found = json.loads(index.read_text())
                before = int(found["parts"])
                if found["format"] != FORMAT or not 1 <= before <= 100_000:
                    raise ValueError
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                raise ConfigError(f"{index} is damaged; delete it when no server uses the folder") from None
        if before == self.parts:
            return
        with contextlib.ExitStack() as held:
            try:
                for other in {*range(before)} - {self.part}:
                    held.enter_context(self._lock_of(other).acquire(timeout=0))
            except Timeout:
                raise ConfigError(
                    f"the state folder {self.folder} is in use by {before} servers; end them before another number of "
                    f"servers ({self.parts}) takes it over"
                ) from None
            write(index, json.dumps({"format": FORMAT, "parts": self.parts}).encode())

    def _is_mine(self, key: str) -> bool:
        return re.fullmatch("[0-9a-f]{64}", key) is not None and int(key[:16], 16) % self.parts == self.part

    def keys(self) -> set[str]:
        """Keys of this part's tenants that have a file."""
        found = (path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))
        return set(filter(self._is_mine, found))

    def path(self, name: str) -> Path:
        """The file of a tenant."""
        return self.folder / f"{key_of(name)}{SUFFIX}"

    def write(self, name: str, data: bytes) -> None:
        """Write a packed state, atomically."""
        write(self.path(name), data)

    def note(self, name: str) -> dict[str, Any]:
        """What was written beside a tenant's state; the file of another tenant is refused."""
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(saving.note_of(self.path(name)))
            if isinstance(found, dict) and found.get("tenant") == name:
                return found
        raise StateError(f"{self.path(name)} is not the state of tenant {name!r}; delete it, or use an older copy")

    def remove(self, name: str) -> None:
        """Delete the state of a tenant."""
        self.path(name).unlink(missing_ok=True)
        settle(self.folder)

    def close(self) -> None:
        """Let another server have the part."""
        self._lock.release()
