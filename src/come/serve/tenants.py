"""Tenants, and the folder of their states: opened at a first request, evicted to disk, restored, written, reset and deleted.

The thread of the service does all of this except writing files in the background: it packs a state, which takes a millisecond,
and a second thread writes it, so that no answer waits for a disk.

A tenant belongs to part sha256(name) mod `parts`. A server owns one part of a folder and holds its lock while it lives, so two
servers never write the same tenant. The system frees the lock of a killed process. The number of parts can only change while no
server uses the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from come.errors import ConfigError, StateError, require_int
from come.fleet import Fleet
from come.serve.errors import RequestError, log
from come.serve.modes import Mode, Signal
from come.state import files, saving

INDEX, FORMAT = "serve.json", "come-serve-1"
SUFFIX = ".safetensors"


def key_of(name: str) -> str:
    """The file of a tenant without its ending: of the same length for every name, and distinct where case is ignored."""
    return hashlib.sha256(name.encode()).hexdigest()


def part_of(name: str, parts: int) -> int:
    """The part that a tenant belongs to.

    Example:
        >>> part_of("north", 4) == part_of("north", 4) < 4
        True
    """
    return int(key_of(name)[:16], 16) % parts


class States:
    """The files of one part of a state folder, and its lock.

    Args:
        folder: it must exist, and be one that all servers see.
        part: which of the parts, from 0.
        parts: how many servers share the folder.
        wait: seconds to wait for a lock, e.g. of a server that is just ending.
    """

    def __init__(self, folder: Path, part: int = 0, parts: int = 1, wait: float = 5.0) -> None:
        require_int("parts", parts, 1)
        require_int("part", part, 0)
        if part >= parts:
            raise ConfigError(f"part must be smaller than parts={parts}, got {part}")
        if not folder.is_dir():
            raise ConfigError(f"the state folder {folder} does not exist; create it first")
        self.folder, self.part, self.parts = folder, part, parts
        self._lock = self._lock_of(part)
        try:
            self._lock.acquire(timeout=wait)
        except Timeout:
            raise ConfigError(
                f"part {part} of the state folder {folder} is in use by another server; end that one, or choose another "
                "folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot lock the state folder {folder}: {error.strerror}; choose another") from error
        try:
            with FileLock(folder / ".start.lock"):
                self._agree_on_parts()
        except BaseException:
            self._lock.release()
            raise
        for left in folder.glob(f".*{SUFFIX}.*.tmp"):  # of a killed server: the part is ours alone now
            if self._is_mine(left.name[1:65]):
                left.unlink(missing_ok=True)

    def _lock_of(self, part: int) -> FileLock:
        return FileLock(self.folder / f".part-{part}.lock", thread_local=False)

    def _agree_on_parts(self) -> None:
        """All servers of a folder must have the same number of parts; only a server that is alone may change it."""
        index, before = self.folder / INDEX, 0
        if index.exists():
            try:
                found = json.loads(index.read_text())
                before = int(found["parts"])
                if found["format"] != FORMAT or not 1 <= before <= 100_000:
                    raise ValueError
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                raise ConfigError(f"{index} is damaged; delete it when no server uses the folder") from None
        if before == self.parts:
            return
        with contextlib.ExitStack() as held:
            try:
                for other in {*range(before)} - {self.part}:
                    held.enter_context(self._lock_of(other).acquire(timeout=0))
            except Timeout:
                raise ConfigError(
                    f"the state folder {self.folder} is in use by {before} servers; end them before another number of "
                    f"servers ({self.parts}) takes it over"
                ) from None
            files.write(index, json.dumps({"format": FORMAT, "parts": self.parts}).encode())

    def _is_mine(self, key: str) -> bool:
        return re.fullmatch("[0-9a-f]{64}", key) is not None and int(key[:16], 16) % self.parts == self.part

    def keys(self) -> set[str]:
        """Keys of this part's tenants that have a file."""
        found = (path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))
        return set(filter(self._is_mine, found))

    def path(self, name: str) -> Path:
        """The file of a tenant."""
        return self.folder / f"{key_of(name)}{SUFFIX}"

    def write(self, name: str, data: bytes) -> None:
        """Write a packed state, atomically."""
        files.write(self.path(name), data)

    def note(self, name: str) -> dict[str, Any]:
        """What was written beside a tenant's state; the file of another tenant is refused."""
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(saving.note_of(self.path(name)))
            if isinstance(found, dict) and found.get("tenant") == name:
                return found
        raise StateError(f"{self.path(name)} is not the state of tenant {name!r}; delete it, or use an older copy")

    def remove(self, name: str) -> None:
        """Delete the state of a tenant."""
        self.path(name).unlink(missing_ok=True)
        files.settle(self.folder)

    def close(self) -> None:
        """Let another server have the part."""
        self._lock.release()


# ---- tenants ----

RETRY = 1.0
"""Seconds, at least, until a write that failed is tried again."""


@dataclass
class Tenant:
    """A tenant in memory, except for its stream of the fleet."""

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
    """When it must be on disk, by `time.monotonic`."""

    @classmethod
    def noted(cls, name: str, note: dict[str, Any]) -> Tenant:
        """The tenant that `note` describes."""
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

    Those in memory are streams of the fleet, which knows which was used last; evicted ones are closed. `Fleet(resident=)` does
    not evict them: most are known here by the names of their files only, and a state travels with the tenant's own counts.

    Args:
        fleet, mode, states, resident, write_every: as in `Service`.
        most: the largest number of tenants, on disk included.
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
        self.here: dict[str, Tenant] = {}
        """Those in memory."""
        self.counts = Counter[str]()
        self._lock = threading.Lock()
        """Guards what both threads change: the counts, and `dirty`, `unwritten` and `due` of tenants."""
        self._writer = ThreadPoolExecutor(1, "come-serve-writer")
        self._writer.submit(bool)  # starts its thread: an error now, not when the first state is due
        self._writing: dict[str, Future[bool]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    # ---- in memory, on disk ----

    def bring(self, name: str, keep: Collection[str] = ()) -> Tenant:
        """A tenant in memory: as it is there, as it was written, or new. Those in `keep` are not evicted for it."""
        if name not in self.here:
            if key_of(name) not in self._keys and len(self._keys) >= self._most:
                raise RequestError("the server has as many tenants as it takes", 429)
            while len(self.here) >= self._resident:
                self._settle()
                oldest = next(one for one in self._fleet.streams if one in self.here and one not in keep)
                self.write(self.here[oldest])
                self.counts["evicted"] += 1
                self.forget(oldest)
            self.here[name] = self._begun(name)
            self._keys.add(key_of(name))
        if self._write_every == 0:
            self.write(self.here[name])  # what a failed commit goes back to
        return self.here[name]

    def _begun(self, name: str) -> Tenant:
        """A tenant as it was written, or new."""
        saved = self._has_file(name)
        try:
            if not saved:
                self._fleet.open(name)
                return Tenant(name, Signal.given(self._mode.reference))
            assert self._states is not None
            tenant = Tenant.noted(name, self._states.note(name))
            self._fleet.load(self._states.path(name), name)
            self.counts["restored"] += 1
            return tenant
        except Exception as error:
            if saved and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise unfit(name, error) from error  # whatever is wrong with the file, it is this tenant's alone
            log.error("no room for another tenant: %s", error)
            raise RequestError("the server has no memory for another tenant; try again later", 503) from error

    def _has_file(self, name: str) -> bool:
        return self._states is not None and self._states.path(name).exists()

    def forget(self, name: str) -> None:
        """Remove a tenant from memory; without a file it is gone."""
        self._fleet.close(name)
        del self.here[name]
        if not self._has_file(name):
            self._keys.discard(key_of(name))

    def check_known(self, name: str) -> None:
        """Raise unless there is such a tenant."""
        if key_of(name) not in self._keys:
            raise RequestError("there is no such tenant", 404)

    def reset(self, name: str) -> None:
        """Put a tenant back to the source model, on disk too."""
        self.check_known(name)
        tenant = self.bring(name)
        self._changed(tenant)
        self.write(tenant)  # what a failed commit goes back to
        self._fleet.reset(name)
        tenant.signal = Signal.given(self._mode.reference)
        self._changed(tenant)
        self._commit(tenant)

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
        with self._lock:
            tenant.dirty = True
            tenant.unwritten += steps
            tenant.due = min(tenant.due, time.monotonic() + self._write_every)

    def learn(self, tenant: Tenant, uncertainties: Iterable[float] | None, stepped: bool) -> None:
        """Take note of a step, and of a request unless its uncertainties are None; on disk, if that comes first."""
        if uncertainties is not None:
            tenant.requests += 1
            tenant.signal.update(uncertainties)
        if stepped or self._mode.kind == "shift":
            self._changed(tenant, int(stepped))
        elif self._mode.kind == "every":  # the number of requests is written when the tenant is evicted
            with self._lock:
                tenant.dirty = True
        if self._write_every == 0 and uncertainties is not None:
            self._commit(tenant)

    def write(self, tenant: Tenant) -> None:
        """Write a state now, if anything is not on disk."""
        self._wait_for(tenant.name)
        if self._states is None or not tenant.dirty:
            return
        if not self._put(tenant, *self._packed(tenant)):
            raise RequestError("the server cannot write states now; try again later", 503)

    def _commit(self, tenant: Tenant) -> None:
        """Write a state now; if that fails, the tenant is again what its file says, or new if it has none."""
        try:
            self.write(tenant)
        except Exception:
            self.forget(tenant.name)
            raise

    def until_due(self) -> float | None:
        """Seconds until a state must be written; None: not before something changes."""
        first = min((tenant.due for tenant in self.here.values()), default=math.inf)
        return None if self._states is None or first == math.inf else max(0.001, first - time.monotonic())

    def write_due(self) -> None:
        """Let the writer write what is due; a tenant that it still writes waits, so each has one packed state at most."""
        now = time.monotonic()
        for tenant in self.here.values() if self._states is not None else ():
            if tenant.due <= now and (tenant.name not in self._writing or self._writing[tenant.name].done()):
                self._writing[tenant.name] = self._writer.submit(self._put, tenant, *self._packed(tenant))

    def close(self) -> None:
        """Write everything, and let another server have the folder."""
        for tenant in self.here.values():
            try:
                self.write(tenant)
            except Exception:
                log.exception("the state of tenant %s was not written, %d steps lost", tenant.name, tenant.unwritten)
        self._writer.shutdown()
        if self._states is not None:
            self._states.close()

    def _packed(self, tenant: Tenant) -> tuple[bytes, int]:
        """The file of a tenant, and how many steps it saves."""
        data = self._fleet.packed(tenant.name, tenant.note())
        with self._lock:
            tenant.dirty, tenant.due = False, math.inf
            return data, tenant.unwritten

    def _put(self, tenant: Tenant, data: bytes, steps: int) -> bool:
        """Write a packed state; returns whether it is on disk."""
        assert self._states is not None
        try:
            self._states.write(tenant.name, data)
        except Exception as error:
            log.error("the state of tenant %s could not be written: %s", tenant.name, error)
            with self._lock:
                tenant.dirty, tenant.due = True, time.monotonic() + max(self._write_every, RETRY)
                self.counts["write_errors"] += 1
            return False
        with self._lock:
            tenant.unwritten -= steps
            self.counts["written"] += 1
        return True

    def _wait_for(self, name: str) -> None:
        """Wait until the writer is done with a tenant."""
        if (writing := self._writing.pop(name, None)) is not None:
            wait([writing])
