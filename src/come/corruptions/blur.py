"""Blur: defocus, glass, motion, zoom and gaussian.

Functions of float32 images (B, 3, H, W) in [0, 1], the parameters of one severity, and the random numbers of the batch.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .draws import Draws
from .filters import extend, fft_filter, fft_size, motion_line, smooth, zoom

__all__ = ["defocus_blur", "gaussian_blur", "glass_blur", "motion_blur", "zoom_blur"]


def gaussian_blur(x: Tensor, sigma: float, draws: Draws) -> Tensor:
    """Blur with a Gaussian of standard deviation sigma in pixels, cut off at 4 sigma, borders replicated."""
    return smooth(x, sigma)


def disk(radius: float, antialias: float) -> Tensor:
    """Make the defocus kernel (K, K) with sum 1: equal weights within the radius, blurred by a Gaussian.

    K = 17 and a 3x3 Gaussian up to radius 8; above it K = 2 radius + 1 and 5x5. `antialias` is the Gaussian's sigma.

    Example:
        >>> disk(3, 0.1).shape, round(disk(3, 0.1).sum().item(), 5)
        (torch.Size([17, 17]), 1.0)
    """
    reach, half = (8, 1) if radius <= 8 else (int(radius), 2)
    axis = torch.arange(-reach, reach + 1, dtype=torch.float64)
    kernel = ((axis[:, None] ** 2 + axis**2) <= radius**2).double()
    kernel /= kernel.sum()
    taps = torch.exp(-0.5 * (torch.arange(-half, half + 1, dtype=torch.float64) / antialias) ** 2)
    taps /= taps.sum()
    wide = extend(kernel, half, half, half, half, "reflect")
    size = 2 * reach + 1
    rows = sum((float(t) * wide[i : i + size] for i, t in enumerate(taps)), torch.zeros(()))
    return sum((float(t) * rows[:, i : i + size] for i, t in enumerate(taps)), torch.zeros(()))


@lru_cache(maxsize=16)
def _disk_spectrum(radius: float, antialias: float, rows: int, cols: int, device: torch.device) -> tuple[Tensor, int]:
    """Real FFT of the defocus kernel, trimmed of its zero rim and centred at the origin, and its reach."""
    kernel = disk(radius, antialias)
    reach = kernel.shape[0] // 2
    while reach > 0 and float(kernel[0].abs().max()) < 1e-9 and float(kernel[:, 0].abs().max()) < 1e-9:
        kernel = kernel[1:-1, 1:-1]
        reach -= 1
    plane = torch.zeros(rows, cols, dtype=torch.float64)
    at = torch.arange(-reach, reach + 1)
    plane.index_put_(((at % rows)[:, None], (at % cols)[None]), kernel, accumulate=True)
    return torch.fft.rfft2(plane).to(torch.complex64).to(device), reach


def defocus_blur(x: Tensor, parameters: tuple[float, float], draws: Draws) -> Tensor:
    """Convolve with an antialiased disk (:func:`disk`), borders mirrored without the edge (cb|abc|ba)."""
    radius, antialias = parameters
    margin = int(radius) + (radius <= 8)
    height, width = x.shape[-2:]
    padded = extend(x, margin, margin, margin, margin, "reflect")
    rows, cols = fft_size(padded.shape[-2]), fft_size(padded.shape[-1])
    spectrum, reach = _disk_spectrum(radius, antialias, rows, cols, x.device)
    assert reach <= margin
    return fft_filter(padded, spectrum, (height, width), (margin, margin))


def motion_blur(x: Tensor, parameters: tuple[int, float], draws: Draws) -> Tensor:
    """Blur along a line at a random angle in [-45, 45] degrees: out(p) = sum_i k_i x(p + i (cos a, sin a)).

    The 2 radius + 1 weights k are half of a Gaussian of width sigma, see :func:`come.corruptions.filters.motion_line`.
    """
    radius, sigma = parameters
    degrees = draws.uniform(0, 1).double().view(-1) * 90.0 - 45.0
    side = math.sqrt(0.5)
    return motion_line(x, radius, sigma, degrees, (0.0, 1.0, side, side))


def zoom_blur(x: Tensor, factors: tuple[float, ...], draws: Draws) -> Tensor:
    """Average the image and its zooms: out = (x + sum_f zoom(x, f)) / (n + 1) over n factors, the first of them 1."""
    out = x.clone()
    for factor in factors:
        out.add_(zoom(x, factor))
    return out.mul_(1.0 / (len(factors) + 1))


def glass_blur(x: Tensor, parameters: tuple[float, int, int], draws: Draws) -> Tensor:
    """Blur, replace pixels by near neighbours, blur again.

    Each round visits the pixels from the bottom right to the top left and gives each one the current colour of the pixel at a
    random offset in [-reach, reach - 1]^2, so a colour can be passed on many times. (The published code means to swap the two
    pixels; as it swaps NumPy views, the second one keeps its colour, and all published data were made this way.) Between the
    blurs the image is truncated to 8 bits, as published.
    """
    sigma, reach, rounds = parameters
    batch, channels, height, width = x.shape
    x = smooth(x, sigma).mul(255.0).add_(1e-3).floor_().mul_(1.0 / 255.0)
    source: Tensor | None = None
    for i in range(rounds):
        # (dy + reach, dx + reach) of each pixel
        offsets = draws.uniform(i, 2, height, width).mul_(2 * reach).long().clamp_(max=2 * reach - 1)
        step = source_map(offsets - reach, reach)
        source = step if source is None else source.gather(1, step)
    assert source is not None
    flat = x.view(batch, channels, height * width)
    x = torch.stack([flat[:, c].gather(1, source) for c in range(channels)], 1).view(x.shape)
    return smooth(x, sigma)


def source_map(offsets: Tensor, reach: int) -> Tensor:
    """Find the pixel (B, H * W) whose colour each pixel ends up with: out[p] = in[map[p]].

    The pixels (h, w), h from H - reach down to reach + 1 and w likewise, are visited in that order; each takes the colour of
    (h + dy, w + dx), with (dy, dx) = offsets (B, 2, H, W) int64 in [-reach, reach - 1]. If that pixel was visited before, its
    colour came from elsewhere in turn: the links to visited pixels form chains, which pointer doubling follows all at once. A
    link continues with probability below 1/2, so no chain comes near the 64 links that are followed.
    """
    batch, _, height, width = offsets.shape
    row = torch.arange(height, device=offsets.device).unsqueeze(1)
    column = torch.arange(width, device=offsets.device)
    visited = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    place = row * width + column
    dy, dx = offsets.unbind(1)
    step = (dy * width + dx).mul_(visited)
    target = place + step
    # bottom rows and both side columns are never visited; a pixel visited before has a positive step
    across = column + dx
    onward = (step > 0) & (row + dy <= height - reach) & (across > reach) & (across <= width - reach)
    link = (step.mul_(onward) + place).view(batch, -1)
    for _ in range(6):
        link = link.gather(1, link)
    return target.view(batch, -1).gather(1, link)
