"""`come.Fleet`: one model, many streams, each of which adapts by itself.

Two adapted copies of a model differ only in the affine parameters of its norm layers, 0.05% of a ViT. So a fleet keeps one
model and a `StreamState` for each stream. A batch may hold samples of many streams. Streams with the same number of samples and
the same flags form a group, which is one step (`come.streams.vmap`). Groups run at the same time and share one call of the
model (`come.streams.rendezvous`).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import quote

import torch
from torch import Tensor, nn

from come.abstain import DEFAULT_SCORE, Abstention, Promise, abstains, confidences, followed, usable
from come.adapter import Adapter, StreamState, adapt
from come.errors import ComeError, ConfigError, InputError, StateError, shown
from come.guard.config import Event, Guard
from come.guard.watch import Sent, to_host
from come.method import Method, Step, untracked
from come.methods import DEFAULT
from come.model.copies import Precision
from come.model.inputs import Inputs, at_least_float32, logits_of
from come.model.locks import ModelLock, exclusive
from come.objectives import Objective
from come.optim import TorchRule
from come.state import saving
from come.state.files import replacing
from come.state.trees import replace
from come.step.compiled import StepRunner
from come.step.transition import StepFlags, StepInput, StepOutput
from come.streams.rendezvous import Rendezvous
from come.streams.spill import Spilled, SpillFolder
from come.streams.transition import StackedModel, StackedTransition
from come.streams.vmap import apart, index, joined, over, parted, sent

if TYPE_CHECKING:
    from typing_extensions import Self

Name = str | int
NAME = re.compile(r"[A-Za-z0-9_@+:=-][A-Za-z0-9_.@+:=-]{0,127}", re.ASCII)


@dataclass(frozen=True)
class _Stream:
    """One of the streams, as it is now."""

    method: Method
    """With its own learning rate and thresholds."""
    own: dict[str, float]
    moment: StreamState | Spilled


class _Part(NamedTuple):
    """A stream in a batch."""

    name: str
    rows: list[int]
    now: StreamState
    method: Method


class _Group(NamedTuple):
    """Streams that run as one."""

    parts: list[_Part]
    rows: list[int]
    before: StepInput
    x: Inputs


class Fleet:
    r"""One model and many streams: cameras, customers, users, or cells of a grid. Each adapts by itself.

    Stream s has its own adapted parameters, moments, memory and guard. A batch goes through the model once, each sample under
    its own stream's parameters, and one backward gives every stream its own gradient:

    .. math:: \theta_s \leftarrow \theta_s
              - \eta_s \, \partial_{\theta_s} \frac{1}{|R_s|} \sum_{i \in R_s} H(m(f_{\theta_s}(x_i)))

    The result is that of one `come.adapt` for each stream on the same samples, within rounding. A collapse in one stream, or an
    absurd input, touches no other. The model is not changed. Threads take turns; a step that fails or is interrupted has not
    happened, for any stream.

    Args:
        model: any classifier whose normalization layers are LayerNorm, GroupNorm, RMSNorm, InstanceNorm or BatchNorm, and which
            keeps samples in the first dimension.
        method: as in `come.adapt`: Tent, EATA, SAR, DeYO, ROID, PL, and any method that can be replayed as a CUDA graph, calls
            the model through `ctx.forward` only, and draws random numbers through `ctx.drawn`.
        objective: as in `come.adapt`.
        streams: names of streams to open, or how many; these are then called "0", "1", ...
        resident: so many streams at most keep their state on the device; the least recently used go to host memory, or to
            `folder`. None: all.
        folder: where streams go that are not resident, while the fleet lives: into a folder of its own in this one, which
            must exist. To keep states use `save`.
        guard: as in `come.adapt`; a policy "raise" would stop all streams, and is refused.
        precision: as in `come.adapt`.
        compile: as in `come.adapt`: each number of streams and of samples is a shape of its own, so it pays where these repeat.
        channels_last: as in `come.adapt`.
        per_sample: as in `come.adapt`.
        **hyperparameters: what the method takes; of all streams, see `open` for one.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        >>> fleet = Fleet(model, "tent", streams=["north", "south"], lr=1e-3)
        >>> logits = fleet(torch.randn(5, 4), ["north", "north", "south", "north", "south"])
        >>> logits.shape, fleet.health("south")["steps"]
        (torch.Size([5, 3]), 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | type[Method] | Method = DEFAULT,
        *,
        objective: str | Objective | None = None,
        streams: int | Sequence[Name] = (),
        resident: int | None = None,
        folder: str | PathLike[str] | None = None,
        guard: bool | Guard = True,
        precision: Precision = "float32",
        compile: bool = False,
        channels_last: bool = False,
        per_sample: Sequence[Name] | None = None,
        **hyperparameters: Any,
    ) -> None:
        names = _names(streams)
        if resident is not None and (isinstance(resident, bool) or not isinstance(resident, int) or resident < 1):
            raise ConfigError(f"resident must be a whole number of streams, at least 1, or None, got {shown(resident)}")
        if isinstance(guard, Guard) and guard.policy == "raise":
            raise ConfigError(
                "a fleet cannot have Guard(policy='raise'): the collapse of one stream would stop all others; use 'recover', "
                "'freeze' or 'warn', and on_event"
            )
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"folder must be a folder that exists, got {shown(str(folder))}")
        self._one = adapt(
            model,
            method,
            objective=objective,
            guard=guard,
            precision=precision,
            compile=compile,
            channels_last=channels_last,
            per_sample=per_sample,
            **hyperparameters,
        )
        """An adapter whose moment is that of whichever stream is looked at."""
        own = self._one.method
        if own.waits:
            raise ConfigError(
                f"{own.name} cannot run for many streams at once: {own.waits}; use one adapter for each stream"
            )
        if isinstance(self._one._core.rule, TorchRule):
            raise ConfigError(
                "a fleet takes optimizer='sgd' or 'adam' (come.optim.sgd, come.optim.adam), no torch optimizer"
            )
        if (name := self._one._borrowed.not_of_norms()) is not None:
            raise ConfigError(
                f"{name!r} cannot differ by stream: a fleet knows weights and biases of normalization layers only; choose "
                "these with select=come.select.norm_affine(), or use one adapter for each stream"
            )
        self._begin()
        self._resident = resident
        self._folder = None if folder is None else SpillFolder(Path(folder))
        self._streams: dict[str, _Stream] = {}
        """Least recently used first. Never changed: whatever changes streams puts another dict here when all has succeeded."""
        self._proven = False
        """Whether the model was seen to keep samples in the first dimension."""
        self._warned: set[str] = set()
        self._check_room(len(names) if resident is None else min(resident, len(names)))
        for name in names:
            self.open(name)

    def _begin(self) -> None:
        """What is made anew for a copy."""
        self._many = StackedTransition(self._one._core)
        self._steps = self._one._steps = StepRunner(self._many)  # the adapter forgets them when the model was moved
        self._rates: tuple[Any, Tensor] | None = None

    @property
    def _lock(self) -> ModelLock:
        return self._one._lock

    @exclusive
    @untracked()
    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: signals on their way from a GPU cannot be copied."""
        kept = dict(vars(self))
        for name in ("_many", "_steps", "_rates"):
            del kept[name]
        kept["_streams"] = {name: replace(one, moment=_settled(one.moment)) for name, one in self._streams.items()}
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """From a copy or a pickle."""
        vars(self).update(kept)
        self._begin()

    # ---- calling it ----

    def __call__(self, x: Any, streams: Any) -> Tensor:
        """Adapt every stream to its samples and return logits (B, K), in the order of the batch."""
        return self.step(x, streams).logits

    @exclusive
    def step(self, x: Any, streams: Any) -> Step:
        """Adapt every stream to its samples; returns what `Adapter.step` does, in the order of the batch.

        Samples of a stream that has no threshold are not abstained from, and have a loss of NaN where the source answers for
        good, if other samples of the batch have these.

        Args:
            x: a batch (B, ...), or a tuple or mapping of the model's arguments.
            streams: the name of the stream of each sample, or one name for all.
        """
        inputs = self._one._borrowed.read((x,))
        rows = self._ready(streams, inputs.size)
        first = any(self._moment(name).state is None for name in rows)
        self._one.method.check(self._one._context(self._one._now, inputs.size), inputs, first)
        parts, events = [], list[tuple[str, Event]]()
        for name, mine in rows.items():
            now, said = self._one._begun(self._moment(name))
            parts.append(_Part(name, mine, now, self._streams[name].method))
            events += [(name, event) for event in said]
        before = self._streams
        try:
            found = self._one._running(lambda: self._groups(inputs, parts))
            moments = {name: moment for group in found for name, moment in group[0].items()}
            out = _in_order([(rows, step) for _, rows, step in found], inputs.size)
            self._streams = before | {name: replace(before[name], moment=now) for name, now in moments.items()}
            self._tell(events)
            return out
        except BaseException:
            self._streams = before
            raise

    def predict(self, x: Any, streams: Any) -> Tensor:
        """Logits (B, K) of a batch without adapting to it: nothing changes. See `answer` for which are valid."""
        return self.answer(x, streams).logits

    @exclusive
    @untracked()
    def answer(self, x: Any, streams: Any) -> Step:
        """What `step` returns, without adapting: logits, and of each sample whether it is valid, and whether to abstain."""
        inputs = self._one._borrowed.read((x,))
        rows = self._ready(streams, inputs.size)
        parts = [_Part(name, mine, self._moment(name), self._streams[name].method) for name, mine in rows.items()]
        found = self._one._running(lambda: self._groups(inputs, parts, adapts=False))
        out = _in_order([(rows, step) for _, rows, step in found], inputs.size)
        calibrated = {part.name: part.rows for part in parts if part.now.abstention is not None}
        return out._replace(abstain=self._below(out.logits, calibrated)) if calibrated else out

    def uncertainty(self, logits: Tensor) -> Tensor:
        """How little is known of each sample, (B, K) -> (B,) in [0, 1]; to abstain, `calibrate` a threshold."""
        return self._one.uncertainty(logits)

    @exclusive
    def confidence(self, logits: Tensor, streams: Any, valid: Tensor | None = None) -> Tensor:
        """How sure each answer is, as `Adapter.confidence`; `streams` as in `step`."""
        by_score: dict[str, list[int]] = {}
        with untracked():
            for name, rows in self._ready(streams, len(logits)).items():
                known = self._moment(name).abstention
                by_score.setdefault(DEFAULT_SCORE if known is None else known.promise.score, []).extend(rows)
            found = at_least_float32(logits).new_zeros(len(logits))
            for score, rows in by_score.items():
                at = index(rows, logits.device)
                good = None if valid is None else valid[at]
                found[at] = confidences(score, self._one._objective, logits[at], good)
            return found

    # ---- abstaining ----

    @exclusive
    def calibrate(self, data: Iterable[Any], **how: Any) -> Promise:
        """Choose when not to answer, for all streams: they begin with the same source model.

        Args:
            data: as in `Adapter.calibrate`.
            **how: risk, coverage, delta, score and follow, as there. A threshold that follows is each stream's own.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
            >>> fleet = Fleet(model, "tent", streams=["north", "south"])
            >>> promise = fleet.calibrate([torch.randn(8, 4) for _ in range(5)], coverage=0.9)
            >>> fleet.step(torch.randn(4, 4), ["north", "north", "south", "south"]).abstain.shape
            torch.Size([4])
        """
        before = self._one._promise, self._one._now
        try:
            promise = self._one.calibrate(data, **how)
            self._streams = {name: _promising(stream, promise) for name, stream in self._streams.items()}
            return promise
        except BaseException:
            self._one._promise, self._one._now = before
            raise

    @property
    def promise(self) -> Promise | None:
        """What `calibrate` promised; None before."""
        return self._one.promise

    @exclusive
    def abstains(self, logits: Tensor, streams: Any) -> Tensor:
        """Which of the answers not to rely on, (B, K) -> (B,) bool; `streams` as in `step`."""
        with untracked():
            return self._below(logits, self._ready(streams, len(logits)))

    def _below(self, logits: Tensor, rows: dict[str, list[int]]) -> Tensor:
        found = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        for name, mine in rows.items():
            at = index(mine, logits.device)
            found[at] = self._view(self._streams[name]).abstains(logits[at])
        return found

    # ---- one step ----

    def _groups(
        self, x: Inputs, parts: list[_Part], adapts: bool = True
    ) -> list[tuple[dict[str, StreamState], list[int], Step]]:
        """All groups of the batch: new moments, rows of the batch, and what is returned for them."""
        self._prove(x)
        groups: dict[Any, list[_Part]] = {}
        for part in parts:
            how, watch = self._one._how(part.now), part.now.watch
            how = how._replace(few=False) if adapts else StepFlags(resting=how.resting, trusted=how.trusted)
            asked = how.asking and watch is not None and watch.sums is not None
            known = part.now.abstention if adapts else None
            promise = None if known is None else known.promise
            groups.setdefault((how, len(part.rows), part.now.state is None, asked, promise), []).append(part)
        prepared = [self._prepared(how, members, x, size) for (how, size, *_), members in groups.items()]
        runs = [partial(self._ran, how, one, adapts) for (how, *_), one in zip(groups, prepared, strict=True)]
        compiled = self._one._borrowed.mode.compile  # then each group is a graph of its own
        outs = [run() for run in runs] if compiled else Rendezvous().run(runs)
        found = []
        for (how, size, _, _, promise), one, after in zip(groups, prepared, outs, strict=True):
            out = Step(*(None if value is None else value.flatten(0, 1) for value in after.out))  # type: ignore[arg-type]
            moments = self._ended(how, one.parts, after, size) if adapts else {}
            if promise is not None:
                out, moments = self._abstaining(promise, moments, out, size)
            found.append((moments, one.rows, out))
        return found

    def _abstaining(
        self, promise: Promise, moments: dict[str, StreamState], out: Step, size: int
    ) -> tuple[Step, dict[str, StreamState]]:
        """What a group returns with its abstentions, and its moments with thresholds that follow."""
        known = [moment.abstention.threshold for moment in moments.values() if moment.abstention is not None]
        own = [threshold for threshold in known if threshold is not None]
        thresholds = torch.stack(own) if own else None
        by_sample = None if thresholds is None else thresholds.repeat_interleave(size)
        abstain = abstains(promise, self._one._objective, out.logits, by_sample, out.valid)
        if thresholds is not None:
            counted = usable(out.logits, out.valid)
            later = apart(followed(promise, thresholds, abstain.view(-1, size), counted.view(-1, size)))
            moments = {
                name: replace(moment, abstention=Abstention(promise, threshold))
                for (name, moment), threshold in zip(moments.items(), later, strict=True)
            }
        return out._replace(abstain=abstain), moments

    def _prepared(self, how: StepFlags, parts: list[_Part], x: Inputs, size: int) -> _Group:
        """Streams with the same number of samples, ready for a step."""
        rows = [row for part in parts for row in part.rows]
        mine = x if rows == list(range(x.size)) else x.take(index(rows, self._one._device))
        before = self._before(how, parts, size)
        if before.state is None and "classes" not in self._one._core.fixed:  # found once, by one stream
            self._one._context(self._one._now, size).classes(mine.take(slice(0, size)))
        many = mine.map_samples(lambda value: value.view(len(parts), size, *value.shape[1:]))
        return _Group(parts, rows, before, many)

    def _ran(self, how: StepFlags, group: _Group, adapts: bool) -> StepOutput:
        """A step of a group; all tensors of the result are (n, ...)."""
        one = self._one
        compiled = one._borrowed.mode.compile
        step = self._many if compiled else StackedTransition(one._core)
        step.begin(one._core, [(part.now.count, part.method) for part in group.parts])
        try:
            if not adapts:
                return StepOutput(group.before.weights, {}, {}, step.answered(how, group.before, group.x))
            if compiled:
                return self._steps.run(how, group.before, group.x, 0, lambda run: run())
            return step(how, group.before, group.x, 0)
        except ComeError:
            raise
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if "vmap" not in str(error):
                raise
            raise ConfigError(
                f"{one.method.name} cannot run for many streams at once: {str(error).strip().splitlines()[0]}; use one "
                "adapter for each stream"
            ) from error

    def _before(self, how: StepFlags, parts: list[_Part], size: int) -> StepInput:
        """What a step of these streams begins with, (n, ...)."""
        moments = [part.now for part in parts]
        rates = tuple(self._one._rate_of(part.now, size, part.method) for part in parts)
        weights = torch.stack([now.weights for now in moments])
        key = rates, weights.device, weights.dtype
        if self._rates is None or self._rates[0] != key:
            self._rates = key, sent(rates, weights.device, weights.dtype)
        states = [now.state for now in moments]
        method = self._one.method
        own = {name: [getattr(part.method, name) for part in parts] for name in method.by_stream}
        own = {name: values for name, values in own.items() if set(values) != {getattr(method, name)}}
        before = StepInput(
            weights,
            joined([now.moments for now in moments]),
            None if states[0] is None else joined(cast("list[dict[str, Tensor]]", states)),
            self._rates[1],
            own={name: sent(values, weights.device, weights.dtype) for name, values in own.items()},
        )
        watches = [now.watch for now in moments if now.watch is not None]
        if not watches:
            return before
        before = before._replace(history=torch.stack([watch.history for watch in watches]))
        if not how.asking:
            return before
        needed = sent([self._one._needed(watch, size) for watch in watches], weights.device, torch.int64)
        sums = [watch.sums for watch in watches]
        known = [value for value in sums if value is not None]
        return before._replace(needed=needed, sums=torch.stack(known) if known else None)

    def _ended(self, how: StepFlags, parts: list[_Part], after: StepOutput, size: int) -> dict[str, StreamState]:
        """The moment of each stream after a step: tensors of its own."""
        weights = apart(after.weights)
        moments, state = parted(after.moments, len(parts)), parted(after.state, len(parts))
        history = [None] * len(parts) if after.history is None else apart(after.history)
        sums = [None] * len(parts) if after.sums is None else apart(after.sums)
        values, arrived = (None, None) if after.values is None else to_host(after.values)
        signals = [None] * len(parts) if values is None else values.unbind(0)

        def send(step: int, batch: int, values: Tensor) -> Sent:
            return Sent(step, batch, values, arrived)

        then = map(StepOutput, weights, moments, state, [after.out] * len(parts), history, sums, signals)
        return {
            part.name: self._one._ended(part.now, how, mine, size, send) for part, mine in zip(parts, then, strict=True)
        }

    def _prove(self, x: Inputs) -> None:
        """See once that two streams get what each would get alone."""
        if self._proven or not self._one._borrowed.parameters:
            return
        borrowed, source = self._one._borrowed, self._one._core.source
        pair = x.take(torch.tensor([0, x.size - 1], device=self._one._device)).map_samples(_usable)
        stack = StackedModel(borrowed)
        with torch.no_grad():
            draw = torch.Generator(source.device).manual_seed(0)
            noise = torch.randn(2, len(source), generator=draw, device=source.device, dtype=source.dtype)
            weights = source * (1 + 0.3 * noise) + 0.1 * noise.flip(0)
            apart = pair.map_samples(lambda value: value[:, None])
            both = over(lambda given, x: stack.call(x, given), weights, apart).flatten(0, 1).float()

            def alone(i: int, given: Tensor) -> Tensor:
                return logits_of(borrowed.call(pair.take(slice(i, i + 1)), given, None, ()), 1)[0].float()

            own, other = (torch.stack([alone(0, weights[a]), alone(1, weights[1 - a])]) for a in (0, 1))
            error, effect = (both - own).abs().amax(), (other - own).abs().amax()
        if not bool(error <= 0.2 * effect + 1e-6):
            raise ConfigError(
                f"{type(self._one.model).__name__} does not keep samples in the first dimension of its norm layers, so a "
                f"fleet cannot tell streams apart (logits off by {float(error):.2g}, where another stream's weights change "
                f"them by {float(effect):.2g}); use one adapter for each stream"
            )
        self._proven = True

    def _tell(self, events: list[tuple[str, Event]]) -> None:
        for name, event in events:
            if event.kind == "probabilities" and event.kind in self._warned:  # of the model, not of the stream: once
                continue
            details = event.details | {"stream": name}
            failed = self._one._tell([event._replace(message=f"stream {name}: {event.message}", details=details)])
            self._warned.add(event.kind)
            stream = self._streams.get(name)
            if (
                failed
                and stream is not None
                and isinstance(stream.moment, StreamState)
                and stream.moment.watch is not None
            ):
                moment = replace(stream.moment, watch=stream.moment.watch.counted(failed))
                self._streams = self._streams | {name: replace(stream, moment=moment)}

    # ---- streams ----

    @property
    def streams(self) -> list[str]:
        """Names of the open streams, least recently used first."""
        return list(self._streams)

    def __len__(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def __contains__(self, name: object) -> bool:
        """Whether a stream of that name is open."""
        return str(name) in self._streams

    @exclusive
    def open(self, name: Name, **own: float) -> None:
        """Begin a new stream at the source model.

        Args:
            name: up to 128 letters, digits and `_ . @ + : = -`; not a dot first.
            **own: a learning rate and thresholds of its own: lr, and what the method lists in `by_stream`.
        """
        name = _name(name)
        with untracked():
            self._one._check_open()
            if name in self._streams:
                raise ConfigError(f"stream {name!r} is open already; close() it first, or reset() it")
            self._follow()
            stream = self._new(own)
            room = len(self._streams) + 1
            self._check_room(room if self._resident is None else min(room, self._resident))
            self._streams = self._evicted(self._streams | {name: stream}, keep={name})

    def _new(self, own: dict[str, float]) -> _Stream:
        method = self._one.method
        known = ("lr", *method.by_stream, *(["seed"] if hasattr(method, "seed") else []))
        for key in own:
            if key not in known:
                raise ConfigError(
                    f"{key!r} of {method.name} cannot differ by stream; what can: {', '.join(known)}. Give it to Fleet()"
                )
        mine = dataclasses.replace(method, **cast(Any, own)) if own else method
        return _Stream(mine, dict(own), self._one._first())

    @exclusive
    def close(self, name: Name | None = None) -> None:
        """Forget a stream; without a name end the fleet. The model is as it was handed in."""
        if name is None:
            self._one.close()
            self._streams, self._folder = {}, None
            return
        gone = self._known(name)
        self._streams = {one: stream for one, stream in self._streams.items() if one != gone}

    @exclusive
    def reset(self, name: Name | None = None) -> None:
        """Put a stream, or all, back to the source model."""
        with untracked():
            self._one._check_open()
            self._follow()
            names = self._streams if name is None else [self._known(name)]
            anew = {one: replace(self._streams[one], moment=self._anew(self._streams[one])) for one in names}
            self._streams = self._evicted(self._streams | anew)

    def _anew(self, stream: _Stream) -> StreamState:
        try:
            return self._one._begun_anew(self._moment_of(stream))
        except StateError:  # what it was is lost
            return self._one._first()

    def __enter__(self) -> Self:
        """Enter a `with` block; at its end the fleet is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # ---- what can be seen ----

    @exclusive
    def health(self, name: Name | None = None) -> dict[str, Any]:
        """Counters and gauges of one stream's guard, as `Adapter.health`; without a name those of all, by stream."""
        if name is None:
            return {one: self.health(one) for one in self._streams}
        return self._streams[self._known(name)].moment.health()

    @exclusive
    def count(self, name: Name) -> int:
        """Batches that a stream has adapted to since it was opened or reset."""
        return self._look(name).count

    def learning_rate(self, name: Name, batch: int) -> float | None:
        """The learning rate of a stream for so many samples of it, before the guard's factor; None if nothing descends."""
        method = self._streams[self._known(name)].method
        return method.learning_rate(batch, self._one._borrowed.has_batch_norm) if method.descends else None

    @exclusive
    def adapted_parameters(self, name: Name) -> dict[str, Tensor]:
        """The adapted parameters of a stream by name: copies."""
        return self._look(name).adapted_parameters

    @exclusive
    def state(self, name: Name) -> dict[str, Tensor]:
        """What the method remembers of a stream: copies."""
        return self._look(name).state

    @exclusive
    @untracked()
    def _look(self, name: Name) -> Adapter:
        """The adapter of one stream, as it is now; the stream stays where it is."""
        return self._view(self._streams[self._known(name)])

    def __repr__(self) -> str:
        """The adapter, and how many streams."""
        where = "" if self._resident is None else f", {self._resident} resident"
        return f"Fleet({len(self._streams)} streams{where}, each {self._one!r})"

    # ---- state ----

    @exclusive
    def save(self, path: str | PathLike[str], name: Name | None = None) -> None:
        """Write the state of a stream to a file that `Adapter.load` reads too; without a name, of all into a folder."""
        with untracked():
            if name is not None:
                self._write(self._known(name), Path(path))
                return
            folder = Path(path)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                files = {one: file_name(one) for one in self._streams}
                for one, file in files.items():
                    self._write(one, folder / file)
                index = {"format": FORMAT, "streams": {one: self._streams[one].own for one in files}}
                with replacing(folder / INDEX) as beside:
                    beside.write_text(json.dumps(index, indent=1))
            except OSError as error:
                raise StateError(
                    f"cannot write to {folder}: {error.strerror}; choose a folder that is writable"
                ) from error

    @exclusive
    def packed(self, name: Name, note: str = "") -> bytes:
        """The bytes of the file that `save` writes of a stream: to keep it elsewhere, or to write it in another thread.

        Args:
            name: of the stream.
            note: a text of yours that travels with it; `come.state.saving.note_of` reads it from the file.
        """
        with untracked():
            return saving.packed(self._look(name), note)

    @exclusive
    def load(self, path: str | PathLike[str], name: Name | None = None) -> None:
        """Continue a stream, which is opened if it is not, from a file that `save` or `Adapter.save` wrote.

        Without a name: all streams of a folder that `save` wrote. What does not fit changes nothing.
        """
        with untracked():
            self._one._check_open()
            self._follow()
            if name is not None:
                name = _name(name)
                stream = self._streams.get(name) or self._new({})
                found = {name: replace(stream, moment=self._read(stream, Path(path)))}
            else:
                found = {}
                for one, own in _index_of(Path(path)).items():
                    stream = self._new(own)
                    file = Path(path) / file_name(one)
                    found[one] = replace(stream, moment=self._read(stream, file))
            others = {one: stream for one, stream in self._streams.items() if one not in found}
            self._streams = self._evicted(others | found)

    def _write(self, name: str, path: Path) -> None:
        saving.save(self._view(self._streams[name]), path)

    def _read(self, stream: _Stream, path: Path) -> StreamState:
        first = replace(stream, moment=self._one._first())
        return saving.restored(self._view(first), saving.read(path, self._one.method.name))

    # ---- inside ----

    def _view(self, stream: _Stream) -> Adapter:
        """The adapter of one stream: all but its moment and its method is that of all."""
        one, core = object.__new__(Adapter), copy.copy(self._one._core)
        core.method = stream.method
        vars(one).update(vars(self._one), _now=self._moment_of(stream), _core=core, method=stream.method)
        return one

    def _moment_of(self, stream: _Stream) -> StreamState:
        """The moment of a stream where the model is, from disk if it is there."""
        one, moment = self._one, stream.moment
        if isinstance(moment, Spilled):
            first = self._view(replace(stream, moment=one._first()))
            moment = saving.resumed(first, moment.tensors(one.method.name))
        return moment if self._at_home(moment) else one._brought(moment)

    def _at_home(self, moment: StreamState) -> bool:
        """Whether it is where the model is, in its precision."""
        borrowed = self._one._borrowed
        return moment.weights.device == borrowed.device and moment.weights.dtype == borrowed.dtype

    def _moment(self, name: str) -> StreamState:
        moment = self._streams[name].moment
        assert isinstance(moment, StreamState)
        return moment

    def _known(self, name: Name) -> str:
        name = _name(name)
        if name not in self._streams:
            raise ConfigError(
                f"there is no stream {name!r}; open() it first ({len(self._streams)} are open"
                + (f", such as {', '.join(map(repr, list(self._streams)[:3]))})" if self._streams else ")")
            )
        return name

    def _rows(self, streams: Any, size: int) -> dict[str, list[int]]:
        """The rows of the batch by stream, in the order in which streams occur."""
        if isinstance(streams, (str, int)):
            streams = [streams] * size
        names = streams.tolist() if isinstance(streams, Tensor) else streams
        if isinstance(names, Mapping) or not isinstance(names, Iterable):
            raise InputError(
                f"streams must be the name of a stream for each of the {size} samples, got {shown(streams)}"
            )
        names = list(names)
        if len(names) != size:
            raise InputError(f"streams must name the stream of each of the {size} samples, got {len(names)} names")
        rows: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            rows.setdefault(self._known(name), []).append(i)
        if self._resident is not None and len(rows) > self._resident:
            raise InputError(
                f"the batch holds samples of {len(rows)} streams, and resident={self._resident} fit on the device; give "
                "smaller batches, or a larger resident"
            )
        return rows

    def _ready(self, streams: Any, size: int) -> dict[str, list[int]]:
        """For a batch: its rows by stream, with the state of each where the model is."""
        self._one._check_open()
        rows = self._rows(streams, size)
        self._follow()
        self._fetch(list(rows))
        return rows

    def _fetch(self, names: list[str]) -> None:
        """Bring the state of these streams to the device, and note that they were used."""
        with untracked():
            streams = dict(self._streams)
            for name in names:
                stream = streams.pop(name)
                streams[name] = replace(stream, moment=self._moment_of(stream))
            self._streams = self._evicted(streams, keep=set(names))

    def _evicted(self, streams: dict[str, _Stream], keep: set[str] | None = None) -> dict[str, _Stream]:
        """These, with the least recently used elsewhere, so that no more than `resident` are on the device."""
        if self._resident is None:
            return streams
        here = [name for name, stream in streams.items() if self._is_here(stream)]
        for name in here[: max(0, len(here) - self._resident)]:
            if keep is None or name not in keep:
                streams[name] = self._put_away(streams[name])
        return streams

    def _put_away(self, stream: _Stream) -> _Stream:
        """To disk, or to host memory."""
        if self._folder is not None:
            one = self._view(stream)
            return replace(stream, moment=Spilled(self._folder, saving.packed(one), one.health()))
        assert isinstance(stream.moment, StreamState)
        return replace(stream, moment=stream.moment.to(torch.device("cpu"), self._one.method.on_host))

    def _is_here(self, stream: _Stream) -> bool:
        """Whether it is on the device; without a folder, others are in host memory."""
        moment = stream.moment
        if isinstance(moment, Spilled):
            return False
        return self._folder is not None or moment.weights.device == self._one._device

    def _follow(self) -> None:
        """After the user has moved or cast the model, bring all resident streams along."""
        one = self._one
        if one._borrowed.mode.plain and not one._borrowed.fresh():
            self._steps.forget()
        if not self._at_home(one._now):  # before the adapter itself: if this is interrupted, it is done again
            was = one._now.weights.device
            self._streams = {
                name: replace(stream, moment=one._brought(stream.moment))
                if isinstance(stream.moment, StreamState)
                and (self._folder is not None or stream.moment.weights.device == was)
                else stream
                for name, stream in self._streams.items()
            }
        one._follow()

    def _check_room(self, streams: int) -> None:
        """Raise if the state of so many streams cannot be in memory."""
        one = self._one
        copies = 1 + sum(value.shape == one._now.weights.shape for value in one._now.moments.values())
        each = one._now.weights.nbytes * (copies + (2 if one.guard is not None else 0))
        taken = sum(map(self._is_here, self._streams.values()))
        free = _free(one._device)
        if free is not None and (streams - taken) * each > free:
            raise ConfigError(
                f"{streams} streams of {each / 2**20:.3g} MB each do not fit into the {free / 2**30:.3g} GB that are free on "
                f"{one._device}; keep fewer on the device with resident="
                + ("" if self._folder else ", and the others on disk with folder=")
            )


