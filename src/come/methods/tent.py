"""Tent: minimizes the entropy of the batch.

Wang et al., "Tent: Fully Test-time Adaptation by Entropy Minimization", ICLR 2021.

    theta <- theta - lr * d/dtheta  mean_i H(f(x_i))

Adapts the affine parameters of normalization layers, with BatchNorm on batch statistics; needs nothing; one forward and one
backward per batch. The prediction is the forward made before the update.

With `keep` below 1, only that share of the batch with the lowest entropy is used: the first figure of the COME paper, which
shows that filtering alone does not save entropy minimization.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from come.errors import require
from come.method import Context, Method, Step, masked_mean, register
from come.model.inputs import Inputs


@register
@dataclass(kw_only=True, eq=False)
class Tent(Method):
    """Tent, with any objective.

    Args:
        keep: share of the batch, lowest entropy first, that drives the update, in (0, 1]; at least one sample.

    Example:
        >>> import come
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> step = come.adapt(model, Tent(keep=0.5, lr=1e-2)).step(torch.randn(10, 4))
        >>> int(step.used.sum())
        5
    """

    name = "tent"
    keep: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.keep <= 1, "keep", self.keep, "in (0, 1]")

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, then one step down the mean entropy."""
        logits = ctx.forward(x)
        entropy = self.objective.entropy(logits)
        used = ctx.valid
        if self.keep < 1:
            rank = torch.where(used, entropy.detach(), math.inf).argsort(stable=True).argsort()
            used = used & (rank < max(1, math.floor(self.keep * len(rank))))
        ctx.descend(masked_mean(entropy, used), go=used.any())
        return Step(logits, entropy, used)
