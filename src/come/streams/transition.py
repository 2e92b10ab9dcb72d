"""One step of many streams, as one: what `come.streams.vmap` makes of a `Transition`, and of the model that it calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from come.errors import ConfigError
from come.method import Method, NotCapturable, Step
from come.model.batchnorm import Statistics, by_selection, mixed
from come.model.copies import Function
from come.model.functional import FunctionalModel
from come.model.inputs import Inputs, logits_of
from come.state.trees import leaves, like, signature
from come.step.transition import StepFlags, StepInput, StepOutput, Transition
from come.streams.norms import Block
from come.streams.rendezvous import ask
from come.streams.vmap import BARE_CALL, CALL, Value, outside, over


class StackedModel:
    """A model as a step of many streams calls it; everything but a call is that of the model itself."""

    def __init__(self, model: FunctionalModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def fused(self, function: Function) -> Function:
        """The function as it is: inside of vmap nothing is compiled."""
        return function

    def call(self, x: Inputs, weights: Tensor, statistics: Statistics = None, hooks: Sequence[Any] = ()) -> Tensor:
        """Logits (b, K), see `FunctionalModel.call`."""
        if hooks:
            raise ConfigError(
                "this method looks into the model by hooks, which cannot tell streams apart; use one adapter for each stream"
            )
        if callable(statistics) and not isinstance(statistics, by_selection):
            raise ConfigError(
                "this method has BatchNorm statistics of its own, which a fleet cannot keep by stream; use one adapter for "
                "each stream"
            )
        tensors = leaves(tuple(x))
        known = vars(statistics) if isinstance(statistics, (mixed, by_selection)) else {}
        shares = {name: value for name, value in known.items() if isinstance(value, Tensor)}

        def do(n: int, weights: Value, *values: Value) -> Tensor:
            inputs, rest = values[: len(tensors)], values[len(tensors) :]
            flat: Inputs = Inputs(*like(tuple(x), [v.flatten(0, 1) if differs else v for differs, v in inputs]))
            own = {
                name: v if differs else v.expand(n, *v.shape) for name, (differs, v) in zip(shares, rest, strict=True)
            }
            rule = replace(statistics, **own) if isinstance(statistics, (mixed, by_selection)) else statistics
            tracked = torch.is_grad_enabled()
            do, given = partial(self._called, tracked), (flat, weights[1], Block(n, rule, flat.size))
            logits: Tensor = ask(CALL if tracked else BARE_CALL, _kind(flat), do, given)
            return logits.view(n, -1, logits.shape[1])

        return outside(do, weights, *tensors, *shares.values())

    def _called(self, tracked: bool, given: list[tuple[Inputs, Tensor, Block]]) -> list[Tensor]:
        """The logits of several groups, by one call, with a gradient or without."""
        batches, weights, blocks = zip(*given, strict=True)
        with torch.set_grad_enabled(tracked):
            x = batches[0] if len(batches) == 1 else _joined(batches)
            out = self._model.call_streams(x, weights, blocks)
        return list(torch.split(logits_of(out, x.size), [block.rows for block in blocks]))


def _kind(x: Inputs) -> Any:
    """The same for batches that can be one: tensors of samples of the same shape, and all else alike."""
    alike = x.map_samples(
        lambda value: (value.shape[1:], value.dtype),
        lambda value: id(value) if isinstance(value, Tensor) else signature(value),
    )
    return tuple(alike.items())


def _joined(batches: Sequence[Inputs]) -> Inputs:
    """One batch of several."""
    parts = iter(zip(*(x.per_sample() for x in batches), strict=True))
    return batches[0].map_samples(lambda _: torch.cat(next(parts)))


class StackedTransition:
    """One step of many streams, as `come.step.compiled.Steps` runs that of one.

    Args:
        core: the step of one.
    """

    def __init__(self, core: Transition) -> None:
        self.method, self.on_batch = core.method, core.on_batch
        self.written: list[Any] = []
        self._own: torch.Generator | None = None
        self.begin(core, [])

    def begin(self, core: Transition, streams: list[tuple[int, Method]]) -> None:
        """Before a step: that of one as it is now, and for each stream its number of the batch and its method."""
        self._core, self._streams = core, streams
        self.model, self.generator = core.model, core.generator

    def seed(self, count: int) -> None:
        """Nothing: each stream has random numbers of its own."""

    def __call__(self, how: StepFlags, before: StepInput, x: Inputs, count: int | None) -> StepOutput:
        """The step; all tensors are (n, ...), and those of the batch (n, b, ...)."""
        core = copy.copy(self._core)
        core.model, core.written = cast(FunctionalModel, StackedModel(core.model)), []
        core.generator = cast(torch.Generator, _refuse if count is None else self._generator)

        def one(before: StepInput, x: Inputs) -> StepOutput:
            if before.own:
                core.method = copy.copy(core.method)
                for name, value in before.own.items():
                    setattr(core.method, name, value)
            return core(how, before, x, None)

        return cast(StepOutput, over(one, before, x))

    def answered(self, how: StepFlags, before: StepInput, x: Inputs) -> Step:
        """Logits (n, b, K) without adapting, and which samples could be answered (n, b)."""
        core = copy.copy(self._core)
        core.model, core.generator = (
            cast(FunctionalModel, StackedModel(core.model)),
            cast(torch.Generator, self._generator),
        )
        return cast(Step, over(lambda before, x: core.answered(how, before, x, None), before, x))

    def _generator(self, i: int) -> torch.Generator:
        """The random numbers of stream i, as an adapter of its own would have them."""
        count, method = self._streams[i]
        if self._own is None:
            self._own = torch.Generator(self.model.device)
        self._own.manual_seed(self._core.seed_of(count, method))
        return self._own


def _refuse(i: int) -> torch.Generator:
    raise NotCapturable("it draws random numbers for each stream")
