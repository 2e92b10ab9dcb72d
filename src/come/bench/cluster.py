"""Cells on a Ray cluster: workers on many machines run them, and this process writes what they find.

The first process claims a cell in the run folder, hands it to a worker, and writes the record that comes back. Workers never
touch the folder, so it need not be shared, and no lock crosses a network. They must see the data under the same path, and have
the same version of `come`. A worker that dies, alone or with its machine, loses the cell it worked on; that cell is run again.
If the first process dies, Ray ends its workers; the same command resumes with the cells that are not finished.

`ray` is imported only when a `Cluster` is used.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from come.bench.cell import Cell
from come.bench.helpers import OFTEN, RemoteProgress, Teller
from come.bench.machine import Jobs
from come.bench.measure import UnfitError
from come.bench.record import Failure
from come.errors import ComeError, ConfigError, InputError, StateError, pip_install, printable, require, require_number
from come.version import __version__

if TYPE_CHECKING:
    from come.bench.runner import Bench, UnderWay

ATTEMPTS = 3
"""How often a cell is run whose worker dies, and how many workers in a row may die before they are ready."""
PATIENCE = 60.0
"""Seconds that the first cell waits for the last worker to be ready."""
REACH = 10.0
"""Seconds in which a cluster must answer."""
INSTALL = f"install it with: {pip_install('bench,ray')}"


@dataclass(frozen=True)
class Cluster:
    """Where and how to run workers with Ray. `Bench(plan, cluster=Cluster())` uses it; `jobs` is the number of workers.

    Args:
        address: HOST:PORT of a cluster that this machine belongs to, "auto" for the one that was started here with
            `ray start`, or ray://HOST:PORT. None: the environment's RAY_ADDRESS, else Ray is started on this machine alone. If
            this process is connected to Ray already, that connection is used.
        cpus: of each worker, also the number of threads it uses.
        gpus: of each worker; a fraction lets several share one. None: 1 if they run on a GPU, else 0.

    Example:
        >>> Cluster("head:6379", gpus=0.5).gpus
        0.5
        >>> Cluster("head")
        Traceback (most recent call last):
        ...
        come.errors.ConfigError: address must be HOST:PORT, ray://HOST:PORT or auto, got 'head'
    """

    address: str | None = None
    cpus: float = 1
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.address is not None and self.address != "auto":
            known = "HOST:PORT, ray://HOST:PORT or auto"
            require(_host_and_port(self.address) is not None, "address", self.address, known)
        limit = "a number > 0"
        require(require_number("cpus", self.cpus, limit) and 0 < self.cpus <= 10**6, "cpus", self.cpus, limit)
        if self.gpus is not None:
            limit = "a number from 0 to 1, or an integer"  # as Ray has it
            require_number("gpus", self.gpus, limit)
            require(0 <= self.gpus <= 1 or (self.gpus <= 10**6 and self.gpus % 1 == 0), "gpus", self.gpus, limit)

    def connect(self, device: str, workers: int | None) -> int:
        """Connect to Ray, and return how many workers to use: `workers`, or as many as there is room for.

        Raises:
            ConfigError: Ray is not installed, or the device is not one that each worker can have.
            InputError: the cluster cannot be reached, or has no room for that many workers.
        """
        require(device in ("cpu", "cuda"), "device", device, "cpu or cuda with Ray, which chooses the GPU")
        gpus = self.gpus_on(device)
        ray = _ray()
        if not ray.is_initialized():
            self._join(ray)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has = {kind: sum(machine.get(kind, 0.0) for machine in machines) for kind in ("CPU", "GPU")}
        room = sum(_room(machine, self.cpus, gpus) for machine in machines)
        if room < (workers or 1):
            raise InputError(
                f"the cluster has room for {room} workers with {self.cpus:g} CPUs and {gpus:g} GPUs each, {workers or 1} are "
                f"needed; it has {has['CPU']:g} CPUs and {has['GPU']:g} GPUs on {len(machines)} machines: lower --jobs, "
                "--cpus or --gpus, or add machines"
            )
        return workers or room

    def gpus_on(self, device: str) -> float:
        """GPUs of each worker that runs on this device."""
        if device == "cpu" and self.gpus:
            raise ConfigError("gpus has no effect on the CPU; leave it out, or choose --device cuda")
        if device == "cuda" and self.gpus == 0:
            raise ConfigError("gpus must be > 0 with --device cuda, got 0")
        return (1 if device == "cuda" else 0) if self.gpus is None else self.gpus

    def _join(self, ray: Any) -> None:
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        place = _host_and_port(address)
        more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to Ray's developers
        try:
            if place is not None:  # Ray itself would try for many minutes
                socket.create_connection(place, REACH).close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's own, about its future versions
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **more)
        except (OSError, RuntimeError, ValueError, ImportError) as error:  # a ConnectionError is an OSError
            if address == "local":
                raise InputError(f"Ray cannot be started on this machine: {_one_line(error)}") from error
            raise InputError(
                f"no Ray cluster can be used at {address} ({_one_line(error)}); start one there with 'ray start --head', "
                "or leave --address out to run on this machine alone"
            ) from error


class Worker:
    """A process of the cluster: it holds the model and the data, and runs the cells it is given, one after the other."""

    def __init__(self) -> None:
        self._said: deque[tuple[Any, ...]] = deque()
        self._teller = Teller(self._said.append)

    def prepare(self, bench: Bench, device: str, threads: int, jobs: int) -> tuple[str, str]:
        """Load everything, once; returns the version of `come` here, and what is wrong, if anything."""
        self._bench, self._threads = bench, threads
        torch.set_num_threads(threads)
        warnings.showwarning = self._teller.warn
        try:
            bench.settle(device, Jobs(jobs, os.getppid()))  # Ray's own process has started all workers of this machine
        except (ComeError, OSError) as error:
            return __version__, f"{platform.node()}: {_one_line(error)}"
        return __version__, ""

    def run(self, cell: Cell) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        """Run a cell; returns its end (what it is, and a record with rows, a reason or an error), and the last news."""
        torch.set_num_threads(self._threads)  # of this thread
        try:
            end: tuple[Any, ...] = "done", *self._bench.measure(cell, self._teller.start, self._teller.advance)
        except UnfitError as error:
            end = "refuse", cell.key, str(error)
        except ComeError as error:
            end = "error", error
        except Exception as error:
            self._bench.give_up(error)
            end = "fail", cell.key, Failure.of(cell, error).reason
        self._teller.tell()
        return end, self.news()

    def news(self, pause: float = 0.0) -> list[tuple[Any, ...]]:
        """What was said since the last time, after a pause; another thread may be running a cell."""
        time.sleep(pause)
        return [self._said.popleft() for _ in range(len(self._said))]


@dataclass
class _Slot:
    """A worker, and what it is doing."""

    number: int
    actor: Any = None
    task: Any = None
    """What it was asked for last and has not answered: to get ready, or to run `cell`."""
    news: Any = None
    cell: Cell | None = None
    claim: ExitStack = field(default_factory=ExitStack)


class Workers(RemoteProgress):
    """Workers on a cluster, and who runs what.

    Args:
        cluster: where.
        bench: what they run; each gets a copy.
        under_way: what they work on, and who is told.
        count: how many.
        device: where each of them runs.
    """

    def __init__(self, cluster: Cluster, bench: Bench, under_way: UnderWay, count: int, device: str) -> None:
        super().__init__(bench, under_way)
        self._ray = _ray()
        self._deaths: Counter[str] = Counter()
        self._unready = 0
        try:
            copy = self._ray.put(bench)
        except Exception as error:  # whatever the model or the source raises when it is pickled
            raise ConfigError(
                f"this model or source cannot be sent to another process ({_one_line(error)}); run it without --engine ray"
            ) from error
        self._given = copy, device, max(1, int(cluster.cpus)), count
        gpus = cluster.gpus_on(device)
        # Two calls at once: a cell, and the news of it. Ray restarts nothing: a worker that is lost is replaced here.
        options = {"num_cpus": cluster.cpus, "num_gpus": gpus, "max_concurrency": 2, "max_restarts": 0}
        self._make = self._ray.remote(Worker).options(**options).remote
        self._slots = [_Slot(number) for number in range(count)]

    def __enter__(self) -> Workers:
        for slot in self._slots:
            self._begin(slot)
        return self

    def __exit__(self, *_: object) -> None:
        """End them; what they have finished is in the folder."""
        for slot in self._slots:
            slot.claim.close()
            self._end(slot)

    def run(self, orders: Sequence[Iterable[Cell]]) -> None:
        """Run all cells. `orders` has the same cells for each worker, in the order in which it should take them."""
        keys = [[cell.key for cell in order] for order in orders]
        until = time.monotonic() + PATIENCE
        while any(slot.task is not None for slot in self._slots) and time.monotonic() < until:
            self._listen()  # nothing runs before every worker has said that it can
        if all(slot.task is not None for slot in self._slots):
            warnings.warn(
                f"no worker was ready within {PATIENCE:.0f} s; waiting: the cluster may be busy", stacklevel=2
            )
        while True:
            for slot in self._slots:
                keys[slot.number] = [key for key in keys[slot.number] if key not in self._under_way.settled]
                if slot.task is None:
                    self._hand_out(slot, keys[slot.number])
            if not any(keys):
                return
            self._listen()

    def _begin(self, slot: _Slot) -> None:
        slot.actor = self._make()
        slot.task = slot.actor.prepare.remote(*self._given)

    def _end(self, slot: _Slot) -> None:
        if slot.actor is not None:
            with suppress(Exception):  # it is dead already, or Ray is
                self._ray.kill(slot.actor)
        slot.actor = slot.task = slot.news = None

    def _hand_out(self, slot: _Slot, keys: Sequence[str]) -> None:
        """Give a worker the first cell that nobody has run or is running."""
        running = {other.cell.key for other in self._slots if other.cell is not None}
        for key in keys:
            if key in running or key in self._under_way.settled:
                continue
            cell, claim = self._cells[key], ExitStack()
            with claim:
                if not claim.enter_context(self._under_way.folder.claim(cell)):
                    continue
                if (record := self._under_way.record(cell)) is not None:  # by another process, meanwhile
                    self._under_way.finish(cell, record, resumed=True)
                elif (failure := self._under_way.failure(cell)) is not None:
                    self._under_way.fail(failure)
                else:
                    slot.cell, slot.claim = cell, claim.pop_all()
                    slot.task = slot.actor.run.remote(cell)
                    return

    def _listen(self) -> None:
        """Wait until a worker answers, but not for long, and act on it."""
        for slot in self._slots:
            if slot.cell is not None and slot.news is None:
                slot.news = slot.actor.news.remote(OFTEN + 0.01 * len(self._slots))
        asked = {ref: slot for slot in self._slots for ref in (slot.task, slot.news) if ref is not None}
        if not asked:  # what is left is being run by processes that are not ours
            time.sleep(0.5)
            return
        for ref in self._ray.wait(list(asked), timeout=0.5)[0]:
            slot = asked[ref]
            is_news = ref == slot.news
            try:
                answer = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                if is_news:
                    slot.news = None  # the task tells
                else:
                    self._lost(slot, error)
                continue
            if is_news:
                slot.news = None
                self._hear(slot, answer)
            elif slot.cell is None:
                slot.task = None
                self._ready(*answer)
            else:
                slot.task = None
                self._hear(slot, answer[1])
                self._over(slot, slot.cell, *answer[0])

    def _hear(self, slot: _Slot, news: Iterable[tuple[Any, ...]]) -> None:
        for words in news:
            self._pass_on(slot.number, *words)

    def _ready(self, version: str, problem: str) -> None:
        if version != __version__:
            raise StateError(f"a worker has come {version}, this is {__version__}; install one version on all machines")
        if problem:
            raise InputError(
                f"a worker cannot run this on {problem}; all machines must have the device and see the data under the same path"
            )
        self._unready = 0

    def _over(self, slot: _Slot, cell: Cell, end: str, *found: Any) -> None:
        """A worker is done with a cell."""
        slot.cell, folder = None, self._under_way.folder
        with slot.claim:
            if end == "done":
                for episode in self._bench.episodes(cell):
                    folder.write_stream(episode.stream)
                folder.write(*found)
                self._under_way.finish(cell, found[0])
                return
            if end == "fail":
                folder.write_failure(Failure(cell=cell, reason=found[1]))
            self._pass_on(slot.number, end, *found)

    def _lost(self, slot: _Slot, error: Exception) -> None:
        """A worker has died: run its cell again, in a new worker, unless that was tried before."""
        self._end(slot)
        cell, why = slot.cell, _one_line(error)
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
                self._over(
                    slot, cell, "fail", cell.key, f"its worker died {ATTEMPTS} times, the last time: {why}"[:500]
                )
            else:
                slot.cell = None
                slot.claim.close()
                warnings.warn(f"a worker died; its cell is run again: {cell.title} ({why})", stacklevel=2)
        self._begin(slot)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is missing; {INSTALL}") from error
    return ray


def _host_and_port(address: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"(?:ray://)?(\[[0-9a-fA-F:]+\]|[^\s:/]+):(\d{1,5})", address, re.ASCII)
    return (found[1].strip("[]"), int(found[2])) if found and 0 < int(found[2]) < 2**16 else None


def _room(machine: dict[str, float], cpus: float, gpus: float) -> int:
    """How many workers fit on a machine."""
    by_gpu = machine.get("GPU", 0.0) / gpus if gpus else float("inf")
    return int(min(machine.get("CPU", 0.0) / cpus, by_gpu) + 1e-9)


def _one_line(error: BaseException) -> str:
    """The first line that says something, of what a worker raised if it is that."""
    error = getattr(error, "cause", None) or error
    text = getattr(error, "strerror", None) or next((line for line in str(error).splitlines() if line.strip()), "")
    return printable(text.strip()[:300]) or type(error).__name__
