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
from typing import Any, cast

import torch

from come.errors import ComeError, one_line, warn
from come.method import NotCapturable, Written, undo
from come.model.copies import room
from come.model.inputs import Inputs
from come.state.trees import leaves, like, replace, signature
from come.step.transition import Run, StepFlags, StepInput, StepOutput, Transition

SHAPES = 8
"""Shapes of batch that are compiled; more run as they are."""
RECENT = 16
"""A shape that comes again within so many batches is compiled."""


class CompiledSteps:
    """Runs the steps of one model compiled, and on a GPU as CUDA graphs."""

    def __init__(self) -> None:
        self._recent: deque[Any] = deque(maxlen=RECENT)
        """Shapes of the batches before."""
        self._shapes: set[Any] = set()
        self._graphs: dict[Any, CapturedGraph] = {}
        self._pool: Any = None
        self._said: set[str] = set()
        self._works = self._capture = True
        """Whether `torch.compile` works on this model, and whether a step can be captured, as far as is known."""

    def run(self, step: Transition, flags: StepFlags, given: StepInput, x: Inputs, run: Run) -> StepOutput:
        """One step."""

        def compute() -> StepOutput:
            return step(flags, given, x, run)

        if not (self._works and self._divides(step) and self._compiles(step, x)):
            return step.borrow(compute)
        if not self._captures(step, given, x):
            return self._compiled(step, compute, run)
        key = signature((flags, given, x, _autocast()))
        try:
            if key not in self._graphs:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                self._graphs[key] = CapturedGraph(self._compiled, step, flags, given, x, run, self._pool)
        except ComeError:
            raise
        except (NotCapturable, RuntimeError) as reason:
            undo(run.written)
            self._no_graph(step, one_line(reason, first=True))
            return self._compiled(step, compute, run)
        step.seed(run)
        return self._graphs[key].replay(given, x, run.written)

    def forget(self) -> None:
        """Give all graphs up: the model was moved, cast or loaded, and what was captured is of another one."""
        self._graphs.clear()
        self._shapes.clear()
        self._recent.clear()

    def _compiles(self, step: Transition, x: Inputs) -> bool:
        """Whether this batch is of the first shape, or of one that has come not long ago."""
        shape = signature(x)
        due = not self._recent or shape in self._recent
        self._recent.append(shape)
        if due and shape not in self._shapes:
            if len(self._shapes) < SHAPES:
                self._shapes.add(shape)
            else:
                self._say(
                    step, f"{SHAPES} shapes of batch are compiled; others run as they are: pad batches to few sizes"
                )
        return shape in self._shapes

    def _divides(self, step: Transition) -> bool:
        """Whether calls that are divided over ranks can be compiled."""
        if step.model.ranks is None or not step.on_batch:
            return True
        self._say(step, "not compiled, since the ranks exchange statistics of the batch in BatchNorm layers")
        return False

    def _captures(self, step: Transition, given: StepInput, x: Inputs) -> bool:
        device = step.model.device
        if not self._capture or device.type != "cuda" or given.state is None:
            return False
        elsewhere = any(t.device != device for t in leaves((given, x)))
        divided = "the ranks exchange logits in it" if step.model.ranks is not None else ""
        if waits := step.method.waits or divided or ("part of its memory is on the CPU" if elsewhere else ""):
            self._no_graph(step, waits)
        return self._capture

    def _no_graph(self, step: Transition, reason: str) -> None:
        """From now on without graphs."""
        self._capture = False
        self._say(step, f"the step is not one CUDA graph: {reason}; its model is compiled all the same")

    def _compiled(self, step: Transition, compute: Callable[[], StepOutput], run: Run) -> StepOutput:
        """A step with the compiled model; if it cannot be compiled, as it is."""
        model = step.model
        model.compiled = True
        try:
            with room():
                return step.borrow(compute)
        except ComeError:
            raise
        except Exception as error:
            if not _by_compiler(error):
                raise
            undo(run.written)
            self._say(
                step,
                f"torch.compile failed ({one_line(error, kind=True, first=True)}); not compiled",
            )
            self._works = False
            model.compiled = False
            return step.borrow(compute)
        finally:
            model.compiled = False

    def _say(self, step: Transition, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(f"compile=True, {step.method.name}: {what}")


def _by_compiler(error: Exception) -> bool:
    """Whether it comes from torch.compile, and not from the model."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__module__.startswith(("torch._dynamo", "torch._inductor")):
            return True
        seen = seen.__cause__
    return False


class CapturedGraph:
    """A step as a CUDA graph, with memory of its own for its inputs and outputs.

    Args:
        compiled: runs a step with the compiled model.
        step: what is captured.
        flags: what the host has decided.
        given: what the step begins with; an example.
        x: a batch; an example.
        run: of the batch.
        pool: memory that all graphs of an adapter share, since one runs at a time.
    """

    def __init__(
        self,
        compiled: Callable[[Transition, Callable[[], StepOutput], Run], StepOutput],
        step: Transition,
        flags: StepFlags,
        given: StepInput,
        x: Inputs,
        run: Run,
        pool: Any,
    ) -> None:
        self._given: tuple[StepInput, Inputs] = (given, x)
        unnumbered = replace(run, count=None)

        def compute() -> StepOutput:
            own, batch = self._given
            return compiled(step, lambda: step(flags, own, batch, unnumbered), run)

        aside = torch.cuda.Stream(step.model.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()  # compiles, and waits
            overwritten = {id(entry) for entry, _, _ in run.written}
            undo(run.written)
            with noticing_waits() as waits:
                compute()
            undo(run.written)
        torch.cuda.current_stream().wait_stream(aside)
        if waits:
            raise NotCapturable(f"it waits for the device ({waits[0]})")
        torch.cuda.empty_cache()  # the graph has memory of its own: what the steps so far have used is free
        # What a method overwrites in place is not copied: TEA's buffer takes gigabytes.
        self._given = cast(
            "tuple[StepInput, Inputs]",
            like((given, x), [t if id(t) in overwritten else t.clone() for t in leaves((given, x))]),
        )
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(run.generator)
        with torch.cuda.graph(self._graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            self._after = compute()
        self._written: list[Written] = list(run.written)
        run.written.clear()

    def replay(self, given: StepInput, x: Inputs, written: list[Written]) -> StepOutput:
        """The step, for these."""
        theirs_all = leaves((given, x))
        own = leaves(self._given)
        with torch.no_grad():
            for mine, theirs in zip(own, theirs_all, strict=True):
                if mine is not theirs:
                    mine.copy_(theirs)
            written.extend(self._written)
            self._graph.replay()
            unchanged = {id(mine): theirs for mine, theirs in zip(own, theirs_all, strict=True)}
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
