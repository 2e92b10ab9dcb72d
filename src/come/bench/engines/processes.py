"""Cells in several processes of this machine.

They share nothing but the run folder, whose locks keep two from working on one cell, and the file of decoded images. So one
that dies loses the cell it worked on and no other: the lock is free again, and whoever comes by next takes it.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path
from typing import Any

import torch

from come.bench.cell import Cell
from come.bench.engines import local
from come.bench.engines.cell_runner import CellRunner
from come.bench.engines.progress import Message, RemoteProgress, Reporter
from come.bench.engines.schedule import Schedule
from come.bench.engines.workload import order_for
from come.bench.folder import RunFolder, Stamp
from come.bench.machine import ALONE, Jobs
from come.errors import ComeError, ConfigError, one_line


def run(runner: CellRunner, schedule: Schedule, cells: Sequence[Cell], count: int) -> None:
    """Run cells in this process and `count` - 1 others until all are settled."""
    threads = torch.get_num_threads()
    share = max(1, threads // count)
    schedule.has_helpers, runner.jobs = True, Jobs(count, os.getpid())
    try:
        with closing(Helpers(runner, schedule, cells, count - 1, share)) as helpers:
            schedule.listen = helpers.listen
            torch.set_num_threads(share)
            local.run(runner, schedule, order_for(cells, 0, count))
    finally:
        torch.set_num_threads(threads)
        schedule.has_helpers, schedule.listen, runner.jobs = False, time.sleep, ALONE


class Helpers(RemoteProgress):
    """Processes beside this one, with a copy of the runner; each runs the cells that nobody has run or is running."""

    def __init__(self, runner: CellRunner, schedule: Schedule, cells: Sequence[Cell], count: int, threads: int) -> None:
        super().__init__(schedule, cells)
        self._processes: dict[connection.Connection, Any] = {}
        context, path, ignored = get_context("spawn"), schedule.folder.path, schedule.ignored
        try:
            for number in range(1, count + 1):
                ours, theirs = context.Pipe(duplex=False)
                order = order_for(cells, number, count + 1)
                process = context.Process(target=_help, args=(runner, order, path, ignored, threads, theirs))
                with _no_ctrl_c():
                    process.start()
                theirs.close()
                self._processes[ours] = process
        except BaseException as error:
            self.close()
            if isinstance(error, (TypeError, AttributeError, ValueError)) or "pickle" in type(error).__name__.lower():
                raise ConfigError(
                    f"this model or source cannot be sent to another process ({one_line(error)}); leave jobs at 1"
                ) from error
            raise

    def listen(self, seconds: float) -> None:
        """Receive what they sent, after at most so many seconds; raises what one of them could not recover from."""
        if self._processes:
            connection.wait(list(self._processes), seconds)
        else:
            time.sleep(seconds)
        for pipe in list(self._processes):
            try:
                while pipe in self._processes and pipe.poll():
                    self.receive(pipe, pipe.recv())
            except (EOFError, ConnectionError):
                self._lost(pipe)

    def receive(self, who: Any, message: Message) -> None:
        """Act on a message."""
        if message[0] == "end":  # it has nothing left to do, or has failed in a way that may be its own
            self._lost(who, *message[1:])
        else:
            super().receive(who, message)

    def _lost(self, pipe: connection.Connection, why: str = "") -> None:
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


def _help(
    runner: CellRunner,
    cells: Sequence[Cell],
    path: Path,
    ignored: Mapping[Path, Stamp],
    threads: int,
    pipe: connection.Connection,
) -> None:
    """What a helper does: run the cells, in its own order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    reporter = Reporter(pipe.send)
    warnings.showwarning = reporter.warn
    runner.workers, runner.is_helper = runner.workers // runner.jobs.count, True
    try:
        local.run_claimed(runner, Schedule(RunFolder(path), reporter, ignored, {}), cells)
        pipe.send(("end",))
    except OSError:  # the first process is gone
        raise SystemExit(1) from None
    except ComeError as error:
        pipe.send(("error", error))
    except Exception as error:
        pipe.send(("end", one_line(error, kind=True)))
        raise SystemExit(1) from None
