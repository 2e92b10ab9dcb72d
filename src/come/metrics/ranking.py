"""How well a confidence ranks: correct samples above wrong ones, or inliers above outliers."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from come.errors import require
from come.metrics.counting import alike, passing


def fpr(confidence: Tensor, correct: Tensor, *, accept: float = 0.95) -> float:
    r"""The paper's FPR: share of wrong samples that pass the threshold which accepts 95% of the correct ones.

    "Wrong" are misclassified samples and outliers. The threshold t is the one of the detection-error curve at which the share
    of correct samples with a confidence of at most t is nearest to 5%;

    .. math:: \mathrm{FPR} = |\{i \text{ wrong} : c_i > t\}| \,/\, |\{i \text{ wrong}\}|

    and 1 if the nearest share is above 10% (a collapsed score). This is not OpenOOD's FPR95, which puts all in-distribution
    samples on one side: that is `fpr95`.

    Args:
        confidence: (N,), larger is more confident. A NaN counts as the least confident.
        correct: (N,) bool; false for misclassified samples and for outliers.
        accept: share of the correct samples to accept, in (0, 1).

    Returns:
        in [0, 1], smaller is better. 0 if nothing is wrong, 1 if nothing is correct.

    Example:
        >>> confidence = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.3, 0.2])
        >>> fpr(confidence, torch.tensor([True, True, True, True, False, False]))
        0.0
    """
    alike(confidence=confidence, correct=correct)
    n_right = int(correct.sum())
    n_wrong = len(correct) - n_right
    if not n_wrong:
        return 0.0
    if not n_right:
        return 1.0
    # The detection-error curve of "wrong" by the score -confidence: one point per distinct score, and one at infinity.
    score = -confidence.double()
    passed, alarms = passing(score.where(~score.isnan(), math.inf), correct=correct)  # alarms are right samples
    found = passed - alarms
    first = int((alarms == 0).sum()) - 1  # of the points without a false alarm only the last counts
    end = int((found < n_wrong).sum()) + 1  # and none after the first that finds everything
    rate, missed = alarms[first:end].double() / n_right, (n_wrong - found[first:end]).double() / n_wrong
    # Nearest to 5%; of equally near ones the one with the lowest threshold.
    nearest = len(rate) - 1 - int((rate.flip(0) - (1 - accept)).abs().argmin())
    return 1.0 if rate[nearest] > 2 * (1 - accept) else missed[nearest].item()


def fpr95(confidence: Tensor, inlier: Tensor, *, accept: float = 0.95) -> float:
    r"""OpenOOD's FPR at 95% TPR: share of outliers that pass the threshold which accepts 95% of all inliers.

    .. math:: \mathrm{FPR95} = |\{i \text{ outlier} : c_i \ge t\}| \,/\, |\{i \text{ outlier}\}|

    where t is the largest confidence such that at least 95% of the inliers have a confidence of at least t. Inliers are all
    samples of the known classes, right or wrong: this is not the paper's `fpr`. It is OpenOOD's `fpr_recall`; the tables of
    its later versions have outliers as positives (`auc_and_fpr_recall`: the share of inliers that are rejected with 95% of the
    outliers), which is `fpr95(-c, ~inlier)`.

    Args:
        confidence: (N,), larger is more confident.
        inlier: (N,) bool; false for outliers.
        accept: share of the inliers to accept, in (0, 1].

    Returns:
        in [0, 1], smaller is better. 0 without outliers; otherwise 1 without inliers, and 1 if all confidences are equal.

    Example:
        >>> fpr95(torch.tensor([0.9, 0.8, 0.4, 0.6, 0.3]), torch.tensor([True, True, True, False, False]))
        0.5
    """
    require(0 < accept <= 1, "accept", accept, "in (0, 1]")
    passed, inliers = passing(confidence, inlier=inlier)
    outliers = passed - inliers
    if not outliers[-1]:
        return 0.0
    if not inliers[-1]:
        return 1.0
    at = int((inliers.double() / inliers[-1] < accept).sum())
    return int(outliers[at]) / int(outliers[-1])


def auroc(confidence: Tensor, positive: Tensor) -> float:
    r"""Area under the ROC curve: the probability that a positive is more confident than a negative, ties half.

    .. math:: \mathrm{AUROC} = P(c_+ > c_-) + \tfrac{1}{2} P(c_+ = c_-)

    Confidence (N,) and positive (N,) bool: correct or wrong samples, inliers or outliers. The result is in [0, 1], larger is
    better; 0.5 if all confidences are equal, and if there is no positive or no negative.

    Example:
        >>> auroc(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([True, True, False, False]))
        0.875
    """
    passed, hits = passing(confidence, positive=positive)
    alarms = passed - hits
    pairs = int(hits[-1]) * int(alarms[-1])
    return int((alarms.diff() * (hits[1:] + hits[:-1])).sum()) / (2 * pairs) if pairs else 0.5


def aupr(confidence: Tensor, positive: Tensor, *, interpolation: Literal["step", "trapezoid"] = "step") -> float:
    r"""Area under the precision-recall curve, over recalls R and precisions P at the distinct confidences.

    .. math:: \mathrm{AUPR} = \sum_j (R_j - R_{j-1}) P_j
              \quad\text{or}\quad \sum_j (R_j - R_{j-1}) \tfrac{1}{2} (P_j + P_{j-1}), \; P_0 = 1

    The "step" form is scikit-learn's average precision. The "trapezoid" form, which is published for COME and OpenOOD, is too
    high where many confidences are equal. With inliers as positives, `aupr(c, inlier)` is the AUPR-in and `aupr(-c, ~inlier)`
    the AUPR-out. Confidence (N,) and positive (N,) bool as in `auroc`.

    Returns:
        in [0, 1], larger is better. 0 if there is no positive, 1 if there is no negative. If all confidences are equal, the
        share s
        of positives, or (1 + s) / 2 for the trapezoid.

    Example:
        >>> aupr(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([True, True, False, False]))
        0.8333333333333333
    """
    require(interpolation in ("step", "trapezoid"), "interpolation", interpolation, '"step" or "trapezoid"')
    passed, hits = passing(confidence, positive=positive)
    if not hits[-1]:
        return 0.0
    precision = torch.cat([torch.ones(1, dtype=torch.float64), hits[1:].double() / passed[1:]])
    height = precision[1:] if interpolation == "step" else (precision[1:] + precision[:-1]) / 2
    return (hits.diff() * height).sum().item() / int(hits[-1])
