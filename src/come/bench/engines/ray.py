"""Cells on a Ray cluster: workers on many machines run them, and this process writes what they find.

The first process claims a cell in the run folder, hands it to a worker, and writes the record that comes back. Workers never
touch the folder, so it need not be shared, and no lock crosses a network. They must see the data under the same path, and have
the same version of `come`. A worker that dies, alone or with its machine, loses the cell it worked on; that cell is run again.
If the first process dies, Ray ends its workers; the same command resumes with the cells that are not finished.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from come.bench.cell import Cell
from come.bench.cluster import Cluster, import_ray
from come.bench.engines.cell_runner import CellRunner
from come.bench.engines.progress import OFTEN, Message, RemoteProgress, Reporter
from come.bench.engines.schedule import PAUSE, Ending, Finished, Schedule
from come.bench.engines.workload import order_for
from come.bench.machine import Jobs
from come.bench.record import Failure
from come.errors import ComeError, ConfigError, InputError, StateError, one_line
from come.version import __version__

ATTEMPTS = 3  # how often a cell is run whose worker dies, and how many workers in a row may die before they are ready
PATIENCE = 60.0  # seconds that the first cell waits for the last worker to be ready


def run(
    runner: CellRunner, schedule: Schedule, cells: Sequence[Cell], cluster: Cluster, count: int, device: str
) -> None:
    """Run cells in `count` workers until all are settled."""
    with closing(Workers(runner, schedule, cells, cluster, count, device)) as workers:
        workers.run()


class Worker:
    """A process of the cluster: it holds the model and the data, and runs the cells it is given, one after the other."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._reporter = Reporter(self._messages.append)

    def prepare(self, runner: CellRunner, device: str, threads: int, jobs: int) -> tuple[str, str]:
        """Load everything, once; returns the version of `come` here, and what is wrong, if anything."""
        self._runner, self._threads = runner, threads
        torch.set_num_threads(threads)
        warnings.showwarning = self._reporter.warn
        try:
            # Ray's own process has started all workers of this machine
            runner.move_to(device, Jobs(jobs, os.getppid()))
        except (ComeError, OSError) as error:
            return __version__, f"{platform.node()}: {one_line(error)}"
        return __version__, ""

    def run(self, cell: Cell) -> tuple[Ending | ComeError, list[Message]]:
        """Run a cell; returns how it ended, or what stops the whole run, and the last messages."""
        torch.set_num_threads(self._threads)  # of this thread
        ending: Ending | ComeError
        try:
            ending = self._runner.attempt(
                cell, lambda run: self._reporter.start(cell, run.samples), self._reporter.advance
            )
        except ComeError as error:
            ending = error
        self._reporter.flush()
        return ending, self.messages()

    def messages(self, pause: float = 0.0) -> list[Message]:
        """What was reported since the last time, after a pause; another thread may be running a cell."""
        time.sleep(pause)
        return [self._messages.popleft() for _ in range(len(self._messages))]


@dataclass
class _Slot:
    """A place for a worker, and what the one there is doing."""

    order: Sequence[Cell]  # all cells, in the order in which it takes them
    actor: Any = None
    task: Any = None  # what it was asked for last and has not answered: to get ready, or to run `cell`
    messages: Any = None  # the messages that it was asked for, while it runs the cell
    cell: Cell | None = None
    claim: ExitStack = field(default_factory=ExitStack)


