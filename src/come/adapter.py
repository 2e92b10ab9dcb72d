"""`come.adapt`, and the adapter that it returns: everything that must never go wrong is here, once.

    step(x):  lock -> check -> guard reads old signals -> method.adapt on a `Context` -> keep or drop -> Step

All that changes is in one `StreamState`, which is never changed itself: a step computes a new one and, when everything has
succeeded, puts it in the place of the old one. So an error or an interrupt anywhere leaves the adapter as it was.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from come import export as exporting
from come import methods, optim
from come.abstain import DEFAULT_SCORE, Abstention, Promise, Wanted, abstains, confidences, followed, scored, usable
from come.errors import ClosedError, CollapseError, ConfigError, ModelError, require, shown, warn
from come.guard.config import Event, Guard
from come.guard.watch import Sent, Watch, send
from come.method import Context, Frozen, Method, Step, Written, undo, untracked
from come.model.copies import Mode, Precision
from come.model.functional import FunctionalModel
from come.model.inputs import Input, Inputs, Key
from come.model.locks import ModelLock, exclusive
from come.model.ranks import Ranks, bits
from come.objectives import Objective
from come.optim import Moments
from come.select import Selector
from come.state import saving
from come.state.trees import replace
from come.step.compiled import StepRunner
from come.step.transition import StepFlags, StepInput, StepOutput, Transition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

log = logging.getLogger("come.guard")

FEW = 0.4
"""If a smaller share of the samples drove the last update, a forward without a gradient and one of those samples with it are
expected to cost less than a forward and a backward of all."""

READS = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "get_parameter", "get_buffer"})
"""Methods of a model that an adapter has, too: they give the source model's tensors, and run nothing."""
MOVES = frozenset(
    {
        *("float", "double", "half", "bfloat16", "type"),
        *("cpu", "cuda", "xpu", "ipu", "mtia", "share_memory", "requires_grad_"),
    }
)
"""Methods of a model that change it and return it, as `to`: those of an adapter do the same, and return the adapter."""

T = TypeVar("T")
Callback = Callable[["Adapter", Step], None]
"""Called with the adapter and what a step returned, after each step."""


@dataclass(frozen=True)
class StreamState:
    """All that a step changes."""

    weights: Tensor
    """(P,): the adapted parameters, in float32 or better."""
    moments: Moments
    state: dict[str, Tensor] | None = None
    """What the method remembers; None before the first batch."""
    count: int = 0
    """Batches since construction or reset."""
    watch: Watch | None = None
    """What the guard has learned; None without one."""
    selected: float = 1.0
    """The share of the samples that drove the last update, as far as the method tells."""
    abstention: Abstention | None = None
    """When not to answer; None before `Adapter.calibrate`."""

    def health(self) -> dict[str, float]:
        """Counters and gauges of the guard as flat numbers; without a guard, the steps only."""
        return {"steps": float(self.count)} if self.watch is None else self.watch.health()

    def to(self, device: torch.device, on_host: tuple[str, ...]) -> StreamState:
        """With all tensors on that device, but for those that stay on the CPU."""
        state = self.state
        if state is not None:
            state = {k: v if on_host and k.startswith(on_host) else v.to(device) for k, v in state.items()}
        # Torch optimizers keep some numbers on the CPU on purpose.
        moments = {k: v.to(device) if v.ndim or v.device.type != "cpu" else v for k, v in self.moments.items()}
        watch = None if self.watch is None else self.watch.to(device)
        abstention = None if self.abstention is None else self.abstention.to(device)
        weights = self.weights.to(device)
        return replace(self, weights=weights, moments=moments, state=state, watch=watch, abstention=abstention)


