"""Which cells of a run are settled, and which one this process may run now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from come.bench.cell import Cell
from come.bench.data import Stream
from come.bench.engines.progress import Progress
from come.bench.folder import RunFolder, Stamp
from come.bench.measure import CellRun
from come.bench.record import Failure, Record, Rows

PAUSE = 0.5  # seconds until it is worth looking again whether another process is done with a cell


class Finished(NamedTuple):
    """A cell was run to its end."""

    record: Record
    rows: Rows
    streams: Sequence[Stream]


class Refused(NamedTuple):
    """The method of a cell cannot be run on this model or these batches."""

    reason: str


Ending = Finished | Refused | Failure  # how the run of a cell ended


class Schedule:
    """The cells of a run: which are settled (finished, failed or refused), and who may run the others.

    Cells are claimed in the run folder, so other processes may work on the same ones. `ignored` are files of an earlier run
    that do not count in this one, as they were: earlier failures, damaged cells, and finished cells that are to be run again.
    `refused`, methods that cannot be run, and why, grows.
    """

    def __init__(
        self, folder: RunFolder, progress: Progress, ignored: Mapping[Path, Stamp], refused: dict[str, str]
    ) -> None:
        self.folder, self.progress, self.ignored, self.refused = folder, progress, ignored, refused
        self.done: dict[str, Record] = {}
        self.failed: list[Failure] = []
        self.settled: set[str] = set()  # keys of the cells that are finished, have failed or cannot be run
        self.has_helpers = False
        """Whether other processes run cells for this one: what is found finished from now on is theirs."""
        self.listen: Callable[[float], None] = time.sleep
        """Takes note of what other processes report, and waits for it up to so many seconds."""

    def record(self, cell: Cell) -> Record | None:
        """The record of a finished cell, if there is one that counts; no rows are read."""
        return None if self._is_ignored(self.folder.file(cell.key)) else self.folder.record(cell)

    def _is_ignored(self, path: Path) -> bool:
        """Whether a file is not there, or does not count."""
        return self.folder.stamp(path) == self.ignored.get(path)

    def open(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that are not settled; those that the folder has a record of are settled now."""
        return [cell for cell in cells if not self.settle(cell)]

    def settle(self, cell: Cell) -> bool:
        """Whether a cell is settled, here or by what another process left in the folder."""
        if cell.key in self.settled:
            return True
        if (record := self.record(cell)) is not None:
            self.finish(cell, record, resumed=not self.has_helpers)
        elif not self._is_ignored(self.folder.failure_file(cell.key)) and (failure := self.folder.failure(cell.key)):
            self.fail(failure)
        return cell.key in self.settled

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Whether this process is to run `cell` within the block: it is not settled, and nobody else is running it."""
        if self.settle(cell):
            yield False
            return
        with self.folder.claim(cell) as mine:
            yield mine and not self.settle(cell)  # another process may have finished it just now

    def start(self, run: CellRun) -> None:
        """A cell begins in this process."""
        self.write_streams(run.streams)
        self.progress.start(run.cell, run.samples)

    def advance(self, samples: int) -> None:
        """Some samples of it are done."""
        self.progress.advance(samples)
        self.listen(0)

    def write_streams(self, streams: Sequence[Stream]) -> None:
        """Keep the manifests of a cell."""
        for stream in streams:
            self.folder.write_stream(stream)

    def end(self, cell: Cell, ending: Ending) -> None:
        """Keep how a cell ended that this process has claimed."""
        if isinstance(ending, Finished):
            self.folder.write(ending.record, ending.rows)
            self.finish(cell, ending.record)
        elif isinstance(ending, Failure):
            self.folder.write_failure(ending)
            self.fail(ending)
        else:
            self.refuse(cell, ending.reason)

    def finish(self, cell: Cell, record: Record, resumed: bool = False) -> None:
        """A cell is finished, and written."""
        if cell.key not in self.settled:
            self.settled.add(cell.key)
            self.done[cell.key] = record
            self.progress.finish(cell, record, resumed)

    def refuse(self, cell: Cell, reason: str) -> None:
        """A cell cannot be run, nor can others of its method."""
        self.refused[cell.method] = reason
        if cell.key not in self.settled:
            self.settled.add(cell.key)
            self.progress.refuse(cell, reason)

    def fail(self, failure: Failure) -> None:
        """A cell has failed."""
        if failure.cell.key not in self.settled:
            self.settled.add(failure.cell.key)
            self.failed.append(failure)
            self.progress.fail(failure)
