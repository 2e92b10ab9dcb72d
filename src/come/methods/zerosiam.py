r"""ZeroSiam (Chen et al., ICLR 2026): a predictor before the classifier makes entropy minimization asymmetric.

With the features f of a sample, the classifier h, a matrix P that starts as the identity, and the masses :math:`o = m(h(P f))`
and :math:`t = m(h(f))`, the second without a gradient:

.. math:: L = \frac1n \sum_i H(o_i) + \mathrm{KL}(t_i \| o_i) + \mathrm{KL}(o_i \| t_i)

A collapse that makes all answers alike would have to pass through P, which moves away from the identity, and the divergence
penalizes that. The gradient goes into P and, through f, into the affine parameters of the normalization layers, with BatchNorm
on batch statistics; each has its own learning rate. The answer is h(f). Needs the features, no source data; one forward and
one backward.

The published factors on the base rate (norm layers and predictor) are 5 and 5 for ViT-B, 10 and 100 for ViT-S, ResNet50-GN and
ConvNeXt-T, 10 and 50 for Swin-T. The default is that of ViT-B for every model: five times Tent's rate for both.

Beyond the published code: any objective, with its masses in place of the softmax; the divergence of a probability that
underflows is not NaN; a reset restores everything, not only the predictor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import require
from come.method import Context, Method, Step, masked_mean, register
from come.model.heads import Head
from come.model.inputs import Inputs, at_least_float32


@register
@dataclass(kw_only=True, eq=False)
class ZeroSiam(Method):
    """ZeroSiam; see the module.

    Args:
        predictor: learning rate of the predictor, relative to that of the norm layers, >= 0.
        momentum: of the predictor, in [0, 1).
        head: the linear layer that gives the logits, or its name; None finds it.

    Example:
        >>> import come
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> classifier = come.adapt(model, ZeroSiam(lr=1e-2))
        >>> _ = classifier(torch.randn(10, 4))
        >>> classifier.state["predictor"].shape
        torch.Size([8, 8])
    """

    name = "zerosiam"
    vectors_only = "its predictor acts on one feature vector per sample"
    needs = "features"
    paper_lr = (5e-3, 1.25e-3)
    predictor: float = 1.0
    momentum: float = 0.9
    head: str | nn.Module | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.predictor < math.inf, "predictor", self.predictor, ">= 0, relative to lr")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")

    def setup(self, ctx: Context) -> dict[str, Any]:
        """The layer that gives the logits."""
        return {"head": Head(ctx.model.model, self.head)}

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """The identity."""
        width = ctx.fixed["head"].linear.in_features
        start = torch.eye(width, device=ctx.device)
        return {"predictor": start, "velocity": torch.zeros_like(start)}

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, then descend the asymmetric loss."""
        features, logits = ctx.features(x)
        target = self.objective.log_mass(logits.detach())
        loss = self._loss(ctx, features, ctx.state["predictor"], target)
        some = ctx.valid.any()

        # The same loss again for P alone: its gradient ends at the features, so it costs two small products.
        before = ctx.leaf(ctx.state["predictor"])
        slope = ctx.gradient(masked_mean(self._loss(ctx, features.detach(), before, target), ctx.valid), before)
        with torch.no_grad():
            velocity = self.momentum * ctx.state["velocity"] + slope.to(before)
            moved = before - ctx.lr.to(before) * self.predictor * velocity
        ctx.descend(masked_mean(loss, ctx.valid), go=some)
        ctx.state["predictor"] = torch.where(some, moved, before).detach()
        ctx.state["velocity"] = torch.where(some, velocity, ctx.state["velocity"])
        return Step(logits, loss, ctx.valid)

    def _loss(self, ctx: Context, features: Tensor, predictor: Tensor, target: Tensor) -> Tensor:
        """Entropy of the online mass and its symmetric divergence from the target, (B,)."""
        linear: nn.Linear = ctx.fixed["head"].linear
        weight = at_least_float32(linear.weight.detach())
        bias = None if linear.bias is None else at_least_float32(linear.bias.detach())
        predicted = F.linear(at_least_float32(features), predictor.to(weight))
        online = self.objective.log_mass(F.linear(predicted, weight, bias))
        entropy = -(online.exp() * online).sum(dim=1)
        return entropy + ((target.exp() - online.exp()) * (target - online)).sum(dim=1)
