"""Optimizers as pure functions: (weights, gradient, moments, learning rate) -> (weights, moments).

All adapted parameters are one vector (P,), so `sgd` and `adam` are a few operations, and nothing is changed in place: a
rejected update is dropped together with its moments. Any other torch optimizer is rebuilt in each step from the moments; that
is slower, and waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from come.errors import ConfigError, require, shown, unknown

OptimizerFactory = Callable[[Sequence[nn.Parameter], float], Optimizer]
"""Takes the parameters and a learning rate, returns a torch optimizer."""

Moments = dict[str, Tensor]
Split = Callable[[Tensor], list[Tensor]]
"""Cuts a vector (P,) into the tensors of the single parameters."""
Join = Callable[[Sequence[Tensor]], Tensor]
"""Its inverse."""


class Rule(Protocol):
    """An optimizer on a vector of weights."""

    def init(self, weights: Tensor) -> Moments:
        """Moments before the first step."""

    def update(self, weights: Tensor, gradient: Tensor, moments: Moments, lr: Tensor) -> tuple[Tensor, Moments]:
        """New weights and moments; `lr` is a 0-d tensor."""


@dataclass(frozen=True)
class sgd:  # noqa: N801 - reads as the value it is: optimizer=sgd(momentum=0.9)
    r"""Stochastic gradient descent, :math:`v \leftarrow \mu v + g,\; \theta \leftarrow \theta - \eta v`.

    With Nesterov momentum, :math:`\theta \leftarrow \theta - \eta (g + \mu v)`, as in torch.

    Args:
        momentum: mu, in [0, 1).
        weight_decay: added to the gradient times the parameter, >= 0.
        nesterov: look ahead along the momentum, which must be above 0.

    Example:
        >>> rule = sgd(momentum=0.9)
        >>> w = torch.ones(2)
        >>> rule.update(w, torch.ones(2), rule.init(w), torch.tensor(0.1))[0]
        tensor([0.9000, 0.9000])
    """

    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    not_negative: ClassVar[tuple[str, ...]] = ()
    """Moments that are never negative."""

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")
        require(not self.nesterov or self.momentum > 0, "momentum", self.momentum, "above 0 with nesterov=True")

    def init(self, weights: Tensor) -> Moments:
        """A velocity of zero: the first step is then the plain gradient, as in torch."""
        return {"momentum": torch.zeros_like(weights)} if self.momentum else {}

    def update(self, weights: Tensor, gradient: Tensor, moments: Moments, lr: Tensor) -> tuple[Tensor, Moments]:
        """One step."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        if self.momentum:
            velocity = self.momentum * moments["momentum"] + gradient
            gradient = gradient + self.momentum * velocity if self.nesterov else velocity
            moments = {"momentum": velocity}
        return weights - lr * gradient, moments


