"""What a stream remembers between steps, and what goes into a step and comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from come.abstain import Abstention
from come.guard.watch import Watch
from come.method import Step
from come.optim import Moments
from come.state.trees import replace


@dataclass(frozen=True)
class StreamState:
    """All that a step changes. A step never writes into it; it returns a new one."""

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
    """The share of the samples that drove the last update, if the method reports it."""
    abstention: Abstention | None = None
    """When to abstain; None before `Adapter.calibrate`."""

    def health(self) -> dict[str, float]:
        """Counters and gauges of the guard as flat numbers; without a guard, the steps only."""
        return {"steps": float(self.count)} if self.watch is None else self.watch.health()

    def to(self, device: torch.device, on_host: tuple[str, ...]) -> StreamState:
        """Move all tensors to a device, except method memory whose name begins with one of `on_host`."""
        state = self.state
        if state is not None:
            state = {k: v if on_host and k.startswith(on_host) else v.to(device) for k, v in state.items()}
        # Torch optimizers keep some numbers on the CPU on purpose.
        moments = {k: v.to(device) if v.ndim or v.device.type != "cpu" else v for k, v in self.moments.items()}
        watch = None if self.watch is None else self.watch.to(device)
        abstention = None if self.abstention is None else self.abstention.to(device)
        weights = self.weights.to(device)
        return replace(self, weights=weights, moments=moments, state=state, watch=watch, abstention=abstention)

    def settled(self) -> StreamState:
        """With pending guard signals copied to the host, so that it can be pickled."""
        return self if self.watch is None else replace(self, watch=self.watch.settled())


class StepFlags(NamedTuple):
    """What the host decides before a step. Each combination is compiled and captured by itself."""

    asking: bool = False
    """The source model checks the adapted one."""
    resting: bool = False
    """The source model answers."""
    frozen: bool = False
    """The source model answers until `reset()`."""
    trusted: bool = True
    """BatchNorm uses statistics of the batch."""
    new: bool = False
    """The first batch in the life of the adapter."""
    few: bool = False
    """Few samples drove the last update, see `Context.again`."""


class StepInput(NamedTuple):
    """The tensors that a step begins with; for many streams each is (n, ...)."""

    weights: Tensor
    moments: Moments
    state: dict[str, Tensor] | None
    lr: Tensor
    """0-d."""
    history: Tensor | None = None
    """Of the guard, see `come.guard.samples`."""
    sums: Tensor | None = None
    """What the current source check has found so far."""
    needed: Tensor | None = None
    """0-d: after how many samples the source check may be acted on."""
    own: dict[str, Tensor] | None = None
    """0-d: hyperparameters in which this stream differs from the others, of those in `Method.by_stream`."""


class StepOutput(NamedTuple):
    """The tensors that a step ends with."""

    weights: Tensor
    moments: Moments
    state: dict[str, Tensor]
    out: Step
    history: Tensor | None = None
    sums: Tensor | None = None
    signals: Tensor | None = None
    """Read by the guard two steps later, see `come.guard.watch.Sent`."""
    selected: float | None = None
    """The share of the samples that drove the update, if the method reports it."""
