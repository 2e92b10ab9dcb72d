"""Groups of streams that run at the same time and meet where they call the model: one call, and one backward, for all of them.

Streams with different numbers of samples cannot be one `torch.vmap`. So each group of a batch runs in a thread of its own, and
a call of the model waits until all groups have come to one. The first thread then makes one call of all of them, and one
backward likewise. All groups run the same method, so they come to the same calls; what only some need (a question to the source
model) is done first, while the others wait.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from queue import SimpleQueue
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


class Rendezvous:
    """Runs functions at the same time that `ask` now and then.

    Threads speak by `SimpleQueue`, whose `put` and `get` are C code: Ctrl-C can stop a `threading.Condition` half way, and
    then the others wait for ever.

    Example:
        >>> def job(value):
        ...     return ask(0, "sum", lambda values: [sum(values)] * len(values), value)
        >>> Rendezvous().run([lambda: job(1), lambda: job(2)])
        [3, 3]
    """

    def __init__(self) -> None:
        self._said: SimpleQueue[tuple[int, Asked | None]] = SimpleQueue()
        """What each function asks for, by its number; None when it is done."""
        self._answers: list[SimpleQueue[Any]] = []
        """For each function; no list: it is abandoned."""

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return; if one raises, all others are stopped at their next question, and it is raised here."""
        if len(jobs) == 1:
            return [jobs[0]()]
        found: dict[int, T] = {}
        errors: list[BaseException] = []
        settings = _settings()
        self._answers = [SimpleQueue() for _ in jobs]

        def work(number: int) -> None:
            _here.meeting = self, number
            try:
                with settings():
                    found[number] = jobs[number]()
            except BaseException as error:
                errors.append(error)
            finally:
                ended.add(number)
                self._said.put((number, None))

        started, ended, asked = set[int](), set[int](), dict[int, Asked]()
        try:
            for number in range(len(jobs)):
                start_new_thread(work, (number,))  # `Thread.start` waits for a Condition
                started.add(number)
            while left := len(started - ended):
                if errors:
                    break
                if len(asked) == left:
                    self._serve(asked)
                number, one = self._said.get()
                if one is not None:
                    asked[number] = one
        finally:
            for answers in self._answers:
                answers.put(None)
            while started - ended:
                self._said.get()
        for error in sorted(errors, key=lambda error: isinstance(error, _AbandonedError)):
            raise error
        return [found[i] for i in range(len(jobs))]

    def _serve(self, asked: dict[int, Asked]) -> None:
        """Do what comes first, for all that ask for the same."""
        order = min(one.order for one in asked.values())
        keys = {one.key: None for one in asked.values() if one.order == order}
        for key in keys:
            numbers = [n for n, one in sorted(asked.items()) if (one.order, one.key) == (order, key)]
            together = [asked.pop(n) for n in numbers]
            found = together[0].do([one.given for one in together])
            for number, answer in zip(numbers, found, strict=True):
                self._answers[number].put([answer])

    def wait(self, number: int, asked: Asked) -> Any:
        """In the thread of a function: what it gets."""
        self._said.put((number, asked))
        answer = self._answers[number].get()
        if answer is None:
            raise _AbandonedError
        return answer[0]


def _settings() -> Callable[[], AbstractContextManager[None]]:
    """What torch keeps for each thread, as it is here: a context for other ones."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda_stream = torch.cuda.current_stream() if cuda else None
    kinds = [kind for kind in ("cuda", "cpu") if (cuda or kind == "cpu") and torch.is_autocast_enabled(kind)]
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextmanager
    def same() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            if cuda_stream is not None:
                stack.enter_context(torch.cuda.stream(cuda_stream))
            yield

    return same


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
