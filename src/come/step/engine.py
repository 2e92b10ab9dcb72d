"""`Engine`: steps of one method on one model. It takes the state of a stream and a batch, and returns the next state.

It holds no stream: an `Adapter` has one state, a `Fleet` many.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from come import methods, optim
from come.abstain import Abstention, Promise, Wanted, abstains, by_image, followed, scored, usable
from come.errors import CollapseError, ConfigError, ModelError, require, shown, warn
from come.guard.config import Event, Guard
from come.guard.watch import Sent, Watch, send
from come.method import Context, Method, Step, Written
from come.model.copies import Mode, Precision
from come.model.functional import FunctionalModel
from come.model.inputs import Inputs, Key
from come.model.locks import ModelLock, untracked
from come.model.ranks import Ranks, bits
from come.objectives import Objective
from come.select import Selector
from come.state.trees import replace
from come.step.compiled import CompiledSteps
from come.step.transition import Run, StepFlags, StepInput, StepOutput, StreamState, Transition

log = logging.getLogger("come.guard")
QUIET = ("healthy", "raised", "statistics")
"""Kinds of events that are no reason to worry."""
FEW = 0.4
"""If a smaller share of the samples drove the last update, a forward without a gradient and one of those samples with it are
expected to cost less than a forward and a backward of all."""


class Engine:
    """A method on a model under a guard, with all that does not change from step to step.

    The arguments are those of `come.adapt`; `method` is copied, `ranks` are the processes that share the stream, or None.
    """

    model: FunctionalModel
    transition: Transition

    def __init__(
        self,
        model: nn.Module,
        method: str | type[Method] | Method,
        *,
        objective: str | Objective | None,
        guard: bool | Guard,
        precision: Precision,
        compile: bool,
        channels_last: bool,
        ranks: Ranks | None = None,
        per_sample: Collection[Key] | None = None,
        class_dim: int = 1,
        **hyperparameters: Any,
    ) -> None:
        if not isinstance(guard, (bool, Guard)):
            raise ConfigError(f"guard must be True, False or a come.Guard, got {shown(guard)}")
        hyperparameters |= {} if objective is None else {"objective": objective}
        if not isinstance(method, Method):
            method = methods.make(method, **hyperparameters)
        elif hyperparameters:
            raise ConfigError(
                f"{', '.join(hyperparameters)} cannot be combined with a Method instance; pass it to {type(method).__name__}()"
            )
        mode = Mode(precision, compile, channels_last)
        if ranks is not None:
            ranks.check_model(model, method.name, method.undivided)
        if not isinstance(model, nn.Module):
            raise ModelError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        self.user_model, self.method, self.ranks = model, copy.copy(method), ranks
        self.guard = Guard() if guard is True else guard or None
        self.promise: Promise | None = None
        """What `calibrate` promised."""
        self.fingerprint: dict[str, Any] = {}
        """Of the source model, see `come.state.saving`."""
        self._per_sample, self._class_dim = per_sample, class_dim
        where = "a dimension of the logits, such as 1 or -1, and not 0, which holds the samples"
        require(type(class_dim) is int and class_dim != 0, "class_dim", class_dim, where)
        self.lock = ModelLock(model)
        # Locked, since other weights are in the model while another adapter's step runs.
        self.lock.run(lambda: self._begin(mode))
        for name in self.method.once:
            if hasattr(self.method, name):
                setattr(self.method, name, None)

    def _begin(self, mode: Mode) -> None:
        with untracked():
            self._bind(self.method.select, mode)
            self.follow()  # copies of the model that other adapters have made may be stale
            first = self.first()
        ctx = self.context(first, 1)
        found = self.model.borrow(self.method.setup, ctx)
        self.transition = replace(self.transition, fixed=self.transition.fixed | found)

    def _bind(self, select: Selector, mode: Mode) -> None:
        """Make what belongs to this model and this process; a copy makes it anew."""
        method = self.method
        self.model = FunctionalModel(
            self.user_model, select, method.name, method.descends, mode, self._per_sample, self._class_dim
        )
        rule = None
        if self.model.parameters:
            rule = optim.get(method.optimizer, self.model.split, self.model.join)
        self.transition = Transition(method, self.guard, self.model, rule, self.model.source())
        self.compiled = CompiledSteps()
        self.generator = torch.Generator(self.device)
        self._rate: tuple[tuple[Any, ...], Tensor] | None = None
        self.together: Callable[[], AbstractContextManager[None]] = nullcontext
        """For a step: on several ranks, one that fails alone stops talking to the others."""
        if self.ranks is not None:
            self.together = self.ranks.noticing

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: locks, generators and graphs are made anew."""
        kept = dict(vars(self))
        for name in ("lock", "model", "transition", "compiled", "generator", "together", "_rate"):
            del kept[name]
        step = self.transition
        fixed = {name: {} if name == "live" else value for name, value in step.fixed.items()}
        kept |= {"fingerprint": {}, "_made_of": (step.source, fixed, list(self.model.parameters), self.model.mode)}
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """From a copy or a pickle."""
        source, fixed, names, mode = kept.pop("_made_of")
        vars(self).update(kept)
        known = dict(self.user_model.named_parameters(remove_duplicate=False))
        self.lock = ModelLock(self.user_model)
        with untracked():
            self._bind(lambda _: {name: known[name] for name in names}, mode)
        self.transition = replace(self.transition, source=source, fixed=fixed)
        self.model.ranks = self.ranks

    def __repr__(self) -> str:
        """Method, objective, what adapts and at which learning rate."""
        method, kind = self.method, type(self.user_model).__name__
        mode = f"{self.model.mode}{self.ranks or ''}"
        if not method.descends:
            return f"{type(method).__name__}({kind}, objective={method.objective!r}{mode})"
        if method.lr is not None:
            rate = f"{method.lr:g}"
        elif self.model.has_batch_norm:
            rate = f"{method.paper_lr[1]:g} (the default for BatchNorm models)"
        else:
            scale = " x batch/64" if method.scales_lr else ""
            rate = f"{method.paper_lr[0]:g}{scale} (the default for models without BatchNorm)"
        size = sum(shape.numel() for shape in self.model.shapes.values())
        statistics = f", BatchNorm statistics={self.transition.rule_of_statistics}" if self.model.has_batch_norm else ""
        return (
            f"{type(method).__name__}({kind}, objective={method.objective!r}, lr={rate}{statistics}{mode}, "
            f"adapts {size:,} values in {len(self.model.shapes)} tensors)"
        )

    # ---- what it is about ----

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def objective(self) -> Objective:
        """Of the method."""
        return self.method.objective

    @property
    def writes(self) -> bool:
        """Whether this process writes files and logs: on several ranks the first one."""
        return self.ranks is None or self.ranks.writes

    def classes_last(self, logits: Tensor) -> Tensor:
        """Logits in the shape of the model's, (B, K) or (B, K, ...), as (B, ..., K)."""
        return logits if logits.ndim < 3 else logits.movedim(self.model.class_dim, -1)

    # ---- batches ----

    def batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: StreamState, check: Callable[[], None]
    ) -> tuple[Inputs, slice]:
        """On several ranks: the batch of all of them, checked, and which samples of it came from this one."""
        assert self.ranks is not None
        decided = f"{bits(state.weights)} {'' if state.watch is None else state.watch.decisions}"

        def read() -> Inputs:
            """What only one rank may refuse is checked here, so that all ranks hear of it."""
            check()
            self.model.check_unchanged()
            return self.model.read(args, kwargs, empty=True)

        return self.ranks.batch(read, state.count, decided, self.device)

    # ---- steps ----

    def step(self, state: StreamState, x: Inputs, written: list[Written]) -> tuple[StreamState, Step, list[Event]]:
        """The next state, what the user is returned, and events to report.

        Args:
            state: the stream's; it is not changed.
            x: the batch.
            written: receives the rows of method memory that were overwritten in place, for `undo`.
        """
        state, events = self.begun(state)
        size = x.size
        flags, given = self.flags(state), self.given(state, size)
        run = Run(state.count, self.generator, written)
        if self.model.mode.compile:
            found = self.compiled.run(self.transition, flags, given, x, run)
        else:
            found = self.model.borrow(self.transition, flags, given, x, run)
        later = self.ended(state, flags, found, size)
        out, (later,) = self.abstaining([later], found.out, size, x.ignore)
        return later, out, events

    def answer(self, state: StreamState, x: Inputs) -> Step:
        """Logits, which samples are valid, and which answers to abstain from, without adapting."""
        run = Run(state.count, self.generator, [])
        size = x.size
        out = self.model.borrow(self.transition.answer, self.flags(state), self.given(state, size), x, run)
        return self.abstaining([state], out, size)[0]

    def begun(self, state: StreamState) -> tuple[StreamState, list[Event]]:
        """The state with which a step begins: forgotten if that is due, and with pending guard signals read."""
        due = self.method.reset_every is not None and state.count >= self.method.reset_every
        if self.method.episodic or due:
            state = self._forgotten(state)
        if self.guard is None or state.watch is None:
            return state, []
        checks = self.method.changes
        watch, events, cause = state.watch.read(self.guard, self.transition.chooses, checks)
        if cause is None:
            return state._replace(watch=watch), events
        if cause.kind == "collapse" and self.guard.policy == "raise":
            raise CollapseError(
                f"{self.method.name} has collapsed at step {cause.step}: {cause.message}; reset() it, lower lr, or use "
                "objective='come' or Guard(policy='recover')"
            )
        watch, more = watch.recovered(self.guard, cause, not self._can_recover, checks)
        return self.first()._replace(count=state.count, watch=watch, abstention=state.abstention), [*events, *more]

    def ended(
        self, state: StreamState, flags: StepFlags, found: StepOutput, size: int, send: Callable[..., Sent] = send
    ) -> StreamState:
        """The state after a step on `size` samples."""
        watch = state.watch
        if watch is not None and self.guard is not None:
            assert found.signals is not None
            assert found.history is not None
            signals = found.signals if self.ranks is None else self.ranks.first(found.signals)
            sums = found.sums if flags.asking else None
            sent = send(watch.steps, size, signals)
            watch = watch.stepped(self.guard, sent, found.history, sums, self.transition.chooses)
        selected = state.selected if found.selected is None else found.selected
        return StreamState(
            found.weights, found.moments, found.state, state.count + 1, watch, selected, state.abstention
        )

    def abstaining(
        self, states: list[StreamState], out: Step, size: int, ignore: Tensor | None = None
    ) -> tuple[Step, list[StreamState]]:
        """Mark the answers to abstain from, and move thresholds that follow; streams of one promise, `size` samples each."""
        known = [state.abstention for state in states if state.abstention is not None]
        if not known:
            return out, states
        promise = known[0].promise
        own = [one.threshold for one in known if one.threshold is not None]
        thresholds = torch.stack(own) if own else None
        by_sample = None if thresholds is None else thresholds.repeat_interleave(size)
        logits = self.classes_last(out.logits)
        abstain = abstains(promise, self.objective, logits, by_sample, out.valid)
        if thresholds is not None:
            counted = usable(logits, out.valid)
            counted = counted if ignore is None else counted & ~ignore.to(counted.device)
            share, counted = by_image(abstain, counted) if counted.ndim > 1 else (abstain, counted)
            moved = followed(promise, thresholds, share.view(-1, size), counted.view(-1, size)).detach()
            parts = zip(states, moved.unbind(0), strict=True)
            states = [state._replace(abstention=Abstention(promise, value.clone())) for state, value in parts]
        return out._replace(abstain=abstain), states

    # ---- what the host decides ----

    def flags(self, state: StreamState) -> StepFlags:
        """What is decided before a step."""
        watch, few = state.watch, state.selected < FEW and not self.model.mode.compile
        if watch is None:
            return StepFlags(few=few)
        return StepFlags(watch.asking, self.resting(watch), watch.frozen, watch.trusted, not watch.steps, few)

    def given(self, state: StreamState, size: int) -> StepInput:
        """The tensors that a step of one stream begins with."""
        watch, weights = state.watch, state.weights
        key = (self.rate(state, size, self.method), weights.dtype, weights.device)
        if self._rate is None or self._rate[0] != key:
            self._rate = key, weights.new_full((), key[0])
        given = StepInput(weights, state.moments, state.state, self._rate[1])
        if watch is None or self.guard is None:
            return given
        given = given._replace(history=watch.history)
        if not watch.asking:
            return given
        needed = torch.full((), self.needed(watch, size), device=self.device)
        return given._replace(sums=watch.sums, needed=needed)

    def rate(self, state: StreamState, size: int, method: Method) -> float:
        """The learning rate for a batch of that size."""
        rate = method.learning_rate(size, self.model.has_batch_norm)
        return rate * (1.0 if state.watch is None else state.watch.scale)

    def needed(self, watch: Watch, size: int) -> int:
        """After how many samples a source check may be acted on."""
        assert self.guard is not None
        return min(self.guard.samples, size + watch.asked)

    def resting(self, watch: Watch) -> bool:
        """Whether the source model answers."""
        return watch.frozen or not (watch.trusted or self._can_recover)

    @property
    def _can_recover(self) -> bool:
        """Whether putting weights or statistics back to the source's changes anything."""
        return bool(self.model.parameters) or self.transition.on_batch

    def context(self, state: StreamState, size: int) -> Context:
        """For calls of a method outside of a step."""
        run = Run(state.count, self.generator, [])
        valid = torch.ones(size, dtype=torch.bool, device=self.device)
        return self.transition.context(self.flags(state), self.given(state, size), valid, run)

    # ---- what is reported ----

    def report(self, events: list[Event]) -> list[Event]:
        """Log what the guard has seen, and tell the user's handler; returns an event for each failure of the handler."""
        failed, handler = [], None if self.guard is None else self.guard.on_event
        for event in events:
            if self.writes:
                level = logging.INFO if event.kind in QUIET else logging.WARNING
                words = (self.method.name, event.step, event.message)
                log.log(level, "%s, step %d: %s", *words, extra={"come": event._asdict()})
            if event.kind == "probabilities":
                warn(event.message)
            if handler is not None:
                failed += self.safely("on_event", event.step, handler, event)
        return failed

    def safely(self, what: str, step: int, call: Callable[..., Any], *args: Any) -> list[Event]:
        """Call a user's function; returns an event if it fails."""
        try:
            call(*args)
        except Exception as error:
            event = Event("callback_failed", step, f"{what} failed: {error}", {})
            log.exception("%s: %s failed; adaptation goes on", self.method.name, what, extra={"come": event._asdict()})
            return [event]
        return []

    # ---- states ----

    def first(self) -> StreamState:
        """Before the first batch."""
        step = self.transition
        moments = {} if step.rule is None else step.rule.init(step.source)
        watch = None if self.guard is None else Watch.new(self.guard, self.device, step.chooses)
        abstention = None if self.promise is None else Abstention.begin(self.promise, self.device)
        return StreamState(step.source, moments, None, 0, watch, abstention=abstention)

    def _forgotten(self, state: StreamState) -> StreamState:
        """After a reset by the method itself: the guard and the threshold keep what they know of the stream."""
        first = self.first()._replace(abstention=state.abstention)
        if state.watch is not None and self.guard is not None:
            first = first._replace(watch=state.watch.forgotten(self.guard))
        return first

    def reset(self, state: StreamState) -> StreamState:
        """After a reset by the user: the guard and the threshold begin anew, too."""
        known, watch = state.abstention, state.watch
        begun = None if known is None else Abstention.begin(known.promise, self.device)
        if watch is not None and self.guard is not None:
            watch = watch.anew(self.guard, self.transition.chooses)
        return self.first()._replace(abstention=begun, watch=watch)

    def calibrated(self, data: Iterable[Any], wanted: Wanted) -> Promise:
        """The promise that source data allows: the source model answers it, each rank by itself; the first rank's holds."""
        first = self.first()

        def answer(x: Any) -> Step:
            batch = self.model.read((x,))
            out = self.answer(first, batch)
            counted = None if batch.ignore is None else ~batch.ignore.to(self.device)
            return out._replace(logits=self.classes_last(out.logits), used=counted)

        with self._undivided():
            scores, wrong = scored(data, answer, self.objective, wanted)
        if self.ranks is not None:
            scores, wrong = self.ranks.first(scores), None if wrong is None else self.ranks.first(wrong)
        return wanted.promise(scores, wrong)

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        self.model.ranks = None
        try:
            yield
        finally:
            self.model.ranks = self.ranks

    # ---- after the user has moved, cast or loaded the model ----

    def follow(self, copies: bool = False) -> None:
        """Bring what does not belong to a stream to the model's device and precision; first end what an interrupt stopped.

        Args:
            copies: whether copies of the model are used whatever the mode.
        """
        self.model.give_back()
        if (copies or not self.model.plain) and self.model.drop_stale_copies():
            self.compiled.forget()
        step, device, dtype = self.transition, self.model.device, self.model.dtype
        if step.source.device != device or step.source.dtype != dtype:
            with untracked():
                fixed = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in step.fixed.items()}
                self.generator = torch.Generator(device)
                self.transition = replace(step, source=step.source.to(device, dtype), fixed=self._cast(fixed))

    def brought(self, state: StreamState) -> StreamState:
        """A state where the model is, in its precision; after `follow`."""
        weights, source = state.weights, self.transition.source
        if weights.device == source.device and weights.dtype == source.dtype:
            return state
        with untracked():
            state = state.to(source.device, self.method.on_host)
            memory = None if state.state is None else self._cast(state.state)
            return state._replace(
                weights=state.weights.to(source.dtype), moments=self._cast(state.moments), state=memory
            )

    def _cast(self, values: dict[str, Any]) -> dict[str, Any]:
        """With the precision of the adapted weights for what has an entry for each of them."""
        shape, dtype = self.transition.source.shape, self.model.dtype
        return {k: v.to(dtype) if isinstance(v, Tensor) and v.shape == shape else v for k, v in values.items()}


def own_rows(out: Step, rows: slice) -> Step:
    """What a step returns for the samples of this rank."""
    return Step(*(None if value is None else value[rows] for value in out))  # type: ignore[arg-type]
