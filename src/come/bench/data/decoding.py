"""From an image file to pixels. The file is not trusted: what it declares is checked before anything is allocated."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from come.bench.data.preprocess import Preprocess

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
"""What a file may hold, whatever its ending says. Pillow knows many more; one of them starts another program."""

MAX_PIXELS = 2**30 // 12
"""Of an image file, 89 million: where Pillow begins to warn. Decoding one takes up to 1 GB."""

MAX_BYTES = 8 * MAX_PIXELS
"""Of an image file: eight bytes a pixel, as uncompressed RGBA of 16 bits has."""


def decode(file: bytes, preprocess: Preprocess) -> Tensor:
    """The picture in the bytes of a file -> (3, size, size) uint8; raises whatever the decoder met there.

    Example:
        >>> Image.new("L", (8, 8)).save(file := BytesIO(), "png")
        >>> decode(file.getvalue(), Preprocess(4, 4)).shape
        torch.Size([3, 4, 4])
    """
    with opened(file) as picture:
        return preprocess.to_tensor(_eight_bits(picture))


@contextmanager
def opened(file: bytes) -> Iterator[Image.Image]:
    """The picture in the bytes of a file, whose header has been checked; its pixels are decoded when they are used.

    Example:
        >>> Image.new("L", (8, 4)).save(file := BytesIO(), "png")
        >>> with opened(file.getvalue()) as picture:
        ...     picture.size
        (8, 4)
    """
    if len(file) > MAX_BYTES:
        raise ValueError(f"the file has {len(file)} bytes, more than {MAX_BYTES}")
    try:
        with quiet(), Image.open(BytesIO(file), formats=FORMATS) as picture:  # reads the header only
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"it declares {width} x {height} pixels, more than {MAX_PIXELS}")
            yield picture
    except UnidentifiedImageError as error:
        raise ValueError("not an image") from error


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Deeper pixels scaled to eight bits a channel; Pillow would cut them off at 255."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of no known range; save it with 8 bits a channel")
    return picture


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings about the insides of files: one is read, or it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
