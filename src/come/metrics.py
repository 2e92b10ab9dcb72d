"""What a run is judged by, on one-dimensional tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from come.errors import InputError


def accuracy(prediction: Tensor, label: Tensor) -> float:
    r"""Share of labelled samples that are predicted right: :math:`\frac{1}{n} \sum_i [\hat y_i = y_i]`.

    Args:
        prediction: (N,) class indices.
        label: (N,) class indices; negative marks an outlier, which has no label and does not count.

    Returns:
        in [0, 1]; NaN if nothing is labelled.

    Example:
        >>> accuracy(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 0, -1]))
        0.6666666666666666
    """
    labelled = label >= 0
    if not labelled.any():
        return float("nan")
    return (prediction[labelled] == label[labelled]).double().mean().item()


def fpr(confidence: Tensor, correct: Tensor, *, accept: float = 0.95) -> float:
    r"""The paper's FPR: share of wrong samples that pass the threshold which accepts 95% of the right ones.

    "Wrong" are misclassified samples and outliers. The threshold t is the one of the detection-error curve at which the
    share of right samples with a confidence of at most t is nearest to 5%;

    .. math:: \mathrm{FPR} = |\{i \text{ wrong} : c_i > t\}| \,/\, |\{i \text{ wrong}\}|

    and 1 if the nearest share is above 10% (a collapsed score). This is not OpenOOD's FPR95, which puts all
    in-distribution samples on one side.

    Args:
        confidence: (N,), larger is more confident.
        correct: (N,) bool; false for misclassified samples and for outliers.
        accept: share of the right samples to accept, in (0, 1).

    Returns:
        in [0, 1], smaller is better. 0 if nothing is wrong, 1 if nothing is right.

    Example:
        >>> confidence = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.3, 0.2])
        >>> fpr(confidence, torch.tensor([True, True, True, True, False, False]))
        0.0
    """
    if confidence.shape != correct.shape or confidence.ndim != 1:
        raise InputError(
            f"confidence has shape {tuple(confidence.shape)} and correct {tuple(correct.shape)}; both must be (N,)"
        )
    wrong = ~correct
    n_right, n_wrong = int(correct.sum()), int(wrong.sum())
    if not n_wrong:
        return 0.0
    if not n_right:
        return 1.0
    # The detection-error curve of "wrong" by the score -confidence: one point per distinct score, and one at infinity.
    score, order = (-confidence.double()).sort(descending=True, stable=True)
    last = torch.cat([score[1:] != score[:-1], torch.ones(1, dtype=torch.bool, device=score.device)])
    zero = torch.zeros(1, dtype=torch.int64, device=score.device)
    alarms = torch.cat([zero, correct[order].long().cumsum(0)[last]])  # right samples at or above each threshold
    found = torch.cat([zero, wrong[order].long().cumsum(0)[last]])  # wrong ones
    first = int((alarms == 0).sum()) - 1  # of the points without a false alarm only the last counts
    end = int((found < n_wrong).sum()) + 1  # and none behind the first that finds everything
    rate, missed = alarms[first:end].double() / n_right, (n_wrong - found[first:end]).double() / n_wrong
    # Nearest to 5%; of equally near ones the one with the lowest threshold.
    nearest = len(rate) - 1 - int((rate.flip(0) - (1 - accept)).abs().argmin())
    return 1.0 if rate[nearest] > 2 * (1 - accept) else missed[nearest].item()