class Workers(RemoteProgress):
    """Workers on a cluster, each with a copy of the runner, and which cell each of them runs."""

    def __init__(
        self, runner: CellRunner, schedule: Schedule, cells: Sequence[Cell], cluster: Cluster, count: int, device: str
    ) -> None:
        super().__init__(schedule, cells)
        self._ray = import_ray()
        self._deaths: Counter[str] = Counter()
        self._unready = 0
        try:
            copy = self._ray.put(runner)
        except Exception as error:  # whatever the model or the source raises when it is pickled
            raise ConfigError(
                f"this model or source cannot be sent to another process ({one_line(error, first=True)}); run it without "
                "--engine ray"
            ) from error
        self._given = copy, device, max(1, int(cluster.cpus)), count
        gpus = cluster.gpus_on(device)
        # Two calls at once: a cell, and its messages. Ray restarts nothing: a worker that is lost is replaced here.
        options = {"num_cpus": cluster.cpus, "num_gpus": gpus, "max_concurrency": 2, "max_restarts": 0}
        self._make = self._ray.remote(Worker).options(**options).remote
        self._slots = [_Slot(order_for(cells, number, count)) for number in range(count)]

    def close(self) -> None:
        """End them; what they have finished is in the folder."""
        for slot in self._slots:
            slot.claim.close()
            self._end(slot)

    def run(self) -> None:
        """Run all cells."""
        for slot in self._slots:
            self._begin(slot)
        until = time.monotonic() + PATIENCE
        while any(slot.task is not None for slot in self._slots) and time.monotonic() < until:
            self._listen()  # nothing runs before every worker has said that it can
        if all(slot.task is not None for slot in self._slots):
            warnings.warn(
                f"no worker was ready within {PATIENCE:.0f} s; waiting: the cluster may be busy", stacklevel=2
            )
        settled = self._schedule.settled
        while True:
            for slot in self._slots:
                slot.order = [cell for cell in slot.order if cell.key not in settled]
                if slot.task is None:
                    self._hand_out(slot)
            if settled.issuperset(self._cells):
                return
            self._listen()

    def _begin(self, slot: _Slot) -> None:
        slot.actor = self._make()
        slot.task = slot.actor.prepare.remote(*self._given)

    def _end(self, slot: _Slot) -> None:
        if slot.actor is not None:
            with suppress(Exception):  # it is dead already, or Ray is
                self._ray.kill(slot.actor)
        slot.actor = slot.task = slot.messages = None

    def _hand_out(self, slot: _Slot) -> None:
        """Give a worker the first cell that nobody has run or is running."""
        running = {other.cell.key for other in self._slots if other.cell is not None}
        for cell in slot.order:
            if cell.key in running:
                continue
            with ExitStack() as claim:
                if claim.enter_context(self._schedule.claim(cell)):
                    slot.cell, slot.claim = cell, claim.pop_all()
                    slot.task = slot.actor.run.remote(cell)
                    return

    def _listen(self) -> None:
        """Wait until a worker answers, but not for long, and act on it."""
        for slot in self._slots:
            if slot.cell is not None and slot.messages is None:
                slot.messages = slot.actor.messages.remote(OFTEN + 0.01 * len(self._slots))
        asked = {ref: slot for slot in self._slots for ref in (slot.task, slot.messages) if ref is not None}
        if not asked:  # what is left is being run by processes that are not ours
            time.sleep(PAUSE)
            return
        for ref in self._ray.wait(list(asked), timeout=PAUSE)[0]:
            slot = asked[ref]
            is_task = ref == slot.task
            if not is_task:
                slot.messages = None
            try:
                answer = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                if is_task:  # else the task tells
                    self._lost(slot, error)
                continue
            if not is_task:
                self._receive_all(slot, answer)
                continue
            slot.task = None
            if slot.cell is None:
                self._check_ready(*answer)
            else:
                ending, messages = answer
                self._receive_all(slot, messages)
                self._settle(slot, slot.cell, ending)

    def _receive_all(self, slot: _Slot, messages: Sequence[Message]) -> None:
        for message in messages:
            self.receive(id(slot), message)

    def _check_ready(self, version: str, problem: str) -> None:
        if version != __version__:
            raise StateError(f"a worker has come {version}, this is {__version__}; install one version on all machines")
        if problem:
            raise InputError(
                f"a worker cannot run this on {problem}; all machines must have the device and see the data under the same path"
            )
        self._unready = 0

    def _settle(self, slot: _Slot, cell: Cell, ending: Ending | ComeError) -> None:
        """A worker is done with a cell."""
        slot.cell = None
        with slot.claim:
            if isinstance(ending, ComeError):
                raise ending
            if isinstance(ending, Finished):
                self._schedule.write_streams(ending.streams)
            self._schedule.end(cell, ending)

    def _lost(self, slot: _Slot, error: Exception) -> None:
        """A worker has died: run its cell again, in a new worker, unless that was tried before."""
        self._end(slot)
        cell, why = slot.cell, one_line(getattr(error, "cause", None) or error, first=True)
        if cell is None:
            self._unready += 1
            if self._unready >= ATTEMPTS:
                raise StateError(
                    f"workers of the cluster do not start ({why}); come {__version__} with its extras bench and ray must be "
                    "installed on every machine"
                ) from error
        else:
            self._deaths[cell.key] += 1
            if self._deaths[cell.key] >= ATTEMPTS:
                reason = f"its worker died {ATTEMPTS} times, the last time: {why}"
                self._settle(slot, cell, Failure(cell=cell, reason=reason))
            else:
                slot.cell = None
                slot.claim.close()
                warnings.warn(f"a worker died; its cell is run again: {cell.title} ({why})", stacklevel=2)
        self._begin(slot)
