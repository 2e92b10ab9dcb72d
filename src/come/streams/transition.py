"""`StackedTransition`: one step of many streams under `torch.vmap`, and `StackedModel`, the model that it calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from come.errors import ConfigError
from come.method import Method, NotCapturable, Step
from come.model.batchnorm import BatchStatistics, Statistics
from come.model.copies import Function
from come.model.functional import FunctionalModel
from come.model.inputs import Inputs
from come.state.trees import leaves, like, replace, signature
from come.step.transition import Run, StepFlags, StepInput, StepOutput, Transition
from come.streams.norms import Block
from come.streams.rendezvous import ask
from come.streams.vmap import BARE_CALL, CALL, Value, drawn, gradient, leaf, outside, over


class StackedModel:
    """A model as a step of many streams calls it; everything but a call is that of the model itself."""

    def __init__(self, model: FunctionalModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    may_branch = False
    leaf, gradient, drawn = staticmethod(leaf), staticmethod(gradient), staticmethod(drawn)

    def fused(self, function: Function) -> Function:
        """The function as it is: inside of vmap nothing is compiled."""
        return function

    def call(self, x: Inputs, weights: Tensor, statistics: Statistics = None, hooks: Sequence[Any] = ()) -> Tensor:
        """Logits (b, K), see `FunctionalModel.call`."""
        if hooks:
            raise ConfigError(
                "this method looks into the model by hooks, which cannot tell streams apart; use one adapter for each stream"
            )
        if callable(statistics):
            raise ConfigError(
                "this method has BatchNorm statistics of its own, which a fleet cannot keep by stream; use one adapter for "
                "each stream"
            )
        tensors = leaves(tuple(x))
        known = vars(statistics) if isinstance(statistics, BatchStatistics) else {}
        shares = {name: value for name, value in known.items() if isinstance(value, Tensor)}

        def do(n: int, weights: Value, *values: Value) -> Tensor:
            inputs, rest = values[: len(tensors)], values[len(tensors) :]
            flat: Inputs = Inputs(*like(tuple(x), [v.flatten(0, 1) if differs else v for differs, v in inputs]))
            own = {
                name: v if differs else v.expand(n, *v.shape) for name, (differs, v) in zip(shares, rest, strict=True)
            }
            rule = replace(statistics, **own) if isinstance(statistics, BatchStatistics) else statistics
            tracked = torch.is_grad_enabled()
            do, given = partial(self._called, tracked), (flat, weights[1], Block(n, rule, flat.size))
            logits: Tensor = ask(CALL if tracked else BARE_CALL, _kind(flat), do, given)
            return logits.unflatten(0, (n, -1))

        return outside(do, weights, *tensors, *shares.values())

    def _called(self, tracked: bool, given: list[tuple[Inputs, Tensor, Block]]) -> list[Tensor]:
        """The logits of several groups, by one call, with a gradient or without."""
        batches, weights, blocks = zip(*given, strict=True)
        with torch.set_grad_enabled(tracked):
            x = batches[0] if len(batches) == 1 else _joined(batches)
            out = self._model.call_streams(x, weights, blocks)
        return list(torch.split(self._model.logits(out, x.size), [block.rows for block in blocks]))


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


@dataclass(frozen=True, eq=False)
class StackedTransition:
    """One step of many streams: `Transition` under `torch.vmap`. All tensors are (n, ...), those of the batch (n, b, ...).

    Args:
        core: the step of one stream.
        streams: the number of the batch and the method of each stream.
    """

    core: Transition
    streams: list[tuple[int, Method]]

    @property
    def method(self) -> Method:
        """Of all streams, but for what `Method.by_stream` lists."""
        return self.core.method

    @property
    def model(self) -> FunctionalModel:
        """The model that all streams share."""
        return self.core.model

    @property
    def on_batch(self) -> bool:
        """Whether BatchNorm may use statistics of the batch."""
        return self.core.on_batch

    def seed(self, run: Run) -> None:
        """Nothing: each stream has random numbers of its own."""

    def borrow(self, call: Callable[[], StepOutput]) -> StepOutput:
        """Call it: the fleet has prepared the model for all groups at once."""
        return call()

    def __call__(self, flags: StepFlags, given: StepInput, x: Inputs, run: Run) -> StepOutput:
        """The step of all streams."""
        core, inner = self._inner(_refuse if run.count is None else self._generators())

        def one(given: StepInput, x: Inputs) -> StepOutput:
            mine = core
            if given.own:
                method = copy.copy(core.method)
                vars(method).update(given.own)
                mine = replace(core, method=method)
            return mine(flags, given, x, inner)

        return cast(StepOutput, over(one, given, x))

    def answer(self, flags: StepFlags, given: StepInput, x: Inputs) -> Step:
        """Logits (n, b, K) without adapting, and which samples could be answered (n, b)."""
        core, inner = self._inner(self._generators())
        return cast(Step, over(lambda given, x: core.answer(flags, given, x, inner), given, x))

    def _inner(self, generator: Callable[[int], torch.Generator]) -> tuple[Transition, Run]:
        return replace(self.core, model=StackedModel(self.model)), Run(None, generator, [])

    def _generators(self) -> Callable[[int], torch.Generator]:
        """Gives the random numbers of stream i, as an adapter of its own would have them."""
        own = torch.Generator(self.model.device)

        def begin(i: int) -> torch.Generator:
            count, method = self.streams[i]
            return own.manual_seed(self.core.seed_of(count, method))

        return begin


def _refuse(i: int) -> torch.Generator:
    raise NotCapturable("it draws random numbers for each stream")
