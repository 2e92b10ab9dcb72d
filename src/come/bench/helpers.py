"""Other processes that work on the cells of a run, and tell the first one what they do.

They share nothing but the run folder, whose locks keep two from working on one cell, and the file of decoded images. So one
that dies loses the cell it worked on and no other: the lock is free again, and whoever comes by next takes it.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from come.bench.cell import Cell
from come.bench.folder import RunFolder, Stamp
from come.bench.machine import Jobs
from come.bench.record import Failure, Record
from come.errors import ComeError, ConfigError

if TYPE_CHECKING:
    from come.bench.runner import Bench, Progress, UnderWay

OFTEN = 0.2
"""Seconds between two reports of progress."""


class RemoteProgress:
    """Passes on what other processes say of their cells.

    Args:
        bench: what they run.
        under_way: who is told.
    """

    def __init__(self, bench: Bench, under_way: UnderWay) -> None:
        self._bench, self._under_way, self._cells = bench, under_way, {cell.key: cell for cell in bench.cells}
        self._running: dict[Any, Progress] = {}

    def _pass_on(self, who: Any, what: str, *said: Any) -> None:
        if what in ("start", "advance") and who not in self._running:
            self._running[who] = self._under_way.progress.beside()
        if what == "start":
            self._running[who].start(self._cells[said[0]], said[1])
        elif what == "advance":
            self._running[who].advance(said[0])
        elif what == "finish":
            cell = self._cells[said[0]]
            if (record := self._under_way.record(cell)) is not None:
                self._under_way.finish(cell, record)
        elif what == "refuse":
            cell = self._cells[said[0]]
            self._bench.refused[cell.method] = said[1]
            self._under_way.refuse(cell, said[1])
        elif what == "fail":
            self._under_way.fail(Failure(cell=self._cells[said[0]], reason=said[1]))
        elif what == "warning":
            warnings.warn(said[0], stacklevel=2)
        elif what == "error":
            raise said[0]


class Helpers(RemoteProgress):
    """Processes beside this one; each goes through all cells and runs those that nobody has run or is running.

    Args:
        bench: what they run; they get a copy.
        under_way: what they work on, and who is told.
        count: how many.
        threads: that each may use.
    """

    def __init__(self, bench: Bench, under_way: UnderWay, count: int, threads: int) -> None:
        super().__init__(bench, under_way)
        self._processes: dict[connection.Connection, Any] = {}
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

    def _pass_on(self, who: Any, what: str, *said: Any) -> None:
        if what == "end":  # it has nothing left to do, or has failed in a way that may be its own
            self._lost(who, *said)
        else:
            super()._pass_on(who, what, *said)

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
    resource_tracker.ensure_running()  # to start it would unblock the signal again (Python before 3.12)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Teller:
    """The progress of a process that helps, told to the first one.

    Args:
        send: takes what is said; an OSError means that the first process is gone, and ends this one.
    """

    def __init__(self, send: Callable[[tuple[Any, ...]], object]) -> None:
        self._to, self._samples, self._last = send, 0, 0.0

    def _send(self, *said: Any) -> None:
        try:
            self._to(said)
        except OSError:
            raise SystemExit(1) from None

    def start(self, cell: Cell, samples: int) -> None:
        """A cell begins."""
        self._samples = 0
        self._send("start", cell.key, samples)

    def advance(self, samples: int) -> None:
        """Some samples are done; said now and then."""
        self._samples += samples
        if time.monotonic() - self._last > OFTEN:
            self.tell()

    def finish(self, cell: Cell, record: Record, resumed: bool) -> None:
        """A cell is done, and written."""
        if not resumed:
            self.tell()
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

    def tell(self) -> None:
        """Say how many samples are done since the last time."""
        if self._samples:
            self._send("advance", self._samples)
        self._samples, self._last = 0, time.monotonic()


def _help(
    bench: Bench,
    path: str,
    before: Mapping[Path, Stamp],
    number: int,
    jobs: Jobs,
    threads: int,
    pipe: connection.Connection,
) -> None:
    """What a helper does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    teller = Teller(pipe.send)
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
