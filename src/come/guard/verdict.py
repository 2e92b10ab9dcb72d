r"""The adapted model next to the source model on the same samples: has it collapsed?

With the source's probabilities :math:`q`, the labels :math:`\hat y` of the adapted model and :math:`\hat y^0` of the source,

.. math:: \text{confidence} = \frac1n \sum_i q_i(\hat y_i^0), \qquad
          \text{agreement} = \frac{\sum_i q_i(\hat y_i)}{\sum_i q_i(\hat y_i^0)} \in [0, 1]:

how much the source believes of what the adapted model says, relative to what it says itself. A model that has adapted well
contradicts its source where that is unsure anyway; one that has collapsed says what the source rules out. It has collapsed if

    agreement < 0.5, or
    confidence >= 0.85 and confidence x (1 - agreement) > 0.10      where the source is sure, less is forgiven

Whether the adapted model names one class or many plays no part: a stream may hold one class.

Where BatchNorm uses statistics of the batch, an unsure source on its own statistics is no judge of a model on better ones: if
its confidence is below 0.65 and the adapted model names more classes (effective number 1.2 times as large), the first rule
does not count. The weights are then judged by the source's weights under the same statistics. Where the source is sure, the
limit on the loss is 0.04 there: to go back to the source's statistics costs little then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from come.guard.signals import votes
from come.inputs import answered, exact

LIMIT, HEALTHY, WELL, TRIAL = 0.5, 0.6, 0.8, 0.9
"""Agreement below which a model has collapsed; from which it is healthy; from which its weights are worth keeping; from which
statistics of the batch that were given up are used again."""
SURE, LOSS, LOSS_BY_STATISTICS = 0.85, 0.10, 0.04
"""Confidence from which the source is sure, and how much of it the adapted model may lose then."""
UNSURE, MORE = 0.65, 1.2
"""Confidence below which the source is unsure; how many times as many classes a model names that sees more than its source."""


class Verdict(NamedTuple):
    """What was found; of floats on the host, of 0-d tensors on the device."""

    agreement: float
    """With the source model."""
    confidence: float
    """Of the source model, mean of its largest probability."""
    spread: float
    """Effective number of classes that the adapted model (on trial: the trial) names, relative to the source's."""
    other: float
    """Agreement in the second comparison, see `compare`; equal to `agreement` if there is none."""
    samples: float


def compare(
    adapted: Tensor,
    source: Tensor,
    usable: Tensor,
    *,
    same_statistics: Tensor | None = None,
    trial: Tensor | None = None,
) -> Tensor:
    """Sums of one batch, (2K + 5,) float64, on the device: they add up over batches.

    Args:
        adapted: logits (B, K) of the adapted model.
        source: logits (B, K) of the source model on its own statistics.
        usable: (B,) bool, which samples count.
        same_statistics: logits of the source's weights under the statistics of the adapted model, for a second comparison.
        trial: logits of the adapted model under statistics that are not in use, for a second comparison with `source`.
    """
    usable = usable & answered(source)
    given, own = _believed(source, adapted, usable), _believed(source, source, usable)
    other = given, own
    if same_statistics is not None:
        other = _believed(same_statistics, adapted, usable), _believed(same_statistics, same_statistics, usable)
    elif trial is not None:
        other = _believed(source, trial, usable), own
    tail = torch.stack([given, own, usable.sum().double(), *other])
    return torch.cat([votes(adapted if trial is None else trial, usable), votes(source, usable), tail])


def _believed(judge: Tensor, labels_of: Tensor, usable: Tensor) -> Tensor:
    """Sum of the judge's probabilities of the other's labels; an answer of nothing is believed nothing."""
    counts = usable & answered(judge) & answered(labels_of)
    q = exact(judge.nan_to_num(0)).softmax(dim=1).gather(1, labels_of.argmax(dim=1, keepdim=True))
    return torch.where(counts, q.squeeze(1), 0).double().sum()


def judged(sums: Tensor) -> Tensor:
    """The five numbers of a `Verdict`, (5,) float64, on the device."""
    given, own, count, other_given, other_own = sums[-5:]
    mine, theirs = (torch.special.entr(v / v.sum().clamp_min(1)).sum() for v in sums[:-5].chunk(2))
    return torch.stack(
        [
            given / own.clamp_min(1e-12),
            own / count.clamp_min(1),
            torch.exp(mine - theirs),
            other_given / other_own.clamp_min(1e-12),
            count,
        ]
    )


def misled(found: Verdict, statistics: bool) -> bool | Tensor:
    """Whether the source model on its own statistics says that the adapted model has collapsed.

    `statistics`: whether the adapted model is on statistics of the batch.
    """
    loss = LOSS_BY_STATISTICS if statistics else LOSS
    sure = (found.confidence >= SURE) & (found.confidence * (1 - found.agreement) > loss)
    lost = found.agreement < LIMIT
    if statistics:
        lost = lost & ((found.confidence >= UNSURE) | (found.spread <= MORE))
    return sure | lost
