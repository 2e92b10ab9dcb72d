"""Drawing of the images of :mod:`come.bench.data.glyphs`: colours, clutter, characters, textures alone.

Everything here is vectorized over a batch, and each image is a pure function of its own row of random
numbers. Only single IEEE operations with a defined rounding are used (add, multiply, divide, square root,
floor, compare; no sine, no matrix product, no sum over an axis), so an image does not depend on its place in
the batch, on the vector units of the machine, or on the number of threads. What is left to the platform is
the rasterizer behind the masks (FreeType).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from come.bench.data.glyphs_fonts import CANVAS, INK, Atlas
from come.bench.data.glyphs_textures import SIDE, Fields, Stream, X, Y, column, unit, upsample

__all__ = [
    "CHARACTER_NUMBERS",
    "TEXTURE_NUMBERS",
    "render_characters",
    "render_textures",
]

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

CHARACTER_NUMBERS = 640
"""Random numbers that :func:`render_characters` needs per image."""

TEXTURE_NUMBERS = 1536
"""Random numbers that :func:`render_textures` needs per image."""

CONTRAST = (0.02, 0.10)
"""Least and largest difference in luminance between a character and its background, before lighting (range 0 to 1)."""

_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_FINE: F32 = (np.arange(2 * SIDE, dtype=np.float32) + np.float32(0.5)) / np.float32(2) - np.float32(SIDE / 2)


def _colour(luminance: F32, chroma: F32) -> F32:
    """Colour (B, 3) of a given luminance (B,); chroma (B, 3) is scaled down until the colour fits [0, 1]."""
    grey = chroma[:, 0] * _LUMA[0] + chroma[:, 1] * _LUMA[1] + chroma[:, 2] * _LUMA[2]
    tint = chroma - grey[:, None]
    room = np.where(tint > 0, np.float32(1) - luminance[:, None], luminance[:, None])
    limit = room / np.maximum(np.abs(tint), np.float32(1e-3))
    scale = np.minimum(np.minimum(limit[:, 0], limit[:, 1]), np.minimum(limit[:, 2], np.float32(1)))
    colour: F32 = luminance[:, None] + tint * scale[:, None]
    return colour


def _blend(image: F32, colour: F32, alpha: F32) -> F32:
    """Image (B, 3, S, S) painted with colour (B, 3) or (B, 3, S, S) where alpha (B, S, S) says so."""
    paint = colour if colour.ndim == 4 else column(colour)
    return image + (paint - image) * alpha[:, None]


def _stamp(atlas: Atlas, slots: I64, size: F32, centre: F32, cos: F32, sin: F32, shear: F32, aspect: F32) -> F32:
    """Coverage (B, SIDE, SIDE) of masks placed in the image, four samples a pixel.

    Args:
        size: longest side in pixels (B,).
        centre: x and y from the image's centre in pixels (B, 2).
        cos, sin: rotation. shear: horizontal. aspect: width over height, both (B,).
    """
    flat = atlas.fetch(slots)
    zoom = np.float32(INK) / size
    dx = _FINE[None, None, :] - centre[:, 0, None, None]
    dy = _FINE[None, :, None] - centre[:, 1, None, None]
    # rotate back, then shear back, then scale to mask pixels: u = a dx + b dy, v = c dx + d dy
    a = (cos - shear * sin) * zoom / aspect
    b = (sin + shear * cos) * zoom / aspect
    c, d = -sin * zoom * aspect, cos * zoom * aspect
    low, high, middle = np.float32(0), np.float32(CANVAS - 1.001), np.float32((CANVAS - 1) / 2)
    u = np.clip((column(a) * dx + middle) + column(b) * dy, low, high)
    v = np.clip((column(c) * dx + middle) + column(d) * dy, low, high)
    left, top = u.astype(np.int32), v.astype(np.int32)
    u -= left.astype(np.float32)
    v -= top.astype(np.float32)
    place = slots[:, None, None] * (CANVAS * CANVAS) + (top * CANVAS + left)
    upper = flat[place].astype(np.float32)
    upper += (flat[place + 1].astype(np.float32) - upper) * u
    place += CANVAS
    lower = flat[place].astype(np.float32)
    lower += (flat[place + 1].astype(np.float32) - lower) * u
    upper += (lower - upper) * v
    pairs = upper[:, 0::2] + upper[:, 1::2]
    return (pairs[:, :, 0::2] + pairs[:, :, 1::2]) * np.float32(0.25 / 255)


def _finish(image: F32) -> U8:
    return (unit(image) * np.float32(255) + np.float32(0.5)).astype(np.uint8)


def _light(image: F32, stream: Stream, most: float) -> F32:
    cos, sin = stream.direction()
    slope = stream.uniform(-most, most) * np.float32(2 / SIDE)
    gain = np.float32(1) + column(slope) * (column(cos) * X + column(sin) * Y)
    return image * gain[:, None]


def _clutter(image: F32, stream: Stream, atlas: Atlas, paint: F32, centre: F32, size: F32) -> F32:
    """What lies under the character: pieces of other characters around its place, strokes and dots.

    Args:
        image: the background (B, 3, SIDE, SIDE), painted over.
        atlas: the characters that the pieces are of.
        paint, centre, size: colour (B, 3), centre (B, 2) and size (B,) of the character to come.
    """
    for chance in (0.7, 0.5, 0.3):
        k = np.flatnonzero(stream.chance(chance))
        slots = atlas.pick(stream.integer(len(atlas.first)), stream.block())
        reach, (cos, sin) = stream.uniform(0.65, 0.95), stream.direction()
        way = stream.uniform(-1.0, 1.0, 2)
        longest = np.maximum(np.abs(way[:, :1]), np.abs(way[:, 1:]))
        way = np.divide(way, np.maximum(longest, np.float32(1e-3)))  # onto the border of a square
        there = centre + way * (size * reach)[:, None]
        length = stream.uniform(10.0, 20.0)
        colour = _colour(stream.block(), stream.uniform(-0.5, 0.5, 3))
        colour = np.where(stream.chance(0.4)[:, None], paint, colour)
        alpha = stream.uniform(0.5, 1.0)
        straight, square = np.zeros(len(k), dtype=np.float32), np.ones(len(k), dtype=np.float32)
        cover = _stamp(atlas, slots[k], length[k], there[k], cos[k], sin[k], straight, square)
        image[k] = _blend(image[k], colour[k], cover * column(alpha[k]))
    for _ in range(2):
        present = stream.chance(0.35).astype(np.float32)
        (cos, sin), offset = stream.direction(), stream.uniform(6.0, 15.0)
        side = np.where(stream.chance(0.5), offset, -offset)
        width, colour = stream.uniform(0.4, 1.2), _colour(stream.block(), stream.uniform(-0.5, 0.5, 3))
        across = np.abs(column(cos) * X + column(sin) * Y - column(side))
        image = _blend(image, colour, unit(column(width + np.float32(0.5)) - across) * column(present))
    for _ in range(3):
        present = stream.chance(0.4).astype(np.float32)
        (cos, sin), offset = stream.direction(), stream.uniform(10.0, 17.0)
        away = np.where(stream.chance(0.5), offset, -offset)
        radius, colour = stream.uniform(0.6, 2.2), _colour(stream.block(), stream.uniform(-0.5, 0.5, 3))
        dx, dy = X - column(cos * away), Y - column(sin * away)
        distance = np.sqrt(dx * dx + dy * dy)
        image = _blend(image, colour, unit(column(radius + np.float32(0.5)) - distance) * column(present))
    return image


def render_characters(rows: F32, characters: I64, atlas: Atlas, clutter: Atlas, plain: bool = False) -> U8:
    """Images (B, 3, SIDE, SIDE) of characters (B,) of ``atlas``, with pieces of ``clutter``'s around them.

    ``plain`` leaves out the texture and the clutter and raises the contrast; the rest of an image stays as it is.
    """
    stream = Stream(rows)
    fields = Fields(stream)
    kinds = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 5], dtype=np.int64)[stream.integer(12)]
    texture = fields.compute(np.zeros_like(kinds) if plain else kinds)

    # background: two colours whose luminances differ by 2 * spread; character: lighter or darker than both
    middle, spread = stream.uniform(0.1, 0.9), stream.uniform(0.02, 0.17)
    gap = np.float32(0.3 if plain else 0.0) + stream.uniform(*CONTRAST)
    high, low = middle + spread, middle - spread
    rises, falls = high <= np.float32(1 - CONTRAST[0]), low >= np.float32(CONTRAST[0])  # one always holds
    ink = unit(np.where(np.where(rises & falls, stream.chance(0.5), rises), high + gap, low - gap))
    tint = stream.uniform(0.1, 0.5)[:, None]
    dark = _colour(unit(low), stream.uniform(-1, 1, 3) * tint)
    light = _colour(unit(high), stream.uniform(-1, 1, 3) * tint)
    paint = _colour(ink, stream.uniform(-1, 1, 3) * np.float32(0.5))
    image = column(dark) + column(light - dark) * texture[:, None]

    size = stream.uniform(10.0, 22.0)
    room = np.minimum((np.float32(SIDE) - size) * np.float32(0.5), np.float32(5))
    centre = stream.uniform(-1.0, 1.0, 2) * room[:, None]

    cluttered = _clutter(image.copy(), stream, clutter, paint, centre, size)
    image = image if plain else cluttered
    slots = atlas.pick(characters, stream.block())
    cos, sin = stream.direction(0.1763)  # up to 20 degrees either way
    cover = _stamp(atlas, slots, size, centre, cos, sin, stream.uniform(-0.25, 0.25), stream.uniform(0.87, 1.15))
    shade = stream.uniform(-0.08, 0.08, 3)  # the character's colour drifts a little across it
    cos, sin = stream.direction()
    slope = (column(cos) * X + column(sin) * Y) * np.float32(1 / SIDE)
    image = _blend(image, column(paint) + column(shade) * slope[:, None], cover)
    return _finish(_light(image, stream, 0.25))


FAR_KINDS = ("noise", "stripes", "checker", "voronoi", "blobs", "plasma", "grain")
"""Textures of the ``far`` outliers."""


def render_textures(rows: F32) -> U8:
    """Images (B, 3, SIDE, SIDE) of textures without any character."""
    stream = Stream(rows)
    fields = Fields(stream, grain=True)
    numbers = np.array([Fields.KINDS.index(name) for name in FAR_KINDS], dtype=np.int64)
    texture = fields.compute(numbers[stream.integer(len(FAR_KINDS))])
    one = _colour(stream.block(), stream.uniform(-1, 1, 3))
    two = _colour(stream.block(), stream.uniform(-1, 1, 3))
    image = column(one) + column(two - one) * texture[:, None]
    haze = upsample(stream.block(5, 5)) * np.float32(0.4)
    image = _blend(image, _colour(stream.block(), stream.uniform(-1, 1, 3)), haze)
    return _finish(_light(image, stream, 0.25))
