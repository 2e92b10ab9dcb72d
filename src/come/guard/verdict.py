r"""The source check: has the adapted model collapsed, and which BatchNorm statistics are better?

A check runs the source weights on the batch, without gradients: under the source's BatchNorm statistics and, where the guard
chooses statistics, under the batch's too.

**Collapse.** The adapted weights are compared with the source's under the same statistics. With the source's probabilities
:math:`q`, the adapted model's predictions :math:`\hat y` and the source's :math:`\hat y^0`,

.. math:: \text{confidence} = \frac1n \sum_i q_i(\hat y_i^0), \qquad
          \text{agreement} = \frac{\sum_i q_i(\hat y_i)}{\sum_i q_i(\hat y_i^0)} \in [0, 1].

A model that has adapted well disagrees where the source is unsure; a collapsed one predicts what the source rules out, and
fewer classes. With the spread, the effective number of predicted classes relative to the source's, a model has collapsed if

    agreement < 0.5, or
    agreement < 0.95 and spread < 0.85 + 2 (0.95 - agreement), at most 0.95, on 32 samples or more, or
    confidence >= 0.85 and confidence x (1 - agreement) > 0.10

The number of predicted classes does not matter by itself: a stream may hold one class.

**Statistics.** A shift and a batch of few classes both move the batch mean. Batch statistics that undo a shift bring features
back to where the head expects them, and the source weights become more confident; statistics of few classes make them less
confident. So the guard uses the statistics under which the source weights are more confident, on the same samples:

.. math:: \text{advantage} = \frac1n \sum_i \left(\max p_i^{\text{batch}} - \max p_i^{\text{source}}\right)
          - \max\left(0,\; a - \max(1/8, 1.25/K)\right) + 0.1 \max\left(0,\; a_0 - a\right)

with the probability :math:`a` that two samples of a batch get the same prediction under the batch's statistics, and :math:`a_0`
under the source's: few classes must gain more, and a source that predicts one class for everything may be confident of it. The
statistics change where the advantage, times n/(n + 64) for n samples, is above 0.01 or below -0.01. Adapted weights play no
part, since minimizing an entropy makes any answer more confident.

**Positions.** Where the answer to a sample has several positions (the pixels of an image), n counts samples: the positions of a
batch count alike and together as many as it has samples, because those of one image say much the same. One class may cover most
of every image, so nothing is compared with equal shares: the spread is relative to the source's as always, a is the probability
that two positions of a batch get the same prediction, and only what exceeds the source's own :math:`a_0` must gain more:
:math:`\max(0, a - \max(1/8, 1.25/K, a_0))`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from come.guard.signals import votes
from come.model.inputs import answered, at_least_float32
from come.model.positions import anywhere, parts

LIMIT = 0.5  # agreement below which a model has collapsed
CLOSE, SEVERAL = 0.95, 32  # agreement below which it has if it also predicts fewer classes; on at least so many samples
NARROW, NARROWER = 0.85, 0.95  # spread that counts as fewer classes if it barely disagrees, and if it clearly does
SURE, LOSS = 0.85, 0.10  # confidence from which the source is sure, and how much of it the adapted model may then lose
TRIAL = 0.9  # agreement from which a method without weights, replaced by the source after a collapse, answers again
ALIKE, MORE = 1 / 8, 1.25  # batch statistics must gain more where a exceeds this, and 1.25 / K
CREDIT = 0.1  # weight of a lower a than the source's
SWITCH = 0.01  # advantage from which statistics change
DOUBTED = 64  # samples without advantage that are added to those seen
CHOICE, KEPT = 5, 0.7  # the last five sums are about statistics: this part of them is kept from check to check


class Verdict(NamedTuple):
    """The result of a source check, see the module's docstring: floats on the host, 0-d tensors on the device."""

    agreement: float
    confidence: float
    spread: float
    samples: float
    gain: float  # mean confidence of the source weights under batch statistics, minus that under the source's
    advantage: float  # times n/(n + 64); -1 where there is no choice


