"""DeYO: samples whose shape matters.

Lee et al., "Entropy is not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors", ICLR 2024.

    drop_i  = p(y_i | x_i) - p(y_i | shuffled x_i),  y_i = argmax p(. | x_i)     pseudo-label probability difference
    used    = {i : H_i < limit * ln K  and  drop_i > drop}
    loss    = mean over used i of (exp(E0 - H_i) + exp(drop_i)) H_i              E0 = margin * ln K

where the shuffled image has its patches in random order. Adapts the affine parameters of normalisation layers but those of
the last quarter of the blocks and the final norm, as SAR does, with BatchNorm on batch statistics; needs images; two forwards
and one backward per batch. H is the objective's entropy; the drop is of softmax probabilities whatever the objective.

The second forward sees the whole batch, with BatchNorm on the statistics of the samples that passed the first filter: the
same numbers as the published code, which cuts the batch down to them, without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.batchnorm import by_selection, normalised_by
from come.errors import InputError, require
from come.inputs import Input, exact, image_of, with_image
from come.method import Common, Method, Step, masked_mean
from come.select import norm_affine

if TYPE_CHECKING:
    from typing_extensions import Unpack

Shuffle = Callable[[Tensor, torch.Generator], Tensor]
"""(images (B, C, H, W), generator) -> images of the same shape whose shape information is destroyed."""


class DeYO(Method):
    """DeYO, with any objective.

    Args:
        model: see `Method`.
        limit: a sample with an entropy of this share of ln K or more is never used, > 0.
        margin: E0 in the weight, as a share of ln K, > 0.
        drop: by how much the probability of the predicted class must drop, in [-1, 1).
        patches: the image is cut into patches x patches, at least 2.
        shuffle: your own way to destroy the shape; None puts the patches in random order.
        seed: of the order of the patches.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 4)
        ... )
        >>> DeYO(model, limit=1.0).step(torch.rand(10, 3, 8, 8)).used.shape
        torch.Size([10])
    """

    name = "deyo"
    needs = "images"
    cost = "2f 1b"
    selects = norm_affine(skip_last=0.25)

    def __init__(
        self,
        model: nn.Module,
        *,
        limit: float = 0.5,
        margin: float = 0.4,
        drop: float = 0.2,
        patches: int = 4,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        **common: Unpack[Common],
    ) -> None:
        require(limit > 0, "limit", limit, "positive: a share of ln K")
        require(margin > 0, "margin", margin, "positive: a share of ln K")
        require(-1 <= drop < 1, "drop", drop, "in [-1, 1): a difference of probabilities")
        require(isinstance(patches, int) and patches >= 2, "patches", patches, "a whole number, at least 2")
        self.limit, self.margin, self.drop, self.patches, self.seed = limit, margin, drop, patches, seed
        self.shuffle: Shuffle = shuffle or self._shuffled
        super().__init__(model, **common)

    def adapt(self, x: Input) -> Step:
        """Predict, destroy the shape and predict again; then one step on what depended on it."""
        images = image_of(x, "deyo")
        logits = self.forward(x)
        entropy = self.objective.entropy(logits)
        scale = math.log(logits.shape[1])
        sure = self.valid & (entropy.detach() < self.limit * scale)
        with torch.no_grad(), normalised_by(self.batch_norms, by_selection(sure)):
            destroyed = self.forward(with_image(x, self.shuffle(images, self.generator())))
        label = logits.argmax(dim=1, keepdim=True)
        drop = (_probability(logits.detach(), label) - _probability(destroyed, label)).squeeze(1)
        used = sure & (drop > self.drop)
        weight = (self.margin * scale - entropy.detach()).exp() + drop.exp()
        self.descend(masked_mean(weight * entropy, used), go=used.any())
        return Step(logits, entropy, used)

    def _shuffled(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Patches of each image in a random order of its own; a size that cannot be cut evenly is resized for it."""
        b, c, h, w = images.shape
        n = self.patches
        if h < n or w < n:
            raise InputError(
                f"images of {h}x{w} cannot be cut into {n}x{n} patches; use larger images or fewer patches"
            )
        size = (h // n * n, w // n * n)
        even = images if size == (h, w) else F.interpolate(exact(images), size, mode="bilinear", antialias=True)
        grid = even.view(b, c, n, size[0] // n, n, size[1] // n).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        order = torch.rand(b, n * n, generator=generator, device=images.device).argsort(dim=1)
        grid = torch.unflatten(grid.gather(1, order.view(b, -1, 1, 1, 1).expand_as(grid)), 1, (n, n))
        mixed = grid.permute(0, 3, 1, 4, 2, 5).reshape(b, c, *size)
        return mixed if size == (h, w) else F.interpolate(mixed, (h, w), mode="bilinear").to(images.dtype)


def _probability(logits: Tensor, label: Tensor) -> Tensor:
    return exact(logits).softmax(dim=1).gather(1, label)
