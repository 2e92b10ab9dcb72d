"""Linear filters that the corruptions share: padding, separable Gaussians, convolution by FFT, motion lines and zoom."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@lru_cache(maxsize=64)
def _border_index(size: int, before: int, after: int, mode: str, device: torch.device) -> Tensor:
    """Source positions of an axis that is padded in the given mode."""
    at = torch.arange(-before, size + after)
    if mode == "replicate" or size == 1:
        at = at.clamp_(0, size - 1)
    elif mode == "reflect":  # c b | a b c | b a
        at = at.remainder_(2 * size - 2)
        at = torch.minimum(at, 2 * size - 2 - at)
    else:  # symmetric: b a | a b c | c b
        at = at.remainder_(2 * size)
        at = torch.minimum(at, 2 * size - 1 - at)
    return at.to(device)


def extend(x: Tensor, left: int, right: int, top: int, bottom: int, mode: str) -> Tensor:
    """Pad the last two axes of (..., H, W) by any number of columns and rows, even more than the image has.

    `mode` is ``"replicate"`` (aa|abc|cc), ``"reflect"`` (cb|abc|ba) or ``"symmetric"`` (ba|abc|cb).

    Example:
        >>> extend(torch.tensor([[1., 2., 3.]]), 2, 1, 0, 0, "symmetric")
        tensor([[2., 1., 1., 2., 3., 3.]])
    """
    height, width = x.shape[-2:]
    fits = max(left, right) < width and max(top, bottom) < height
    if x.ndim == 4 and (mode == "replicate" or (mode == "reflect" and fits)):
        return F.pad(x, (left, right, top, bottom), mode=mode)
    if top or bottom:
        x = x.index_select(-2, _border_index(height, top, bottom, mode, x.device))
    if left or right:
        x = x.index_select(-1, _border_index(width, left, right, mode, x.device))
    return x


def gaussian_taps(sigma: float, truncate: float = 4.0) -> list[float]:
    """Right half of a sampled and normalized Gaussian: weight at 0, 1, ..., int(truncate * sigma + 0.5)."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return [1.0]
    half = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(radius + 1)]
    total = half[0] + 2.0 * sum(half[1:])
    return [value / total for value in half]


def smooth(x: Tensor, sigma: float, *, truncate: float = 4.0, mode: str = "replicate") -> Tensor:
    """Blur (B, C, H, W) with a Gaussian, by one pass along each axis; sigma 0 returns ``x`` itself.

    out[y, x] = sum_ij g_i g_j in[y + i, x + j] with g_i proportional to exp(-i^2 / (2 sigma^2)), |i| <= truncate * sigma.
    `mode` is the border mode of :func:`extend`.
    """
    taps = gaussian_taps(sigma, truncate)
    radius = len(taps) - 1
    if radius == 0:
        return x
    for axis in (-1, -2):
        size = x.shape[axis]
        margins = (radius, radius, 0, 0) if axis == -1 else (0, 0, radius, radius)
        wide = extend(x, *margins, mode)
        x = wide.narrow(axis, radius, size) * taps[0]
        for i in range(1, radius + 1):
            x.add_(wide.narrow(axis, radius - i, size), alpha=taps[i])
            x.add_(wide.narrow(axis, radius + i, size), alpha=taps[i])
    return x


@lru_cache(maxsize=512)
def fft_size(least: int) -> int:
    """Smallest even number >= least whose prime factors are 2, 3 and 5: a fast FFT length."""
    size = least + least % 2
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 2


def fft_filter(padded: Tensor, spectrum: Tensor, shape: tuple[int, int], corner: tuple[int, int]) -> Tensor:
    """Convolve circularly with a kernel given by its real FFT and cut the valid part out.

    `padded` is the image with its border (B, C, h, w), `spectrum` broadcasts to (B, C, FH, FW // 2 + 1) with FH = fft_size(h)
    and FW = fft_size(w), and the result is (B, C, *shape), cut out at `corner` = (top, left).
    """
    size = (fft_size(padded.shape[-2]), fft_size(padded.shape[-1]))
    image = torch.fft.rfft2(padded, s=size).mul_(spectrum)
    full: Tensor = torch.fft.irfft2(image, s=size)
    (top, left), (height, width) = corner, shape
    return full[..., top : top + height, left : left + width]


def motion_line(
    x: Tensor, radius: int, sigma: float, degrees: Tensor, reach: tuple[float, float, float, float]
) -> Tensor:
    """Blur (B, C, H, W) along a line that starts at the pixel, at one angle per image, with half-Gaussian weights.

    out(p) = sum_i k_i in(p + round(i (cos a, sin a))), i = 0..2 radius, k_i proportional to exp(-i^2 / (2 sigma^2)), where
    positions off the image read its nearest border pixel. It is computed in the frequency domain, as sum_i k_i e^(2 pi j f .
    offset_i), so the kernels of all images are made by one matrix product.
    `degrees`, float64 (B,), are the angles of the images (0 reads to the right, 90 downwards); `reach` is how far the line can
    go left, right, up and down, as shares of its length.
    """
    taps = 2 * radius + 1
    left, right, top, bottom = (math.ceil(share * (taps - 1)) for share in reach)
    height, width = x.shape[-2:]
    padded = extend(x, left, right, top, bottom, "replicate")
    rows, cols = fft_size(padded.shape[-2]), fft_size(padded.shape[-1])

    step = torch.arange(taps, dtype=torch.float64, device=x.device)
    weight = torch.exp(-0.5 * (step / sigma) ** 2)
    weight = weight / weight.sum()
    angle = torch.deg2rad(degrees).unsqueeze(1)
    dy = torch.ceil(step * torch.sin(angle) - 0.5).float()
    dx = torch.ceil(step * torch.cos(angle) - 0.5).float()
    fy = torch.arange(rows, dtype=torch.float32, device=x.device) * (2.0 * math.pi / rows)
    fx = torch.arange(cols // 2 + 1, dtype=torch.float32, device=x.device) * (2.0 * math.pi / cols)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    vertical = torch.polar(weight.float().view(1, -1, 1).expand(x.shape[0], -1, rows), dy.unsqueeze(2) * fy)
    horizontal = torch.polar(one.expand(x.shape[0], taps, cols // 2 + 1), dx.unsqueeze(2) * fx)
    spectrum = torch.bmm(vertical.transpose(1, 2), horizontal).unsqueeze(1)
    return fft_filter(padded, spectrum, (height, width), (top, left))


def zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the centre of an image by a factor >= 1 to its full size, bilinearly with the corners aligned.

    The centre has ceil(side / factor) pixels a side and is enlarged to round(that * factor), whose extra row and column, if
    any, are cut off in the middle.
    """
    height, width = x.shape[-2:]
    rows, cols = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - rows) // 2, (width - cols) // 2
    return enlarge(x[..., top : top + rows, left : left + cols], height, width, factor)


def enlarge(x: Tensor, height: int, width: int, factor: float) -> Tensor:
    """Enlarge by a factor, corners aligned, and crop the middle (height, width)."""
    rows = max(height, round(x.shape[-2] * factor))
    cols = max(width, round(x.shape[-1] * factor))
    if (rows, cols) != tuple(x.shape[-2:]):
        x = F.interpolate(x, size=(rows, cols), mode="bilinear", align_corners=True)
    top, left = (rows - height) // 2, (cols - width) // 2
    return x[..., top : top + height, left : left + width]
