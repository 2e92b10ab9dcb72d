"""Groups of streams that run at the same time and meet where they call the model: one call, and one backward, for all of them.

Streams with different numbers of samples cannot be one `torch.vmap`. So each group of a batch runs in a thread of its own, and
a call of the model waits until all groups have come to one. The first thread then makes one call of all of them, and one
backward likewise. All groups run the same method, so they come to the same calls; what only some need (a question to the source
model) is done first, while the others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Asked(NamedTuple):
    """What a group asks for."""

    order: int
    """What has a smaller one is done first, while others wait."""
    key: Any
    """Those with the same are done together."""
    do: Callable[[list[Any]], list[Any]]
    """For all of them: what was given by each -> what each gets."""
    given: Any


class _AbandonedError(Exception):
    """Another group has failed."""


class Meeting:
    """Runs functions at the same time that `ask` now and then.

    Example:
        >>> def job(value):
        ...     return ask(0, "sum", lambda values: [sum(values)] * len(values), value)
        >>> Meeting().run([lambda: job(1), lambda: job(2)])
        [3, 3]
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._asked: dict[int, Asked] = {}
        self._answers: dict[int, Any] = {}
        self._left = 0
        """How many functions are not done."""
        self._broken = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return; if one raises, all others are stopped at their next question, and it is raised here."""
        if len(jobs) == 1:
            return [jobs[0]()]
        found: dict[int, T] = {}
        errors: list[BaseException] = []
        settings = _Settings()

        def work(number: int) -> None:
            _here.meeting = self, number
            try:
                with settings:
                    found[number] = jobs[number]()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._news:
                    self._left -= 1
                    self._broken = self._broken or bool(errors)
                    self._news.notify_all()

        threads = [threading.Thread(target=work, args=(i,), name=f"come-group-{i}") for i in range(len(jobs))]
        self._left = len(threads)
        try:
            for thread in threads:
                thread.start()
            while self._next():
                self._serve()
        finally:
            with self._news:
                self._broken = True
                self._news.notify_all()
            for thread in threads:
                with suppress(
                    RuntimeError
                ):  # not started: if an interrupt struck in that, it ends at its first question
                    thread.join()
        for error in sorted(errors, key=lambda error: isinstance(error, _AbandonedError)):
            raise error
        return [found[i] for i in range(len(jobs))]

    def _next(self) -> bool:
        """Wait until all that are left have asked; False when none is left."""
        with self._news:
            while self._left and not self._broken and len(self._asked) < self._left:
                self._news.wait()
            return bool(self._left) and not self._broken

    def _serve(self) -> None:
        """Do what comes first, for all that ask for the same."""
        order = min(one.order for one in self._asked.values())
        keys = {one.key: None for one in self._asked.values() if one.order == order}
        for key in keys:
            numbers = [n for n, one in sorted(self._asked.items()) if (one.order, one.key) == (order, key)]
            together = [self._asked.pop(n) for n in numbers]
            found = together[0].do([one.given for one in together])
            with self._news:
                self._answers |= dict(zip(numbers, found, strict=True))
                self._news.notify_all()

    def wait(self, number: int, asked: Asked) -> Any:
        """In the thread of a function: what it gets."""
        with self._news:
            self._asked[number] = asked
            self._news.notify_all()
            while number not in self._answers and not self._broken:
                self._news.wait()
            if number not in self._answers:
                raise _AbandonedError
            return self._answers.pop(number)


class _Settings:
    """What torch keeps for each thread, as it is here; for another one, as a context."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if self._cuda else None
        kinds = ("cuda", "cpu") if self._cuda else ("cpu",)
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._local = threading.local()

    def __enter__(self) -> None:
        self._local.entered = [torch.autocast(kind, dtype, enabled=on) for kind, dtype, on in self._autocast if on]
        if self._stream is not None:
            self._local.entered.append(torch.cuda.stream(self._stream))
        for one in self._local.entered:
            one.__enter__()

    def __exit__(self, *error: Any) -> None:
        for one in reversed(self._local.entered):
            one.__exit__(*error)


_here = threading.local()


def ask(order: int, key: Any, do: Callable[[list[Any]], list[Any]], given: Any) -> Any:
    """Do something together with the other groups that ask for the same; alone if there is no meeting."""
    found = getattr(_here, "meeting", None)
    if found is None:
        return do([given])[0]
    meeting, number = found
    return meeting.wait(number, Asked(order, key, do, given))


def gradients(given: list[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    """For each (loss, weights) the gradient, by one backward; None where there is none."""
    able = [(loss, weights) for loss, weights in given if loss.requires_grad]
    total = sum(loss.sum() for loss, _ in able)
    found = iter(
        torch.autograd.grad(total, [w for _, w in able], allow_unused=True) if isinstance(total, Tensor) else ()
    )
    return [next(found) if loss.requires_grad else None for loss, _ in given]
