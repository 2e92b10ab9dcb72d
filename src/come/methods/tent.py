"""Tent: minimises the entropy of the batch.

Wang et al., "Tent: Fully Test-time Adaptation by Entropy Minimization", ICLR 2021.

    theta <- theta - lr * d/dtheta  mean_i H(f(x_i))

Adapts the affine parameters of normalisation layers, with BatchNorm on batch statistics; needs nothing; one forward and one
backward per batch. The prediction is the forward made before the update.

With `keep` below 1, only that share of the batch with the lowest entropy is used: the first figure of the COME paper,
which shows that filtering alone does not save entropy minimisation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from come.errors import require
from come.inputs import Input
from come.method import Common, Method, Step, masked_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Tent(Method):
    """Tent, with any objective.

    Args:
        model: see `Method`.
        keep: share of the batch, lowest entropy first, that drives the update, in (0, 1]; at least one sample.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> step = Tent(model, keep=0.5, lr=1e-2).step(torch.randn(10, 4))
        >>> int(step.used.sum())
        5
    """

    name = "tent"

    def __init__(self, model: nn.Module, *, keep: float = 1.0, **common: Unpack[Common]) -> None:
        require(0 < keep <= 1, "keep", keep, "in (0, 1]")
        self.keep = keep
        super().__init__(model, **common)

    def adapt(self, x: Input) -> Step:
        """Predict, then one step down the mean entropy."""
        logits = self.forward(x)
        entropy = self.objective.entropy(logits)
        rank = torch.where(self.valid, entropy.detach(), math.inf).argsort(stable=True).argsort()
        used = self.valid & (rank < max(1, math.floor(self.keep * len(rank))))
        self.descend(masked_mean(entropy, used), go=used.any())
        return Step(logits, entropy, used)
