"""Digital: contrast, elastic transform, pixelate, JPEG compression; and brightness and saturation in HSV.

Functions as in `blur`, which may overwrite the images; ``pixelate`` and ``jpeg_compression`` take and return uint8 images.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .draws import Draws
from .filters import smooth
from .jpeg import jpeg_round_trip

__all__ = ["brightness", "contrast", "elastic_transform", "jpeg_compression", "pixelate", "saturate"]


def contrast(x: Tensor, factor: float, draws: Draws) -> Tensor:
    """Shrink the deviation from each channel's mean: out = mean + factor (x - mean)."""
    mean = x.mean((2, 3), keepdim=True)
    return x.mul_(factor).add_(mean.mul_(1.0 - factor))


def brightness(x: Tensor, amount: float, draws: Draws) -> Tensor:
    """Raise V = max(R, G, B) of HSV: V' = min(V + amount, 1) at the same hue and saturation.

    RGB is proportional to V at fixed hue and saturation, so out = x V' / V; black becomes the grey V'.
    """
    tiny = 1e-6  # keeps black grey: (0 + tiny) * (V' / tiny)
    x = x.clamp_(min=tiny)
    value = x.amax(1, keepdim=True)
    return x.mul_((value + amount).clamp_(max=1.0).div_(value))


def saturate(x: Tensor, parameters: tuple[float, float], draws: Draws) -> Tensor:
    """Change S of HSV: S' = clip(factor S + offset, 0, 1) at the same hue and value.

    V - RGB is proportional to S at fixed hue and value, so out = V - (V - x) S' / S. A grey pixel has hue 0, red, as is usual;
    with an offset it turns reddish.

    Example:
        >>> x = torch.tensor([0.5, 0.25, 0.0]).view(1, 3, 1, 1)
        >>> saturate(x, (0.5, 0.0), Draws(0, torch.arange(1), "s", 1)).flatten().tolist()
        [0.5, 0.375, 0.25]
    """
    factor, offset = parameters
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    if offset == 0.0:
        # S' / S = min(factor, 1 / S), and 1 / S = V / (max - min)
        ratio = (value / chroma.clamp_(min=1e-6)).clamp_(max=factor)
        return torch.addcmul(value, x.sub_(value), ratio)
    # a grey pixel gets a very small step away from red so that its S' comes out along hue 0
    tiny = 2.0**-16
    step = (chroma * -1e9).add_(1.0).clamp_(0.0, 1.0).mul_(tiny)
    x[:, 1:].sub_(step)
    chroma.add_(step)
    saturation = chroma / value.clamp(min=tiny)
    ratio = saturation.mul_(factor).add_(offset).clamp_(0.0, 1.0).mul_(value).div_(chroma)
    return torch.addcmul(value, x.sub_(value), ratio)


