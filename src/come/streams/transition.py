"""One step for many streams at once: `torch.vmap` over everything but the model.

A step is written for one stream. For n streams with b samples each it runs once, on tensors that carry a hidden first dimension
of n. Three things leave that: the model, which gets all n x b samples in one call (`come.streams.norms`); the gradient, one
backward of the sum of all losses, since the loss of a stream depends on no other stream's weights; and random numbers, drawn
stream by stream.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from come.errors import ConfigError, ModelError
from come.method import Method, NotCapturable, Step
from come.model.batchnorm import BatchStatistics, Statistics
from come.model.copies import Function
from come.model.functional import FunctionalModel
from come.model.inputs import Inputs
from come.state.trees import leaves, like, replace, signature
from come.step.transition import Run, StepFlags, StepInput, StepOutput, Transition
from come.streams.norms import GroupRows
from come.streams.rendezvous import ask, gradients

T = TypeVar("T")
BARE_CALL, CALL, GRADIENT = range(3)
"""What groups of streams ask for, in this order: calls of the model without and with a gradient, and gradients."""


# ---- what leaves vmap ----


class _Outside(torch.autograd.Function):
    """Something that is done to all streams at once, on tensors whose first dimension is the stream."""

    @staticmethod
    def forward(*_: Any) -> Any:
        """Never called: there is a vmap around it always."""
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: the tensors inside have a history of their own."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], do: Callable[..., Tensor], *values: Any) -> tuple[Tensor, int]:
        """Call `do` with the number of streams and, for each value, whether it differs by stream, and the value."""
        moved = [
            (dim is not None, value.movedim(dim, 0) if isinstance(value, Tensor) and dim else value)
            for dim, value in zip(in_dims[1:], values, strict=True)
        ]
        return do(info.batch_size, *moved), 0


Value = tuple[bool, Any]
"""Whether a value differs by stream, and the value."""


def outside(do: Callable[..., Tensor], *values: Any) -> Tensor:
    """Leave vmap: `do(n, (differs, value), ...)` returns a tensor whose first dimension is the stream."""
    found: Tensor = _Outside.apply(do, *values)
    return found


# ---- from one to many and back ----


def over(run: Callable[[Any, Inputs], Any], given: Any, x: Inputs) -> Any:
    """`run(given, x)` of each stream at once.

    Args:
        run: from what one stream is given and its samples to a tree of tensors.
        given: a tree of tensors (n, ...).
        x: the samples (n, b, ...), and what all streams share.

    Returns:
        the tree, of tensors (n, ...).
    """
    mine, batch = leaves(given), leaves(tuple(x))
    placed = (0 if key in x.samples else None for key, value in x.items() for _ in leaves(value))
    dims = (*[0] * len(mine), *placed)
    made: list[Any] = []

    def one(*values: Tensor) -> tuple[Tensor, ...]:
        made.append(run(like(given, list(values[: len(mine)])), Inputs(*like(tuple(x), list(values[len(mine) :])))))
        return tuple(leaves(made[0]))

    found = torch.vmap(one, in_dims=dims)(*mine, *batch)
    return like(made[0], list(found))


# ---- the step ----


class StackedModel(FunctionalModel):
    """A model as a step of many streams calls it; what it knows of the model is shared."""

    may_branch = False

    def __init__(self, model: FunctionalModel) -> None:
        vars(self).update(vars(model))

    @staticmethod
    def leaf(values: Tensor) -> Tensor:
        """`values` of each stream as a tensor of its own that gradients can be taken with respect to."""

        def do(n: int, given: Value) -> Tensor:
            differs, value = given
            every: Tensor = value if differs else value.expand(n, *value.shape)
            return every.detach().requires_grad_()

        return outside(do, values)

    @staticmethod
    def gradient(loss: Tensor, weights: Tensor) -> Tensor:
        """Gradient (P,) of each stream's loss with respect to its own weights, by one backward."""

        def do(n: int, loss: Value, weights: Value) -> Tensor:
            found: Tensor | None = ask(GRADIENT, "gradient", gradients, (loss[1], weights[1]))
            if found is None:
                raise ModelError(
                    "no gradient reaches the adapted parameters; does the model's forward run under no_grad, or detach its "
                    "output?"
                )
            return found

        return outside(do, loss, weights)

    @staticmethod
    def drawn(draw: Callable[[Tensor, torch.Generator], Tensor], values: Tensor, begin: Callable[[int], Any]) -> Tensor:
        """What a function draws for each stream; `begin(i)` gives the random numbers of stream i."""

        def do(n: int, given: Value) -> Tensor:
            differs, value = given
            return torch.stack([draw(value[i] if differs else value, begin(i)) for i in range(n)])

        return outside(do, values)

    def borrow(self, call: Callable[..., T], *args: Any) -> T:
        """Call it: the fleet has prepared the model for all groups at once."""
        return call(*args)

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
            do, given = partial(self._called, tracked), (flat, weights[1], GroupRows(n, rule, flat.size))
            logits: Tensor = ask(CALL if tracked else BARE_CALL, _kind(flat), do, given)
            return torch.unflatten(logits, 0, (n, -1))

        return outside(do, weights, *tensors, *shares.values())

    def _called(self, tracked: bool, given: list[tuple[Inputs, Tensor, GroupRows]]) -> list[Tensor]:
        """The logits of several groups, by one call, with a gradient or without."""
        batches, weights, groups = zip(*given, strict=True)
        with torch.set_grad_enabled(tracked):
            x = batches[0] if len(batches) == 1 else _joined(batches)
            out = self.call_streams(x, weights, groups)
        return list(torch.split(self.logits(out, x.size), [group.rows for group in groups]))


