"""Tenants: opened at their first request, evicted to disk, restored, written back, reset and deleted.

All but `_write_files` runs in the thread of the service. A state is packed there, which takes a millisecond, and
written by a second thread, so that no answer waits for a disk.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from come.errors import ConfigError, StateError, require_int
from come.fleet import Fleet
from come.serve.errors import RequestError
from come.serve.modes import Mode, Signal
from come.serve.states import States, key_of

log = logging.getLogger("come.serve")

RETRY = 1.0
"""Seconds, at least, until a write that failed is tried again."""


@dataclass
class Tenant:
    """What is known of a tenant in memory, beside its stream of the fleet."""

    name: str
    signal: Signal
    requests: int = 0
    """Answered, by earlier servers too."""
    restored: bool = False
    """It began with a file."""
    dirty: bool = False
    """Something is not on disk."""
    unwritten: int = 0
    """Steps that are not on disk."""
    due: float = math.inf
    """When it is to be on disk, by `time.monotonic`."""

    @classmethod
    def noted(cls, name: str, note: dict[str, Any]) -> Tenant:
        """As `note` has written it down."""
        require_int("requests", note["requests"], 0)
        return cls(name, Signal(**note["signal"]), note["requests"], restored=True)

    def note(self) -> str:
        """What is written beside the state of the stream."""
        return json.dumps({"tenant": self.name, "requests": self.requests, "signal": asdict(self.signal)})


def unfit(name: str, error: Exception) -> RequestError:
    """Build the answer to a tenant whose saved state cannot be used."""
    log.error("the state of tenant %s cannot be used: %s", name, error)
    return RequestError(
        "the saved state of this tenant does not fit this server; its log says why, and DELETE begins anew", 409
    )


class Tenants:
    """All tenants of a service.

    Args:
        fleet: the model and the streams.
        mode: when they adapt.
        states: where they are kept; None: in memory only.
        most: so many tenants, on disk included.
        resident: so many of them in memory.
        write_every: seconds until a change is on disk.
        settle: makes all steps that tenants in memory still owe; called before one is evicted.
    """

    def __init__(
        self,
        fleet: Fleet,
        mode: Mode,
        states: States | None,
        most: int,
        resident: int,
        write_every: float,
        settle: Callable[[], None],
    ) -> None:
        self._fleet, self._mode, self._states = fleet, mode, states
        self._most, self._resident, self._write_every, self._settle = most, resident, write_every, settle
        self._keys = set[str]() if states is None else states.keys()
        """Of all tenants, on disk included."""
        self.here: OrderedDict[str, Tenant] = OrderedDict()
        """Those in memory, least recently used first."""
        self.counts = Counter[str]()
        self._files: queue.SimpleQueue[tuple[Tenant, bytes, int] | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        """Guards what both threads change: `Tenant`'s last three fields, the counts, and these:"""
        self._writing = set[str]()
        """Tenants whose state the writer has not yet written."""
        self._writer = threading.Thread(target=self._write_files, name="come-serve-writer", daemon=True)
        self._writer.start()

    def __len__(self) -> int:
        """How many there are, on disk included."""
        return len(self._keys)

    @property
    def alive(self) -> bool:
        """Whether states are written."""
        return self._writer.is_alive()

    # ---- in memory, on disk ----

    def bring(self, name: str, keep: Iterable[str] = ()) -> Tenant:
        """A tenant in memory: as it is there, as it was written, or new. Those in `keep` are not evicted for it."""
        if name in self.here:
            self.here.move_to_end(name)
            return self.here[name]
        if key_of(name) not in self._keys and len(self._keys) >= self._most:
            raise RequestError("the server has as many tenants as it takes", 429)
        while len(self.here) >= self._resident:
            self._evict(next(one for one in self.here.values() if one.name not in keep))
        self.here[name] = self._restored(name) or self._opened(name)
        self._keys.add(key_of(name))
        return self.here[name]

    def _opened(self, name: str) -> Tenant:
        try:
            self._fleet.open(name)
        except ConfigError as error:
            raise self._no_room(error) from error
        return Tenant(name, Signal.given(self._mode.reference))

    def _no_room(self, error: Exception) -> RequestError:
        log.error("no room for another tenant: %s", error)
        return RequestError("the server has no memory for another tenant; try again later", 503)

    def _restored(self, name: str) -> Tenant | None:
        """As it was written; None if there is no file."""
        if self._states is None or not self._states.path(name).exists():
            return None
        try:
            tenant = Tenant.noted(name, self._states.note(name))
            self._fleet.load(self._states.path(name), name)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise self._no_room(error) from error
        except Exception as error:  # whatever is wrong with the file, it is this tenant's alone
            raise unfit(name, error) from error
        self.counts["restored"] += 1
        return tenant

    def _evict(self, tenant: Tenant) -> None:
        self._settle()
        self.write(tenant)
        self.counts["evicted"] += 1
        self.forget(tenant.name)

    def forget(self, name: str) -> None:
        """Out of memory; without a file, for good."""
        self._fleet.close(name)
        del self.here[name]
        if self._states is None or not self._states.path(name).exists():
            self._keys.discard(key_of(name))

    def check_known(self, name: str) -> None:
        """Refuse a tenant that there is not."""
        if key_of(name) not in self._keys:
            raise RequestError("there is no such tenant", 404)

    def reset(self, name: str) -> None:
        """Back to the source model, on disk too."""
        self.check_known(name)
        tenant = self.bring(name)
        self._changed(tenant)
        self.write(tenant)  # what `commit` goes back to
        self._fleet.reset(name)
        tenant.signal = Signal.given(self._mode.reference)
        self._changed(tenant)
        self.commit(tenant)

    def delete(self, name: str) -> None:
        """Forget a tenant, on disk too."""
        self.check_known(name)
        self._wait_for(name)
        if self._states is not None:
            try:
                self._states.remove(name)
            except OSError as error:
                log.error("the state of tenant %s cannot be deleted: %s", name, error)
                raise RequestError("the state of this tenant could not be deleted; try again later", 503) from error
        if name in self.here:
            self.forget(name)
        self._keys.discard(key_of(name))

    # ---- writing ----

    def _changed(self, tenant: Tenant, steps: int = 0) -> None:
        with self._news:
            tenant.dirty = True
            tenant.unwritten += steps
            tenant.due = min(tenant.due, time.monotonic() + self._write_every)

    def learn(self, tenant: Tenant, uncertainties: Iterable[float] | None, stepped: bool) -> None:
        """Take note of a request (unless its uncertainties are None) and of a step."""
        if uncertainties is not None:
            tenant.requests += 1
            tenant.signal.update(uncertainties)
        if stepped or self._mode.kind == "shift":
            self._changed(tenant, int(stepped))
        elif self._mode.kind == "every":  # how many requests there were is written when it is evicted
            with self._news:
                tenant.dirty = True

    def write(self, tenant: Tenant) -> None:
        """Write a state now, if anything is not on disk."""
        self._wait_for(tenant.name)
        if self._states is None or not tenant.dirty:
            return
        try:
            self._put(tenant, *self._packed(tenant))
        except StateError as error:
            log.error("the state of tenant %s could not be written: %s", tenant.name, error)
            raise RequestError("the server cannot write states now; try again later", 503) from error

    def commit(self, tenant: Tenant) -> None:
        """Write a state now; if that fails, the tenant is again what its file says, or new if it has none."""
        try:
            self.write(tenant)
        except Exception:
            self.forget(tenant.name)
            raise

    def until_due(self) -> float | None:
        """Seconds until a state is to be written; None: not before something changes."""
        first = min((one.due for one in self.here.values()), default=math.inf)
        if self._states is None or first == math.inf:
            return None
        return max(0.001, first - time.monotonic())

    def write_due(self) -> None:
        """Hand over what is due to the writer; a tenant that it still writes waits, so each has one packed state at most."""
        now = time.monotonic()
        for tenant in self.here.values() if self._states is not None else ():
            if tenant.due <= now and tenant.name not in self._writing:
                data, steps = self._packed(tenant)
                with self._news:
                    self._writing.add(tenant.name)
                self._files.put((tenant, data, steps))

    def close(self) -> None:
        """Write everything, and let another server have the folder."""
        for tenant in self.here.values():
            try:
                self.write(tenant)
            except Exception:
                log.exception("the state of tenant %s was not written, %d steps lost", tenant.name, tenant.unwritten)
        self._files.put(None)
        self._writer.join()
        if self._states is not None:
            self._states.close()

    def _packed(self, tenant: Tenant) -> tuple[bytes, int]:
        """The file of a tenant, and how many steps it saves."""
        data = self._fleet.packed(tenant.name, tenant.note())
        with self._news:
            tenant.dirty, tenant.due = False, math.inf
            return data, tenant.unwritten

    def _put(self, tenant: Tenant, data: bytes, steps: int) -> None:
        assert self._states is not None
        try:
            self._states.write(tenant.name, data)
        except Exception:
            with self._news:
                tenant.dirty, tenant.due = True, time.monotonic() + max(self._write_every, RETRY)
                self.counts["write_errors"] += 1
            raise
        with self._news:
            tenant.unwritten -= steps
            self.counts["written"] += 1

    def _write_files(self) -> None:
        while (one := self._files.get()) is not None:
            try:
                self._put(*one)
            except Exception as error:
                log.error("the state of tenant %s could not be written: %s", one[0].name, error)
            with self._news:
                self._writing.discard(one[0].name)
                self._news.notify_all()

    def _wait_for(self, name: str) -> None:
        """Until the writer is done with a tenant."""
        with self._news:
            self._news.wait_for(lambda: name not in self._writing)