INDEX, FORMAT = "fleet.json", "come-fleet-1"


def _index_of(folder: Path) -> dict[str, dict[str, float]]:
    """Streams of a folder that `save` wrote, and what each has of its own."""
    try:
        found = json.loads((folder / INDEX).read_text())
        if found["format"] != FORMAT:
            raise StateError(f"{folder / INDEX} must have format {FORMAT!r}, got {shown(found['format'])}")
        return {_name(name): {k: _number(k, v) for k, v in own.items()} for name, own in found["streams"].items()}
    except OSError as error:
        raise StateError(f"cannot read {folder / INDEX}: {error.strerror}; give a folder that save() wrote") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{folder / INDEX} is damaged: {error}; use an older copy") from error


def _number(name: str, value: Any) -> float:
    """As it was written: a seed is an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {shown(value)}")
    return value


def _names(streams: int | Sequence[Name]) -> list[str]:
    """The names that were given, or as many as asked for."""
    if isinstance(streams, int):
        if isinstance(streams, bool) or streams < 0:
            raise ConfigError(f"streams must be names, or how many, at least 0; got {shown(streams)}")
        return [str(i) for i in range(streams)]
    if isinstance(streams, (str, Mapping)) or not isinstance(streams, Iterable):
        raise ConfigError(f"streams must be a list of names, or how many, got {shown(streams)}")
    return [_name(name) for name in streams]


def _name(name: Any) -> str:
    """A valid name; it may become the name of a file, a label of a metric and a line of a log."""
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return str(name)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"the name of a stream must be 1 to 128 letters, digits and _ . @ + : = -, no dot first, got {shown(name)}"
        )
    return name


def file_name(name: str) -> str:
    """The file of a stream in a folder: readable, and unlike all others where case does not count and names must be short."""
    plain = quote(name, safe="")
    if len(plain) > 200 or name != name.lower():
        plain = f"{plain[:100]}~{hashlib.sha256(name.encode()).hexdigest()}"
    return f"{plain}.safetensors"


def _usable(value: Tensor) -> Tensor:
    """With 0 for what no model can answer."""
    if not value.is_floating_point():
        return value
    return torch.where(value.abs() <= 1e6, value, 0)


def _free(device: torch.device) -> int | None:
    """Bytes that are free there; None if nobody knows."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _in_order(parts: list[tuple[list[int], Step]], size: int) -> Step:
    """What groups returned, in the order of the batch; what only some return is false, or NaN, for the others."""
    order = [row for rows, _ in parts for row in rows]
    columns = list(zip(*(step for _, step in parts), strict=True))
    whole = [_column(column, [len(rows) for rows, _ in parts]) for column in columns]
    if order != list(range(size)):
        back = sorted(range(size), key=order.__getitem__)
        places = index(back, whole[0].device)  # type: ignore[union-attr]
        whole = [None if value is None else value.index_select(0, places) for value in whole]
    return Step(*whole)  # type: ignore[arg-type]


def _column(values: Sequence[Tensor | None], sizes: list[int]) -> Tensor | None:
    """One value of all samples, of what each group has returned."""
    known = next((value for value in values if value is not None), None)
    if known is None:
        return None
    unknown = False if known.dtype == torch.bool else torch.nan
    parts = zip(values, sizes, strict=True)
    return torch.cat([known.new_full((size,), unknown) if value is None else value for value, size in parts])


def _settled(moment: StreamState | Spilled) -> StreamState | Spilled:
    """With its signals on the host, for a copy."""
    if isinstance(moment, Spilled) or moment.watch is None:
        return moment
    return replace(moment, watch=moment.watch.settled())


def _promising(stream: _Stream, promise: Promise) -> _Stream:
    """With a new promise; a stream on disk gets it when it comes back."""
    if isinstance(stream.moment, Spilled):
        return stream
    begun = Abstention.begin(promise, stream.moment.weights.device)
    return replace(stream, moment=replace(stream.moment, abstention=begun))
