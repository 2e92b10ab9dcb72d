"""Procedural frost textures, which stand in for the published photographs, since these are not shipped.

Each texture is a mix of drawn ice ferns, embossed ridges and fractal noise, with the mean colour and the contrast of one of
the five photographs. They are made once, on the CPU, from a fixed seed, so they are the same everywhere.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .draws import Draws
from .filters import smooth

TEXTURE_SHAPE = (480, 640)


class _Style(NamedTuple):
    """One texture: colour statistics (0..255), then the crystals and how the layers are mixed."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    ferns: int
    length: float  # of a fern's spine, in pixels
    branches: int  # on each side of the spine
    angle: float  # between branch and spine, in radians
    crystal: float  # weight of the ferns
    crumple: float  # weight of embossed ridges
    cloud: float  # weight of broad patches
    grain: float  # weight of fine grain


_STYLES = (
    _Style((77.7, 149.1, 165.7), (26.9, 16.5, 15.3), 500, 26.0, 3, 0.5, 0.35, 0.8, 1.2, 0.25),
    _Style((200.8, 205.4, 214.5), (21.4, 22.1, 22.6), 700, 80.0, 5, 0.12, 0.8, 0.35, 1.0, 0.25),
    _Style((200.8, 205.4, 214.5), (21.4, 22.1, 22.6), 1200, 50.0, 4, 0.2, 0.8, 0.35, 1.0, 0.25),
    _Style((137.6, 152.8, 165.2), (28.5, 28.5, 29.9), 1600, 22.0, 7, 0.55, 0.9, 0.5, 1.0, 0.4),
    _Style((112.4, 123.4, 134.8), (44.4, 43.3, 41.7), 800, 48.0, 12, 0.9, 1.1, 0.2, 0.9, 0.15),
)


def _fractal(draws: Draws, stream: int, coarsest: int, finest: int, fall: float) -> Tensor:
    """Sum octaves of smooth noise with cells of ``coarsest`` down to ``finest`` pixels: (H, W) with unit deviation."""
    height, width = TEXTURE_SHAPE
    total = torch.zeros(height, width)
    cell, weight, octave = coarsest, 1.0, 0
    while cell >= finest:
        rows, cols = math.ceil(height / cell) + 3, math.ceil(width / cell) + 3
        noise = draws.normal(stream * 16 + octave, 1, rows, cols)
        fine = F.interpolate(noise, scale_factor=float(cell), mode="bicubic", align_corners=False)
        total += weight * fine[0, 0, cell : cell + height, cell : cell + width]
        cell, weight, octave = cell // 2, weight * fall, octave + 1
    return (total - total.mean()) / total.std()


def _unit(x: Tensor) -> Tensor:
    """Shift and scale to mean 0 and deviation 1."""
    return (x - x.mean()) / x.std()


def _emboss(x: Tensor) -> Tensor:
    """Light a relief from the upper left: differences along the diagonal; unit deviation."""
    return _unit(x - torch.roll(x, (1, 1), (0, 1)))


def _ferns(draws: Draws, stream: int, style: _Style) -> Tensor:
    """Draw fern-like crystals, a spine with branches on both sides, at random places: (H, W) with unit deviation.

    Every fern is a set of points, which are summed in the picture; 1 - exp(-sum) then bounds the crossings.
    """
    height, width = TEXTURE_SHAPE
    count, dots = style.ferns, math.ceil(style.length * 1.6)
    y, x, turn, size, bright = draws.uniform(stream * 16, 5, count)[0].unbind(0)
    turn = turn * (2.0 * math.pi)
    size = (0.35 + 1.1 * size**2) * style.length
    along = torch.linspace(0.0, 1.0, dots)
    knot = torch.linspace(0.02, 0.92, style.branches)
    # the spine is branch number 0, of length 1, starting at the foot and going straight on
    foot = torch.cat((torch.zeros(1), knot, knot))
    reach = torch.cat((torch.ones(1), 0.45 * (1.0 - knot), 0.45 * (1.0 - knot)))
    bend = torch.cat((torch.zeros(1), torch.full_like(knot, style.angle), torch.full_like(knot, -style.angle)))
    jitter = draws.uniform(stream * 16 + 1, count, foot.numel())[0] - 0.5
    heading = turn[:, None] + bend + 0.12 * jitter * (bend != 0.0)
    step = (reach * (1.0 + jitter))[:, :, None] * along
    fy = (foot * torch.sin(turn)[:, None])[:, :, None] + step * torch.sin(heading)[:, :, None]
    fx = (foot * torch.cos(turn)[:, None])[:, :, None] + step * torch.cos(heading)[:, :, None]
    row = (y[:, None, None] * height + size[:, None, None] * fy).round().long() % height
    column = (x[:, None, None] * width + size[:, None, None] * fx).round().long() % width
    ink = ((0.15 + bright[:, None, None]) * (1.1 - along) * (0.5 + 0.5 * reach[:, None])).expand_as(row)
    picture = torch.zeros(height * width).index_add_(0, (row * width + column).flatten(), ink.flatten())
    picture = smooth(picture.view(1, 1, height, width), 0.7)[0, 0]
    return _unit(1.0 - torch.exp(-0.7 * picture))


@lru_cache(maxsize=1)
def _originals() -> Tensor:
    """The textures at their own size, (5, 3, H, W) in [0, 1]."""
    made = []
    for number, style in enumerate(_STYLES):
        draws = Draws(0xF2057, torch.tensor([number]), "frost texture", 1)
        crystal = _ferns(draws, 1, style)
        ridges = 1.0 - (0.6 * _fractal(draws, 3, 32, 4, 0.65)).abs()
        patch = _fractal(draws, 0, 256, 32, 0.6)
        # crystals stand out in some patches more than in others
        grey = style.crystal * crystal * (1.0 + 0.4 * torch.tanh(_fractal(draws, 4, 128, 32, 0.6)))
        grey = grey + style.crystal * 0.35 * _emboss(crystal) + style.crumple * _emboss(ridges)
        grey = _unit(grey + style.cloud * patch + style.grain * _fractal(draws, 5, 4, 1, 0.9))
        tint = _fractal(draws, 6, 256, 64, 0.6)
        layers = []
        for c in range(3):
            layer = _unit(grey + 0.1 * (1 - c) * tint)
            layers.append((layer * style.deviation[c] + style.mean[c]).clamp_(0.0, 255.0))
        made.append(torch.stack(layers))
    return torch.stack(made) / 255.0


@lru_cache(maxsize=4)
def frost_textures(rows: int, cols: int, device: torch.device) -> Tensor:
    """The five frost textures as uint8 (5, 3, rows, cols); cached, do not modify.

    Example:
        >>> frost_textures(96, 128, torch.device("cpu")).shape
        torch.Size([5, 3, 96, 128])
    """
    smaller = rows < TEXTURE_SHAPE[0]
    textures = F.interpolate(_originals(), (rows, cols), mode="bicubic", align_corners=False, antialias=smaller)
    return textures.mul_(255.0).round_().clamp_(0.0, 255.0).to(torch.uint8).to(device)
