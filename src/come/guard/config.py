"""What the guard is told to do. What it learns belongs to the adapter, see `come.guard.watch`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from come.errors import require, require_int

Policy = Literal["recover", "freeze", "raise", "warn"]


class Event(NamedTuple):
    """Something that happened."""

    kind: str
    """invalid_samples, update_refused, unanswered, suspicious, healthy, collapse, recovered, raised, statistics, frozen,
    probabilities, callback_failed"""
    step: int
    """Number of the batch, from 0, over the life of the adapter."""
    message: str
    """For an operator: what was seen, against which limit, what was done."""
    details: dict[str, float | str]


@dataclass(frozen=True)
class Guard:
    """Filters invalid inputs, rejects bad updates, detects and undoes collapse.

    A guard is configuration only: one may be given to many adapters.

    Args:
        policy: what to do on a collapse. "recover": back to the source's weights, and a lower learning rate until `reset()`.
            "freeze": answer with the source model from then on. "raise": `CollapseError`. "warn": an event only. Under each
            of them the guard chooses BatchNorm statistics where a method leaves them to it, see `come.guard.verdict`.
        warmup: windows (batches, or 64 samples if that is more) that the bands of the signals are learned from, at least 2.
        patience: windows outside the bands in a row before the source model is asked ahead of time, at least 1.
        samples: how many samples the source is asked about at least, at least 1.
        backoff: largest factor on the learning rate at a recovery, in (0, 1]; n/10,000 if the model has collapsed after n
            windows, so that the new rate lasts.
        largest_input: a sample with an entry beyond this is invalid, > 0.
        on_event: called with each `Event`, after it was logged. What it raises is logged and counted, and stops nothing.

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
        require_int("warmup", self.warmup, 2)
        require_int("patience", self.patience, 1)
        require_int("samples", self.samples, 1)
        require(0 < self.backoff <= 1, "backoff", self.backoff, "in (0, 1]")
        require(0 < self.largest_input <= math.inf, "largest_input", self.largest_input, "a positive number")
        require(self.on_event is None or callable(self.on_event), "on_event", self.on_event, "a function, or None")
