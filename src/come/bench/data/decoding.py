"""Decodes image files that are not trusted: what one declares is checked before anything is allocated."""

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
"""Accepted whatever the file's ending. Pillow knows many more; one of them starts another program."""
MAX_PIXELS = 2**30 // 12
"""Of an image file, 89 million: where Pillow begins to warn. Decoding one takes up to 1 GB."""
MAX_BYTES = 8 * MAX_PIXELS  # of an image file: eight bytes a pixel, as uncompressed RGBA of 16 bits has


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
