"""Shares of samples: of right predictions, and of the class that is predicted most."""

from __future__ import annotations

from torch import Tensor

from come.metrics.checks import alike


def accuracy(prediction: Tensor, label: Tensor) -> float:
    r"""Share of labelled samples that are predicted right: :math:`\frac{1}{n} \sum_i [\hat y_i = y_i]`.

    Args:
        prediction: (N,) class indices.
        label: (N,) class indices; negative marks an outlier, which has no label and does not count.

    Returns:
        in [0, 1]; NaN if nothing is labelled.

    Example:
        >>> import torch
        >>> accuracy(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 0, -1]))
        0.6666666666666666
    """
    alike(prediction=prediction, label=label)
    return labelled_mean(prediction == label, label)


def labelled_mean(values: Tensor, label: Tensor) -> float:
    r"""Mean over the labelled samples: :math:`\frac{1}{n} \sum_{i : y_i \ge 0} v_i`.

    Args:
        values: (N,), for example of `nll` or `brier`.
        label: (N,) class indices; negative marks an outlier, which does not count.

    Returns:
        the mean, in float64; NaN if nothing is labelled.

    Example:
        >>> import torch
        >>> labelled_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0, 3, -1]))
        1.5
    """
    alike(values=values, label=label)
    return values[label >= 0].cpu().double().mean().item()


def dominant_share(prediction: Tensor) -> float:
    r"""Share of the class that is predicted most: :math:`\max_k \frac{1}{N} |\{i : \hat y_i = k\}|`.

    A model that collapses predicts ever fewer classes: the share grows towards 1.

    Args:
        prediction: (N,) class indices.

    Returns:
        in [0, 1]; 0 for an empty set.

    Example:
        >>> import torch
        >>> dominant_share(torch.tensor([3, 3, 3, 1]))
        0.75
    """
    alike(prediction=prediction)
    if not len(prediction):
        return 0.0
    return int((prediction == prediction.mode().values).sum()) / len(prediction)
