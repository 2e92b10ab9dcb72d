"""Shares of samples: of correct predictions, and of the most predicted class."""

from __future__ import annotations

from torch import Tensor

from come.metrics.checks import alike


def accuracy(prediction: Tensor, label: Tensor) -> float:
    r"""Share of labelled samples that are predicted right, :math:`\frac{1}{n} \sum_i [\hat y_i = y_i]`.

    Prediction and label are class indices (N,); a negative label marks an outlier, which does not count. NaN if nothing is
    labelled.

    Example:
        >>> import torch
        >>> accuracy(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 0, -1]))
        0.6666666666666666
    """
    alike(prediction=prediction, label=label)
    return labelled_mean(prediction == label, label)


def labelled_mean(values: Tensor, label: Tensor) -> float:
    r"""Mean in float64 over the labelled samples, :math:`\frac{1}{n} \sum_{i : y_i \ge 0} v_i`.

    Values and labels are (N,); a negative label marks an outlier, which does not count. NaN if nothing is labelled.

    Example:
        >>> import torch
        >>> labelled_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0, 3, -1]))
        1.5
    """
    alike(values=values, label=label)
    return values[label >= 0].cpu().double().mean().item()


def dominant_share(prediction: Tensor) -> float:
    r"""Share of the most predicted class, :math:`\max_k \frac{1}{N} |\{i : \hat y_i = k\}|` of class indices (N,).

    A model that collapses predicts ever fewer classes: the share grows towards 1. It is 0 for an empty set.

    Example:
        >>> import torch
        >>> dominant_share(torch.tensor([3, 3, 3, 1]))
        0.75
    """
    alike(prediction=prediction)
    if not len(prediction):
        return 0.0
    return int((prediction == prediction.mode().values).sum()) / len(prediction)
