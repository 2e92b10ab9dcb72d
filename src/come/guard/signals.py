"""What can be seen of a model's health without labels, and where it usually lies.

Each batch gives six signals: the share of the most predicted class, the entropy and the uncertainty of the objective's mass,
the norm of the logits, the distance of the weights from the source, and the confidence, the mean of the largest softmax
probability. `Bands` learns where the first five usually lie. A signal outside its band, or a confidence that has changed, only
makes suspicious; `come.guard.verdict` judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from come.model.inputs import answered, at_least_float32
from come.objectives import Objective
from come.state.trees import replace

SIGNALS = ("share", "entropy", "uncertainty", "norm", "distance", "confidence")
BANDED = SIGNALS[:-1]
LOW = {"entropy", "uncertainty"}
"""A collapse lies below the band of these, and above that of the others."""
FIRST = 3
"""Rows that the middle of a band comes from: the weights have hardly moved by then."""


def observe(
    objective: Objective,
    logits: Tensor,
    valid: Tensor,
    ok: Tensor,
    weights: Tensor,
    source: Tensor,
    closely: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which samples have a usable answer (B,), whether the update may be kept (0-d), and what is reported: (10,) float64.

    Args:
        objective: whose entropy and uncertainty.
        logits: (B, K).
        valid: (B,) bool, which samples could be put to the model.
        ok: 0-d bool, whether the update was sound so far.
        weights: (P,) adapted.
        source: (P,) of the source.
        closely: whether to look for probabilities, too.
    """
    usable, counts = look(logits, valid, closely)
    # Where nobody has an answer the method is not to blame, but nothing may be learned from it either.
    ok = ok & (counts[1] == 0)
    signals = measure(objective, logits, usable, weights, source)
    return usable, ok, torch.cat([ok[None].to(signals), counts.to(signals), signals])


def look(logits: Tensor, valid: Tensor, closely: bool) -> tuple[Tensor, Tensor]:
    """Which samples have a usable answer (B,); and how many are invalid, how many unanswered, and whether these are
    probabilities: (3,).

    Args:
        logits: (B, K).
        valid: (B,) bool, which samples could be put to the model.
        closely: whether to look for probabilities, too.
    """
    usable = valid & answered(logits)
    counts = torch.stack([~valid, valid & ~usable]).sum(dim=1).to(at_least_float32(logits).dtype)
    if not closely:
        return usable, F.pad(counts, (0, 1))
    z = at_least_float32(logits)
    probabilities = (z >= 0).all() & ((z.sum(dim=1) - 1).abs() < 1e-3).all()
    return usable, torch.cat([counts, probabilities.to(counts)[None]])


def measure(objective: Objective, logits: Tensor, usable: Tensor, weights: Tensor, source: Tensor) -> Tensor:
    """The six signals of a batch, (6,) float64, on the device.

    Args:
        objective: whose entropy and uncertainty.
        logits: (B, K).
        usable: (B,) bool, which samples count.
        weights: (P,) adapted.
        source: (P,) of the source.
    """
    z = at_least_float32(logits)
    count = usable.sum().clamp_min(1)
    mass = objective.log_mass(z)  # once for entropy and u
    chances = mass.exp()
    entropy = -(chances * mass).sum(dim=1)
    doubt = chances[:, -1] if mass.shape[1] > z.shape[1] else 1 - chances.amax(dim=1)
    size = torch.linalg.vector_norm(z.masked_fill(z.isneginf(), 0), dim=1)
    means = torch.where(usable, torch.stack([entropy, doubt, size.to(entropy)]), 0).sum(dim=1) / count
    most = votes(z, usable).max() / count
    distance = torch.linalg.vector_norm(weights - source)
    sure = torch.where(usable, z.softmax(dim=1).amax(dim=1), 0).sum() / count
    return torch.cat([most[None], means.double(), torch.stack([distance, sure]).double()])


def votes(logits: Tensor, usable: Tensor) -> Tensor:
    """How many of the `usable` samples (B,) name each class, (B, K) -> (K,) float64."""
    counts = usable.double()
    return counts.new_zeros(logits.shape[1]).scatter_add(0, logits.argmax(dim=1), counts)


@dataclass(frozen=True)
class Bands:
    """Where each signal usually lies: around its first values, as wide as it jumps from one row to the next.

    A drift in the rows that are learned from moves neither: a model that collapses at once does not teach its own collapse.

    Example:
        >>> bands = Bands(4)
        >>> for entropy in (2.0, 2.1, 1.9, 2.0):
        ...     bands = bands.learned((0.1, entropy, 0.5, 9.0, 0.0, 0.6))
        >>> bands.ready, bands.outside((0.1, 0.3, 0.5, 9.0, 0.0, 0.6)), bands.outside((0.1, 1.9, 0.5, 9.0, 0.0, 0.6))
        (True, {'entropy': 1.7}, {})
    """

    warmup: int
    rows: tuple[tuple[float, ...], ...] = ()
    seen: int = 0
    """Rows since the learning began."""

    @property
    def ready(self) -> bool:
        """Whether enough has been seen."""
        return len(self.rows) >= self.warmup

    def learned(self, row: tuple[float, ...]) -> Bands:
        """With one more row of signals, which is learned from until enough have been seen."""
        rows = self.rows if self.ready else (*self.rows, row)
        return replace(self, rows=rows, seen=self.seen + 1)

    def limits(self) -> dict[str, float]:
        """How far each signal may go."""
        found = {}
        for name, values in zip(BANDED, zip(*self.rows, strict=True), strict=False):
            middle = median(values[:FIRST])
            jump = median(abs(b - a) for a, b in pairwise(values))
            width = max(2.8 * jump, 0.15 * abs(middle), 1e-6)
            found[name] = middle - width if name in LOW else middle + width
        # The distance grows by itself: twice as fast as at first is too fast.
        found["distance"] = 2 * max(self.rows[-1][SIGNALS.index("distance")], 1e-6) * self.seen / self.warmup
        return found

    def outside(self, row: tuple[float, ...]) -> dict[str, float]:
        """The signals that lie beyond their limit, on the side of a collapse, and that limit."""
        return {
            name: round(limit, 12)
            for value, (name, limit) in zip(row, self.limits().items(), strict=False)
            if (value < limit if name in LOW else value > limit)
        }
