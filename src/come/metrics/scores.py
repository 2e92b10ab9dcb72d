"""Confidences by name, from the rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

Rows = Mapping[str, Tensor]

SCORES: Mapping[str, Callable[[Rows], Tensor]] = {
    "confidence": lambda rows: rows["confidence"],
    "msp": lambda rows: rows["msp"],
    "uncertainty": lambda rows: -rows["uncertainty"],
    "energy": lambda rows: rows["energy"],
    "entropy": lambda rows: -rows["entropy"],
}
"""Confidences by name, from the rows of a run; larger is more confident.

"confidence" is the objective's own: the largest probability or belief. "msp" is the largest softmax probability. "energy"
is the logsumexp of the logits, the negative of the energy. "uncertainty" and "entropy" are negated.
"""

PROBABILITIES = ("confidence", "msp")
"""The scores that claim a probability, and so can be calibrated."""


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""Confidence that the published code of COME calls "entropy", per sample: how far p is from uniform.

    .. math:: H(U, p) = -\frac{1}{K} \sum_k \ln p_k = \ln \sum_k e^{z_k} - \frac{1}{K} \sum_k z_k

    It is not the entropy of p, which the score "entropy" in `SCORES` negates. The published value has the other sign.

    Args:
        logits: (..., K).

    Returns:
        (...,), larger is more confident; ln K for uniform logits.

    Example:
        >>> import torch
        >>> uniform_cross_entropy(torch.tensor([[0.0, 0.0], [4.0, 0.0]]))
        tensor([0.6931, 2.0181])
    """
    return -logits.log_softmax(dim=-1).mean(dim=-1)
