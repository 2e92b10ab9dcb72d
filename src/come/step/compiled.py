"""Steps that are compiled and, on a GPU, replayed as one CUDA graph.

The first shape of batch is compiled at once, another one when it comes for the second time within 16 batches: a last batch
that is smaller runs as it is. On a GPU the whole step is then captured: model, objective, selection, backward, optimizer,
signals of the guard and roll-back. A step is a function of what there was before, so a replay copies that into the graph's own
memory, runs, and copies what came out: nothing outside knows that there is a graph.

What cannot be captured, since it waits for the device or asks for the number of the batch, says so once and runs without a
graph, on the compiled model.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from come.errors import ComeError, warn
from come.method import NotCapturable, Written, undo
from come.model.copies import room
from come.model.inputs import Inputs
from come.state.trees import leaves, like, signature
from come.step.transition import StepFlags, StepInput, StepOutput, Transition

if TYPE_CHECKING:
    from come.streams.transition import StackedTransition

SHAPES = 8
"""Shapes of batch that are compiled; more run as they are."""
RECENT = 16
"""A shape that comes again within so many batches is compiled."""

Running = Callable[[Callable[[], StepOutput]], StepOutput]
"""Runs a function while the model is borrowed."""


class StepRunner:
    """The steps of one adapter: as they are, compiled, or captured.

    Args:
        step: what computes one.
    """

    def __init__(self, step: Transition | StackedTransition) -> None:
        self._step = step
        self._recent: deque[Any] = deque(maxlen=RECENT)
        """Shapes of the batches before."""
        self._shapes: set[Any] = set()
        self._graphs: dict[Any, CapturedGraph] = {}
        self._pool: Any = None
        self._said: set[str] = set()
        self._works = self._capture = True
        """Whether `torch.compile` works on this model, and whether a step can be captured, as far as is known."""

    def run(self, how: StepFlags, before: StepInput, x: Inputs, count: int, running: Running) -> StepOutput:
        """One step."""
        step = self._step

        def compute() -> StepOutput:
            step.seed(count)
            return step(how, before, x, count)

        if not (step.model.mode.compile and self._works and self._divides() and self._compiles(x)):
            return running(compute)
        if not self._captures(before, x):
            return self._compiled(compute, running)
        key = signature((how, before, x, _autocast()))
        try:
            if key not in self._graphs:
                self._graphs[key] = self._captured(how, before, x, running)
        except ComeError:
            raise
        except (NotCapturable, RuntimeError) as reason:
            undo(step.written)
            self._no_graph(str(reason).strip().splitlines()[0])
            return self._compiled(compute, running)
        step.seed(count)
        return self._graphs[key].replay(before, x, step.written)

    def forget(self) -> None:
        """Give all graphs up: the model was moved, cast or loaded, and what was captured is of another one."""
        self._graphs.clear()
        self._shapes.clear()
        self._recent.clear()

    def _compiles(self, x: Inputs) -> bool:
        """Whether this batch is of the first shape, or of one that has come not long ago."""
        shape = signature(x)
        due = not self._recent or shape in self._recent
        self._recent.append(shape)
        if due and shape not in self._shapes:
            if len(self._shapes) < SHAPES:
                self._shapes.add(shape)
            else:
                self._say(f"{SHAPES} shapes of batch are compiled; others run as they are: pad batches to few sizes")
        return shape in self._shapes

    def _divides(self) -> bool:
        """Whether calls that are divided over ranks can be compiled."""
        if self._step.model.ranks is None or not self._step.on_batch:
            return True
        self._say("not compiled, since the ranks exchange statistics of the batch in BatchNorm layers")
        return False

    def _captures(self, before: StepInput, x: Inputs) -> bool:
        device = self._step.model.device
        if not self._capture or device.type != "cuda" or before.state is None:
            return False
        elsewhere = any(t.device != device for t in leaves((before, x)))
        divided = "the ranks exchange logits in it" if self._step.model.ranks is not None else ""
        if waits := self._step.method.waits or divided or ("part of its memory is on the CPU" if elsewhere else ""):
            self._no_graph(waits)
        return self._capture

    def _no_graph(self, reason: str) -> None:
        """From now on without graphs."""
        self._capture = False
        self._say(f"the step is not one CUDA graph: {reason}; its model is compiled all the same")

    def _compiled(self, step: Callable[[], StepOutput], running: Running) -> StepOutput:
        """A step with the compiled model; if it cannot be compiled, as it is."""
        model = self._step.model
        model.compiled = True
        try:
            with room():
                return running(step)
        except ComeError:
            raise
        except Exception as error:
            if not _by_compiler(error):
                raise
            undo(self._step.written)
            self._say(
                f"torch.compile failed ({type(error).__name__}: {str(error).strip().splitlines()[0]}); not compiled"
            )
            self._works = False
            model.compiled = False
            return running(step)
        finally:
            model.compiled = False

    def _captured(self, how: StepFlags, before: StepInput, x: Inputs, running: Running) -> CapturedGraph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return CapturedGraph(self._step, how, before, x, lambda f: self._compiled(f, running), self._pool)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(f"compile=True, {self._step.method.name}: {what}")


def _by_compiler(error: Exception) -> bool:
    """Whether it comes from torch.compile, and not from the model."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__module__.startswith(("torch._dynamo", "torch._inductor")):
            return True
        seen = seen.__cause__
    return False