def compare(
    adapted: Tensor,
    source: Tensor,
    usable: Tensor,
    batch: Tensor | None = None,
    running: Tensor | None = None,
    *,
    positions: tuple[int, ...] = (),
    corrected: bool = False,
) -> Tensor:
    """Sums over the `usable` rows (N,) of a batch, (2K + 8,) float64, on the device; sums of several batches are added.

    Args:
        adapted: logits (N, K) of the adapted model.
        source: those of the source weights under the same statistics.
        batch: those under batch statistics, where the guard chooses statistics; `running`: under the source's.
        positions: of the rows of one sample; together they count as one sample.
        corrected: the method corrects predictions by the classes of the batch: predicting fewer is no sign of collapse.
    """
    usable = usable & answered(source)
    given, own = _believed(source, adapted, usable), _believed(source, source, usable)
    mine, theirs, count = votes(source if corrected else adapted, usable), votes(source, usable), usable.sum().double()
    each = _each(usable, positions)
    if each is not None:
        mine, theirs, given, own, count = (value * each for value in (mine, theirs, given, own, count))
    found = [mine, theirs, torch.stack([given, own, count])]
    if batch is None or running is None:
        return torch.cat([*found, given.new_zeros(CHOICE)])
    both = usable & answered(batch) & answered(running)
    count, named = both.sum().double(), torch.stack([votes(batch, both), votes(running, both)])
    gain = _believed(batch, batch, both) - _believed(running, running, both)
    each = _each(both, positions)
    if each is None:
        pairs, alike = count * (count - 1), (named * (named - 1)).sum(dim=1)
    else:  # pairs of positions, in units of pairs of samples
        gain, count, named = gain * each, count * each, named * each
        pairs, alike = count.square(), named.square().sum(dim=1)
    return torch.cat([*found, torch.stack([gain, count, pairs]), alike])


def _each(usable: Tensor, positions: tuple[int, ...]) -> Tensor | None:
    """What one of the rows (N,) counts, 0-d float64, in samples; None if each is a sample."""
    if math.prod(positions) == 1:
        return None
    return anywhere(usable, positions).sum().double() / usable.sum().clamp_min(1)


def renewed(sums: Tensor) -> Tensor:
    """The sums that the next check starts with: nothing about collapse, and a part of those about statistics.

    Example:
        >>> renewed(torch.ones(10, dtype=torch.float64)).tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.7, 0.7, 0.7, 0.7, 0.7]
    """
    return torch.cat([torch.zeros_like(sums[:-CHOICE]), KEPT * sums[-CHOICE:]])


def _believed(judge: Tensor, labels_of: Tensor, usable: Tensor) -> Tensor:
    """Sum of the first logits' probabilities of the second's predictions; non-finite answers count as zero."""
    counts = usable & answered(judge) & answered(labels_of)
    labels = labels_of.argmax(dim=1, keepdim=True)
    found = []
    for z, label, counted in parts(judge, labels, counts):
        q = at_least_float32(z.nan_to_num(0)).softmax(dim=1).gather(1, label)
        found.append(torch.where(counted, q.squeeze(1), 0).double().sum())
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def judged(sums: Tensor, dense: bool = False) -> Tensor:
    """The fields of a `Verdict`, (6,) float64, on the device; `dense`: the samples have several positions."""
    (given, own, count), (gain, seen, pairs, *alike) = sums[-CHOICE - 3 : -CHOICE], sums[-CHOICE:]
    named = sums[: -CHOICE - 3].chunk(2)
    mine, theirs = (torch.special.entr(v / v.sum().clamp_min(1)).sum() for v in named)
    batch, source = (value / pairs.clamp_min(1) for value in alike)
    trust, gain = seen / (seen + DOUBTED), gain / seen.clamp_min(1)
    usual = max(ALIKE, MORE / len(named[0]))
    price = (batch - (source.clamp_min(usual) if dense else usual)).clamp_min(0)
    advantage = torch.where(pairs > 0, trust * (gain - price + CREDIT * (source - batch).clamp_min(0)), -1)
    agreement, confidence = given / own.clamp_min(1e-12), own / count.clamp_min(1)
    return torch.stack([agreement, confidence, torch.exp(mine - theirs), count, gain, advantage])


def collapsed(found: Verdict) -> bool | Tensor:
    """Whether the adapted weights have collapsed."""
    sure = (found.confidence >= SURE) & (found.confidence * (1 - found.agreement) > LOSS)
    return (found.agreement < LIMIT) | sure | narrow(found)


def narrow(found: Verdict) -> bool | Tensor:
    """Whether the adapted model disagrees with the source and predicts fewer classes."""
    few = (found.spread < NARROWER) & (found.spread < NARROW + 2 * (CLOSE - found.agreement))
    return (found.agreement < CLOSE) & few & (found.samples >= SEVERAL)


def surer(found: Verdict, trusted: bool) -> bool | Tensor:
    """Whether to use batch statistics, given whether they are in use now (`trusted`)."""
    return found.advantage > (-SWITCH if trusted else SWITCH)
