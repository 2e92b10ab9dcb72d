"""Counters and gauges of a service and of its tenants."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import NamedTuple

OTHER = "(other)"
"""All tenants that have no counters of their own; not a valid name."""
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the time to an answer, in seconds."""
SERVICE = {
    "tenants": ("gauge", "Tenants, on disk included"),
    "resident_tenants": ("gauge", "Tenants in memory"),
    "queued_samples": ("gauge", "Samples that wait"),
    "unwritten_steps": ("gauge", "Steps that a kill would lose now"),
    "refused": ("counter", "Requests refused because the queue was full"),
    "failed": ("counter", "Requests, and steps after an answer, that failed"),
    "evicted": ("counter", "Tenants moved from memory to disk"),
    "restored": ("counter", "Tenants read from disk"),
    "written": ("counter", "States written"),
    "write_errors": ("counter", "States that could not be written"),
}
COUNTERS = ("requests", "samples", "abstained", "steps")
GAUGES = ("uncertainty", "shifted", "unwritten_steps", "agreement", "lr_scale", "collapse")


class Metric(NamedTuple):
    """One number; `kind` is "counter" or "gauge"."""

    kind: str
    name: str
    help: str
    labels: dict[str, str]
    value: float


class Metrics(NamedTuple):
    """All numbers of a service."""

    values: list[Metric]
    answered: list[int]
    """Requests by the time to their answer: up to each of `BUCKETS`, and above."""
    seconds: float
    """Sum of these times."""


class Counts:
    """Counters of a service and of its tenants; the first `labels` tenants have their own until they are deleted.

    Example:
        >>> counts = Counts(labels=1)
        >>> for name in ("north", "south", "east"):
        ...     counts.of(name)["requests"] += 1
        >>> {name: counter["requests"] for name, counter in counts.by_tenant.items()}
        {'north': 1, '(other)': 2}
    """

    def __init__(self, labels: int) -> None:
        self._labels = labels
        self.by_tenant: dict[str, Counter[str]] = {}
        self.answered = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0

    def of(self, name: str) -> Counter[str]:
        """The counters of a tenant, or of the others."""
        own = name in self.by_tenant or len(self.by_tenant) - (OTHER in self.by_tenant) < self._labels
        return self.by_tenant.setdefault(name if own else OTHER, Counter())

    def answer(self, name: str, samples: int, abstained: int, seconds: float) -> None:
        """Count an answer."""
        self.of(name).update(requests=1, samples=samples, abstained=abstained)
        self.answered[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds
