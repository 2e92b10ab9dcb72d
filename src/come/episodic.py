r"""Answers each image by itself: back to the source, adapt to views of it, answer.

The protocol of MEMO and TPT, for any method. With the image and V - 1 views of it as a batch,

.. math:: \theta_x = \mathrm{adapt}(\theta_0,\ \{x, a_1(x), \ldots, a_{V-1}(x)\}), \qquad \mathrm{answer}(x) = f_{\theta_x}(x)

No image knows of another one. MEMO and TPT make views of their own, and are called with the images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from come.adapter import Adapter
from come.errors import require_int
from come.images.augment import Augment, crops
from come.images.normalization import MeanStd, Normalization
from come.method import Step, converted
from come.seeds import derived_seed


@dataclass
class Episodic:
    """A classifier that forgets after each image.

    Args:
        classifier: of `come.adapt`.
        views: V, of each image, itself included, at least 2.
        normalization: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        augment: makes views of images (V, B, C, H, W) in [0, 1] from a generator.
        seed: of the views.

    Example:
        >>> import come
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 5))
        >>> alone = Episodic(come.adapt(model, "tent"), views=8)
        >>> alone(torch.rand(3, 3, 8, 8)).shape
        torch.Size([3, 5])
    """

    classifier: Adapter
    views: int = 64
    normalization: converted[MeanStd, Normalization] = converted(Normalization.of, None)
    augment: Augment = crops()
    seed: int = 0
    count: int = 0
    """Images so far: each has views of its own."""

    def __post_init__(self) -> None:
        require_int("views", self.views, 2, ": a single view is the image itself")

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, K) of images (B, C, H, W)."""
        return self.step(images).logits

    def step(self, images: Tensor) -> Step:
        """The logits, and of each image the mean loss of its views, whether any drove an update, and whether it is valid."""
        if self.classifier.method.alone:
            return self.classifier.step(images)
        columns = zip(*map(self._one, torch.split(images, 1)), strict=True)
        return Step(*(None if parts[0] is None else torch.cat(parts) for parts in columns))  # type: ignore[arg-type]

    def _one(self, image: Tensor) -> Step:
        self.classifier.reset()
        generator = torch.Generator(image.device).manual_seed(derived_seed(self.seed, self.count))
        self.count += 1
        pixels = self.normalization.images(image)
        views = self.augment(pixels.expand(self.views - 1, *pixels.shape), generator).flatten(0, 1)
        adapted = self.classifier.step(torch.cat([image, self.normalization.inputs(views)]))
        answer = self.classifier.answer(image)
        return answer._replace(
            loss=None if adapted.loss is None else adapted.loss.mean(dim=0, keepdim=True),
            used=None if adapted.used is None else adapted.used.any(dim=0, keepdim=True),
        )
