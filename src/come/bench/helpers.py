"""Other processes that work on the cells of a run, and tell the first one what they do.

They share nothing but the run folder, whose locks keep two from working on one cell, and the file of decoded images. So one
that dies loses the cell it worked on and no other: the lock is free again, and whoever comes by next takes it.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection, get_context
from typing import TYPE_CHECKING, Any

import torch

from come.bench.cell import Cell
from come.bench.folder import RunFolder, Stamp
from come.bench.machine import Jobs
from come.bench.record import Record
from come.errors import ComeError, ConfigError

if TYPE_CHECKING:
    from come.bench.runner import Bench, Progress, UnderWay

OFTEN = 0.2
"""Seconds between two reports of progress."""


class Helpers:
    """Processes beside this one; each goes through all cells and runs those that nobody has run or is running.

    Args:
        bench: what they run; they get a copy.
        under_way: what they work on, and who is told.
        count: how many.
        threads: that each may use.
    """

    def __init__(self, bench: Bench, under_way: UnderWay, count: int, threads: int) -> None:
        self._bench, self._under_way, self._cells = bench, under_way, {cell.key: cell for cell in bench.cells}
        self._processes: dict[connection.Connection, Any] = {}
        self._running: dict[connection.Connection, Progress] = {}
        context, jobs = get_context("spawn"), Jobs(count + 1, os.getpid())
        try:
            for number in range(1, count + 1):
                ours, theirs = context.Pipe(duplex=False)
                given = (bench, under_way.folder.path, under_way.before, number, jobs, threads, theirs)
                process = context.Process(target=_help, args=given)
                with _no_ctrl_c():
                    process.start()
                theirs.close()
                self._processes[ours] = process
        except BaseException as error:
            self.close()
            if isinstance(error, (TypeError, AttributeError, ValueError)) or "pickle" in type(error).__name__.lower():
                raise ConfigError(
                    f"this model or source cannot be sent to another process ({error}); leave jobs at 1"
                ) from error
            raise

    def wait(self, seconds: float) -> None:
        """Until one of them has something to say."""
        connection.wait(list(self._processes), seconds) if self._processes else time.sleep(seconds)

    def hear(self) -> None:
        """Pass on what they said since the last time; raises what one of them could not get over."""
        for pipe in list(self._processes):
            try:
                while pipe in self._processes and pipe.poll():
                    self._pass_on(pipe, *pipe.recv())
            except (EOFError, ConnectionError):
                self._lost(pipe)

    def _pass_on(self, pipe: connection.Connection, what: str, *said: Any) -> None:
        if what in ("start", "advance") and pipe not in self._running:
            self._running[pipe] = self._under_way.progress.beside()
        if what == "start":
            self._running[pipe].start(self._cells[said[0]], said[1])
        elif what == "advance":
            self._running[pipe].advance(said[0])
        elif what == "finish":
            cell = self._cells[said[0]]
            if (record := self._under_way.record(cell)) is not None:
                self._under_way.finish(cell, record)
        elif what == "refuse":
            cell = self._cells[said[0]]
            self._bench.refused[cell.method] = said[1]
            self._under_way.refuse(cell, said[1])
        elif what == "warning":
            warnings.warn(said[0], stacklevel=2)
        elif what == "error":
            raise said[0]
        else:  # it has nothing left to do, or has failed in a way that may be its own
            self._lost(pipe, *said)

    def _lost(self, pipe: connection.Connection, why: str | None = None) -> None:
        process = self._processes.pop(pipe)
        pipe.close()
        process.join(5)
        if process.exitcode:
            died = f"was killed by signal {-process.exitcode}" if process.exitcode < 0 else "failed"
            warnings.warn(
                f"a process of this run {died}{f' ({why})' if why else ''}; the others run its cells", stacklevel=2
            )

    def close(self) -> None:
        """End them; what they have finished is in the folder."""
        for process in self._processes.values():
            process.terminate()
        for pipe, process in self._processes.items():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._processes.clear()


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """A process that is started here never sees Ctrl-C: the first one ends it. One that comes meanwhile is not lost."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Teller:
    """The progress of a helper, told to the first process."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe, self._samples, self._last = pipe, 0, 0.0

    def start(self, cell: Cell, samples: int) -> None:
        self._samples = 0
        self._pipe.send(("start", cell.key, samples))

    def advance(self, samples: int) -> None:
        self._samples += samples
        if time.monotonic() - self._last > OFTEN:
            self._tell()

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        if not resumed:
            self._tell()
            self._pipe.send(("finish", cell.key))

    def refuse(self, cell: Cell, reason: str) -> None:
        self._pipe.send(("refuse", cell.key, reason))

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self._pipe.send(("warning", str(message)))

    def _tell(self) -> None:
        if self._samples:
            self._pipe.send(("advance", self._samples))
        self._samples, self._last = 0, time.monotonic()


def _help(
    bench: Bench,
    path: str,
    before: Mapping[str, Stamp],
    number: int,
    jobs: Jobs,
    threads: int,
    pipe: connection.Connection,
) -> None:
    """What a helper does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    teller = _Teller(pipe)
    warnings.showwarning = teller.warn
    try:
        bench.help(RunFolder(path), teller, before, number, jobs)  # type: ignore[arg-type]
        pipe.send(("end",))
    except OSError:  # the first process is gone
        raise SystemExit(1) from None
    except ComeError as error:
        pipe.send(("error", error))
    except Exception as error:
        pipe.send(("end", f"{type(error).__name__}: {error}"[:500]))
        raise SystemExit(1) from None
