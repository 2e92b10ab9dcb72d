"""How good a classifier is that may abstain where it is not confident."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from come.errors import require
from come.metrics.counting import passing
from come.metrics.scores import SCORES, Rows, require_score


def aurc(confidence: Tensor, correct: Tensor) -> float:
    r"""Area under the risk-coverage curve: the error among the k most confident samples, averaged over k.

    .. math:: \mathrm{AURC} = \frac{1}{N} \sum_{k=1}^{N} \frac{1}{k} \sum_{i \le k} [\text{i-th most confident is wrong}]

    Confidence (N,) and correct (N,) bool. Equal confidences are in random order: the value is the expectation over it, the
    error rate if all are equal. It is in [0, 1], smaller is better; 0 for an empty set. The best that any score could do for
    these samples is `aurc(correct, correct)`; the rest is the excess AURC.

    Example:
        >>> aurc(torch.tensor([0.9, 0.8, 0.1, 0.1]), torch.tensor([True, True, False, True]))  # risks 0, 0, 1/6, 1/4
        0.10416666666666666
    """
    risk = risk_by_coverage(confidence, correct)
    return risk.sum().item() / max(len(risk), 1)


def abstention_accuracy(confidence: Tensor, correct: Tensor, coverage: float) -> float:
    r"""Accuracy on the most confident share, when the model may abstain on the rest.

    .. math:: \frac{1}{k} \sum_{i \le k} [\text{i-th most confident is right}], \quad k = \lceil \text{coverage} \cdot N \rceil

    Confidence (N,), correct (N,) bool, and a coverage in (0, 1]. With equal confidences at the border it is the expectation
    over their random order; 1 for an empty set.

    Example:
        >>> abstention_accuracy(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, True, False, False]), 0.5)
        1.0
    """
    require(0 < coverage <= 1, "coverage", coverage, "in (0, 1]")
    accuracies = _accuracy_by_coverage(confidence, correct)
    k = math.ceil(coverage * len(accuracies) - 1e-9)
    return accuracies[max(k, 1) - 1].item() if len(accuracies) else 1.0


def risk_by_coverage(confidence: Tensor, correct: Tensor) -> Tensor:
    r"""The risk-coverage curve: the error among the k most confident samples, at coverage k / N.

    .. math:: r_k = \frac{1}{k} \sum_{i \le k} [\text{i-th most confident is wrong}]

    Confidence (N,) and correct (N,) bool give (N,) float64, k = 1..N; with equal confidences, the expectation over their
    random order.

    Example:
        >>> risk_by_coverage(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, True, False, True]))
        tensor([0.0000, 0.0000, 0.3333, 0.2500], dtype=torch.float64)
    """
    return 1 - _accuracy_by_coverage(confidence, correct)


def selective(
    rows: Rows, *, score: str = "confidence", outliers: bool = True, coverages: Sequence[float] = (0.5, 0.8, 0.9)
) -> dict[str, float]:
    """AURC, and the accuracy at some coverages ("accuracy_at_50"), of the rows of a run.

    Args:
        rows: label and prediction, (N,), and the column of the score.
        score: a name in `SCORES`.
        outliers: count an answered outlier as an error; False leaves outliers out.
        coverages: shares of the samples to answer.

    Example:
        >>> rows = {"label": torch.tensor([0, 1, -1]), "prediction": torch.tensor([0, 1, 0])}
        >>> rows["softmax"] = torch.tensor([0.9, 0.6, 0.8])
        >>> selective(rows, score="softmax")["accuracy_at_50"]
        0.5
        >>> selective(rows, score="softmax", outliers=False)["accuracy_at_50"]
        1.0
    """
    require_score(score)
    label, confidence = rows["label"], SCORES[score](rows)
    correct = (label >= 0) & (rows["prediction"] == label)
    if not outliers:
        confidence, correct = confidence[label >= 0], correct[label >= 0]
    found = {f"accuracy_at_{100 * share:g}": abstention_accuracy(confidence, correct, share) for share in coverages}
    return {"aurc": aurc(confidence, correct), **found}


def _accuracy_by_coverage(confidence: Tensor, correct: Tensor) -> Tensor:
    """Expected accuracy on the k most confident, k = 1..N, over random orders of equal confidences: (N,), float64."""
    passed, hits = passing(confidence, correct=correct)
    sizes = passed.diff()
    right = (hits.diff().double() / sizes).repeat_interleave(sizes).cumsum(0)
    return (right / torch.arange(1, len(right) + 1)).clamp_max(1)
