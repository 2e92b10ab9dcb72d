"""How good a classifier is that may abstain where it is not confident."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from come.errors import require
from come.metrics.checks import passing


def aurc(confidence: Tensor, correct: Tensor) -> float:
    r"""Area under the risk-coverage curve: the error among the k most confident, averaged over k.

    .. math:: \mathrm{AURC} = \frac{1}{N} \sum_{k=1}^{N} \frac{1}{k} \sum_{i \le k} [\text{i-th most confident is wrong}]

    Equal confidences are in random order: the value is the expectation over it. The best that any score could do for
    these samples is `aurc(correct, correct)`; what is above it is the excess AURC.

    Args:
        confidence: (N,), larger is more confident.
        correct: (N,) bool.

    Returns:
        in [0, 1], smaller is better. 0 if nothing is wrong (or there is nothing), 1 if nothing is right. The error rate
        if all confidences are equal.

    Example:
        >>> aurc(torch.tensor([0.9, 0.8, 0.1, 0.1]), torch.tensor([True, True, False, True]))  # risks 0, 0, 1/6, 1/4
        0.10416666666666666
    """
    risk = 1 - _accuracy_by_coverage(confidence, correct)
    return risk.sum().item() / max(len(risk), 1)


def abstention_accuracy(confidence: Tensor, correct: Tensor, coverage: float) -> float:
    r"""Accuracy on the most confident share, when the model may abstain on the rest.

    .. math:: \frac{1}{k} \sum_{i \le k} [\text{i-th most confident is right}], \quad k = \lceil \text{coverage} \cdot N \rceil

    Args:
        confidence: (N,), larger is more confident.
        correct: (N,) bool.
        coverage: share of the samples that are answered, in (0, 1].

    Returns:
        in [0, 1]; with equal confidences at the border, the expectation over their random order. 1 for an empty set.

    Example:
        >>> abstention_accuracy(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, True, False, False]), 0.5)
        1.0
    """
    require(0 < coverage <= 1, "coverage", coverage, "in (0, 1]")
    by_coverage = _accuracy_by_coverage(confidence, correct)
    k = math.ceil(coverage * len(by_coverage) - 1e-9)
    return by_coverage[max(k, 1) - 1].item() if len(by_coverage) else 1.0


def _accuracy_by_coverage(confidence: Tensor, correct: Tensor) -> Tensor:
    """Expected accuracy on the k most confident, k = 1..N, over random orders of equal confidences: (N,), float64."""
    passed, hits = passing(confidence, correct=correct)
    sizes = passed.diff()
    right = (hits.diff().double() / sizes).repeat_interleave(sizes).cumsum(0)
    return (right / torch.arange(1, len(right) + 1)).clamp_max(1)
