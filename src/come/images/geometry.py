"""Views of another size and mirrored, undone on the logits, so that predictions of all views are of the same pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from come.errors import require, require_int

Undo = Callable[[Tensor, tuple[int, ...]], Tensor]
"""(logits of a view, size (h, w)) -> the logits (B, K, h, w) of the image itself."""


@dataclass(frozen=True)
class flip_scale:  # noqa: N801 - reads as the value it is: augment=flip_scale(scales=(1.0,))
    """Images in several sizes, as they are and mirrored: the views of CoTTA on segmentation.

    Args:
        scales: factors on height and width, > 0.
        flip: also the mirror image of each.
        multiple: sizes are rounded to multiples of this, at least 1, for models that need it.

    Example:
        >>> import torch
        >>> images = torch.rand(1, 3, 32, 64, generator=torch.Generator().manual_seed(0))
        >>> views = list(flip_scale(scales=(0.5, 1.0))(images))
        >>> [tuple(view.shape[-2:]) for view, _ in views]
        [(16, 32), (16, 32), (32, 64), (32, 64)]
        >>> view, undo = views[-1]  # the mirror image
        >>> torch.equal(undo(view, (32, 64)), images)
        True
    """

    scales: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    flip: bool = True
    multiple: int = 1

    def __post_init__(self) -> None:
        good = bool(self.scales) and all(0 < scale < math.inf for scale in self.scales)
        require(good, "scales", self.scales, "a tuple of positive factors")
        require(isinstance(self.flip, bool), "flip", self.flip, "True or False")
        require_int("multiple", self.multiple, 1)

    def __call__(self, images: Tensor) -> Iterator[tuple[Tensor, Undo]]:
        """Each view of images (B, C, H, W), and what undoes it on logits."""
        for scale in self.scales:
            size = tuple(max(1, round(side * scale / self.multiple)) * self.multiple for side in images.shape[-2:])
            for mirrored in (False, True)[: 1 + self.flip]:
                view = _resized(images, size)
                yield view.flip(-1) if mirrored else view, partial(_undone, mirrored)


def _undone(mirrored: bool, logits: Tensor, size: tuple[int, ...]) -> Tensor:
    return _resized(logits.flip(-1) if mirrored else logits, size)


def _resized(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return x if x.shape[-2:] == size else F.interpolate(x, size, mode="bilinear", align_corners=False)
