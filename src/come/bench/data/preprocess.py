"""From image files to what a model takes: decoded with care, since files are not trusted, cropped and normalized."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from come.errors import require_int, unknown
from come.images.normalization import Normalization

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
"""Accepted whatever the file's ending. Pillow knows many more; one of them starts another program."""
MAX_PIXELS = 2**30 // 12  # of an image file, 89 million: where Pillow begins to warn. Decoding one takes up to 1 GB.
MAX_BYTES = 8 * MAX_PIXELS  # of an image file: eight bytes a pixel, as uncompressed RGBA of 16 bits has

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


class WholeImage(Preprocess):
    """Preprocessing for a class of each pixel: all of an image, its shorter side resized to `resize`; nothing is cropped.

    Example:
        >>> WholeImage(size=4, resize=4).to_tensor(Image.new("RGB", (30, 20))).shape
        torch.Size([3, 4, 6])
    """

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) uint8 -> the same size in float32: scaled to [0, 1], normalized."""
        return Normalization.of(self.normalization).inputs(images.float() / 255)

    def square(self, picture: Image.Image) -> Image.Image:
        """No square: resize the shorter side to `resize`."""
        scale = self.resize / min(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        return picture.resize((width, height), INTERPOLATIONS[self.interpolation])


def pixels(picture: Image.Image) -> Tensor:
    """An RGB image as a tensor (3, H, W) uint8."""
    return torch.from_numpy(np.array(picture, dtype=np.uint8)).movedim(-1, 0).contiguous()


def decode(file: bytes, preprocess: Preprocess) -> Tensor:
    """The bytes of an image file -> (3, size, size) uint8; raises whatever the decoder raises."""
    with opened(file) as image:
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
            # Pillow would clip 16-bit pixels at 255.
            return preprocess.to_tensor(Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)))
        if image.mode in ("I", "F"):
            raise ValueError("its pixels are 32-bit numbers of no known range; save it with 8 bits a channel")
        return preprocess.to_tensor(image)


@contextmanager
def opened(file: bytes) -> Iterator[Image.Image]:
    """The image in the bytes of a file: its header is checked, its pixels are decoded when they are used."""
    if len(file) > MAX_BYTES:
        raise ValueError(f"the file has {len(file)} bytes, more than {MAX_BYTES}")
    try:
        with quiet(), Image.open(BytesIO(file), formats=FORMATS) as image:  # reads the header only
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"it declares {width} x {height} pixels, more than {MAX_PIXELS}")
            yield image
    except UnidentifiedImageError as error:
        raise ValueError("not an image") from error


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings about the insides of files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
