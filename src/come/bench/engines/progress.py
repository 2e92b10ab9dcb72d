"""What a run reports while it goes on: to whoever watches, and from one process to another."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from come.bench.cell import Cell
from come.bench.protocols import Outcome
from come.bench.record import Failure, Record
from come.errors import warn

if TYPE_CHECKING:
    from come.bench.engines.schedule import Schedule

OFTEN = 0.2  # seconds between two reports of progress from another process

Message = tuple[Any, ...]  # from one process to another: what happened, and to which cell


class Progress:
    """What a runner tells whoever watches; this one shows nothing. Subclass it to show something."""

    def start(self, cell: Cell, samples: int) -> None:
        """A cell begins."""

    def start_together(self, cells: Sequence[Cell], samples: int) -> None:
        """Several cells begin, as streams of one fleet."""
        self.start(cells[0], samples)

    def advance(self, samples: int) -> None:
        """Some samples of it are done."""

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        """It is done, now or in an earlier run."""

    def refuse(self, cell: Cell, reason: str) -> None:
        """The method cannot be run on this model or stream; the others can."""

    def fail(self, failure: Failure) -> None:
        """It failed; the others go on."""

    def doubt(self, doubt: str) -> None:
        """The unadapted model is near chance, before anything runs; by default a warning."""
        warn(doubt)

    def meet(self, outcome: Outcome) -> None:
        """No Adapt reached the number of the protocol, or there is none."""

    def beside(self) -> Progress:
        """Who is told how cells begin and advance in another process, at the same time."""
        return self


class Reporter(Progress):
    """Sends the progress of this process to the first one; an OSError of `send` means that it is gone, and ends this one."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._to, self._samples, self._last = send, 0, 0.0

    def _send(self, *message: Any) -> None:
        try:
            self._to(message)
        except OSError:
            raise SystemExit(1) from None

    def start(self, cell: Cell, samples: int) -> None:
        """A cell begins."""
        self._samples = 0
        self._send("start", cell.key, samples)

    def advance(self, samples: int) -> None:
        """Some samples are done; sent now and then."""
        self._samples += samples
        if time.monotonic() - self._last > OFTEN:
            self.flush()

    def flush(self) -> None:
        """Send how many samples are done since the last time."""
        if self._samples:
            self._send("advance", self._samples)
        self._samples, self._last = 0, time.monotonic()

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        """A cell is done, and written."""
        if not resumed:
            self.flush()
            self._send("finish", cell.key)

    def refuse(self, cell: Cell, reason: str) -> None:
        """The method cannot be run."""
        self._send("refuse", cell.key, reason)

    def fail(self, failure: Failure) -> None:
        """A cell failed."""
        self._send("fail", failure.cell.key, failure.reason)

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """In place of `warnings.showwarning`."""
        self._send("warning", str(message))


class RemoteProgress:
    """Notes in the schedule of this process what the `Reporter`s of others send of these cells."""

    def __init__(self, schedule: Schedule, cells: Sequence[Cell]) -> None:
        self._schedule, self._cells = schedule, {cell.key: cell for cell in cells}
        self._shown: dict[Any, Progress] = {}

    def receive(self, who: Any, message: Message) -> None:
        """Act on what the process `who` sent."""
        schedule, cells = self._schedule, self._cells
        match message:
            case "start", key, samples:
                self._shown_for(who).start(cells[key], samples)
            case "advance", samples:
                self._shown_for(who).advance(samples)
            case "finish", key:
                schedule.settle(cells[key])
            case "refuse", key, reason:
                schedule.refuse(cells[key], reason)
            case "fail", key, reason:
                schedule.fail(Failure(cell=cells[key], reason=reason))
            case "warning", text:
                warnings.warn(text, stacklevel=2)
            case "error", error:
                raise error

    def _shown_for(self, who: Any) -> Progress:
        if who not in self._shown:
            self._shown[who] = self._schedule.progress.beside()
        return self._shown[who]
