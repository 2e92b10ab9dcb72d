"""How well probabilities match outcomes: calibration error, log-likelihood, Brier score."""

from __future__ import annotations

import torch
from torch import Tensor

from come.errors import InputError, require_int
from come.metrics.counting import alike, no_nan

LARGEST_NLL = 100.0
"""In nats, as in PyTorch's `binary_cross_entropy`."""


def ece(confidence: Tensor, correct: Tensor, *, bins: int = 15, adaptive: bool = False) -> float:
    r"""Expected calibration error in [0, 1]: the gap between confidence and accuracy, averaged over bins of confidence.

    .. math:: \mathrm{ECE} = \sum_b \frac{|B_b|}{N} \, \bigl| \mathrm{acc}(B_b) - \mathrm{conf}(B_b) \bigr|

    Args:
        confidence: (N,), the claimed probability in [0, 1]; up to 1e-3 outside is rounding, and clamped. Empty gives 0.
        correct: (N,) bool.
        bins: how many, of equal width: (0, 1/bins], (1/bins, 2/bins], ...; 0 belongs to the first.
        adaptive: bins of equal numbers of samples instead; equal confidences stay in one bin, the first they reach.

    Example:
        >>> ece(torch.tensor([1.0, 1.0, 0.5, 0.5]), torch.tensor([True, True, True, False]))
        0.0
    """
    require_int("bins", bins, 1)
    alike(confidence=confidence, correct=correct)
    no_nan(confidence)
    if not len(confidence):
        return 0.0
    c = confidence.detach().cpu().double()
    if c.min() < -1e-3 or c.max() > 1 + 1e-3:
        raise InputError(
            f"confidence must be in [0, 1], as it is compared with an accuracy, got {c.min().item():.4g} to "
            f"{c.max().item():.4g}: pass the largest probability or belief, not a logit, an energy or an entropy"
        )
    c = c.clamp(0, 1)
    if adaptive:
        which = torch.searchsorted(c.sort().values, c) * bins // len(c)
    else:
        which = torch.bucketize(c, torch.arange(1, bins, dtype=torch.float64) / bins)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, c - correct.cpu().double())
    return gap.abs().sum().item() / len(c)


def nll(log_probability: Tensor, label: Tensor) -> Tensor:
    r"""Negative log-likelihood of the label, per sample: :math:`-\ln p_{y_i}`.

    Args:
        log_probability: (N, K), or logits: they are normalized here, which leaves log-probabilities as they are.
        label: (N,) class indices; negative marks an outlier.

    Returns:
        (N,) nats in [0, 100], never NaN. 0 for outliers, so average it with `labelled_mean`; 100 where the label is none of
        the K classes or a logit is NaN.

    Example:
        >>> nll(torch.tensor([[0.0, 0.0], [200.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 1, -1]))
        tensor([  0.6931, 100.0000,   0.0000])
    """
    log_p, target = _log_softmax(log_probability, label)
    value = -log_p.gather(1, target[:, None])[:, 0]
    value = value.where((label < log_p.shape[1]) & ~value.isnan(), LARGEST_NLL).clamp(0, LARGEST_NLL)
    return value.where(label >= 0, 0)


def brier(log_probability: Tensor, label: Tensor) -> Tensor:
    r"""Brier score over all classes, per sample: :math:`\sum_k (p_k - [k = y_i])^2`, of arguments as in `nll`.

    Returns:
        (N,) in [0, 2], never NaN. 0 for outliers, so average it with `labelled_mean`; 2 where a logit is NaN. A label that is
        none of the K classes counts as a class of probability 0.

    Example:
        >>> brier(torch.tensor([[0.0, 0.0], [200.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 1, -1]))
        tensor([0.5000, 2.0000, 0.0000])
    """
    log_p, target = _log_softmax(log_probability, label)
    known = (label < log_p.shape[1]).to(log_p)
    value = log_p.exp().scatter_add(1, target[:, None], -known[:, None]).square().sum(dim=1) + (1 - known)
    return value.where(~value.isnan(), 2).where(label >= 0, 0)


def _log_softmax(scores: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, K) in float32 or better, and labels (N,) as indices that are always in range."""
    if scores.ndim != 2 or not scores.shape[1] or label.shape != scores.shape[:1]:
        found = f"{tuple(scores.shape)} and {tuple(label.shape)}"
        raise InputError(f"log_probability and label must be (N, K) and (N,), got {found}")
    log_p = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(dim=1)
    return log_p, label.long().clamp(0, scores.shape[1] - 1)
