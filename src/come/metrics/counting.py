"""Shares of samples, and what all metrics share: the checks of arguments, and the counts that most are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from come.errors import InputError


def alike(**columns: Tensor) -> None:
    """Raise an `InputError` unless all columns are (N,) with one N."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        found = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"columns must be (N,), all of one length, got {found}")


def no_nan(column: Tensor, name: str = "confidence") -> None:
    """Raise an `InputError` if the column has a NaN, which cannot be ranked."""
    bad = int(column.isnan().sum())
    if bad:
        raise InputError(
            f"{name} is NaN for {bad} of {len(column)} samples; leave those samples out, or replace the NaN first (a "
            "confidence of -inf is the least confident)"
        )


def passing(confidence: Tensor, **flag: Tensor) -> tuple[Tensor, Tensor]:
    """Count the samples, and those with the flag, that pass each threshold, from none to all of them.

    There is one threshold per distinct confidence, and one above all: two int64 tensors of that length, on the CPU.
    """
    alike(confidence=confidence, **flag)
    no_nan(confidence)
    (flagged,) = flag.values()
    value, order = confidence.detach().sort(descending=True)
    last = torch.ones_like(value, dtype=torch.bool)
    last[:-1] = value[1:] != value[:-1]
    hits = flagged.bool()[order].long().cumsum(0)[last]
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cat([zero, last.nonzero()[:, 0].cpu() + 1]), torch.cat([zero, hits.cpu()])


def accuracy(prediction: Tensor, label: Tensor) -> float:
    r"""Share of labelled samples that are predicted right, :math:`\frac{1}{n} \sum_i [\hat y_i = y_i]`.

    Prediction and label are class indices (N,); a negative label marks an outlier, which does not count. NaN if nothing is
    labelled.

    Example:
        >>> accuracy(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 0, -1]))
        0.6666666666666666
    """
    alike(prediction=prediction, label=label)
    return labelled_mean(prediction == label, label)


def labelled_mean(values: Tensor, label: Tensor) -> float:
    r"""Mean in float64 over the labelled samples, :math:`\frac{1}{n} \sum_{i : y_i \ge 0} v_i`.

    Values and labels are (N,); a negative label marks an outlier, which does not count. NaN if nothing is labelled.

    Example:
        >>> labelled_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0, 3, -1]))
        1.5
    """
    alike(values=values, label=label)
    return values[label >= 0].cpu().double().mean().item()


def dominant_share(prediction: Tensor) -> float:
    r"""Share of the most predicted class, :math:`\max_k \frac{1}{N} |\{i : \hat y_i = k\}|` of class indices (N,).

    A model that collapses predicts ever fewer classes: the share grows towards 1. It is 0 for an empty set.

    Example:
        >>> dominant_share(torch.tensor([3, 3, 3, 1]))
        0.75
    """
    alike(prediction=prediction)
    if not len(prediction):
        return 0.0
    return int((prediction == prediction.mode().values).sum()) / len(prediction)