def _kind(x: Inputs) -> Any:
    """The same for batches that can be one: tensors of samples of the same shape, and all else alike."""

    def kind(key: Any, value: Any) -> Any:
        if key in x.samples:
            return value.shape[1:], value.dtype
        return id(value) if isinstance(value, Tensor) else signature(value)

    return tuple((key, kind(key, value)) for key, value in x.items())


def _joined(batches: Sequence[Inputs]) -> Inputs:
    """One batch of several."""
    parts = iter(zip(*(x.per_sample() for x in batches), strict=True))
    return batches[0].map_samples(lambda _: torch.cat(next(parts)))


class StackedTransition(Transition):
    """One step of many streams: `Transition` under `torch.vmap`. All tensors are (n, ...), those of the batch (n, b, ...).

    Args:
        core: the step of one stream.
        streams: the number of the batch and the method of each stream.
    """

    streams: list[tuple[int, Method]]

    def __init__(self, core: Transition, streams: list[tuple[int, Method]]) -> None:
        vars(self).update(vars(core), model=StackedModel(core.model), streams=streams)

    def __call__(self, flags: StepFlags, given: StepInput, x: Inputs, run: Run) -> StepOutput:
        """The step of all streams."""
        inner = Run(None, _refuse if run.count is None else self._generators(), [])

        def one(given: StepInput, x: Inputs) -> StepOutput:
            mine: Transition = self
            if given.own:
                method = copy.copy(self.method)
                vars(method).update(given.own)
                mine = replace(self, method=method)
            return Transition.__call__(mine, flags, given, x, inner)

        return cast(StepOutput, over(one, given, x))

    def answer(self, flags: StepFlags, given: StepInput, x: Inputs, run: Run) -> Step:
        """Logits (n, b, K) without adapting, and which samples could be answered (n, b)."""
        inner, one = Run(None, self._generators(), []), super().answer
        return cast(Step, over(lambda given, x: one(flags, given, x, inner), given, x))

    def _generators(self) -> Callable[[int], torch.Generator]:
        """Gives the random numbers of stream i, as an adapter of its own would have them."""
        own = torch.Generator(self.model.device)

        def begin(i: int) -> torch.Generator:
            return own.manual_seed(self.seed_of(*self.streams[i]))

        return begin


def _refuse(i: int) -> torch.Generator:
    raise NotCapturable("it draws random numbers for each stream")


# ---- stacking and unstacking ----


def joined(trees: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One tree for each stream -> one of tensors (n, ...)."""
    return {key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}


def parted(tree: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The other way; the tensors are copies."""
    parts = {key: apart(value) for key, value in tree.items()}
    return [{key: values[i] for key, values in parts.items()} for i in range(count)]


def apart(values: Tensor) -> list[Tensor]:
    """(n, ...) -> n tensors of their own, copied by few kernels."""
    rows = list(values.detach().unbind(0))
    own = [torch.empty_like(row, memory_format=torch.contiguous_format) for row in rows]
    torch._foreach_copy_(own, rows)
    return own


def sent(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers as a tensor there, without a wait."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def index(rows: list[int], device: torch.device) -> Tensor:
    """Rows as a tensor there, without a wait."""
    return sent(rows, device, torch.int64)
