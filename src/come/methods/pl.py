"""PL: trains on its own confident labels.

Lee, "Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural Networks", ICML workshop 2013, as
a test-time method.

    used  = {i : max_k p_ik > threshold}
    loss  = mean over used i of -ln p_i,argmax

Adapts the affine parameters of normalization layers, with BatchNorm on its source statistics; needs nothing; one forward and
one backward per batch. The objective is not used. COME's paper gives PL the memory and the time of Tent, hence this default;
the published code behind its numbers corresponds to `select=everything(), optimizer="adam"`.

Deviation from the published code: when no sample is confident nothing moves, where that code averages over no samples and the
model becomes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from come.errors import require
from come.method import Context, Method, Step, masked_mean, register
from come.model.inputs import Inputs, at_least_float32
from come.model.positions import by_rows


@register
@dataclass(kw_only=True, eq=False)
class PL(Method):
    """Pseudo-labels with a confidence threshold.

    Args:
        threshold: a sample is used if its largest softmax probability is above this, in [0, 1).

    Example:
        >>> import come, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> come.adapt(model, PL(threshold=0.4)).step(torch.randn(10, 4)).used.shape
        torch.Size([10])
    """

    name = "pl"
    by_stream = ("threshold",)
    minimizes = False
    batch_statistics = False
    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.threshold < 1, "threshold", self.threshold, "a probability in [0, 1)")

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, then one step down the cross-entropy with the confident predictions."""
        logits = ctx.forward(x)
        loss = by_rows(_own_label, logits)
        used = ctx.valid & ((-loss.detach()).exp() > self.threshold)
        ctx.descend(masked_mean(loss, used), go=used.any())
        return Step(logits, loss, used)


def _own_label(logits: Tensor) -> Tensor:
    """Cross-entropy (N,) of logits (N, K) with their own largest."""
    log_p = at_least_float32(logits).log_softmax(dim=1)
    return F.nll_loss(log_p, log_p.argmax(dim=1), reduction="none")
