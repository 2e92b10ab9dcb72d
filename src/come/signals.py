r"""What can be seen of a model's health without labels.

Each batch gives five signals: the share of the most predicted class, the entropy and the uncertainty of the objective's
opinion, the norm of the logits, the distance of the weights from the source. `Bands` learns where they usually lie.

Bands only make suspicious; the judge is the source model on the same samples. With its probabilities :math:`q`, the labels
:math:`\hat y` of the adapted model and :math:`\hat y^0` of the source, and :math:`v, v^0` the shares of the classes among them,

.. math:: \text{standing} = \frac{\sum_i q_i(\hat y_i)}{\sum_i q_i(\hat y_i^0)} \cdot \min(1, e^{H(v) - H(v^0)}) \in [0, 1]:

how much the source believes of what the adapted model says, compared with what it says itself, times how many classes the
adapted model still names, compared with those that the source names. A model that has adapted well contradicts its source
where that is unsure anyway; one that has collapsed says what the source rules out. A stream that really holds one class, or a
domain that really is harder, is the same for both.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from come.inputs import exact, together

if TYPE_CHECKING:
    from come.method import Method

SIGNALS = ("share", "entropy", "uncertainty", "norm", "distance")
LOW = {"entropy", "uncertainty"}
"""A collapse lies below the band of these, and above that of the others."""
FIRST = 3
"""Rows that the middle of a band comes from: the weights have hardly moved by then."""


def measure(method: Method, logits: Tensor, usable: Tensor) -> Tensor:
    """The five signals of a batch, (5,) float64, on the device."""
    z = exact(logits)
    count = usable.sum().clamp_min(1)
    mass = method.objective.log_mass(z)  # once for entropy and u
    entropy = -(mass.exp() * mass).sum(dim=1)
    doubt = mass[:, -1].exp() if mass.shape[1] > z.shape[1] else 1 - mass.amax(dim=1).exp()
    means = [torch.where(usable, v, 0).sum() / count for v in (entropy, doubt, torch.linalg.vector_norm(z, dim=1))]
    if method.parameters:
        params = [p.detach() for p in method.parameters.values()]
        moved = torch._foreach_norm(
            torch._foreach_sub(params, [method.source_values[name] for name in method.parameters])
        )
        distance = torch.linalg.vector_norm(together(moved))
    else:
        distance = torch.zeros((), device=z.device)
    return torch.stack([v.double() for v in (_votes(z, usable).max() / count, *means, distance)])


def _votes(logits: Tensor, usable: Tensor) -> Tensor:
    """How many of the `usable` samples (B,) name each class, (B, K) -> (K,) float64."""
    counts = usable.double()
    return counts.new_zeros(logits.shape[1]).index_add_(0, logits.argmax(dim=1), counts)


class Bands:
    """Where each signal usually lies: around its first values, as wide as it jumps from one row to the next.

    A drift in the rows that are learned from moves neither: a model that collapses at once does not teach its own collapse.

    Example:
        >>> bands = Bands(4)
        >>> for entropy in (2.0, 2.1, 1.9, 2.0):
        ...     bands.learn((0.1, entropy, 0.5, 9.0, 0.0))
        >>> bands.ready, bands.outside((0.1, 0.3, 0.5, 9.0, 0.0)), bands.outside((0.1, 1.9, 0.5, 9.0, 0.0))
        (True, ['entropy'], [])
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.rows: list[tuple[float, ...]] = []
        self.seen = 0
        """Rows since the learning began."""
        self._limits: dict[str, float] = {}

    @property
    def ready(self) -> bool:
        """Whether enough has been seen."""
        return len(self.rows) >= self.warmup

    def learn(self, row: tuple[float, ...]) -> None:
        """Take in one row of signals; with the last one the limits are set."""
        self.rows.append(row)
        self.seen += 1
        if not self.ready:
            return
        for name, values in zip(SIGNALS, zip(*self.rows, strict=True), strict=True):
            middle = median(values[:FIRST])
            jump = median(abs(b - a) for a, b in pairwise(values))
            width = max(2.8 * jump, 0.15 * abs(middle), 1e-6)
            self._limits[name] = middle - width if name in LOW else middle + width
        self._limits["distance"] = 2 * max(self.rows[-1][-1], 1e-6)

    def outside(self, row: tuple[float, ...]) -> list[str]:
        """Names of the signals that lie beyond their limit, on the side of a collapse."""
        self.seen += 1
        found = []
        for name, value in zip(SIGNALS, row, strict=True):
            limit = self._limits[name]
            if name == "distance":  # it grows by itself: twice as fast as at first is too fast
                limit *= self.seen / self.warmup
            if (value < limit) if name in LOW else (value > limit):
                found.append(name)
        return found


class Comparison:
    """The adapted model next to its source on the same samples, summed over batches on the device."""

    def __init__(self, sums: Tensor | None = None) -> None:
        self.sums = sums
        """(2K + 3,) float64: how often each one names each class, what the source gives to each one's labels, samples."""

    def add(self, logits: Tensor, source: Tensor, usable: Tensor) -> None:
        """Take in logits (B, K) of both; only `usable` samples (B,) count, if the source has an answer for them."""
        usable = usable & source.isfinite().all(dim=1)
        q = torch.where(usable[:, None], exact(source).softmax(dim=1), 0).double()
        both = exact(logits), exact(source)
        given = [q.gather(1, z.argmax(dim=1, keepdim=True)).sum() for z in both]
        new = torch.cat([*(_votes(z, usable) for z in both), torch.stack([*given, usable.sum().double()])])
        self.sums = new if self.sums is None else self.sums.to(new) + new

    def result(self) -> Tensor:
        """Standing, its two factors (credit and spread), and the number of samples: (4,) float64, on the device."""
        assert self.sums is not None
        given, own, count = self.sums[-3:]
        mine, theirs = (torch.special.entr(v / count.clamp_min(1)).sum() for v in self.sums[:-3].chunk(2))
        spread = torch.exp(mine - theirs)
        credit = given / own.clamp_min(1e-12)
        return torch.stack([credit * spread.clamp_max(1), credit, spread, count])
