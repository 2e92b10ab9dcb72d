"""Locks for models: two adapters that share a module take turns, and a fork waits for the steps under way."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from types import TracebackType

from torch import nn


class _Lock:
    """A reentrant lock with a number, by which several are taken in the same order everywhere."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.lock = threading.RLock()


_of: weakref.WeakKeyDictionary[nn.Module, _Lock] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[_Lock] = weakref.WeakSet()
_making = threading.Lock()
_held: list[_Lock] = []


class ModelLock:
    """The lock of a model: of all its modules, so that wrappers of one model exclude each other too.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> with ModelLock(model), ModelLock(nn.Sequential(model)):  # one thread may take it twice
        ...     pass
    """

    def __init__(self, model: nn.Module) -> None:
        with _making:
            fresh = _Lock()
            found = {_of.setdefault(module, fresh) for module in model.modules()}
            _all.update(found)
        self._locks = sorted(found, key=lambda lock: lock.number)

    def __enter__(self) -> None:
        for taken, lock in enumerate(self._locks):
            try:
                lock.lock.acquire()
            except BaseException:
                for other in reversed(self._locks[:taken]):
                    other.lock.release()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lock in reversed(self._locks):
            lock.lock.release()


def _before_fork() -> None:
    """Wait for the steps of other threads: the child would find their models half way."""
    _making.acquire()
    _held[:] = sorted(_all, key=lambda lock: lock.number)
    for lock in _held:
        lock.lock.acquire()


def _after_fork() -> None:
    for lock in reversed(_held):
        lock.lock.release()
    _held.clear()
    _making.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
