"""Runs a batch that holds samples of many streams: streams with as many samples and the same flags are one stacked step."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from come.errors import ComeError, ConfigError, one_line
from come.guard.watch import Sent, to_host
from come.method import Method, Step
from come.model.inputs import Inputs
from come.optim import TorchRule
from come.step.engine import Engine
from come.step.transition import Run, StepFlags, StepInput, StepOutput, StreamState
from come.streams.rendezvous import Rendezvous
from come.streams.transition import StackedModel, StackedTransition, apart, index, joined, over, parted, sent


class StreamRows(NamedTuple):
    """A stream in a batch."""

    name: str
    rows: list[int]
    state: StreamState
    method: Method


class Group(NamedTuple):
    """Streams that run as one step."""

    parts: list[StreamRows]
    size: int
    """Samples of each stream."""
    flags: StepFlags
    given: StepInput
    x: Inputs

    @property
    def ignore(self) -> Tensor | None:
        """Of all samples: positions that drive nothing."""
        return None if self.x.ignore is None else self.x.ignore.flatten(0, 1)

    @property
    def rows(self) -> list[int]:
        """Their rows of the batch."""
        return [row for part in self.parts for row in part.rows]


class Groups:
    """Steps of many streams on one engine.

    Args:
        engine: of all streams.

    Raises:
        ConfigError: its method, optimizer or parameters cannot be stacked.
    """

    def __init__(self, engine: Engine) -> None:
        method = engine.method
        if method.waits:
            raise ConfigError(
                f"{method.name} cannot run for many streams at once: {method.waits}; use one adapter for each stream"
            )
        if isinstance(engine.transition.rule, TorchRule):
            raise ConfigError(
                "a fleet takes optimizer='sgd' or 'adam' (come.optim.sgd, come.optim.adam), no torch optimizer"
            )
        if (name := engine.model.not_of_norms()) is not None:
            raise ConfigError(
                f"{name!r} cannot differ by stream: a fleet knows weights and biases of normalization layers only; choose "
                "these with select=come.select.norm_affine(), or use one adapter for each stream"
            )
        self._engine = engine
        self._rates: tuple[Any, Tensor] | None = None
        self._proven = False
        """Whether the model was seen to keep samples in the first dimension."""

    def step(self, x: Inputs, parts: list[StreamRows]) -> tuple[dict[str, StreamState], Step]:
        """The new state of each stream, and what is returned, in the order of the batch."""
        found, states = self._run(x, parts, True), dict[str, StreamState]()
        steps = list[tuple[list[int], Step]]()
        for group, output in found:
            later = self._ended(group, output)
            out, later = self._engine.abstaining(later, _flat(output.out), group.size, group.ignore)
            states |= {part.name: state for part, state in zip(group.parts, later, strict=True)}
            steps.append((group.rows, out))
        return states, in_order(steps, x.size)

    def answer(self, x: Inputs, parts: list[StreamRows]) -> Step:
        """What is returned without adapting, in the order of the batch."""
        return in_order([(group.rows, _flat(output.out)) for group, output in self._run(x, parts, False)], x.size)

    def _run(self, x: Inputs, parts: list[StreamRows], adapts: bool) -> list[tuple[Group, StepOutput]]:
        """What each group of the batch ends with."""

        def run() -> list[tuple[Group, StepOutput]]:
            self._prove(x)
            groups = self._grouped(x, parts, adapts)
            calls = [partial(self._run_group, group, adapts) for group in groups]
            compiled = self._engine.model.mode.compile  # then each group is a graph of its own
            outputs = [call() for call in calls] if compiled else Rendezvous().run(calls)
            return list(zip(groups, outputs, strict=True))

        return self._engine.model.borrow(run)

    def _grouped(self, x: Inputs, parts: list[StreamRows], adapts: bool) -> list[Group]:
        groups: dict[Any, list[StreamRows]] = {}
        for part in parts:
            flags, watch = self._engine.flags(part.state), part.state.watch
            flags = flags._replace(few=False) if adapts else StepFlags(resting=flags.resting, trusted=flags.trusted)
            asked = flags.asking and watch is not None and watch.sums is not None
            known = part.state.abstention if adapts else None
            promise = None if known is None else known.promise
            key = (flags, len(part.rows), part.state.state is None, asked, promise)
            groups.setdefault(key, []).append(part)
        return [self._prepared(flags, members, x, size) for (flags, size, *_), members in groups.items()]

    def _prepared(self, flags: StepFlags, parts: list[StreamRows], x: Inputs, size: int) -> Group:
        """Streams with the same number of samples, ready for a step."""
        engine = self._engine
        rows = [row for part in parts for row in part.rows]
        mine = x if rows == list(range(x.size)) else x.take(index(rows, engine.device))
        given = self._given(flags, parts, size)
        if given.state is None and "classes" not in engine.transition.fixed:  # found once, by one stream
            engine.context(engine.first(), size).classes(mine.for_model().take(slice(0, size)))
        many = mine.map_samples(lambda value: value.view(len(parts), size, *value.shape[1:]))
        return Group(parts, size, flags, given, many)

    def _run_group(self, group: Group, adapts: bool) -> StepOutput:
        """A step of a group; all tensors of the result are (n, ...)."""
        engine = self._engine
        step = StackedTransition(engine.transition, [(part.state.count, part.method) for part in group.parts])
        run = Run(0, engine.generator, [])
        try:
            if not adapts:
                return StepOutput(group.given.weights, {}, {}, step.answer(group.flags, group.given, group.x, run))
            if engine.model.mode.compile:
                return engine.compiled.run(step, group.flags, group.given, group.x, run)
            return step(group.flags, group.given, group.x, run)
        except ComeError:
            raise
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if "vmap" not in str(error):
                raise
            raise ConfigError(
                f"{engine.method.name} cannot run for many streams at once: {one_line(error, first=True)}; use one "
                "adapter for each stream"
            ) from error

    # ---- stacking and unstacking ----

    def _given(self, flags: StepFlags, parts: list[StreamRows], size: int) -> StepInput:
        """What a step of these streams begins with, (n, ...)."""
        engine, states = self._engine, [part.state for part in parts]
        rates = tuple(engine.rate(part.state, size, part.method) for part in parts)
        weights = torch.stack([state.weights for state in states])
        key = rates, weights.device, weights.dtype
        if self._rates is None or self._rates[0] != key:
            self._rates = key, sent(rates, weights.device, weights.dtype)
        memories, method = [state.state for state in states], engine.method
        own = {name: [getattr(part.method, name) for part in parts] for name in method.by_stream}
        own = {name: values for name, values in own.items() if set(values) != {getattr(method, name)}}
        given = StepInput(
            weights,
            joined([state.moments for state in states]),
            None if memories[0] is None else joined(cast("list[dict[str, Tensor]]", memories)),
            self._rates[1],
            own={name: sent(values, weights.device, weights.dtype) for name, values in own.items()},
        )
        watches = [state.watch for state in states if state.watch is not None]
        if not watches:
            return given
        given = given._replace(history=torch.stack([watch.history for watch in watches]))
        if not flags.asking:
            return given
        needed = sent([engine.needed(watch, size) for watch in watches], weights.device, torch.int64)
        sums = [watch.sums for watch in watches if watch.sums is not None]
        return given._replace(needed=needed, sums=torch.stack(sums) if sums else None)

    def _ended(self, group: Group, output: StepOutput) -> list[StreamState]:
        """The state of each stream after a step: tensors of its own."""
        count = len(group.parts)
        weights = apart(output.weights)
        moments, memory = parted(output.moments, count), parted(output.state, count)
        history = [None] * count if output.history is None else apart(output.history)
        sums = [None] * count if output.sums is None else apart(output.sums)
        values, arrived = (None, None) if output.signals is None else to_host(output.signals)
        signals = [None] * count if values is None else values.unbind(0)

        def send(step: int, batch: int, values: Tensor) -> Sent:
            return Sent(step, batch, values, arrived)

        outputs = map(StepOutput, weights, moments, memory, [output.out] * count, history, sums, signals)
        return [
            self._engine.ended(part.state, group.flags, mine, group.size, send)
            for part, mine in zip(group.parts, outputs, strict=True)
        ]

    def _prove(self, x: Inputs) -> None:
        """Check once that two streams get what each would get alone."""
        engine = self._engine
        if self._proven or not engine.model.parameters:
            return
        model, source = engine.model, engine.transition.source
        pair = x.for_model().take(torch.tensor([0, x.size - 1], device=engine.device)).map_samples(_usable)
        stacked = StackedModel(model)
        with torch.no_grad():
            draw = torch.Generator(source.device).manual_seed(0)
            noise = torch.randn(2, len(source), generator=draw, device=source.device, dtype=source.dtype)
            weights = source * (1 + 0.3 * noise) + 0.1 * noise.flip(0)
            one_each = pair.map_samples(lambda value: value[:, None])
            both = over(lambda given, x: stacked.call(x, given), weights, one_each).flatten(0, 1).float()

            def alone(i: int, given: Tensor) -> Tensor:
                return model.logits(model.call(pair.take(slice(i, i + 1)), given, None, ()), 1)[0].float()

            own, other = (torch.stack([alone(0, weights[a]), alone(1, weights[1 - a])]) for a in (0, 1))
            error, effect = (both - own).abs().amax(), (other - own).abs().amax()
        if not bool(error <= 0.2 * effect + 1e-6):
            raise ConfigError(
                f"{type(engine.user_model).__name__} does not keep samples in the first dimension of its norm layers, so a "
                f"fleet cannot tell streams apart (logits off by {float(error):.2g}, where another stream's weights change "
                f"them by {float(effect):.2g}); use one adapter for each stream"
            )
        self._proven = True


def _flat(out: Step) -> Step:
    """(n, b, ...) -> (n * b, ...)."""
    return Step(*(None if value is None else value.flatten(0, 1) for value in out))  # type: ignore[arg-type]


def _usable(value: Tensor) -> Tensor:
    """With 0 for values that no model can use."""
    return torch.where(value.abs() <= 1e6, value, 0) if value.is_floating_point() else value


def in_order(parts: list[tuple[list[int], Step]], size: int) -> Step:
    """What groups returned, in the order of the batch; what only some return is false, or NaN, for the others."""
    if len(parts) == 1 and parts[0][0] == list(range(size)):
        return parts[0][1]
    places = [index(rows, step.logits.device) for rows, step in parts]
    whole: list[Tensor | None] = []
    for column in zip(*(step for _, step in parts), strict=True):
        known = next((value for value in column if value is not None), None)
        if known is not None:
            unknown = False if known.dtype == torch.bool else torch.nan
            known = known.new_full((size, *known.shape[1:]), unknown)
            for value, at in zip(column, places, strict=True):
                if value is not None:
                    known[at] = value
        whole.append(known)
    return Step(*whole)  # type: ignore[arg-type]
