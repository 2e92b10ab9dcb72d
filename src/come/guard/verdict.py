r"""What a question to the source model finds: have the weights collapsed, and which BatchNorm statistics serve better?

A question puts a batch to the source's weights, without a gradient: under the source's BatchNorm statistics and, where a method
may use those of the batch, under these too.

**Weights.** The adapted weights are compared with the source's under the same statistics. With the source's probabilities
:math:`q`, the labels :math:`\hat y` of the adapted model and :math:`\hat y^0` of the source,

.. math:: \text{confidence} = \frac1n \sum_i q_i(\hat y_i^0), \qquad
          \text{agreement} = \frac{\sum_i q_i(\hat y_i)}{\sum_i q_i(\hat y_i^0)} \in [0, 1]:

how much the source believes of what the adapted model says, relative to what it says itself. A model that has adapted well
contradicts its source where that is unsure anyway; one that has collapsed says what the source rules out, and names fewer
classes: the more it contradicts, the fewer it need have given up. With the spread, the effective number of classes that the
adapted model names relative to the source's, it has collapsed if

    agreement < 0.5, or
    agreement < 0.95 and spread < 0.85 + 2 (0.95 - agreement), at most 0.95, on 32 samples or more, or
    confidence >= 0.85 and confidence x (1 - agreement) > 0.10  where the source is sure, less is forgiven

Whether the adapted model names one class or many plays no part by itself: a stream may hold one class.

**Statistics.** A shift and a batch of few classes both move the mean of a batch, and both make answers under the two statistics
disagree. What differs is how sure the answers are. Statistics of the batch that undo a shift bring features back to where the
head expects them, and the answers become surer; statistics of a few classes move features away from there, and the answers
become less sure. So the statistics in use are those under which the source's weights are surer, on the same samples:

.. math:: \text{advantage} = \frac1n \sum_i \left(\max p_i^{\text{batch}} - \max p_i^{\text{source}}\right)
          - \max\left(0,\; a - \max(1/8, 1.25/K)\right) + 0.1 \max\left(0,\; a_0 - a\right)

with the probability :math:`a` that two samples of a batch are answered alike under its statistics, and :math:`a_0` under the
source's. The fewer classes come, the more has to be gained; and a model that a shift makes answer one class for all may be sure
of that. The statistics change where the advantage, times n/(n + 64) for n samples, is above 0.01 or below -0.01. Adapted
weights play no part in it, since minimizing an entropy makes any answer surer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from come.guard.signals import votes
from come.model.inputs import answered, at_least_float32

LIMIT, CLOSE, TRIAL = 0.5, 0.95, 0.9
"""Agreement below which a model has collapsed; below which it has if it names fewer classes, too; from which a method without
weights may answer again."""
NARROW, NARROWER, SEVERAL = 0.85, 0.95, 32
"""How many classes a model names at least, relative to the source, if it just contradicts it, and if it does so clearly; on how
many samples that is seen."""
SURE, LOSS = 0.85, 0.10
"""Confidence from which the source is sure, and how much of it the adapted model may lose then."""
ALIKE, MORE = 1 / 8, 1.25
"""Two samples of a batch may be answered alike this often, or so many times as often as K equally frequent classes would be,
before statistics of the batch have to gain more."""
CREDIT = 0.1
"""What it counts for that fewer samples are answered alike."""
SWITCH, DOUBTED = 0.01, 64
"""Advantage from which statistics change; samples without any that are counted with those that were seen."""
CHOICE = 5
"""Of the sums, the last ones are about statistics: they outlast a question."""
KEPT = 0.7
"""How much of them is kept when the next question begins."""


class Verdict(NamedTuple):
    """What was found; of floats on the host, of 0-d tensors on the device."""

    agreement: float
    """Of the adapted model with the source's weights under the same statistics."""
    confidence: float
    """Of these, mean of the largest probability."""
    spread: float
    """Effective number of classes that the adapted model names, relative to theirs."""
    samples: float
    gain: float
    """Mean confidence of the source's weights under statistics of the batch, minus that under the source's."""
    advantage: float
    """See the head of this file, times n/(n + 64); -1 where there is no choice."""


