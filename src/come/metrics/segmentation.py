"""Metrics over positions: of the pixels of images, or the points of clouds.

Positions are many, so nothing here keeps them: `confusion` and `binned` count what a batch holds, image by image, and all
metrics follow from the counts, of one image or of a sum over many.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from come.errors import InputError, require, require_int

IGNORED = -1
"""The label of positions that do not count."""

_STEPS = torch.arange(41, dtype=torch.float64)
EDGES = torch.cat([_STEPS[:15] / 15, 1 - 10 ** (-_STEPS[1:] / 8) / 15, _STEPS[1:2]])
"""Borders of the bins of confidence, (56,): the 15 of the ECE, the last of them cut into 41, ever finer towards 1."""

BINS = len(EDGES) - 1


def confusion(prediction: Tensor, label: Tensor, num_classes: int, *, ignore: int = IGNORED) -> Tensor:
    r"""How often each class is predicted as each: :math:`C_{ij} = |\{p : y_p = i, \hat y_p = j\}|`, for each image.

    Args:
        prediction: (B, ...) class indices.
        label: (B, ...), the same shape.
        num_classes: K.
        ignore: the label of positions that do not count.

    Returns:
        (B, K, K) int64; sum over B for a data set.

    Raises:
        InputError: another label, or a prediction, is none of the K classes.

    Example:
        >>> label = torch.tensor([[[0, 1], [1, -1]]])
        >>> confusion(torch.tensor([[[0, 1], [0, 0]]]), label, 2)
        tensor([[[1, 0],
                 [1, 1]]])
    """
    require_int("num_classes", num_classes, 1)
    if prediction.shape != label.shape or label.ndim < 1:
        raise InputError(
            f"prediction and label must have one shape (B, ...), got {tuple(prediction.shape)} and {tuple(label.shape)}"
        )
    counted = label != ignore
    for name, values in (("label", label), ("prediction", prediction)):
        outside = counted & ((values < 0) | (values >= num_classes))
        if outside.any():
            raise InputError(
                f"{name} must be from 0 to {num_classes - 1}{f', or {ignore}' * (name == 'label')}, got "
                f"{int(values[outside][0])}; {'give it as ignore' if name == 'label' else 'take the argmax over classes'}"
            )
    b, k = len(label), num_classes
    image = torch.arange(b, device=label.device).view(-1, *[1] * (label.ndim - 1))
    cell = ((image * k + label) * k + prediction)[counted]
    return cell.bincount(minlength=b * k * k).view(b, k, k)


def iou(counts: Tensor) -> Tensor:
    r"""Intersection over union of each class, :math:`C_{kk} / (\sum_j C_{kj} + \sum_i C_{ik} - C_{kk})`.

    Args:
        counts: (..., K, K) of `confusion`, summed over the images that are judged together.

    Returns:
        (..., K) float64; NaN for a class that is neither labelled nor predicted.

    Example:
        >>> iou(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]]))
        tensor([0.5000, 0.5000,    nan], dtype=torch.float64)
    """
    counts = counts.double()
    both = counts.diagonal(dim1=-2, dim2=-1)
    return both / (counts.sum(dim=-1) + counts.sum(dim=-2) - both)


def miou(counts: Tensor) -> Tensor:
    """The mean of `iou` over the classes that are labelled or predicted, (..., K, K) -> (...); NaN if there is none.

    Example:
        >>> miou(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]]))
        tensor(0.5000, dtype=torch.float64)
    """
    return iou(counts).nanmean(dim=-1)


def pixel_accuracy(counts: Tensor) -> Tensor:
    """Share of the counted positions that are predicted right, (..., K, K) -> (...); NaN if none is counted.

    Example:
        >>> pixel_accuracy(torch.tensor([[1, 0], [1, 2]]))
        tensor(0.7500, dtype=torch.float64)
    """
    counts = counts.double()
    return counts.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / counts.sum(dim=(-2, -1))


class Segmentation:
    """Metrics of a data set while it is predicted: a running confusion matrix and binned confidences.

    Args:
        num_classes: K.
        ignore: the label of positions that do not count.

    Example:
        >>> metrics = Segmentation(3)
        >>> logits, label = torch.eye(3)[None, :, :, None], torch.tensor([[[0], [1], [-1]]])
        >>> metrics.add(logits, label)
        >>> {name: round(value, 2) for name, value in metrics.summary().items()}
        {'miou': 1.0, 'accuracy': 1.0, 'ece': 0.42, 'aurc': 0.0, 'accuracy_at_80': 1.0}
    """

    def __init__(self, num_classes: int, *, ignore: int = IGNORED) -> None:
        self.ignore = ignore
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        """(K, K), see `confusion`."""
        self.bins = torch.zeros(BINS, 3, dtype=torch.float64)
        """(55, 3), see `binned`."""

    def add(self, logits: Tensor, label: Tensor) -> None:
        """Count a batch: logits (B, K, ...) and labels (B, ...)."""
        confidence, prediction = logits.softmax(dim=1).max(dim=1)
        self.counts += confusion(prediction, label, len(self.counts), ignore=self.ignore).sum(dim=0).cpu()
        self.bins += binned(confidence, prediction == label, label != self.ignore).sum(dim=0).cpu()

    def iou(self) -> list[float]:
        """Of each class; NaN for one that is neither labelled nor predicted."""
        return list(iou(self.counts).tolist())

    def summary(self) -> dict[str, float]:
        """All metrics by name; NaN where nothing was counted."""
        return {"miou": miou(self.counts).item(), "accuracy": pixel_accuracy(self.counts).item()} | selective_of(
            self.bins
        )


# ---- calibration and abstention ----


def binned(confidence: Tensor, correct: Tensor, counted: Tensor) -> Tensor:
    """Positions by their confidence, for each image.

    Args:
        confidence: (B, ...), probabilities; a NaN counts as 0.
        correct: (B, ...) bool.
        counted: (B, ...) bool, false for positions without a label.

    Returns:
        (B, 55, 3) float64: of each bin between two of `EDGES`, the upper one included, how many positions it has, how many of
        them are right, and the sum of their confidences. Sum over B for a data set.

    Example:
        >>> found = binned(torch.tensor([[0.25, 0.5]]), torch.tensor([[True, False]]), torch.tensor([[True, True]]))
        >>> found.sum(dim=1)
        tensor([[2.0000, 1.0000, 0.7500]], dtype=torch.float64)
    """
    if not confidence.shape == correct.shape == counted.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (confidence, correct, counted))
        raise InputError(f"confidence, correct and counted must have one shape (B, ...), got {shapes}")
    b = len(confidence)
    c = confidence.detach().double().nan_to_num(0).clamp(0, 1).reshape(b, -1)
    weight = counted.reshape(b, -1).double()
    place = torch.bucketize(c, EDGES[1:-1].to(c.device)) + BINS * torch.arange(b, device=c.device)[:, None]
    columns = [weight, weight * correct.reshape(b, -1), weight * c]
    found = [place.flatten().bincount(column.flatten(), minlength=b * BINS) for column in columns]
    return torch.stack(found, dim=-1).view(b, BINS, 3)


def binned_ece(bins: Tensor) -> float:
    """The expected calibration error over 15 equal bins, as `come.metrics.ece`, of (55, 3) of `binned`; 0 without positions.

    Example:
        >>> binned_ece(binned(torch.tensor([[0.5, 1.0]]), torch.tensor([[False, True]]), torch.ones(1, 2) > 0)[0])
        0.25
    """
    count, right, sure = torch.cat([bins[:14], bins[14:].sum(dim=0, keepdim=True)]).double().T
    return float((sure - right).abs().sum() / count.sum().clamp_min(1))


def binned_risk(bins: Tensor) -> tuple[Tensor, Tensor]:
    """The risk-coverage curve at the borders of the bins that hold positions, of (55, 3) of `binned`.

    Returns:
        coverages, ascending to 1, and the error among the positions that are answered there; float64.

    Example:
        >>> bins = binned(torch.tensor([[0.5, 1.0]]), torch.tensor([[False, True]]), torch.ones(1, 2) > 0)[0]
        >>> binned_risk(bins)
        (tensor([0.5000, 1.0000], dtype=torch.float64), tensor([0.0000, 0.5000], dtype=torch.float64))
    """
    count, right = bins[bins[:, 0] > 0][:, :2].double().flip(0).cumsum(dim=0).T
    return count / count[-1:].clamp_min(1), 1 - right / count.clamp_min(1)


def binned_aurc(bins: Tensor) -> float:
    r"""Area under the risk-coverage curve, as `come.metrics.aurc` with all confidences of a bin equal; 0 without positions.

    A bin with n positions, r of them right, after N others with R right ones, adds :math:`\sum_{j=1}^n (R + j r/n) / (N + j)`.

    Example:
        >>> bins = binned(torch.tensor([[0.5, 1.0]]), torch.tensor([[False, True]]), torch.ones(1, 2) > 0)[0]
        >>> round(binned_aurc(bins), 6)
        0.25
    """
    count, right = bins[bins[:, 0] > 0][:, :2].double().flip(0).T
    if not len(count):
        return 0.0
    before, right_before = count.cumsum(dim=0) - count, right.cumsum(dim=0) - right
    share = right / count
    harmonic = torch.digamma(before + count + 1) - torch.digamma(before + 1)
    return float(1 - (right + (right_before - share * before) * harmonic).sum() / count.sum())


def binned_accuracy(bins: Tensor, coverage: float) -> float:
    """Accuracy on the most confident share of the positions, as `come.metrics.abstention_accuracy`; 1 without positions.

    Example:
        >>> bins = binned(torch.tensor([[0.5, 1.0]]), torch.tensor([[False, True]]), torch.ones(1, 2) > 0)[0]
        >>> binned_accuracy(bins, 0.5), binned_accuracy(bins, 1.0)
        (1.0, 0.5)
    """
    require(0 < coverage <= 1, "coverage", coverage, "in (0, 1]")
    count, right = bins[bins[:, 0] > 0][:, :2].double().flip(0).T
    if not len(count):
        return 1.0
    k = max(1, math.ceil(coverage * float(count.sum()) - 1e-9))
    at = int(torch.searchsorted(count.cumsum(dim=0), k))
    before = count[:at].sum().item()
    return float(right[:at].sum() + (k - before) * right[at] / count[at]) / k


def selective_of(bins: Tensor) -> dict[str, float]:
    """ECE, AURC, and the accuracy on the most confident 80%, of (55, 3) of `binned`.

    Example:
        >>> sorted(selective_of(torch.ones(BINS, 3)))
        ['accuracy_at_80', 'aurc', 'ece']
    """
    return {"ece": binned_ece(bins), "aurc": binned_aurc(bins), "accuracy_at_80": binned_accuracy(bins, 0.8)}