class Adapter:
    """A classifier that adapts while it predicts. `come.adapt` makes one; it is called in place of the model.

    The model itself is not changed: adapted weights live in the adapter, in float32 or better, and stand in the place of the
    model's own while a step runs. Between steps the model is as it was handed in. Dropout and drop-path are off in a step.

    Threads take turns. A step in which anything fails, or that is interrupted, has not happened.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        guard: Guard | None = None,
        mode: Mode | None = None,
        ranks: Ranks | None = None,
        per_sample: Collection[Key] | None = None,
    ) -> None:
        if ranks is not None:
            ranks.check_model(model, method.name, method.undivided)
        self.method = copy.copy(method)
        """The method and its hyperparameters."""
        self.guard = guard
        """The guard's configuration, or None."""
        self.model = model
        """The classifier, as it was handed in."""
        self.callbacks: list[Callback] = []
        """Called after each step, e.g. `come.callbacks.Snapshots`. What they raise is logged and counted, and stops nothing."""
        self._closed = False
        self._per_sample = per_sample
        self._to_undo: list[Written] = []
        self._promise: Promise | None = None
        self._ranks = ranks
        self._fingerprint: dict[str, Any] = {}
        self._rate: tuple[tuple[Any, ...], Tensor] | None = None
        if not isinstance(model, nn.Module):
            raise ModelError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        self._lock = ModelLock(model)
        self._begin(mode or Mode())  # while another adapter's step runs, other weights stand in the model
        for name in self.method.once:
            if hasattr(self.method, name):
                setattr(self.method, name, None)

    @exclusive
    def _begin(self, mode: Mode) -> None:
        with untracked():
            self._borrow(self.method.select, mode)
            self._now = self._first()
        self._follow()
        ctx = self._context(self._now, 1)
        self._core.fixed |= self._running(lambda: self.method.setup(ctx))
        if self._ranks is not None:
            with untracked():
                saving.agree(self, self._ranks)
            self._borrowed.ranks = self._ranks

    def _borrow(self, select: Selector, mode: Mode) -> None:
        """What belongs to this model and to this process: it is made anew for a copy."""
        method = self.method
        self._borrowed = FunctionalModel(self.model, select, method.name, method.descends, mode, self._per_sample)
        rule = None
        if self._borrowed.parameters:
            rule = optim.get(method.optimizer, self._borrowed.split, self._borrowed.join)
        self._core = Transition(method, self.guard, self._borrowed, rule)
        self._steps = StepRunner(self._core)

    def _first(self) -> StreamState:
        """Before the first batch."""
        core = self._core
        moments = {} if core.rule is None else core.rule.init(core.source)
        watch = None if self.guard is None else Watch.new(self.guard, self._borrowed.device, core.chooses)
        abstention = None if self._promise is None else Abstention.begin(self._promise, self._borrowed.device)
        return StreamState(core.source, moments, None, 0, watch, abstention=abstention)

    # ---- calling it ----

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Adapt to a batch and return its logits (B, K); the arguments are those of the model."""
        return self.step(*args, **kwargs).logits

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same: of a `torch.nn.Module` people call this, too."""
        return self(*args, **kwargs)

    @exclusive
    def step(self, *args: Any, **kwargs: Any) -> Step:
        """Adapt to a batch and return logits and, of each sample, its loss, whether it was used, valid, and is answered."""
        x, own = self._batch(args, kwargs)
        with self._together():
            before, written = self._now, list[Written]()
            try:
                self._core.written = written
                self._check_open()
                self._follow()
                moment, out, events = self._advance(self._now, x)
                self._now = moment
                self._count(self._tell(events))
                out = _own(out, own)
                self._count(self._call_back(out))
                return out
            except BaseException:
                self._to_undo = written  # for `_follow`, should an interrupt stop it here
                self._now = before
                undo(written)
                raise

    @exclusive
    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise an `InputError` if the method cannot use this batch. The model is not called, and nothing changes."""
        x, _ = self._batch(args, kwargs)
        with self._together():
            self._check_open()
            self.method.check(self._context(self._now, x.size), x, True)

    def predict(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (B, K) of a batch without adapting to it: nothing changes.

        The guard judges samples as in a step: an invalid one does not touch the others, and its own logits are all -1e4.
        """
        return self.answer(*args, **kwargs).logits

    @exclusive
    @untracked()
    def answer(self, *args: Any, **kwargs: Any) -> Step:
        """What `step` returns, without adapting: logits, and of each sample whether it is valid, and whether to abstain."""
        x, own = self._batch(args, kwargs)
        with self._together():
            self._check_open()
            self._follow()
            out, known = self._answered(self._now, x), self._now.abstention
            if known is not None:
                abstain = abstains(known.promise, self._objective, out.logits, known.threshold, out.valid)
                out = out._replace(abstain=abstain)
            return _own(out, own)

    def _answered(self, now: StreamState, x: Inputs) -> Step:
        self._core.seed(now.count)
        how, before = self._how(now), self._before(now, x.size)
        return self._running(lambda: self._core.answered(how, before, x, now.count))

    def uncertainty(self, logits: Tensor) -> Tensor:
        """How little is known of each sample, (B, K) -> (B,) in [0, 1]; to abstain, `calibrate` a threshold."""
        return self._objective.uncertainty(logits)

    def confidence(self, logits: Tensor, valid: Tensor | None = None) -> Tensor:
        """How sure each answer is, (B, K) -> (B,), by the score that the threshold is on; see `come.abstain.confidences`.

        Before `calibrate` it is the objective's confidence: the largest probability of a class.
        """
        now = self._now.abstention
        return confidences(DEFAULT_SCORE if now is None else now.promise.score, self._objective, logits, valid)

    # ---- abstaining ----

    @exclusive
    @untracked()
    def calibrate(
        self,
        data: Iterable[Any],
        *,
        risk: float | None = None,
        coverage: float | None = None,
        delta: float = 0.1,
        score: str = DEFAULT_SCORE,
        follow: bool = False,
    ) -> Promise:
        r"""Choose when not to answer, with a promise for samples like these; then `Step.abstain` and `abstains` say so.

        The source model predicts the samples, without adapting, on the BatchNorm statistics that `predict` uses; give batches
        of the size to come. Both promises are for samples that are drawn as these were, and for the source model: see
        docs/abstain.md for what is left of them under a shift and after adaptation.

        Args:
            data: batches of source data that the model was not trained on: (x, y) for a risk, with y = -1 for an outlier;
                x or (x, y) for a coverage. x is what the adapter is called with, or a tuple or mapping of the model's
                arguments. On several ranks the same on each.
            risk: with probability 1 - delta over these samples, at most this share of the answered samples is wrong.
            coverage: at least this share of samples is answered, on average. No labels are needed.
            delta: the probability with which these samples may mislead about the risk. Where no threshold has it, all but
                this share of calibrations raise an error, and the promises of the others are wrong.
            score: what the threshold is on, a name in `come.metrics.SCORES`. The promise holds with each; a score that ranks
                better answers more. The default is low for two reasons to abstain, a sample between classes and one that is
                like none.
            follow: keep the coverage up along any stream by moving the threshold, see `come.abstain.Abstention`. Not for a
                risk, which cannot be seen without labels.

        Returns:
            the promise, with the threshold; `print` says it in words.

        Raises:
            ConfigError: arguments out of range, or a risk that is to be followed.
            InputError: no or too few samples, wrong labels, or a risk that no threshold has.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
            >>> classifier = adapt(model, "tent")
            >>> promise = classifier.calibrate([torch.randn(8, 4) for _ in range(5)], coverage=0.9)
            >>> step = classifier.step(torch.randn(8, 4))
            >>> step.abstain.shape, torch.equal(classifier.abstains(step.logits), step.abstain)
            (torch.Size([8]), True)
        """
        wanted = Wanted(risk, coverage, delta, score, follow)
        with self._together():
            self._check_open()
            self._follow()
            first = self._first()
            self._borrowed.ranks = None  # each by itself
            try:
                scores, wrong = scored(
                    data, lambda x: self._answered(first, self._borrowed.read((x,))), self._objective, wanted
                )
            finally:
                self._borrowed.ranks = self._ranks
            if self._ranks is not None:
                scores, wrong = self._ranks.first(scores), None if wrong is None else self._ranks.first(wrong)
            self._promise = wanted.promise(scores, wrong)
            self._now = replace(self._now, abstention=Abstention.begin(self._promise, self._device))
            return self._promise

    @property
    def promise(self) -> Promise | None:
        """What `calibrate` promised, or the state that was loaded; None before."""
        return None if self._now.abstention is None else self._now.abstention.promise

    def abstains(self, logits: Tensor) -> Tensor:
        """Which of the answers not to rely on, (B, K) -> (B,) bool, by the threshold that is in force now."""
        now = self._now.abstention
        if now is None:
            raise ConfigError("no threshold was chosen; calibrate() first")
        return abstains(now.promise, self._objective, logits, now.threshold)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Inputs, slice | None]:
        """The batch, checked; on several ranks that of all of them, and which samples of it came from this one."""
        if self._ranks is None:
            return self._borrowed.read(args, kwargs), None
        with untracked(), self._together():
            self._follow()
            now = self._now
            state = f"{bits(now.weights)} {'' if now.watch is None else now.watch.decisions}"

            def read() -> Inputs:
                """What only one rank may refuse is looked for here, so that all ranks hear of it."""
                self._check_open()
                self._borrowed.check_unchanged()
                return self._borrowed.read(args, kwargs, empty=True)

            return self._ranks.batch(read, now.count, state, self._device)

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.noticing()

    # ---- one step, from moment to moment ----

    def _running(self, run: Callable[[], T]) -> T:
        """Run something that calls the model; the model is as before when this returns or raises."""
        self._borrowed.check_unchanged()
        try:
            try:
                with torch.enable_grad(), self._borrowed.mode.active():
                    self._borrowed.prepare()
                    return run()
            finally:
                self._borrowed.give_back()
        finally:  # again, in case an interrupt struck in the line above
            self._borrowed.give_back()

    def _advance(self, now: StreamState, x: Inputs) -> tuple[StreamState, Step, list[Event]]:
        """The next moment, what is returned, and what is to be reported."""
        now, events = self._begun(now)
        how = self._how(now)
        after = self._steps.run(how, self._before(now, x.size), x, now.count, self._running)
        moment, out, known = self._ended(now, how, after, x.size), after.out, now.abstention
        if known is not None:
            abstain = abstains(known.promise, self._objective, out.logits, known.threshold, out.valid)
            out = out._replace(abstain=abstain)
            if known.threshold is not None:
                threshold = followed(known.promise, known.threshold, abstain, usable(out.logits, out.valid))
                moment = replace(moment, abstention=Abstention(known.promise, threshold))
        return moment, out, events

    def _begun(self, now: StreamState) -> tuple[StreamState, list[Event]]:
        """The moment as a step begins with it: forgotten if that is due, and with old signals read."""
        due = self.method.reset_every is not None and now.count >= self.method.reset_every
        if self.method.episodic or due:
            now = self._forgotten(now)
        return (now, []) if self.guard is None else self._read(now, self.guard)

    def _ended(
        self, now: StreamState, how: StepFlags, after: StepOutput, size: int, send: Callable[..., Sent] = send
    ) -> StreamState:
        """The moment after a step on `size` samples."""
        watch = now.watch
        if watch is not None and self.guard is not None:
            assert after.values is not None
            assert after.history is not None
            values = after.values if self._ranks is None else self._ranks.first(after.values)
            sums = after.sums if how.asking else None
            watch = watch.stepped(self.guard, send(watch.steps, size, values), after.history, sums, self._core.chooses)
        selected = now.selected if after.selected is None else after.selected
        return StreamState(after.weights, after.moments, after.state, now.count + 1, watch, selected, now.abstention)

    def _before(self, now: StreamState, size: int) -> StepInput:
        """What a step begins with."""
        rate = self._rate_of(now, size, self.method)
        if self._rate is None or self._rate[0] != (rate, now.weights.dtype, self._device):
            value = torch.full((), rate, dtype=now.weights.dtype, device=self._device)
            self._rate = (rate, now.weights.dtype, self._device), value
        before = StepInput(now.weights, now.moments, now.state, self._rate[1])
        watch = now.watch
        if watch is None or self.guard is None:
            return before
        before = before._replace(history=watch.history)
        if not watch.asking:
            return before
        needed = torch.full((), self._needed(watch, size), device=self._device)
        return before._replace(sums=watch.sums, needed=needed)

    def _rate_of(self, now: StreamState, size: int, method: Method) -> float:
        """The learning rate for a batch of that size."""
        rate = method.learning_rate(size, self._borrowed.has_batch_norm)
        return rate * (1.0 if now.watch is None else now.watch.scale)

    def _needed(self, watch: Watch, size: int) -> int:
        """After how many samples a question may be acted on."""
        assert self.guard is not None
        return min(self.guard.samples, size + watch.asked)

    def _how(self, now: StreamState) -> StepFlags:
        """What is decided on the host."""
        watch, few = now.watch, now.selected < FEW and not self._borrowed.mode.compile
        if watch is None:
            return StepFlags(few=few)
        return StepFlags(watch.asking, self._resting(watch), watch.frozen, watch.trusted, not watch.steps, few)

    def _read(self, now: StreamState, guard: Guard) -> tuple[StreamState, list[Event]]:
        """Take up old signals, and do what follows from them."""
        assert now.watch is not None
        watch, events, cause = now.watch.read(guard, self._core.chooses)
        if cause is None or (cause.kind == "collapse" and guard.policy == "warn"):
            return replace(now, watch=self._asking(watch)), events
        if cause.kind == "collapse" and guard.policy == "raise":
            raise CollapseError(
                f"{self.method.name} has collapsed at step {cause.step}: {cause.message}; reset() it, lower lr, or use "
                "objective='come' or Guard(policy='recover')"
            )
        weightless = not (self._borrowed.parameters or self._core.on_batch)
        watch, more = watch.recovered(guard, cause, weightless)
        watch = self._asking(watch.counted(more))
        return replace(self._first(), count=now.count, watch=watch, abstention=now.abstention), [*events, *more]

    def _asking(self, watch: Watch) -> Watch:
        """With a question to the source, if one is due and can find anything."""
        return watch.asks() if self.method.changes else watch

    def _resting(self, watch: Watch) -> bool:
        """Whether the source model answers."""
        return watch.frozen or not (watch.trusted or self._borrowed.parameters or self._core.on_batch)

    def _context(self, now: StreamState, size: int) -> Context:
        """For what is not a step."""
        self._core.seed(now.count)
        valid = torch.ones(size, dtype=torch.bool, device=self._device)
        return self._core.context(self._how(now), self._before(now, size), valid, now.count)

    def _forgotten(self, now: StreamState) -> StreamState:
        """As before the first batch. What the stream is answered by is not forgotten: resets may be part of a method."""
        first = replace(self._first(), abstention=now.abstention)
        if now.watch is not None and self.guard is not None:
            first = replace(first, watch=now.watch.forgotten(self.guard))
        return first

    def _begun_anew(self, now: StreamState) -> StreamState:
        """After a reset by the user: also what the guard knows and the threshold are as at the beginning."""
        known, watch = now.abstention, now.watch
        begun = None if known is None else Abstention.begin(known.promise, self._device)
        if watch is not None and self.guard is not None:
            watch = watch.anew(self.guard, self._core.chooses)
        return replace(self._first(), abstention=begun, watch=watch)

    @property
    def _device(self) -> torch.device:
        return self._borrowed.device

    @property
    def _objective(self) -> Objective:
        return self.method.objective

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {self.method.name} adapter is closed; adapt() the model again")

    @untracked()
    def _follow(self) -> None:
        """After the user has moved, cast or loaded the model, bring everything along; first end what an interrupt stopped."""
        self._borrowed.give_back()
        undo(self._to_undo)
        if not (self._borrowed.mode.plain or self._borrowed.fresh()):
            self._steps.forget()
        device, dtype = self._borrowed.device, self._borrowed.dtype
        if self._now.weights.device == device and self._now.weights.dtype == dtype:
            return
        core = self._core
        fixed = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in core.fixed.items()}
        self._now = self._brought(self._now)
        core.source, core.fixed = core.source.to(device, dtype), self._cast(fixed)
        core.generator = torch.Generator(device)

    def _brought(self, moment: StreamState) -> StreamState:
        """A moment where the model is, in its precision."""
        moment = moment.to(self._device, self.method.on_host)
        weights, state = moment.weights.to(self._borrowed.dtype), moment.state
        state = None if state is None else self._cast(state)
        return replace(moment, weights=weights, moments=self._cast(moment.moments), state=state)

    def _cast(self, values: dict[str, Any]) -> dict[str, Any]:
        """With the precision of the adapted weights for what has an entry for each of them."""
        shape, dtype = self._core.source.shape, self._borrowed.dtype
        return {k: v.to(dtype) if isinstance(v, Tensor) and v.shape == shape else v for k, v in values.items()}

    def _tell(self, events: list[Event]) -> list[Event]:
        """Report events; returns the failures of the user's handler."""
        failed = []
        for event in events:
            level = logging.INFO if event.kind in ("healthy", "raised", "statistics") else logging.WARNING
            if self.writes:  # on several ranks once
                words = (self.method.name, event.step, event.message)
                log.log(level, "%s, step %d: %s", *words, extra={"come": event._asdict()})
            if event.kind == "probabilities":
                warn(event.message)
            if self.guard is not None and self.guard.on_event is not None:
                failed += self._safely("on_event", event.step, lambda event=event: self.guard.on_event(event))  # type: ignore[misc]
        return failed

    def _call_back(self, out: Step) -> list[Event]:
        failed, step = [], 0 if self._now.watch is None else self._now.watch.steps
        for callback in tuple(self.callbacks):
            name = getattr(callback, "__name__", type(callback).__name__)
            failed += self._safely(f"callback {name}", step, lambda callback=callback: callback(self, out))  # type: ignore[misc]
        return failed

    def _safely(self, what: str, step: int, call: Callable[[], None]) -> list[Event]:
        """A user's function must not stop the answers; returns the event if it fails."""
        try:
            call()
        except Exception as error:
            event = Event("callback_failed", step, f"{what} failed: {error}", {})
            log.exception("%s: %s failed; adaptation goes on", self.method.name, what, extra={"come": event._asdict()})
            return [event]
        return []

    def _count(self, events: list[Event]) -> None:
        if self._now.watch is not None:
            self._now = replace(self._now, watch=self._now.watch.counted(events))

    # ---- what can be seen ----

    @property
    def count(self) -> int:
        """Batches since construction or reset."""
        return self._now.count

    @property
    def state(self) -> dict[str, Tensor]:
        """What the method remembers, by name: copies; empty before the first batch."""
        return {name: value.clone() for name, value in (self._now.state or {}).items()}

    @property
    def adapted_parameters(self) -> dict[str, Tensor]:
        """The adapted parameters now, by name: copies, in float32 or better."""
        return {name: value.clone() for name, value in self._borrowed.named(self._now.weights).items()}

    @property
    def source_parameters(self) -> dict[str, Tensor]:
        """The same parameters of the source model: copies."""
        return {name: value.clone() for name, value in self._borrowed.named(self._core.source).items()}

    @property
    def writes(self) -> bool:
        """Whether `save` writes here: on several ranks only on the first, until one of them is lost."""
        return self._ranks is None or self._ranks.writes

    def health(self) -> dict[str, float]:
        """Counters and gauges of the guard as flat numbers; without a guard, the steps only. Looking changes nothing."""
        return self._now.health()

    def learning_rate(self, batch: int) -> float:
        """The learning rate for a batch of that size, before the guard's factor."""
        return self.method.learning_rate(batch, self._borrowed.has_batch_norm)

    # ---- its life ----

    @exclusive
    def reset(self) -> None:
        """Back to the state after construction: weights, moments, memory, and what the guard has learned.

        What `calibrate` promised stays; a threshold that follows the stream is where it was at the beginning.
        """
        with untracked():
            self._check_open()
            self._follow()
            self._now = self._begun_anew(self._now)

    @exclusive
    def close(self, *, keep: bool = False) -> None:
        """End the adaptation. The model is as it was handed in; may be called again.

        Args:
            keep: write the adapted weights into the model.
        """
        self._borrowed.give_back()
        if self._closed:
            return
        if keep:
            self._borrowed.check_unchanged()
            with untracked():
                self._borrowed.overwrite(self._now.weights)
        self._steps.forget()
        self._closed = True

    def __enter__(self) -> Self:
        """Enter a `with` block; at its end the adapter is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @exclusive
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the model; what the adapter remembers follows. So do `cuda`, `cpu`, `half` and the others in `MOVES`."""
        return self._moved("to", *args, **kwargs)

    @exclusive
    def _moved(self, name: str, *args: Any, **kwargs: Any) -> Self:
        getattr(self.model, name)(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Self:
        """Do nothing: an adapter always predicts in evaluation mode and adapts. Use `predict` to not adapt."""
        return self

    def eval(self) -> Self:
        """Do nothing, see `train`."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Other public attributes are those of the model, so that an adapter can stand where a model stood.

        Not so its methods, which would run the model without adaptation, or return it: only those in `READS` and `MOVES` are
        there.
        """
        if name.startswith("_") or "model" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.model, name)
        if name in MOVES:
            return partial(self._moved, name)
        if getattr(value, "__self__", None) is self.model and name not in READS:
            raise AttributeError(
                f"{name}() is a method of the unadapted {type(self.model).__name__}, and not of its adapter; if that is meant, "
                f"call it as classifier.model.{name}()"
            )
        return self if value is self.model else value

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: a lock and a generator cannot be copied, and are made anew."""
        kept = dict(vars(self))
        for name in ("_lock", "_core", "_steps", "_borrowed", "_rate"):
            del kept[name]
        kept["_fingerprint"] = {}
        watch = self._now.watch
        if watch is not None:
            kept["_now"] = replace(self._now, watch=watch.settled())
        fixed = {name: {} if name == "live" else value for name, value in self._core.fixed.items()}
        kept["_made_of"] = (self._core.source, fixed, list(self._borrowed.parameters), self._borrowed.mode)
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """From a copy or a pickle."""
        source, fixed, names, mode = kept.pop("_made_of")
        vars(self).update(kept, _rate=None)
        known = dict(self.model.named_parameters(remove_duplicate=False))
        self._lock = ModelLock(self.model)
        with untracked():
            self._borrow(lambda _: {name: known[name] for name in names}, mode)
        self._core.source, self._core.fixed = source, fixed
        self._borrowed.ranks = self._ranks

    # ---- state ----

    @exclusive
    def state_dict(self) -> dict[str, Tensor]:
        """All that the next step depends on, as a flat dictionary of copied tensors."""
        with untracked():
            return saving.collect(self)

    @exclusive
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict()` of an adapter of the same configuration on the same source model, bit for bit."""
        with untracked():
            self._check_open()
            self._follow()
            self._now = saving.restored(self, saved)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file, whole or not at all; on several ranks the first one writes it.

        hf://OWNER/REPOSITORY[@REVISION]/FILE is a file of a repository on the Hugging Face Hub, which must be there.
        """
        if self.writes:
            saving.save(self, path)

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a file that `save` wrote, here or on the Hub; a file that does not fit changes nothing."""
        self.load_state_dict(saving.read(path, self.method.name))

    @untracked()
    def export(self, path: str | PathLike[str] | None = None, example: Input | None = None) -> nn.Module:
        """The adapted model by itself: a copy of the model that computes what `predict` does, and adapts no more.

        It is in evaluation mode and needs no gradients. It holds the weights of now: of a teacher, where that answers (CoTTA,
        RoTTA); T3A's prototypes in place of its head; the source's where the guard lets the source answer. What a BatchNorm
        layer normalizes by is what `predict` uses:

        - statistics="source": the running statistics of the source (RoTTA: its robust ones); the layer stays as it is.
        - "mixed": n/(n + 16) of the statistics of the n samples that the export is called with, and the rest of the source's;
          a `come.export.OnBatch` stands around the layer. With a guard that uses the source's now: these.
        - "batch": the statistics of these samples alone, in the same way.

        So with mixed and batch an answer depends on the other samples of its batch, as in `predict`; for one that does not,
        adapt with statistics="source". `precision`, `compile` and `channels_last` are ways to run a model, and are not in it.
        Nor is the guard: an invalid sample, which `predict` masks, is answered, and spoils the statistics of its batch.

        Args:
            path: write it to a file, too: NAME.pt2 for `torch.export.load`, NAME.onnx for ONNX Runtime and others (needs the
                extra `export` and torch 2.6). Its output is the logits (B, K), for any B >= 1.
            example: for a file: 2 or more samples, as a tensor, or a tuple or mapping of the model's arguments.

        Returns:
            the copy, which returns what the model returns.

        Raises:
            ModelError: the method does not answer by weights alone, or torch cannot trace the model.
            ConfigError: a file of another kind, or no example.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
            >>> classifier, x = adapt(model, "tent", statistics="batch"), torch.randn(8, 4)
            >>> _ = classifier(x)
            >>> alone = classifier.export()
            >>> torch.allclose(alone(x), classifier.predict(x), atol=1e-5), type(alone[1]).__name__
            (True, 'OnBatch')
        """
        file, given = None if path is None else Path(path), None if example is None else self._borrowed.read((example,))
        if file is not None:
            exporting.check(file, given)
        require(file is not None or given is None, "path", path, "a file, where there is an example")
        model = self._standalone()
        if file is not None and given is not None:
            exporting.write(model, file, given)
        return model

    @exclusive
    def _standalone(self) -> nn.Module:
        """See `export`."""
        self._check_open()
        self._follow()
        self._borrowed.check_unchanged()
        now, core = self._now, self._core
        resting = now.watch is not None and self._resting(now.watch)
        frozen = Frozen(core.source) if resting else self.method.frozen(self._context(now, 1))
        own = self._how(now).trusted and not resting
        return exporting.standalone(self._borrowed, frozen, core.rule_of_statistics if own else "source")

    def __repr__(self) -> str:
        """Method, objective, what adapts and at which learning rate."""
        method, kind = self.method, type(self.model).__name__
        mode = f"{self._borrowed.mode}{self._ranks or ''}"
        if not method.descends:
            return f"{type(method).__name__}({kind}, objective={method.objective!r}{mode})"
        if method.lr is not None:
            rate = f"{method.lr:g}"
        elif self._borrowed.has_batch_norm:
            rate = f"{method.paper_lr[1]:g} (the default for BatchNorm models)"
        else:
            scale = " x batch/64" if method.scales_lr else ""
            rate = f"{method.paper_lr[0]:g}{scale} (the default for models without BatchNorm)"
        size = sum(shape.numel() for shape in self._borrowed.shapes.values())
        on_batch = f", BatchNorm statistics={self._core.rule_of_statistics}" if self._borrowed.has_batch_norm else ""
        return (
            f"{type(method).__name__}({kind}, objective={method.objective!r}, lr={rate}{on_batch}{mode}, "
            f"adapts {size:,} values in {len(self._borrowed.shapes)} tensors)"
        )


