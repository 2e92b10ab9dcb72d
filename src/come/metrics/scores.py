"""Confidences by name, from the rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

Rows = Mapping[str, Tensor]
"""What a run keeps of its samples: tensors (N,) by name."""

SCORES: Mapping[str, Callable[[Rows], Tensor]] = {
    "confidence": lambda rows: rows["confidence"],
    "softmax": lambda rows: rows["softmax"],
    "belief": lambda rows: rows["belief"],
    "u": lambda rows: -rows["uncertainty"],
    "entropy": lambda rows: -rows["entropy"],
    "energy": lambda rows: rows["energy"],
}
r"""Confidences by name, from the rows of a run; larger is more confident.

"confidence" is the objective's own, as published: the largest softmax probability for EM, the largest belief for COME. All
others are functions of the logits f alone, so the same for every objective. With the log-sum :math:`L = \ln \sum_k e^{f_k}`:

- softmax: the largest softmax probability, :math:`e^{\max f - L}`.
- belief: the largest belief of COME, :math:`e^{\max f} / (e^L + K)`.
- u: COME's uncertainty, negated: :math:`-K / (e^L + K)`. It ranks as the energy does.
- entropy: of the softmax, negated.
- energy: L, which is minus what the literature calls the energy.
"""

PROBABILITIES = ("confidence", "softmax", "belief")
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
