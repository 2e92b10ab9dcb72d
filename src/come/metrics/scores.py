"""Confidences by name, from the rows of a run or from logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from come.errors import unknown
from come.model.inputs import at_least_float32
from come.model.positions import by_rows
from come.objectives import Objective, Opinion, Softmax

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
r"""Confidences by name, from the rows of a run; larger is more confident. `score_of` computes them from logits.

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

_COLUMNS: Mapping[str, Callable[[Objective, Tensor], Tensor]] = {
    "confidence": lambda objective, logits: objective.confidence(logits),
    "softmax": lambda _, logits: Softmax().confidence(logits),
    "belief": lambda _, logits: Opinion().confidence(logits),
    "uncertainty": lambda _, logits: Opinion().uncertainty(logits),
    "entropy": lambda _, logits: Softmax().entropy(logits),
    "energy": lambda _, logits: at_least_float32(logits).logsumexp(dim=-1),
}


class _FromLogits(dict[str, Tensor]):
    """Rows of which each column is computed from logits (..., K) when it is asked for."""

    def __init__(self, objective: Objective, logits: Tensor) -> None:
        super().__init__()
        self.objective, self.logits = objective, logits

    def __missing__(self, name: str) -> Tensor:
        return _COLUMNS[name](self.objective, self.logits)


def score_of(name: str, objective: Objective, logits: Tensor) -> Tensor:
    """The confidence `name` of `SCORES`, from an objective and logits (..., K) to (...,).

    Example:
        >>> import torch
        >>> score_of("softmax", Opinion(), torch.zeros(1, 4))
        tensor([0.2500])
    """
    return by_rows(lambda z: SCORES[name](_FromLogits(objective, z)), logits)


def require_score(name: str) -> None:
    """Raise a `ConfigError` unless `name` is in `SCORES`."""
    if name not in SCORES:
        raise unknown("score", name, SCORES)


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    r"""The confidence (...,) that COME's published code calls "entropy", of logits (..., K): how far p is from uniform.

    .. math:: H(U, p) = -\frac{1}{K} \sum_k \ln p_k = \ln \sum_k e^{z_k} - \frac{1}{K} \sum_k z_k

    It is ln K for uniform logits. It is not the entropy of p, which the score "entropy" in `SCORES` negates, and the published
    value has the other sign.

    Example:
        >>> import torch
        >>> uniform_cross_entropy(torch.tensor([[0.0, 0.0], [4.0, 0.0]]))
        tensor([0.6931, 2.0181])
    """
    return -logits.log_softmax(dim=-1).mean(dim=-1)
