"""DeYO: samples whose shape matters.

Lee et al., "Entropy is not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors", ICLR 2024.

    drop_i  = p(y_i | x_i) - p(y_i | shuffled x_i),  y_i = argmax p(. | x_i)     pseudo-label probability difference
    used    = {i : H_i < limit * ln K  and  drop_i > drop}
    loss    = mean over used i of (exp(E0 - H_i) + exp(drop_i)) H_i              E0 = margin * ln K

where the shuffled image has its patches in random order. Adapts the affine parameters of normalization layers except those of
the last quarter of the blocks and the final norm, as SAR does, with BatchNorm on batch statistics; needs images; two forwards
and one backward per batch. H is the objective's entropy; the drop is of softmax probabilities whatever the objective.

The second forward gets the whole batch, with BatchNorm on the statistics of the samples that passed the first filter. This
gives the numbers of the published code, which cuts the batch down to these samples, without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from come.errors import InputError, require, require_int
from come.method import Context, Method, Step, masked_mean, register
from come.model.batchnorm import BatchStatistics
from come.model.inputs import Inputs, at_least_float32
from come.select import Selector, norm_affine

Shuffle = Callable[[Tensor, torch.Generator], Tensor]
"""(images (B, C, H, W), generator) -> images of the same shape whose shape information is destroyed."""


@register
@dataclass(kw_only=True, eq=False)
class DeYO(Method):
    """DeYO, with any objective.

    Args:
        limit: a sample is used only if its entropy is below this share of ln K, > 0.
        margin: E0 in the weight, as a share of ln K, > 0.
        drop: by how much the probability of the predicted class must drop, in [-1, 1).
        patches: the image is cut into patches x patches, at least 2.
        shuffle: your own way to destroy the shape; None puts the patches in random order.
        seed: of the order of the patches.

    Example:
        >>> import come
        >>> from torch import nn
        >>> layers = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)
        >>> model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4))
        >>> come.adapt(model, DeYO(limit=1.0)).step(torch.rand(10, 3, 8, 8)).used.shape
        torch.Size([10])
    """

    name = "deyo"
    vectors_only = "it shuffles the patches of an image, and so the positions that it would compare"
    by_stream = ("limit", "margin", "drop")
    needs = "images"
    cost = "2f 1b"
    select: Selector = norm_affine(skip_last=0.25)
    limit: float = 0.5
    margin: float = 0.4
    drop: float = 0.2
    patches: int = 4
    shuffle: Shuffle | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.limit > 0, "limit", self.limit, "a positive share of ln K")
        require(self.margin > 0, "margin", self.margin, "a positive share of ln K")
        require(-1 <= self.drop < 1, "drop", self.drop, "a difference of probabilities in [-1, 1)")
        require_int("patches", self.patches, 2)

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:
        """Images that are large enough to be cut."""
        h, w = x.image("deyo").shape[-2:]
        if self.shuffle is None and min(h, w) < self.patches:
            raise InputError(
                f"images must be at least {self.patches}x{self.patches} to be cut into that many patches, got {h}x{w}; use "
                "larger images or fewer patches"
            )

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, destroy the shape, predict again, and take one step on the samples whose prediction depended on it."""
        images = x.image("deyo")
        logits = ctx.forward(x, sparing=True)
        entropy = self.objective.entropy(logits)
        scale = math.log(logits.shape[1])
        sure = ctx.valid & (entropy.detach() < self.limit * scale)
        with torch.no_grad():
            shuffled = x.with_image(ctx.drawn(self.shuffle or self._shuffled, images))
            statistics = None if ctx.share is None else BatchStatistics(ctx.share, used=sure)
            destroyed = ctx.forward_where(shuffled, sure, statistics=statistics)
        label = logits.argmax(dim=1, keepdim=True)
        drop = (_probability(logits.detach(), label) - _probability(destroyed, label)).squeeze(1)
        used = sure & (drop > self.drop)
        weight = (self.margin * scale - entropy.detach()).exp() + drop.exp()
        again = ctx.again(x, used, logits)
        loss = weight * (entropy if again is None else self.objective.entropy(again))
        ctx.descend(masked_mean(loss, used), go=used.any())
        return Step(logits, entropy, used)

    def _shuffled(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The patches of each image in its own random order; a size that cannot be divided evenly is resized and back."""
        b, c, h, w = images.shape
        n = self.patches
        size = (h // n * n, w // n * n)
        even = images
        if size != (h, w):
            even = F.interpolate(at_least_float32(images), size, mode="bilinear", antialias=True)
        grid = even.view(b, c, n, size[0] // n, n, size[1] // n).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        order = torch.rand(b, n * n, generator=generator, device=images.device).argsort(dim=1)
        grid = torch.unflatten(grid.gather(1, order.view(b, -1, 1, 1, 1).expand_as(grid)), 1, (n, n))
        mixed = grid.permute(0, 3, 1, 4, 2, 5).reshape(b, c, *size)
        return mixed if size == (h, w) else F.interpolate(mixed, (h, w), mode="bilinear").to(images.dtype)


def _probability(logits: Tensor, label: Tensor) -> Tensor:
    return at_least_float32(logits).softmax(dim=1).gather(1, label)