def _own(out: Step, rows: slice | None) -> Step:
    """What a step returns for some samples; None: for all."""
    return out if rows is None else Step(*(None if value is None else value[rows] for value in out))  # type: ignore[arg-type]


def adapt(
    model: nn.Module,
    method: str | type[Method] | Method = methods.DEFAULT,
    *,
    objective: str | Objective | None = None,
    guard: bool | Guard = True,
    precision: Precision = "float32",
    compile: bool = False,
    channels_last: bool = False,
    ranks: bool | ProcessGroup = False,
    per_sample: Collection[str | int] | None = None,
    **hyperparameters: Any,
) -> Adapter:
    r"""Put test-time adaptation around a classifier.

    The result is called in place of the model and returns logits; each call also adapts to its batch:

    .. math:: \theta \leftarrow \theta - \eta \, \partial_\theta \, \frac{1}{|R|} \sum_{i \in R} H(m(f_\theta(x_i)))

    with the samples R and the step that the method chooses, and the mass m that the objective gives.

    Args:
        model: any classifier that maps a batch (B, ...) to logits (B, K), or to an object or mapping with `logits`. It is
            not changed.
        method: a name (`come.methods.names()`), also with hyperparameters as in "tent:lr=5e-4", a subclass of `come.Method`,
            or a method that was made, such as `come.methods.Tent(lr=5e-4, objective="em")`.
        objective: a name (`come.objectives.names()`) or a `come.Objective`; None is the one that the method was made for:
            "come", and "invariant" for Steady. A `Method` instance has its own.
        guard: filter invalid inputs, reject bad updates, detect and undo collapse; False for the bare method, a `come.Guard`
            for a policy of your own.
        precision: "float32" (as the model and torch are set), "tf32", or "bf16"; the objective and the adapted weights are in
            float32 always.
        compile: the model by `torch.compile`, and on a GPU the whole step as one CUDA graph: for the first shape of batch, and
            for others that come again within 16 batches. The first steps then take seconds to a minute. What cannot be compiled
            or captured says so once, and runs as it can.
        channels_last: on a GPU, images and convolutions with the channels innermost: faster for convolutions in bf16.
        ranks: True: the processes that torchrun has started, or those of a given process group, adapt to one stream. Each calls
            the adapter with samples of its own at the same time, and together they adapt as one process does that is called
            with all of these, in the order of the ranks. False: each process for itself.
        per_sample: for a model that is called with several tensors: names or positions of the arguments with one entry per
            sample, e.g. ("tokens", "mask"); all samples share the others. What a tokenizer of transformers returns is known.
        **hyperparameters: what the method takes, e.g. lr=1e-3. Without lr the method's default is used, and the repr of the
            result says which.

    Returns:
        the adapter.

    Raises:
        ConfigError: an unknown method, objective or hyperparameter, or one out of range.
        ModelError: a model with nothing to adapt.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        >>> classifier = adapt(model, "sar", objective="come", lr=1e-3)
        >>> classifier(torch.randn(8, 4)).shape
        torch.Size([8, 3])
    """
    if not isinstance(guard, (bool, Guard)):
        raise ConfigError(f"guard must be True, False or a come.Guard, got {shown(guard)}")
    hyperparameters |= {} if objective is None else {"objective": objective}
    if isinstance(method, Method):
        if hyperparameters:
            raise ConfigError(
                f"{', '.join(hyperparameters)} cannot be combined with a Method instance; pass it to {type(method).__name__}()"
            )
        made = method
    else:
        made = methods.make(method, **hyperparameters)
    mode = Mode(precision, compile, channels_last)
    return Adapter(model, made, Guard() if guard is True else guard or None, mode, Ranks.of(ranks), per_sample)
