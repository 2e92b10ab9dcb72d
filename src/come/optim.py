"""Optimisers by value: what to build, written down before there is a model.

The step can be called off on the device: `descend` hands the optimiser a flag tensor, and torch's fused kernels skip the
update, moments and all, where it says so. Nothing waits for the GPU, and "no sample was selected" moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from come.errors import ConfigError, require, unknown

OptimizerFactory = Callable[[Sequence[nn.Parameter], float], Optimizer]
"""Takes the parameters and a learning rate, returns a torch optimiser."""


@dataclass(frozen=True)
class sgd:  # noqa: N801 - reads as the value it is: optimizer=sgd(momentum=0.9)
    r"""Stochastic gradient descent, :math:`v \leftarrow \mu v + g,\; \theta \leftarrow \theta - \eta v`.

    Args:
        momentum: mu, in [0, 1).
        weight_decay: added to the gradient times the parameter, >= 0.

    Example:
        >>> sgd(momentum=0.9)([nn.Parameter(torch.ones(2))], 0.1).defaults["lr"]
        0.1
    """

    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")

    def __call__(self, params: Sequence[nn.Parameter], lr: float) -> Optimizer:
        """Build the optimiser."""
        return torch.optim.SGD(
            list(params), lr=lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=_fused(params)
        )


@dataclass(frozen=True)
class adam:  # noqa: N801
    """Adam, with decoupled weight decay (AdamW).

    Args:
        betas: decay rates of the two moments, each in [0, 1).
        weight_decay: decoupled weight decay, >= 0.

    Example:
        >>> type(adam()([nn.Parameter(torch.ones(2))], 0.1)).__name__
        'AdamW'
    """

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two numbers in [0, 1)")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")

    def __call__(self, params: Sequence[nn.Parameter], lr: float) -> Optimizer:
        """Build the optimiser."""
        # In float16 the usual 1e-8 is 0, and small squares are too: 0 / 0.
        eps = 1e-4 if any(p.dtype == torch.float16 for p in params) else 1e-8
        return torch.optim.AdamW(
            list(params), lr=lr, betas=self.betas, eps=eps, weight_decay=self.weight_decay, fused=_fused(params)
        )


NAMED: dict[str, Callable[[], OptimizerFactory]] = {"sgd": sgd, "adam": adam}


def get(optimizer: str | OptimizerFactory) -> OptimizerFactory:
    """The factory of that name with its defaults, or the factory itself.

    Example:
        >>> get("sgd")
        sgd(momentum=0.9, weight_decay=0.0)
    """
    if isinstance(optimizer, str):
        if optimizer not in NAMED:
            raise unknown("optimizer", optimizer, NAMED)
        return NAMED[optimizer]()
    if not callable(optimizer):
        raise ConfigError(f"optimizer is {optimizer!r}; give a name or a function (parameters, lr) -> torch optimiser")
    return optimizer


def _fused(params: Sequence[nn.Parameter]) -> bool:
    return all(p.device.type in ("cpu", "cuda") for p in params)


def prepare(optimizer: Optimizer) -> None:
    """Give SGD its momentum buffers before the first step.

    torch creates them on the first step and leaves them unwritten when that step is called off. A buffer of zeros gives the
    same first step, because mu * 0 + g = g without dampening.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
            for p in group["params"]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def step(optimizer: Optimizer, lr: float, go: Tensor | None) -> None:
    """One optimiser step at learning rate `lr`, called off where the 0-d tensor `go` is false (None: always go)."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    if go is None:
        optimizer.step()
    elif all(group.get("fused") for group in optimizer.param_groups):
        # The mechanism of torch.amp.GradScaler: a fused step reads `found_inf` on the device and does nothing if it is 1.
        optimizer.grad_scale, optimizer.found_inf = None, (~go).float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif bool(go):  # an optimiser without fused kernels: ask the device
        optimizer.step()
