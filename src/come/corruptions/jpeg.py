"""JPEG compression and decompression of 8-bit images, by Pillow or by a discrete cosine transform in torch.

Both follow the defaults of libjpeg and ``PIL.Image.save(..., quality=q)``: Annex K quantization tables scaled by quality,
YCbCr, 4:2:0 chroma, and "fancy" (triangle) chroma upsampling in the decoder. The torch path leaves out only the lossless
entropy coder. ``"auto"`` takes Pillow, which is faster, for CPU tensors if it is installed, and torch otherwise;
:func:`jpeg_backend` forces one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from .filters import extend

_BACKENDS = ("auto", "pillow", "dct")
_backend: ContextVar[str] = ContextVar("jpeg_backend", default="auto")

# ITU-T T.81, Annex K.1
_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)


@contextmanager
def jpeg_backend(name: str) -> Iterator[None]:
    """Force the JPEG path inside a ``with`` block (of this thread or task).

    Args:
        name: ``"auto"`` (Pillow for CPU tensors if installed, else torch), ``"pillow"`` (any device, by way of the CPU) or
            ``"dct"`` (torch on any device).

    Example:
        >>> with jpeg_backend("dct"):
        ...     jpeg_round_trip(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 50).shape
        torch.Size([1, 3, 8, 8])
    """
    if name not in _BACKENDS:
        raise ValueError(f"JPEG backend must be one of {', '.join(_BACKENDS)}, got {name!r}")
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


def jpeg_round_trip(images: Tensor, quality: int) -> Tensor:
    """Compress and decompress uint8 images (B, 3, H, W) at a libjpeg quality from 1 to 100."""
    backend = _backend.get()
    if backend == "auto":
        backend = "pillow" if images.device.type == "cpu" and _has_pillow() else "dct"
    return jpeg_by_pillow(images, quality) if backend == "pillow" else jpeg_by_dct(images, quality)


@lru_cache(maxsize=1)
def _has_pillow() -> bool:
    return find_spec("PIL") is not None


def jpeg_by_pillow(images: Tensor, quality: int) -> Tensor:
    """Compress and decompress each image with Pillow, in memory; arguments as in :func:`jpeg_round_trip`."""
    import numpy as np
    from PIL import Image

    height, width = images.shape[-2:]
    planes = images.cpu().contiguous().numpy()
    out = torch.empty(images.shape, dtype=torch.uint8)
    into = out.view(-1, 3, height * width).numpy()
    for i, image in enumerate(planes):
        bands = [Image.frombuffer("L", (width, height), band, "raw", "L", 0, 1) for band in image]
        with io.BytesIO() as file:
            Image.merge("RGB", bands).save(file, "JPEG", quality=quality)
            # the decoder proper, without a second look at the header
            decoded = Image.frombytes("RGB", (width, height), file.getvalue(), "jpeg", "RGB", "")
        for c, band in enumerate("RGB"):
            into[i, c] = np.frombuffer(decoded.tobytes("raw", band), np.uint8)
    return out.to(images.device)


@lru_cache(maxsize=64)
def quantization_tables(quality: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Scale the luminance and the chrominance table as libjpeg does: q' = clamp((q s + 50) // 100, 1, 255).

    s = 5000 // quality below quality 50, else 200 - 2 quality.

    Example:
        >>> quantization_tables(50)[0][0]
        (16, 11, 10, 16, 24, 40, 51, 61)
    """
    if not 1 <= quality <= 100:
        raise ValueError(f"JPEG quality must be from 1 to 100, got {quality}")
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality

    def scaled(table: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(min(max((q * scale + 50) // 100, 1), 255) for q in row) for row in table)

    return scaled(_LUMINANCE), scaled(_CHROMINANCE)


@lru_cache(maxsize=32)
def _constants(quality: int, device: torch.device) -> tuple[Tensor, ...]:
    """Orthonormal DCT matrix, both quantization tables and both colour matrices, on a device."""
    k = torch.arange(8, dtype=torch.float64)
    dct = torch.cos((2 * k + 1) * k[:, None] * math.pi / 16) * 0.5
    dct[0] *= math.sqrt(0.5)
    luminance, chrominance = quantization_tables(quality)
    to_ycc = torch.tensor([[0.299, 0.587, 0.114], [-0.168735892, -0.331264108, 0.5], [0.5, -0.418687589, -0.081312411]])
    to_rgb = torch.tensor([[1.0, 0.0, 1.402], [1.0, -0.344136286, -0.714136286], [1.0, 1.772, 0.0]])
    made = (dct.float(), torch.tensor(luminance).float(), torch.tensor(chrominance).float(), to_ycc, to_rgb)
    return tuple(part.to(device) for part in made)


def _quantize(plane: Tensor, table: Tensor, dct: Tensor) -> Tensor:
    """Take planes (B, N, h, w) in 0..255 through an 8x8 DCT, quantization by `table` (8, 8) and back, rounded to 0..255.

    Any h and w: a plane is padded by its last row and column.
    """
    batch, number, height, width = plane.shape
    plane = extend(plane, 0, -width % 8, 0, -height % 8, "replicate")
    rows, cols = plane.shape[-2:]

    def both(blocks: Tensor, left: Tensor, right: Tensor) -> Tensor:
        # left @ block @ right for each 8x8 block of a (..., rows, cols) plane
        strips = torch.matmul(left, blocks.reshape(-1, 8, cols))
        return torch.matmul(strips.view(-1, 8), right).view(batch, number, rows // 8, 8, cols // 8, 8)

    steps = table[:, None, :]
    # the encoder's transform yields eighths; then it rounds half away from zero
    coefficients = both(plane - 128.0, dct, dct.T).mul_(8.0).round_().div_(8.0 * steps)
    coefficients = coefficients.abs().add_(0.5).floor_().copysign_(coefficients).mul_(steps)
    plane = both(coefficients.view(batch, number, rows, cols), dct.T, dct).add_(128.5).floor_().clamp_(0.0, 255.0)
    return plane.view(batch, number, rows, cols)[..., :height, :width]


def _halve_chroma(chroma: Tensor) -> Tensor:
    """Average 2x2 pixels, rounded down after a bias of 1/4 and 2/4 in turn along a row (libjpeg's h2v2)."""
    height, width = chroma.shape[-2:]
    # the encoder repeats the last column up to whole blocks before it averages, the last row up to whole
    # pairs
    chroma = extend(chroma, 0, -width % 16, 0, height % 2, "replicate")
    mean = F.avg_pool2d(chroma, 2)
    bias = torch.tensor([0.25, 0.5], device=chroma.device).repeat(mean.shape[-1] // 2)
    return mean.add_(bias).floor_()


def _double_chroma(chroma: Tensor, height: int, width: int) -> Tensor:
    """Upsample 2x with weights 9 3 3 1 / 16 (libjpeg's fancy upsampling), cut to (height, width)."""
    rows, cols = (height + 1) // 2, (width + 1) // 2
    chroma = chroma[..., :rows, :cols]
    wide = extend(chroma, 1, 1, 1, 1, "replicate")
    middle = wide[..., 1:-1, :] * 3.0
    up = torch.stack((middle + wide[..., :-2, :], middle + wide[..., 2:, :]), -2)
    up = up.view(*chroma.shape[:-2], 2 * rows, cols + 2)
    centre = up[..., 1:-1] * 3.0
    out = torch.stack((centre + up[..., :-2] + 8.0, centre + up[..., 2:] + 7.0), -1)
    return out.mul_(1.0 / 16.0).floor_().view(*chroma.shape[:-2], 2 * rows, 2 * cols)[..., :height, :width]


def jpeg_by_dct(images: Tensor, quality: int) -> Tensor:
    """Compress and decompress a batch with torch operations; arguments as in :func:`jpeg_round_trip`.

    It agrees with libjpeg up to the rounding of its integer transforms.
    """
    height, width = images.shape[-2:]
    dct, luminance, chrominance, to_ycc, to_rgb = _constants(int(quality), images.device)
    r, g, b = images.float().unbind(1)

    def mixed(weights: Tensor, shift: float) -> Tensor:
        return (r * weights[0]).addcmul_(g, weights[1]).addcmul_(b, weights[2]).add_(shift).floor_()

    luma = mixed(to_ycc[0], 0.5).unsqueeze(1)
    # the encoder's integer form rounds chroma just below one half
    chroma = torch.stack((mixed(to_ycc[1], 128.499), mixed(to_ycc[2], 128.499)), 1)
    luma = _quantize(luma, luminance, dct)[:, 0]
    small = _halve_chroma(chroma)
    chroma = _double_chroma(_quantize(small, chrominance, dct), height, width).sub_(128.0)
    blue, red = chroma.unbind(1)
    out = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    for c in range(3):
        colour = (blue * to_rgb[c, 1]).addcmul_(red, to_rgb[c, 2]).add_(luma).add_(0.5).floor_().clamp_(0.0, 255.0)
        out[:, c] = colour.to(torch.uint8)
    return out
