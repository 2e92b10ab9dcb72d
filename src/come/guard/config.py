"""Settings of the guard, and the events that it reports. Its state is in `come.guard.watch`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from come.errors import require, require_int

Policy = Literal["recover", "freeze", "raise", "warn"]


class Event(NamedTuple):
    """One event of the guard; docs/operate.md lists the kinds."""

    kind: str
    """A name in `come.guard.watch.COUNTED`."""
    step: int
    """Number of the batch, from 0, over the life of the adapter."""
    message: str
    """What was seen, the limit, and what was done."""
    details: dict[str, float | str]


@dataclass(frozen=True)
class Guard:
    """Filters invalid inputs, rejects bad updates, detects and undoes collapse.

    It holds settings only: many adapters can share one.

    Args:
        policy: the reaction to a collapse. "recover": restore the source weights and lower the learning rate until `reset()`.
            "freeze": answer with the source model until `reset()`. "raise": `CollapseError`. "warn": only report it. Whatever
            the policy, the guard chooses the BatchNorm statistics of methods with `statistics=None`, see `come.guard.verdict`.
        warmup: windows (64 samples, or a batch if that is more) that the usual ranges of the signals are learned from, >= 2.
        patience: windows in a row outside these ranges before an early source check, >= 1.
        samples: the fewest samples in a source check, >= 1.
        backoff: largest factor on the learning rate at a recovery, in (0, 1]; n/10,000 if the model has collapsed after n
            windows, so that the new rate lasts.
        largest_input: a sample with an entry beyond this is invalid, > 0.
        on_event: called with each `Event` after it is logged. Errors that it raises are logged and counted.

    Example:
        >>> import come, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> classifier = come.adapt(model, "tent", guard=Guard(policy="freeze"))
        >>> x = torch.randn(6, 4)
        >>> x[2] = torch.nan
        >>> step = classifier.step(x)
        >>> step.valid.tolist(), step.logits.isfinite().all().item()
        ([True, True, False, True, True, True], True)
    """

    policy: Policy = "recover"
    warmup: int = 10
    patience: int = 3
    samples: int = 64
    backoff: float = 0.1
    largest_input: float = 1e6
    on_event: Callable[[Event], None] | None = None

    def __post_init__(self) -> None:
        require(self.policy in get_args(Policy), "policy", self.policy, f"one of {', '.join(get_args(Policy))}")
        for name, least in (("warmup", 2), ("patience", 1), ("samples", 1)):
            require_int(name, getattr(self, name), least)
        require(0 < self.backoff <= 1, "backoff", self.backoff, "in (0, 1]")
        require(0 < self.largest_input <= math.inf, "largest_input", self.largest_input, "a positive number")
        require(self.on_event is None or callable(self.on_event), "on_event", self.on_event, "a function, or None")
