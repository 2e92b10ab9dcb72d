"""PL: trains on its own confident labels.

Lee, "Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural Networks", ICML workshop 2013,
as a test-time method.

    used  = {i : max_k p_ik > threshold}
    loss  = mean over used i of -ln p_i,argmax

Adapts the affine parameters of normalisation layers, with BatchNorm on its source statistics; needs nothing; one forward
and one backward per batch. The objective plays no part in it. COME's paper gives PL the memory and the time of Tent, hence
that default; the published code that its numbers come from is met with `select=everything(), optimizer="adam"`.

Deviation from the published code: when no sample is confident nothing moves, where that code takes the mean of nothing and
the model becomes NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional as F

from come.errors import require
from come.inputs import Input, exact
from come.method import Common, Method, Step, masked_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PL(Method):
    """Pseudo-labels with a confidence threshold.

    Args:
        model: see `Method`.
        threshold: a sample is used if its largest softmax probability is above this, in [0, 1).
        **common: see `Method`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> step = PL(model, threshold=0.4).step(torch.randn(10, 4))
        >>> step.used.shape
        torch.Size([10])
    """

    name = "pl"
    minimises = False
    batch_statistics = False

    def __init__(self, model: nn.Module, *, threshold: float = 0.9, **common: Unpack[Common]) -> None:
        require(0 <= threshold < 1, "threshold", threshold, "in [0, 1): a probability")
        self.threshold = threshold
        super().__init__(model, **common)

    def adapt(self, x: Input) -> Step:
        """Predict, then one step down the cross-entropy towards the confident predictions."""
        logits = self.forward(x)
        log_p = exact(logits).log_softmax(dim=1)
        used = self.valid & (log_p.detach().exp().amax(dim=1) > self.threshold)
        loss = F.nll_loss(log_p, log_p.argmax(dim=1), reduction="none")
        self.descend(masked_mean(loss, used), go=used.any())
        return Step(logits, loss, used)
