"""What waits for the thread of the fleet: requests, in their order, and commands."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from come.serve.errors import RequestError, refusal

SHARE = 4
"""One tenant may fill 1/4 of the queue."""


@dataclass
class Request:
    """Samples of a tenant."""

    name: str
    x: Tensor
    future: Future[Any]
    arrived: float = field(default_factory=time.monotonic)


@dataclass
class Command:
    """Anything else that the thread of the fleet does."""

    name: str
    """Of the tenant whose earlier requests come first; empty: the command comes before all requests."""
    run: Callable[[], Any]
    future: Future[Any]

    def do(self) -> None:
        """Run it."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.run())
            except Exception as error:
                self.future.set_exception(refusal(error, "a command"))


class Queue:
    """Many threads put, one takes.

    Args:
        most: the largest number of samples that wait.
        batch: samples that are run together, unless one request holds more.
        tenants: tenants that are run together.
        wait: seconds that a request waits for others.
    """

    def __init__(self, most: int, batch: int, tenants: int, wait: float) -> None:
        self.most, self._batch, self._tenants, self._wait = most, batch, tenants, wait
        self.refused = 0
        self.closing = False
        self._waiting: deque[Request | Command] = deque()
        self._mutex = threading.RLock()
        """Guards all of these."""
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rings when there is something to do. In C, as the lock: Ctrl-C can stop a Condition half way, for good."""

    def samples(self, name: str | None = None) -> int:
        """Samples that wait, of one tenant or of all."""
        with self._mutex:
            requests = [one for one in self._waiting if isinstance(one, Request)]
        return sum(len(one.x) for one in requests if name is None or one.name == name)

    def put(self, one: Request | Command) -> None:
        """Add something, unless the queue is full."""
        with self._mutex:
            if self.closing:
                raise RequestError("the server is shutting down; try again later", 503)
            if isinstance(one, Request):
                self._check_room(one)
            if one.name:
                self._waiting.append(one)  # one call: an interrupt leaves it in the queue or not
            else:
                self._waiting.appendleft(one)
        self._bell.put(None)

    def _check_room(self, one: Request) -> None:
        if self.samples() + len(one.x) > self.most:
            self.refused += 1
            raise RequestError("the server is busy; try again later", 503)
        if self.samples(one.name) + len(one.x) > self.most // SHARE:
            self.refused += 1
            raise RequestError("this tenant has too many requests waiting; try again later", 429)

    def close(self) -> None:
        """Refuse what comes from now on."""
        with self._mutex:
            self.closing = True
        self._bell.put(None)

    def next(self, idle: float | None) -> Command | list[Request] | None:
        """A command, or requests to run together, perhaps none; None: the queue is closed and empty.

        Args:
            idle: seconds to wait for something if the queue is empty. None: without an end; 0: there is other work.
        """
        while not self._bell.empty():  # what it rang for is looked at now
            self._bell.get()
        if not self._waiting and idle != 0:
            if self.closing:
                return None
            self._listen(idle)
        while self._waiting and isinstance(first := self._waiting[0], Request):
            left = first.arrived + self._wait - time.monotonic()
            if left <= 0 or self.closing or self.samples() >= self._batch:
                break
            self._listen(left)
        with self._mutex:
            if self._waiting and isinstance(first := self._waiting[0], Command):
                self._waiting.popleft()
                return first
            return self._take()

    def _listen(self, seconds: float | None) -> None:
        with contextlib.suppress(Empty):
            self._bell.get(timeout=seconds)

    def _take(self) -> list[Request]:
        """The next requests, in their order, at most one of each tenant, and none that must wait for a command."""
        batch, samples, seen, later = list[Request](), 0, set[str](), deque[Request | Command]()
        while self._waiting and len(batch) < self._tenants:
            one = self._waiting.popleft()
            if isinstance(one, Command) or one.name in seen:
                later.append(one)
            elif batch and samples + len(one.x) > self._batch:
                later.append(one)
                break
            elif not one.future.set_running_or_notify_cancel():
                continue
            else:
                batch.append(one)
                samples += len(one.x)
            seen.add(one.name)
        self._waiting.extendleft(reversed(later))
        return batch
