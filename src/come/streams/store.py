"""`Residency`: which streams of a fleet have their state on the device, and where the others wait."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from come.abstain import Abstention, Promise
from come.errors import ConfigError
from come.method import Method
from come.state import saving
from come.state.trees import replace
from come.step.engine import Engine
from come.step.transition import StreamState
from come.streams.spill import Spilled, SpillFolder


@dataclass(frozen=True)
class Stream:
    """One of the streams at one moment."""

    method: Method
    """With its own learning rate and thresholds."""
    own: dict[str, float]
    """The hyperparameters of its own that `Fleet.open` was given."""
    state: StreamState | Spilled

    def settled(self) -> Stream:
        """With pending guard signals copied to the host, so that it can be pickled."""
        return self if isinstance(self.state, Spilled) else replace(self, state=self.state.settled())

    def promising(self, promise: Promise) -> Stream:
        """With a new promise; a stream on disk gets it when it comes back."""
        if isinstance(self.state, Spilled):
            return self
        begun = Abstention.begin(promise, self.state.weights.device)
        return replace(self, state=self.state._replace(abstention=begun))


class Residency:
    """Keeps at most `resident` states on the device; the least recently used wait in host memory or in a folder.

    Args:
        engine: of all streams.
        resident: how many; None: all.
        folder: an existing folder for the others; None: host memory.
    """

    def __init__(self, engine: Engine, resident: int | None, folder: Path | None) -> None:
        self._engine, self.resident = engine, resident
        self._folder = None if folder is None else SpillFolder(folder)

    def state_of(self, stream: Stream) -> StreamState:
        """The state where the model is, from disk if it is there."""
        state, engine = stream.state, self._engine
        if isinstance(state, Spilled):
            state = saving.resumed(engine, state.tensors(engine.method.name))
        return engine.brought(state)

    def fetched(self, streams: dict[str, Stream], names: list[str]) -> dict[str, Stream]:
        """With the state of these streams on the device, as the most recently used."""
        streams, moved = dict(streams), False
        for name in names:
            stream = streams.pop(name)
            state = self.state_of(stream)
            if state is not stream.state:
                stream, moved = replace(stream, state=state), True
            streams[name] = stream
        return self.evicted(streams, keep=names) if moved else streams  # looking at thousands of streams takes a while

    def evicted(self, streams: dict[str, Stream], keep: Collection[str] = ()) -> dict[str, Stream]:
        """With no more than `resident` on the device; `streams` has the least recently used first."""
        if self.resident is None:
            return streams
        here = [name for name, stream in streams.items() if self._is_on(self._engine.device, stream)]
        for name in here[: max(0, len(here) - self.resident)]:
            if name not in keep:
                streams[name] = self._put_away(streams[name])
        return streams

    def moved(self, streams: dict[str, Stream], was: torch.device) -> dict[str, Stream]:
        """With all resident states brought to where the user has moved the model; `was`: where it was before."""
        here = {name: stream for name, stream in streams.items() if self._is_on(was, stream)}
        return streams | {name: replace(stream, state=self.state_of(stream)) for name, stream in here.items()}

    def check_room(self, count: int, streams: dict[str, Stream]) -> None:
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

    def _put_away(self, stream: Stream) -> Stream:
        """To disk, or to host memory."""
        state, engine = stream.state, self._engine
        assert isinstance(state, StreamState)
        if self._folder is not None:
            data = saving.packed(engine, state, method=stream.method)
            return replace(stream, state=Spilled(self._folder, data, state.health()))
        return replace(stream, state=state.to(torch.device("cpu"), engine.method.on_host))

    def _is_on(self, device: torch.device, stream: Stream) -> bool:
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
