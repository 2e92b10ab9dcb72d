"""Weather: snow, frost, fog and spatter (brightness, the fourth of the group, is with the other HSV maps).

Functions as in `blur`, which may overwrite the images, and leave clipping to [0, 1] to the caller.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .draws import Draws
from .filters import enlarge, extend, motion_line, smooth
from .frosting import TEXTURE_SHAPE, frost_textures

__all__ = ["fog", "frost", "snow", "spatter"]


def snow(x: Tensor, parameters: tuple[float, float, float, float, int, float, float], draws: Draws) -> Tensor:
    """Whiten the image and add streaks of snow: out = w x + (1 - w) max(x, 1.5 grey(x) + 0.5) + s + rot180(s).

    The layer s is N(mean, deviation) noise, zoomed, zeroed below a threshold and blurred along a line at -135 to -45 degrees.
    """
    mean, deviation, factor, threshold, radius, sigma, weight = parameters
    height, width = x.shape[-2:]
    flakes = draws.normal(0, 1, math.ceil(height / factor), math.ceil(width / factor)).mul_(deviation).add_(mean)
    layer = enlarge(flakes, height, width, factor).clone()
    # 0 below the threshold, the value above it: a steep ramp instead of a mask
    layer.mul_((layer - threshold).mul_(1e9).clamp_(0.0, 1.0)).clamp_(0.0, 1.0)
    degrees = draws.uniform(1, 1).double().view(-1) * 90.0 - 135.0
    side = math.sqrt(0.5)
    layer = motion_line(layer, radius, sigma, degrees, (side, side, 1.0, 0.0))
    layer = layer.mul(255.0).round_().mul_(1.0 / 255.0)
    layer = layer + layer.flip((2, 3))
    red, green, blue = x.unbind(1)
    pale = (red * (1.5 * 0.299)).add_(green, alpha=1.5 * 0.587).add_(blue, alpha=1.5 * 0.114).add_(0.5).unsqueeze(1)
    out = torch.maximum(x, pale).mul_(1.0 - weight)
    return out.add_(x, alpha=weight).add_(layer)


def frost(x: Tensor, parameters: tuple[float, float, float], draws: Draws) -> Tensor:
    """Overlay frost: out = a x + b f, f a random crop of one of five frost textures.

    The textures are procedural (:mod:`come.corruptions.frosting`), with the mean colours and contrasts of the published
    photographs, which are not shipped; so results agree with the published ones in brightness and contrast, not in pattern.
    The third parameter is the scale of the textures; they are enlarged further for images that they do not cover.
    """
    keep, strength, scale = parameters
    batch, _, height, width = x.shape
    scale = max(scale, 1.1 * height / TEXTURE_SHAPE[0], 1.1 * width / TEXTURE_SHAPE[1])
    rows, cols = math.ceil(TEXTURE_SHAPE[0] * scale), math.ceil(TEXTURE_SHAPE[1] * scale)
    textures = frost_textures(rows, cols, x.device)
    limits = torch.tensor([5, rows - height + 1, cols - width + 1], device=x.device)
    pick = torch.minimum((draws.uniform(0, 3) * limits).long(), limits - 1)
    x.mul_(keep)
    if x.device.type == "cpu":
        for i, (kind, top, left) in enumerate(pick.tolist()):
            x[i].add_(textures[kind, :, top : top + height, left : left + width].float(), alpha=strength / 255.0)
        return x
    kind, top, left = (pick[:, i].view(batch, 1, 1, 1) for i in range(3))
    row = top + torch.arange(height, device=x.device).view(1, 1, -1, 1)
    column = left + torch.arange(width, device=x.device)
    channel = torch.arange(3, device=x.device).view(1, 3, 1, 1)
    return x.add_(textures[kind, channel, row, column].float(), alpha=strength / 255.0)


def plasma(draws: Draws, side: int, decay: float) -> Tensor:
    """Make plasma fractals (B, side, side) in [0, 1] by the diamond-square method, on a torus; `side` is a power of two.

    From the coarsest grid to single pixels, the points half-way between known ones get the mean of their four neighbours
    (first diagonal, then straight) plus uniform noise in [-w^2, w^2]; w starts at 100 and is divided by ``decay`` at each
    level. Whole levels are computed at once.

    Example:
        >>> plasma(Draws(0, torch.arange(2), "fog", 1), 16, 2.0).shape
        torch.Size([2, 16, 16])
    """
    noise = draws.uniform(0, side * side).mul_(2.0).sub_(1.0)
    batch = noise.shape[0]
    grid = torch.zeros(batch, 1, 1, dtype=torch.float32, device=noise.device)
    size, wibble, used = 1, 100.0, 0
    while size < side:
        new = noise[:, used : used + 3 * size * size].view(batch, 3, size, size).mul_(wibble * wibble)
        pair = grid + torch.roll(grid, -1, 1)
        diagonal = new[:, 0].add_(pair, alpha=0.25).add_(torch.roll(pair, -1, 2), alpha=0.25)
        both = grid + diagonal
        right = new[:, 1].add_(both, alpha=0.25)
        right.add_(torch.roll(diagonal, 1, 1), alpha=0.25).add_(torch.roll(grid, -1, 2), alpha=0.25)
        below = new[:, 2].add_(both, alpha=0.25)
        below.add_(torch.roll(diagonal, 1, 2), alpha=0.25).add_(torch.roll(grid, -1, 1), alpha=0.25)
        upper = torch.stack((grid, right), 3).view(batch, size, 1, 2 * size)
        lower = torch.stack((below, diagonal), 3).view(batch, size, 1, 2 * size)
        grid = torch.cat((upper, lower), 2).view(batch, 2 * size, 2 * size)
        used += 3 * size * size
        size, wibble = 2 * size, wibble / decay
    low, high = grid.amin((1, 2), keepdim=True), grid.amax((1, 2), keepdim=True)
    return grid.sub_(low).div_((high - low).clamp_(min=1e-12))


def fog(x: Tensor, parameters: tuple[float, float], draws: Draws) -> Tensor:
    """Add a plasma fractal (:func:`plasma`) and rescale: out = (x + c f) m / (m + c), m the largest value of the image."""
    weight, decay = parameters
    height, width = x.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    most = x.amax((1, 2, 3), keepdim=True)
    layer = plasma(draws, side, decay)[:, None, :height, :width]
    scale = most / (most + weight)
    return x.mul_(scale).add_(layer.mul(scale * weight))


def spatter(x: Tensor, parameters: tuple[float, float, float, float, float, bool], draws: Draws) -> Tensor:
    """Splash water (severities 1 to 3) or mud (4 and 5) onto the lens.

    A liquid layer is N(mean, deviation) noise, blurred by sigma and zeroed below a threshold. Mud: the mask m of the layer is
    blurred by `strength` and zeroed below 0.8, out = (1 - m) x + m brown. Water: out = x + strength m turquoise, with m of
    :func:`_water`.
    """
    mean, deviation, sigma, threshold, strength, mud = parameters
    height, width = x.shape[-2:]
    liquid = smooth(draws.normal(0, 1, height, width).mul_(deviation).add_(mean), sigma)
    wet = (liquid - threshold).mul_(1e9).clamp_(0.0, 1.0)
    if mud:
        mask = smooth(wet, strength)
        mask = mask * (mask - 0.8).mul_(1e9).clamp_(0.0, 1.0)
        brown = torch.tensor([63.0, 42.0, 20.0], device=x.device).div_(255.0).view(1, 3, 1, 1)
        return x.mul_(1.0 - mask).add_(mask * brown)
    mask = _water(liquid.mul_(wet).mul_(255.0).floor_().clamp_(0.0, 255.0)).mul_(strength)
    turquoise = torch.tensor([175.0, 238.0, 238.0], device=x.device).div_(255.0).view(1, 3, 1, 1)
    return x.add_(mask * turquoise)


def _box3(x: Tensor) -> Tensor:
    """Mean over 3x3 pixels, borders mirrored without the edge."""
    for axis in (-1, -2):
        size = x.shape[axis]
        wide = extend(x, 1, 1, 0, 0, "reflect") if axis == -1 else extend(x, 0, 0, 1, 1, "reflect")
        x = (wide.narrow(axis, 0, size) + wide.narrow(axis, 1, size)).add_(wide.narrow(axis, 2, size)).div_(3.0)
    return x


def _edges(layer: Tensor) -> Tensor:
    """Mark the rims of drops (B, 1, H, W) as 0 or 1: Sobel magnitude |gx| + |gy| above 150 that is largest across the rim.

    This is Canny's detector without its weak edges; the rim of a drop jumps from 0 to about 170, so all of it is strong.
    """
    height, width = layer.shape[-2:]
    p = extend(layer, 1, 1, 1, 1, "replicate")

    def at(t: Tensor, dy: int, dx: int) -> Tensor:
        return t[..., 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]

    gx = at(p, -1, 1) + 2 * at(p, 0, 1) + at(p, 1, 1) - at(p, -1, -1) - 2 * at(p, 0, -1) - at(p, 1, -1)
    gy = at(p, 1, -1) + 2 * at(p, 1, 0) + at(p, 1, 1) - at(p, -1, -1) - 2 * at(p, -1, 0) - at(p, -1, 1)
    ax, ay = gx.abs(), gy.abs()
    size = ax + ay
    m = torch.nn.functional.pad(size, (1, 1, 1, 1))
    flat = ay < 0.41421356 * ax
    steep = ay > 2.41421356 * ax
    falling = (gx * gy) > 0  # gradient towards the lower right or the upper left
    slanted = torch.where(falling, at(m, -1, -1), at(m, -1, 1)), torch.where(falling, at(m, 1, 1), at(m, 1, -1))
    before = torch.where(flat, at(m, 0, -1), torch.where(steep, at(m, -1, 0), slanted[0]))
    after = torch.where(flat, at(m, 0, 1), torch.where(steep, at(m, 1, 0), slanted[1]))
    return ((size > 150.0) & (size > before) & (size >= after)).float()


def _distance(edges: Tensor, most: int = 20) -> Tensor:
    """Euclidean distance to the nearest marked pixel, at most ``most``; exact, by one pass along each axis."""
    far = float(most * most)
    for axis in (-1, -2):
        size = edges.shape[axis]
        pad = (most, most, 0, 0) if axis == -1 else (0, 0, most, most)
        squared = (1.0 - edges).mul_(far) if axis == -1 else edges
        wide = torch.nn.functional.pad(squared, pad, value=far)
        best = squared.clone()
        for k in range(1, most):
            for step in (-k, k):
                torch.minimum(best, wide.narrow(axis, most + step, size) + float(k * k), out=best)
        edges = best
    return edges.sqrt_()


def _water(layer: Tensor) -> Tensor:
    """Shade water drops, with values 0..255 in ``layer``, by their distance from the rim.

    The distance to the rim (at most 20) is blurred, histogram-equalized, embossed with [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]],
    blurred, multiplied by the layer and divided by its largest value.
    """
    height, width = layer.shape[-2:]
    distance = _box3(_distance(_edges(layer))).add_(1e-3).floor_()
    count = float(height * width)
    # equalization: every value v is mapped to 255 (P(d <= v) - P(d = least)) / (1 - P(d = least))
    share = torch.stack([(distance <= v).float().sum((1, 2, 3)) for v in range(21)], 1).div_(count)
    least = share + (share <= 0).float() * 2.0
    first = least.amin(1, keepdim=True)
    level = ((share - first).clamp_(min=0.0) / (1.0 - first).clamp_(min=1e-9)).mul_(255.0).round_()
    rise = torch.diff(level, dim=1)
    equal = level[:, 0].view(-1, 1, 1, 1).expand_as(distance).clone()
    for v in range(20):
        equal.add_((distance > v).float().mul_(rise[:, v].view(-1, 1, 1, 1)))
    p = extend(equal, 1, 1, 1, 1, "reflect")
    embossed = torch.zeros_like(equal)
    for dy, dx, weight in ((0, 0, -2), (0, 1, -1), (1, 0, -1), (1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2)):
        embossed.add_(p[..., dy : dy + height, dx : dx + width], alpha=weight)
    shade = _box3(embossed.clamp_(0.0, 255.0)).round_().mul_(layer)
    return shade.div_(shade.amax((2, 3), keepdim=True).clamp_(min=1e-6))
