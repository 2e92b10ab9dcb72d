"""SAR: sharpness-aware, with recovery.

Niu et al., "Towards Stable Test-time Adaptation in Dynamic Wild World", ICLR 2023.

    R      = {i : H_i(theta) < E0}                              E0 = margin * ln K
    e      = rho * g / |g|,  g = d/dtheta mean_R H              climb to the sharpest point nearby
    R'     = {i in R : H_i(theta + e) < E0}
    theta <- theta - lr * d/dtheta mean_R' H (theta + e)
    m     <- 0.9 m + 0.1 mean_R' H (theta + e);  if m < recover_below: back to the source

Adapts the affine parameters of normalization layers except those of the last quarter of the blocks and the final norm, with
BatchNorm on batch statistics; needs nothing; two forwards and two backwards per batch.

Deviations from the published code, all undone by `quirks=True`: a recovery also clears the moving average and the momentum;
when no sample is reliable nothing moves, where the published optimizer still takes a momentum step. `reset()` always clears
everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from come.errors import require
from come.method import Context, Method, Step, masked_mean, register
from come.model.inputs import Inputs
from come.select import Selector, norm_affine


@register
@dataclass(kw_only=True, eq=False)
class SAR(Method):
    """SAR, with any objective.

    Args:
        margin: E0 as a share of ln K, > 0.
        rho: radius of the sharpness-aware step, >= 0.
        recover_below: recover when the moving average of the loss falls below this; 0 never does.
        quirks: behave as the published code at recovery and when no sample is reliable.

    Example:
        >>> import come
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> classifier = come.adapt(model, SAR(margin=1.0))
        >>> step = classifier.step(torch.randn(10, 4))
        >>> int(classifier.state["recoveries"])
        0
    """

    name = "sar"
    by_stream = ("margin", "rho", "recover_below")
    cost = "2f 2b"
    select: Selector = norm_affine(skip_last=0.25)
    margin: float = 0.4
    rho: float = 0.05
    recover_below: float = 0.2
    quirks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.margin > 0, "margin", self.margin, "a positive share of ln K")
        require(0 <= self.rho < math.inf, "rho", self.rho, ">= 0")
        require(self.recover_below >= 0, "recover_below", self.recover_below, ">= 0 (0 never recovers)")

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """No moving average and no recoveries yet."""
        return {
            "average": torch.zeros((), device=ctx.device),
            "averaged": torch.zeros((), dtype=torch.bool, device=ctx.device),
            "recoveries": torch.zeros((), dtype=torch.int64, device=ctx.device),
        }

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, climb, then descend from there; recover if the loss has become implausibly small."""
        logits = ctx.forward(x, sparing=True)
        entropy = self.objective.entropy(logits)
        margin = self.margin * math.log(logits.shape[1])
        reliable = ctx.valid & (entropy < margin)
        again = ctx.again(x, reliable, logits)
        slope = ctx.gradient(masked_mean(entropy if again is None else self.objective.entropy(again), reliable))
        climbed = ctx.leaf(ctx.weights + slope * (self.rho / (torch.linalg.vector_norm(slope) + 1e-12)))

        perturbed = self.objective.entropy(ctx.forward_where(x, reliable, climbed))
        used = reliable & (perturbed < margin)
        loss = masked_mean(perturbed, used)
        some = used.any()
        ctx.descend_along(ctx.gradient(loss, climbed), go=None if self.quirks else some)
        self._watch(ctx, loss.detach().float(), some)
        return Step(logits, entropy, used)

    def _watch(self, ctx: Context, loss: Tensor, some: Tensor) -> None:
        """Update the moving average of the loss, and recover if it has fallen below the limit."""
        average, averaged = ctx.state["average"], ctx.state["averaged"]
        followed = torch.where(averaged, 0.9 * average + 0.1 * loss, loss)
        average, averaged = torch.where(some, followed, average), averaged | some
        collapsed = averaged & (average < self.recover_below)
        ctx.recover(collapsed, moments=not self.quirks)
        ctx.state["average"] = average
        ctx.state["averaged"] = averaged if self.quirks else averaged & ~collapsed
        ctx.state["recoveries"] = ctx.state["recoveries"] + collapsed
