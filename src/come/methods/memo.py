"""MEMO: agreement over views, image by image.

Zhang, Levine and Finn, "MEMO: Test Time Robustness via Adaptation and Augmentation", NeurIPS 2022.

    m      = mean over views v of the mass of f_theta(view_v(x))
    theta' = theta - lr dH(m)/dtheta
    answer f_theta'(x), and back to theta

Adapts the whole model to each image separately; needs images whose normalization is known, because AugMix acts on images in
[0, 1]. For each image one forward and one backward of all its views, and one forward. Images are a loop, since each has its
own weights; their views are one batch. BatchNorm mixes prior/(prior + 1) of its source statistics with 1/(prior + 1) of the
views' own (of the image's own for the answer), without a gradient through them.

COME: H is the objective's entropy of the averaged mass, so with opinions that of the view-averaged opinion. The paper only
says that the objective is replaced; this is our interpretation.

Deviation from the published code: the optimizer's moments are reset with the weights, where that code carries AdamW's from
image to image, as `quirks=True` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from come.errors import require, require_int
from come.images.augment import Augment, augmix
from come.images.normalization import MeanStd, Normalization
from come.method import Context, Method, Step, converted, register
from come.model.batchnorm import Statistics, batch_statistics, following
from come.model.inputs import Inputs
from come.objectives import Softmax
from come.optim import OptimizerFactory, adam, sgd
from come.select import Selector, everything

TOGETHER = 8  # images whose views are made at once


@register
@dataclass(kw_only=True, eq=False)
class MEMO(Method):
    """MEMO, with any objective.

    Args:
        normalization: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        views: views of each image, at least 2.
        keep: share of the views that is used, those with the lowest softmax entropy, in (0, 1]; at least one.
        augment: makes views of images (V, B, C, H, W) in [0, 1] from a generator; None is `come.images.augment.augmix()`.
        prior: weight of BatchNorm's source statistics, in images, at least 0; None uses them alone.
        quirks: carry the optimizer's moments from image to image, as the published code does.
        seed: of the views.

    Example:
        >>> import come
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
        >>> come.adapt(model, MEMO(views=4))(torch.rand(3, 3, 8, 8)).shape
        torch.Size([3, 5])
    """

    name = "memo"
    vectors_only = "its views move the positions that it would compare"
    unexported = "it returns to the source model after each image; it leaves the model as it is"
    needs = "images"
    cost = "33f 32b"
    batch_statistics = False
    alone = True
    with_itself: ClassVar[bool] = False
    """Whether the image is the first of its views."""
    paper_lr = (2.5e-4, 2.5e-4)
    scales_lr = False
    select: Selector = everything()
    optimizer: str | sgd | adam | OptimizerFactory = sgd(momentum=0.0)
    normalization: converted[MeanStd, Normalization] = converted(Normalization.of, None)
    views: int = 32
    keep: float = 1.0
    augment: Augment | None = None
    prior: float | None = 16.0
    quirks: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("views", self.views, 2, " (one view agrees with itself)")
        require(0 < self.keep <= 1, "keep", self.keep, "in (0, 1]")
        good = self.prior is None or self.prior >= 0
        require(good, "prior", self.prior, ">= 0, or None for the source statistics alone")

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:
        """The views need images."""
        self.normalization.check(x.image("memo"), "memo", first)

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """The source's answer, image by image."""
        rows = [ctx.forward(x.take(slice(i, i + 1)), statistics=self._prior(ctx)) for i in range(x.size)]
        return torch.cat(rows)

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """For each image: one step on its views, the answer, and back."""
        images = x.image("memo")
        logits, losses = [], []
        for begin in range(0, len(images), TOGETHER):
            some = self.normalization.images(images[begin : begin + TOGETHER])
            views = (self.augment or augmix())(some.expand(self.views - self.with_itself, *some.shape), ctx.generator)
            views = torch.cat([some[None], views]) if self.with_itself else views
            views = self.normalization.inputs(views)
            for i in range(views.shape[1]):
                answer, loss = self._one(ctx, x.take(slice(begin + i, begin + i + 1)), views[:, i])
                logits.append(answer)
                losses.append(loss)
        return Step(torch.cat(logits), torch.stack(losses), ctx.valid)

    def _one(self, ctx: Context, x: Inputs, views: Tensor) -> tuple[Tensor, Tensor]:
        """The answer for one image (1, K), and the loss on its views."""
        found = ctx.forward(x.with_image(views), statistics=self._prior(ctx))
        if self.keep < 1:
            doubt = Softmax().entropy(found.detach())
            found = found[doubt.topk(max(1, int(self.keep * len(doubt))), largest=False).indices]
        loss = self.objective.marginal_entropy(found)
        ctx.descend(loss)
        with torch.no_grad():
            answer = ctx.forward(x, statistics=self._prior(ctx))
        ctx.recover(torch.ones((), dtype=torch.bool, device=answer.device), moments=not self.quirks)
        return answer, loss.detach()

    def _prior(self, ctx: Context) -> Statistics:
        """BatchNorm on source statistics mixed with those of the next forward."""
        if self.prior is None:
            return None
        known = {n.number: (n.mean, n.var) for n in ctx.batch_norms if n.mean is not None and n.var is not None}
        follow = following(known, 1 / (self.prior + 1), correction=1)
        return lambda layer, x: (follow if layer.number in known else batch_statistics)(layer, x)