@dataclass(frozen=True)
class adam:  # noqa: N801
    r"""Adam with decoupled weight decay (AdamW).

    .. math:: \theta \leftarrow \theta (1 - \eta \lambda) - \eta \, \hat m / (\sqrt{\hat v} + 10^{-8})

    Args:
        betas: decay rates of the two moments, each in [0, 1).
        weight_decay: lambda, >= 0.

    Example:
        >>> rule = adam()
        >>> w = torch.ones(2)
        >>> rule.update(w, torch.full((2,), 5.0), rule.init(w), torch.tensor(0.1))[0]
        tensor([0.9000, 0.9000])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    not_negative: ClassVar[tuple[str, ...]] = ("step", "second")

    def __post_init__(self) -> None:
        require(len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two in [0, 1)")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")

    def init(self, weights: Tensor) -> Moments:
        """Moments of zero."""
        zero = torch.zeros_like(weights)
        return {"step": weights.new_zeros(()), "first": zero, "second": zero.clone()}

    def update(self, weights: Tensor, gradient: Tensor, moments: Moments, lr: Tensor) -> tuple[Tensor, Moments]:
        """One step."""
        b1, b2 = self.betas
        step = moments["step"] + 1
        first = torch.lerp(moments["first"], gradient, 1 - b1)
        second = b2 * moments["second"] + (1 - b2) * gradient.square()
        # Powers by exp: a GPU then needs no number from the host.
        c1, c2 = (1 - torch.exp(step * math.log(b)) if b else step.new_ones(()) for b in self.betas)
        weights = weights * (1 - lr * self.weight_decay) if self.weight_decay else weights
        weights = weights - lr / c1 * first / (second.sqrt() / c2.sqrt() + 1e-8)
        return weights, {"step": step, "first": first, "second": second}


class TorchRule:
    """Any torch optimizer as a `Rule`, one parameter tensor at a time as it expects."""

    def __init__(self, build: OptimizerFactory, split: Split, join: Join) -> None:
        self.build, self.split, self.join = build, split, join

    def init(self, weights: Tensor) -> Moments:
        """Nothing: the optimizer makes its own on its first step. It is built once here, so that errors come early."""
        self._optimizer(weights, 1.0)
        return {}

    def _optimizer(self, weights: Tensor, lr: float) -> tuple[Optimizer, list[nn.Parameter]]:
        params = [nn.Parameter(part.detach().clone()) for part in self.split(weights)]
        optimizer = self.build(params, lr)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer must return a torch optimizer, got {type(optimizer).__name__}; pass 'sgd', 'adam', or a "
                "function such as lambda params, lr: torch.optim.RMSprop(params, lr=lr)"
            )
        return optimizer, params

    def update(self, weights: Tensor, gradient: Tensor, moments: Moments, lr: Tensor) -> tuple[Tensor, Moments]:
        """One step of a new optimizer that gets the moments of the previous one."""
        optimizer, params = self._optimizer(weights, float(lr))
        for i, (p, g) in enumerate(zip(params, self.split(gradient), strict=True)):
            p.grad = g.clone()
            mine = {key: value.clone() for key, value in moments.items() if key.startswith(f"{i}.")}
            if mine:
                optimizer.state[p] = {key.partition(".")[2]: value for key, value in mine.items()}
        optimizer.step()
        kept = {
            f"{i}.{key}": torch.as_tensor(value).detach()
            for i, p in enumerate(params)
            for key, value in optimizer.state[p].items()
            if value is not None
        }
        return self.join([p.detach() for p in params]), kept


NAMED: dict[str, Callable[[], sgd | adam]] = {"sgd": sgd, "adam": adam}


def get(optimizer: str | sgd | adam | OptimizerFactory, split: Split, join: Join) -> Rule:
    """The rule of that name with its defaults, the rule itself, or a torch optimizer wrapped in one."""
    if isinstance(optimizer, str):
        if optimizer not in NAMED:
            raise unknown("optimizer", optimizer, NAMED)
        return NAMED[optimizer]()
    if isinstance(optimizer, (sgd, adam)):
        return optimizer
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer must be 'sgd', 'adam' or a function (parameters, lr) -> torch optimizer, got {shown(optimizer)}"
        )
    return TorchRule(optimizer, split, join)


# ---- which updates are kept ----


def descended(
    rule: Rule,
    weights: Tensor,
    gradient: Tensor,
    moments: Moments,
    lr: Tensor,
    go: Tensor | None,
    largest: float | None,
) -> tuple[Tensor, Moments, Tensor | None]:
    """Weights and moments after a step of the optimizer, where it may go and is sound; and whether it was (0-d bool).

    Sound is what is finite and, for the weights, below `largest`; with None nothing is looked at.
    """
    new, later = rule.update(weights, gradient, moments, lr)
    fine = None
    if largest is not None:
        sound = _largest(new) < largest
        for moment in later.values():
            if moment.device == sound.device and moment.is_floating_point():
                sound = sound & (_largest(moment) < torch.inf)
        fine = sound if go is None else sound | ~go
        go = sound if go is None else go & sound
    if go is not None:
        new, later = torch.where(go, new, weights), chosen(go, later, moments)
    return new, later, fine


def still_finite(ok: Tensor, values: Tensor) -> Tensor:
    """`ok` (0-d bool), and all values are finite."""
    return ok & (_largest(values) < torch.inf)


def _largest(values: Tensor) -> Tensor:
    """Largest entry by size, 0-d; NaN if there is one."""
    return values.abs().amax()


def chosen(where: Tensor, new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """`new` where the 0-d bool tensor is true, else `old`; read on the device, but for entries that are elsewhere.

    Example:
        >>> chosen(torch.tensor(False), {"a": torch.ones(1)}, {"a": torch.zeros(1)})
        {'a': tensor([0.])}
    """
    if new.keys() != old.keys():
        return new if bool(where) else old

    def one(name: str) -> Tensor:
        if new[name] is old[name]:
            return new[name]
        if new[name].device == where.device and new[name].shape == old[name].shape:
            return torch.where(where, new[name], old[name])
        return new[name] if bool(where) else old[name]

    return {name: one(name) for name in new}
