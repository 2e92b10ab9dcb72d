"""From images to what a model takes: size, crop and normalization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from come.errors import require_int, unknown
from come.images.normalization import Normalization

INTERPOLATIONS = {method.name.lower(): method for method in Image.Resampling}
MAX_ASPECT = 16
"""A longer image is cropped to this aspect ratio before it is resized; the center crop drops the rest anyway."""


@dataclass(frozen=True)
class Preprocess:
    """Crops an image to a square, and turns squares into a model's input.

    Args:
        size: side of the square, in pixels.
        resize: the shorter side of an image before the center `size` x `size` is cropped.
        interpolation: of that resizing: "bilinear", "bicubic", ...
        mean: per channel, of images in [0, 1].
        std: the same, positive.

    Example:
        >>> preprocess = Preprocess(size=4, resize=5)
        >>> preprocess.to_tensor(Image.new("RGB", (30, 20))).shape
        torch.Size([3, 4, 4])
        >>> preprocess(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)).shape
        torch.Size([1, 3, 4, 4])
    """

    size: int = 224
    resize: int = 256
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        require_int("size", self.size, 1)
        require_int("resize", self.resize, 1)
        if self.interpolation not in INTERPOLATIONS:
            raise unknown("interpolation", self.interpolation, INTERPOLATIONS)
        Normalization.of(self.normalization)

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """`(mean, std)`, as the methods that augment images take it."""
        return self.mean, self.std

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) uint8 -> (B, 3, size, size) float32: scaled to [0, 1], resized if needed, normalized."""
        x = images.float() / 255
        if x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True, align_corners=False)
        return Normalization.of(self.normalization).inputs(x)

    def to_tensor(self, picture: Image.Image) -> Tensor:
        """An image -> (3, size, size) uint8."""
        return pixels(self.square(picture.convert("RGB")))

    def square(self, picture: Image.Image) -> Image.Image:
        """Resize the shorter side to `resize` and crop the center.

        An image whose shorter side is `size` is only cropped: ImageNet-C is made of such crops.
        """
        width, height = picture.size
        if min(width, height) != self.size:
            longest = MAX_ASPECT * min(width, height)
            if max(width, height) > longest:
                left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
                picture = picture.crop((left, top, left + min(width, longest), top + min(height, longest)))
                width, height = picture.size
            scale = self.resize / min(width, height)
            larger = (max(1, round(width * scale)), max(1, round(height * scale)))
            picture = picture.resize(larger, INTERPOLATIONS[self.interpolation])
            width, height = larger
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return picture.crop((left, top, left + self.size, top + self.size))


def pixels(picture: Image.Image) -> Tensor:
    """An RGB image as a tensor (3, H, W) uint8."""
    return torch.from_numpy(np.array(picture, dtype=np.uint8)).movedim(-1, 0).contiguous()
