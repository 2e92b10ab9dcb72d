"""Locks for models: adapters that share a module take turns, a fork waits for running steps, and Ctrl-C releases the locks.

Python can raise KeyboardInterrupt between any two bytecodes of the main thread, also inside an `__enter__` or `__exit__` that
is written in Python (`threading.Condition` included); the lock is then never released. `with` on an `RLock`, which is written
in C, cannot be interrupted there, so locks are only taken that way. `_registry` is taken last: no thread that holds it waits
for another lock.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

T = TypeVar("T")


class _Lock:
    """A numbered reentrant lock: several are always taken in the order of their numbers."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.lock: Any = threading.RLock()


_of: weakref.WeakKeyDictionary[nn.Module, _Lock] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[_Lock] = weakref.WeakSet()
_registry: Any = threading.RLock()
_forking = threading.local()  # the locks that this thread has taken for a fork


class ModelLock:
    """The lock of a model and all its modules, so that wrappers of one model exclude each other too.

    >>> model = nn.Linear(2, 2)
    >>> ModelLock(model).run(lambda: ModelLock(nn.Sequential(model)).run(lambda: "one thread may take it twice"))
    'one thread may take it twice'
    """

    def __init__(self, model: nn.Module) -> None:
        with _registry:
            fresh = _Lock()
            found = {_of.setdefault(module, fresh) for module in model.modules()}
            _all.update(found)
        self._locks = sorted(found, key=lambda lock: lock.number)

    def run(self, call: Callable[[], T]) -> T:
        """Call a function while no other thread runs the model; restores locks and torch's modes at the end."""
        return _holding(self._locks, functools.partial(_in_modes_of_its_own, call))


def _holding(locks: Sequence[_Lock], call: Callable[[], T]) -> T:
    """Call a function with all these locks held."""
    if not locks:
        return call()
    lock = locks[0].lock
    nested = lock._is_owned()
    try:
        with lock:
            return _holding(locks[1:], call)
    finally:
        if not nested and lock._is_owned():  # a trace function can raise where a signal cannot: at the end of `with`
            lock.release()


def _in_modes_of_its_own(call: Callable[[], T]) -> T:
    """Call a function outside of inference mode, and restore torch's modes.

    `torch.no_grad`, `torch.vmap` and `TorchFunctionMode` are written in Python: an interrupt in them leaves them on, or makes
    their exit fail.
    """
    c, handled = torch._C, sys.exc_info()[1]
    grad, layers = torch.is_grad_enabled(), c._functorch.get_dynamic_layer_stack_depth()
    modes = [c._get_function_stack_at(i) for i in range(c._len_torch_function_stack())]
    try:
        with c._InferenceMode(False):  # in C; its end restores gradient mode, inference mode and autocast
            c._set_grad_enabled(grad)
            return call()
    except Exception as error:
        found: BaseException | None = error
        while found is not None and found is not handled:
            if isinstance(found, KeyboardInterrupt):
                raise found from None
            found = found.__context__
        raise
    finally:
        if c._functorch.get_dynamic_layer_stack_depth() > layers:
            c._functorch.pop_dynamic_layer_stack_and_undo_to_depth(layers)
        while c._len_torch_function_stack() > len(modes):
            c._pop_torch_function_stack()
        for mode in modes[c._len_torch_function_stack() :]:
            c._push_on_torch_function_stack(mode)


@contextmanager
def untracked() -> Iterator[None]:
    """No gradients, and ordinary tensors even where the user is in `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


Method = TypeVar("Method", bound=Callable[..., Any])


def exclusive(method: Method) -> Method:
    """Decorate a method of an adapter or a fleet: it runs while no other thread runs the model."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._engine.lock.run(functools.partial(method, self, *args, **kwargs))

    return cast(Method, call)


def _before_fork() -> None:
    """Wait for the steps of other threads: the child would inherit their models in the middle of a step.

    Nothing is held while waiting, since a thread that holds one lock may wait for another one, or for the registry.
    """
    while True:
        with _registry:
            known = tuple(_all)
        busy = next((lock for lock in known if not _taken_for_fork(lock)), None)
        if busy is None:
            _registry.acquire()
            if all(lock.lock._is_owned() for lock in tuple(_all)):  # no new one meanwhile
                return
            _registry.release()
        _release_after_fork()
        if busy is not None:
            with busy.lock:
                pass


def _taken_for_fork(lock: _Lock) -> bool:
    if lock.lock._is_owned():
        return True
    vars(_forking).setdefault("locks", []).append(lock)  # noted first: an interrupt may follow
    return bool(lock.lock.acquire(blocking=False))


def _release_after_fork() -> None:
    locks = vars(_forking).setdefault("locks", [])
    while locks:
        if locks[-1].lock._is_owned():
            locks[-1].lock.release()
        locks.pop()


def _after_fork() -> None:
    if _registry._is_owned():
        _registry.release()
    _release_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
