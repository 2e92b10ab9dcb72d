r"""The paper's bounds, corrected, as functions.

Everything here holds for logits of any sign and for the default evidence of `come.Opinion`, where

.. math:: u = \frac{K}{\sum_k e^{f_k} + K} = \sigma(\ln K - \mathrm{LSE}(f)).

The errors in the paper: Lemma 1 and Theorem 1 are proved with :math:`u = K / \mathrm{LSE}(f)`, but by the paper's own Eq. 4
:math:`u = K / \sum_k e^{f_k}`: the logarithm was lost. As printed, the lower bound of Lemma 1 is 2.88 for K = 2, f = 0, though
u never exceeds 1. Theorem 1 bounds the *softmax* confidence by u alone; that cannot hold, since u depends only on the sum of
the evidence: K = 2, f = (ln 2, -40) has u = 1/2 and softmax confidence 1 - 2e-18, while the printed bound is 0.982. The idea
survives in three true statements: the norm that COME holds brackets u (`uncertainty_bounds`), it bounds the softmax confidence
(`confidence_bound`), and u itself bounds the belief that COME reports (`belief_bound`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from come.errors import require


def uncertainty_bounds(norm: Tensor, num_classes: int, p: float = 2.0) -> tuple[Tensor, Tensor]:
    r"""Lemma 1, corrected: the p-norm of the logits brackets the uncertainty.

    .. math:: \frac{1}{1 + e^{\lVert f \rVert_p}} \;\le\; u \;\le\; \sigma\!\left(K^{-1/p} \lVert f \rVert_p\right)

    Because :math:`\ln K - K^{-1/p}\lVert f\rVert_p \le \mathrm{LSE}(f) \le \ln K + \lVert f\rVert_\infty`. Equal negative
    logits attain the upper bound for every p, equal positive logits the lower one for p = inf.

    Args:
        norm: :math:`\lVert f \rVert_p` >= 0, of any shape, which the lower and the upper bound have too.
        num_classes: K >= 2.
        p: order of the norm, 1 <= p <= inf.

    Example:
        >>> f = torch.tensor([[1.0, -2.0, 0.5]])
        >>> low, high = uncertainty_bounds(f.norm(dim=-1), 3)
        >>> u = torch.sigmoid(torch.tensor(3.0).log() - f.logsumexp(-1))
        >>> bool(low <= u), bool(u <= high)
        (True, True)
    """
    _check(num_classes, p)
    return torch.sigmoid(-norm), torch.sigmoid(norm * num_classes ** (-1 / p))


def confidence_bound(norm: Tensor, num_classes: int, p: float = 2.0) -> Tensor:
    r"""Theorem 1 for the quantity that COME actually holds: a norm bounds the softmax confidence.

    .. math:: \max_k p_k \;\le\; \frac{1}{1 + (K - 1) \exp\!\left(-2^{1 - 1/p} \lVert f \rVert_p\right)}

    Because no difference of two logits exceeds :math:`2^{1-1/p}\lVert f\rVert_p`. Attained by (a, -a) for K = 2 and every p,
    and by (a, -a, ..., -a) for p = inf and every K. Arguments as in `uncertainty_bounds`.

    Example:
        >>> f = torch.tensor([3.0, -3.0])
        >>> round(float(confidence_bound(f.norm(), 2)), 4), round(float(f.softmax(-1).max()), 4)
        (0.9975, 0.9975)
    """
    _check(num_classes, p)
    gap = norm * 2 ** (1 - 1 / p)
    return torch.sigmoid(gap - torch.log(torch.tensor(num_classes - 1.0, dtype=gap.dtype, device=gap.device)))


def belief_bound(source_uncertainty: Tensor, delta: float | Tensor = 0.0) -> Tensor:
    r"""Theorem 1 in terms of u: if :math:`|u - u_0| \le \delta`, the largest belief of each sample is bounded.

    .. math:: \max_k b_k \;\le\; 1 - u \;\le\; 1 - \max(u_0 - \delta, 0)

    Attained in the limit of one logit far above the others. `source_uncertainty` is :math:`u_0` of the source model in [0, 1],
    of any shape, and delta >= 0 how far u may move from it.

    Example:
        >>> belief_bound(torch.tensor([0.0, 0.5, 0.9]), delta=0.1)
        tensor([1.0000, 0.6000, 0.2000])
    """
    require(bool((torch.as_tensor(delta) >= 0).all()), "delta", delta, "at least 0")
    return 1 - (source_uncertainty - delta).clamp_min(0)


def _check(num_classes: int, p: float) -> None:
    require(num_classes >= 2, "num_classes", num_classes, "at least 2")
    require(p >= 1, "p", p, "at least 1 (math.inf included)")
