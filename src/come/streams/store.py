"""`StreamStore`: which streams of a fleet have their state on the device, and where the others wait.

An evicted state goes to host memory or to a temporary file. A file is written once and deleted with the object that wrote it.
So whatever still holds the object, such as a copy of the fleet or a step that is rolled back, can read it. A process deletes no
file of another process, and none that a process forked from it may still read; these go with the folder. A killed process
leaves its folder behind.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from come.abstain import Abstention, Promise
from come.errors import ConfigError, StateError
from come.method import Method
from come.state import saving
from come.state.files import unwritable
from come.state.trees import replace
from come.step.engine import Engine
from come.step.transition import StreamState

_forks = 0
"""Of this process, so far."""


def _forking() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forking)


class _Owned:
    """A file, or a folder of files, that is deleted with this object; copies in this process are the object itself."""

    def __init__(self, path: Path, forks: int | None) -> None:
        self._path = path
        weakref.finalize(self, _delete, path, os.getpid(), forks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise StateError(
            "a fleet with a folder cannot be pickled: its files belong to this process; save() it and load() it"
        )


def _delete(path: Path, owner: int, forks: int | None) -> None:
    """Delete a folder, or a file unless this process was forked since."""
    if os.getpid() == owner:
        if forks is None:
            shutil.rmtree(path, ignore_errors=True)
        elif forks == _forks:
            path.unlink(missing_ok=True)


class Folder(_Owned):
    """A folder of the fleet's own, inside of the user's.

    Example:
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = Folder(Path(parent))
        ...     there = len(list(Path(parent).iterdir()))
        ...     del folder
        ...     there, len(list(Path(parent).iterdir()))
        (1, 0)
    """

    def __init__(self, parent: Path) -> None:
        try:
            super().__init__(Path(tempfile.mkdtemp(prefix="come-fleet-", dir=parent)), None)
        except OSError as error:
            raise ConfigError(f"folder must be writable, got {str(parent)!r}: {error.strerror}") from error

    def write(self, data: bytes, health: dict[str, float]) -> StateFile:
        """Put a packed state into a file."""
        return StateFile(self, self._path / f"{secrets.token_hex(8)}.safetensors", data, health)


class StateFile(_Owned):
    """The state of a stream on disk, and its health, which is read more often than the file."""

    def __init__(self, folder: Folder, path: Path, data: bytes, health: dict[str, float]) -> None:
        super().__init__(path, _forks)
        self._folder, self._health = folder, health
        try:
            path.write_bytes(data)
        except OSError as error:
            raise unwritable(path, error) from error

    def health(self) -> dict[str, float]:
        """As it was when the file was written."""
        return dict(self._health)

    def read(self, engine: Engine) -> StreamState:
        """The state."""
        try:
            tensors = saving.read(self._path, engine.method.name)
        except StateError as error:
            raise StateError(f"the state of this stream on disk is lost: {error}; reset() the stream") from error
        return saving.resumed(engine, tensors)


@dataclass(frozen=True)
class OpenStream:
    """One of a fleet's streams at one moment."""

    method: Method
    """With its own learning rate and thresholds."""
    own: dict[str, float]
    """The hyperparameters of its own that `Fleet.open` was given."""
    state: StreamState | StateFile

    def settled(self) -> OpenStream:
        """With pending guard signals copied to the host, so that it can be pickled."""
        return self if isinstance(self.state, StateFile) else replace(self, state=self.state.settled())

    def promising(self, promise: Promise) -> OpenStream:
        """With a new promise; a stream on disk gets it when it comes back."""
        if isinstance(self.state, StateFile):
            return self
        begun = Abstention.begin(promise, self.state.weights.device)
        return replace(self, state=self.state._replace(abstention=begun))


class StreamStore:
    """Keeps at most `resident` states on the device; the least recently used wait in host memory or in a folder.

    It holds no stream: each method takes a fleet's streams, the least recently used first, and returns the next ones.

    Args:
        engine: of all streams.
        resident: how many; None: all.
        folder: an existing folder for the others; None: host memory.
    """

    def __init__(self, engine: Engine, resident: int | None, folder: Path | None) -> None:
        self._engine, self.resident = engine, resident
        self._folder = None if folder is None else Folder(folder)

    def state_of(self, stream: OpenStream) -> StreamState:
        """The state where the model is, from disk if it is there."""
        state = stream.state
        return self._engine.brought(state.read(self._engine) if isinstance(state, StateFile) else state)

    def fetched(self, streams: dict[str, OpenStream], names: Collection[str]) -> dict[str, OpenStream]:
        """With the state of these streams on the device, as the most recently used."""
        streams, moved = dict(streams), False
        for name in names:
            stream = streams.pop(name)
            state = self.state_of(stream)
            if state is not stream.state:
                stream, moved = replace(stream, state=state), True
            streams[name] = stream
        return self.evicted(streams, keep=names) if moved else streams  # looking at thousands of streams takes a while

    def evicted(self, streams: dict[str, OpenStream], keep: Collection[str] = ()) -> dict[str, OpenStream]:
        """With no more than `resident` on the device."""
        if self.resident is None:
            return streams
        here = [name for name, stream in streams.items() if self._is_on(self._engine.device, stream)]
        for name in here[: max(0, len(here) - self.resident)]:
            if name not in keep:
                streams[name] = self._put_away(streams[name])
        return streams

    def moved(self, streams: dict[str, OpenStream], was: torch.device) -> dict[str, OpenStream]:
        """With all resident states brought to where the user has moved the model; `was`: where it was before."""
        here = {name: stream for name, stream in streams.items() if self._is_on(was, stream)}
        return streams | {name: replace(stream, state=self.state_of(stream)) for name, stream in here.items()}

    def check_room(self, count: int, streams: dict[str, OpenStream]) -> None:
        """Raise if the states of so many streams do not fit into memory."""
        count = count if self.resident is None else min(count, self.resident)
        first, device = self._engine.first(), self._engine.device
        copies = 1 + sum(value.shape == first.weights.shape for value in first.moments.values())
        each = first.weights.nbytes * (copies + (2 if self._engine.guard is not None else 0))
        more = count - sum(self._is_on(device, stream) for stream in streams.values())
        free = _free(device)
        if free is not None and more * each > free:
            raise ConfigError(
                f"{count} streams of {each / 2**20:.3g} MB each do not fit into the {free / 2**30:.3g} GB that are free on "
                f"{device}; keep fewer on the device with resident="
                + ("" if self._folder else ", and the others on disk with folder=")
            )

    def close(self) -> None:
        """Delete what is on disk."""
        self._folder = None

    def _put_away(self, stream: OpenStream) -> OpenStream:
        """To disk, or to host memory."""
        state, engine = stream.state, self._engine
        assert isinstance(state, StreamState)
        if self._folder is None:
            return replace(stream, state=state.to(torch.device("cpu"), engine.method.on_host))
        data = saving.packed(engine, state, method=stream.method)
        return replace(stream, state=self._folder.write(data, state.health()))

    def _is_on(self, device: torch.device, stream: OpenStream) -> bool:
        """Whether its state is on the model's device; with a folder, all that is in memory is."""
        state = stream.state
        return isinstance(state, StreamState) and (self._folder is not None or state.weights.device == device)


def _free(device: torch.device) -> int | None:
    """Free bytes there; None if unknown."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