def compare(
    adapted: Tensor,
    source: Tensor,
    usable: Tensor,
    batch: Tensor | None = None,
    running: Tensor | None = None,
    *,
    corrected: bool = False,
) -> Tensor:
    """Sums of one batch, (2K + 8,) float64, on the device: they add up over batches.

    Args:
        adapted: logits (B, K) of the adapted model.
        source: logits (B, K) of the source's weights under the same statistics.
        usable: (B,) bool, which samples count.
        batch: logits (B, K) of the source's weights under statistics of the batch, where there is a choice.
        running: the same under the source's statistics.
        corrected: the answers follow the classes of the batch: that they name fewer says nothing about the weights.
    """
    usable = usable & answered(source)
    given, own = _believed(source, adapted, usable), _believed(source, source, usable)
    mine = votes(source if corrected else adapted, usable)
    found = [mine, votes(source, usable), torch.stack([given, own, usable.sum().double()])]
    if batch is None or running is None:
        return torch.cat([*found, given.new_zeros(CHOICE)])
    both = usable & answered(batch) & answered(running)
    count, named = both.sum().double(), torch.stack([votes(batch, both), votes(running, both)])
    gain = _believed(batch, batch, both) - _believed(running, running, both)
    alike = (named * (named - 1)).sum(dim=1)
    return torch.cat([*found, torch.stack([gain, count, count * (count - 1)]), alike])


def renewed(sums: Tensor) -> Tensor:
    """Sums as the next question begins with: what was found about the weights is forgotten, of the statistics a part is kept.

    Example:
        >>> renewed(torch.ones(10, dtype=torch.float64)).tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.7, 0.7, 0.7, 0.7, 0.7]
    """
    return torch.cat([torch.zeros_like(sums[:-CHOICE]), KEPT * sums[-CHOICE:]])


def _believed(judge: Tensor, labels_of: Tensor, usable: Tensor) -> Tensor:
    """Sum of the judge's probabilities of the other's labels; non-finite answers count as zero."""
    counts = usable & answered(judge) & answered(labels_of)
    q = at_least_float32(judge.nan_to_num(0)).softmax(dim=1).gather(1, labels_of.argmax(dim=1, keepdim=True))
    return torch.where(counts, q.squeeze(1), 0).double().sum()


def judged(sums: Tensor) -> Tensor:
    """The six numbers of a `Verdict`, (6,) float64, on the device."""
    (given, own, count), (gain, seen, pairs, *alike) = sums[-CHOICE - 3 : -CHOICE], sums[-CHOICE:]
    named = sums[: -CHOICE - 3].chunk(2)
    mine, theirs = (torch.special.entr(v / v.sum().clamp_min(1)).sum() for v in named)
    batch, source = (value / pairs.clamp_min(1) for value in alike)
    trust, gain = seen / (seen + DOUBTED), gain / seen.clamp_min(1)
    price = (batch - max(ALIKE, MORE / len(named[0]))).clamp_min(0)
    advantage = trust * (gain - price + CREDIT * (source - batch).clamp_min(0))
    return torch.stack(
        [
            given / own.clamp_min(1e-12),
            own / count.clamp_min(1),
            torch.exp(mine - theirs),
            count,
            gain,
            torch.where(pairs > 0, advantage, -1),
        ]
    )


def collapsed(found: Verdict) -> bool | Tensor:
    """Whether the source's weights say that the adapted ones have collapsed."""
    lost = found.agreement < LIMIT
    sure = (found.confidence >= SURE) & (found.confidence * (1 - found.agreement) > LOSS)
    return lost | sure | narrow(found)


def narrow(found: Verdict) -> bool | Tensor:
    """Whether the adapted model contradicts the source's weights, and names fewer classes."""
    few = (found.spread < NARROWER) & (found.spread < NARROW + 2 * (CLOSE - found.agreement))
    return (found.agreement < CLOSE) & few & (found.samples >= SEVERAL)


def surer(found: Verdict, trusted: bool) -> bool | Tensor:
    """Whether to use statistics of the batch, if they are in use now (`trusted`) or not."""
    return found.advantage > (-SWITCH if trusted else SWITCH)