@lru_cache(maxsize=64)
def _box_plan(size: int, small: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """Plan Pillow's BOX reduction of an axis: for each step k the k-th pixel of every window and its weight."""
    edge = (torch.arange(small + 1, dtype=torch.float64) * (size / small) + 0.5).floor().long()
    start, length = edge[:-1], edge[1:] - edge[:-1]
    plan = []
    for k in range(int(length.max())):
        at = (start + k).clamp(max=size - 1)
        plan.append((at.to(device), ((length > k).double() / length).float().to(device)))
    return tuple(plan)


@lru_cache(maxsize=64)
def _nearest(size: int, small: int, device: torch.device) -> Tensor:
    at = ((torch.arange(size, dtype=torch.float64) + 0.5) * (small / size)).floor().long()
    return at.clamp_(max=small - 1).to(device)


def pixelate(x: Tensor, share: float, draws: Draws) -> Tensor:
    """Reduce to int(share side) pixels a side by box means and enlarge again by repetition.

    The windows are those of Pillow's BOX filter, [round(i s), round((i + 1) s)) with s the reduction; the way back is its
    nearest (or BOX, which is the same when enlarging) filter.

    Example:
        >>> x = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4).expand(1, 3, 4, 4)
        >>> pixelate(x, 0.5, Draws(0, torch.arange(1), "p", 1))[0, 0].tolist()
        [[3, 3, 5, 5], [3, 3, 5, 5], [11, 11, 13, 13], [11, 11, 13, 13]]
    """
    height, width = x.shape[-2:]
    rows, cols = max(1, int(height * share)), max(1, int(width * share))
    narrow = x.float()
    for axis, size, small_size in ((2, height, rows), (3, width, cols)):
        plan = _box_plan(size, small_size, x.device)
        parts = (narrow.index_select(axis, at).mul_(weight[:, None] if axis == 2 else weight) for at, weight in plan)
        narrow = sum(parts, torch.zeros((), device=x.device))
    small = narrow.add_(0.5).to(torch.uint8)
    wide = small.index_select(3, _nearest(width, cols, x.device))
    return wide.index_select(2, _nearest(height, rows, x.device))


def jpeg_compression(x: Tensor, quality: int, draws: Draws) -> Tensor:
    """Compress and decompress with JPEG at a libjpeg quality from 1 to 100, see :mod:`come.corruptions.jpeg`."""
    return jpeg_round_trip(x, quality)


def elastic_transform(x: Tensor, parameters: tuple[float, float, float], draws: Draws) -> Tensor:
    """Warp with a smooth random field: out(p) = in(p + a (G_sigma * u)(p)), u uniform in [-1, 1]^2 at each pixel.

    Sampling is bilinear with mirrored borders. With a jitter, the affine transform that moves three points (a square of a
    third of the side around the centre) by uniform offsets in [-jitter, jitter]^2 comes first. The displacement a, sigma and
    jitter are shares of the shorter side, so the effect does not depend on the size.
    """
    batch, _, height, width = x.shape
    side = min(height, width)
    amplitude, sigma, jitter = (share * side for share in parameters)
    if jitter > 0.0:
        x = _affine(x, draws.uniform(1, 3, 2).mul_(2.0 * jitter).sub_(jitter), side)
    if amplitude == 0.0:
        return x
    field = draws.uniform(0, 2, height, width).mul_(2.0 * amplitude).sub_(amplitude)
    field = smooth(field, sigma, truncate=3.0, mode="symmetric")
    grid = torch.empty(batch, height, width, 2, dtype=torch.float32, device=x.device)
    column = torch.arange(width, dtype=torch.float32, device=x.device)
    row = torch.arange(height, dtype=torch.float32, device=x.device).unsqueeze(1)
    # pixel p has the normalized position (2 p + 1) / n - 1
    torch.add(column.mul_(2.0 / width).add_(1.0 / width - 1.0), field[:, 0], alpha=2.0 / width, out=grid[..., 0])
    torch.add(row.mul_(2.0 / height).add_(1.0 / height - 1.0), field[:, 1], alpha=2.0 / height, out=grid[..., 1])
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _affine(x: Tensor, moved: Tensor, side: int) -> Tensor:
    """Map by the affine transform that moves c + (s, s), c + (s, -s) and c - (s, s) by ``moved`` (B, 3, 2).

    c is the centre and s a third of the side; borders are mirrored without the edge.
    """
    _, _, height, width = x.shape
    square = max(1, side // 3)
    first, second, third = moved.unbind(1)
    # p -> p + shift + (p - c)_x along_x + (p - c)_y along_y; its inverse is sampled
    along_x = (second - third) / (2.0 * square)
    along_y = (first - second) / (2.0 * square)
    shift = (first + third) * 0.5
    a, b = 1.0 + along_x[:, 0], along_y[:, 0]
    c, d = along_x[:, 1], 1.0 + along_y[:, 1]
    det = a * d - b * c
    cx, cy = float(width // 2), float(height // 2)
    column = torch.arange(width, dtype=torch.float32, device=x.device) - cx
    row = (torch.arange(height, dtype=torch.float32, device=x.device) - cy).unsqueeze(1)
    u = column - shift[:, 0].view(-1, 1, 1)
    v = row - shift[:, 1].view(-1, 1, 1)

    def view(t: Tensor) -> Tensor:
        return (t / det).view(-1, 1, 1)

    at_x = view(d) * u - view(b) * v + cx
    at_y = view(a) * v - view(c) * u + cy
    grid = torch.stack((at_x * (2.0 / max(width - 1, 1)) - 1.0, at_y * (2.0 / max(height - 1, 1)) - 1.0), -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=True)