class CapturedGraph:
    """A step as a CUDA graph, with memory of its own for what goes in and what comes out.

    Args:
        step: what is captured.
        how: what the host has decided.
        before: what the step begins with; an example.
        x: a batch; an example.
        running: runs a function while the model is borrowed.
        pool: memory that all graphs of an adapter share, since one runs at a time.
    """

    def __init__(
        self,
        step: Transition | StackedTransition,
        how: StepFlags,
        before: StepInput,
        x: Inputs,
        running: Running,
        pool: Any,
    ) -> None:
        self._given: tuple[StepInput, Inputs] = (before, x)

        def compute() -> StepOutput:
            given = self._given
            return running(lambda: step(how, given[0], given[1], None))

        aside = torch.cuda.Stream(step.model.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()  # compiles, and waits
            overwritten = {id(entry) for entry, _, _ in step.written}
            undo(step.written)
            with noticing_waits() as waits:
                compute()
            undo(step.written)
        torch.cuda.current_stream().wait_stream(aside)
        if waits:
            raise NotCapturable(f"it waits for the device ({waits[0]})")
        torch.cuda.empty_cache()  # the graph has memory of its own: what the steps so far have used is free
        # What a method overwrites in place is not copied: TEA's buffer takes gigabytes.
        self._given = cast(
            "tuple[StepInput, Inputs]",
            like((before, x), [t if id(t) in overwritten else t.clone() for t in leaves((before, x))]),
        )
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(step.generator)
        with torch.cuda.graph(self._graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            self._after = compute()
        self._written: list[Written] = list(step.written)
        step.written.clear()

    def replay(self, before: StepInput, x: Inputs, written: list[Written]) -> StepOutput:
        """The step, for these."""
        given = leaves((before, x))
        own = leaves(self._given)
        with torch.no_grad():
            for mine, theirs in zip(own, given, strict=True):
                if mine is not theirs:
                    mine.copy_(theirs)
            written.extend(self._written)
            self._graph.replay()
            unchanged = {id(mine): theirs for mine, theirs in zip(own, given, strict=True)}
            overwritten = {id(entry) for entry, _, _ in self._written}
            found = [
                t if id(t) in overwritten else unchanged[id(t)] if id(t) in unchanged else t.clone()
                for t in leaves(self._after)
            ]
        return cast(StepOutput, like(self._after, found))


@contextmanager
def noticing_waits() -> Iterator[list[str]]:
    """Collects where this thread waits for the device; other threads may."""
    found: list[str] = []
    mine, before = threading.get_ident(), torch.cuda.get_sync_debug_mode()

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        synchronizes = "synchroniz" in str(message) and "prototype" not in str(message)
        if synchronizes and threading.get_ident() == mine:
            found.append(f"{filename.rpartition('/')[2]}, line {lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _autocast() -> tuple[Any, ...]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
