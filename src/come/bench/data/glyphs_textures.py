"""Random numbers and grey textures for :mod:`come.bench.data.glyphs_render`, under its rule of exact operations."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["SIDE", "Fields", "Stream", "random_rows"]

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

SIDE = 32
"""Side of an image in pixels."""

_AXIS: F32 = np.arange(SIDE, dtype=np.float32) - np.float32((SIDE - 1) / 2)
X, Y = _AXIS[None, None, :], _AXIS[None, :, None]
"""Distance of a pixel from the image's centre: (1, 1, SIDE) and (1, SIDE, 1)."""


def random_rows(key: tuple[int, ...], indices: I64, count: int) -> F32:
    """Random numbers in [0, 1), one row per image: (B, count), each a pure function of ``(*key, index)``."""
    half = (count + 1) // 2
    raw = np.empty((len(indices), half), dtype=np.uint64)
    for row, index in enumerate(indices.tolist()):
        raw[row] = np.random.PCG64(np.random.SeedSequence([*key, index])).random_raw(half)
    rows = np.empty((len(indices), 2 * half), dtype=np.float32)
    rows[:, :half] = raw >> np.uint64(40)
    rows[:, half:] = (raw >> np.uint64(8)) & np.uint64(0xFFFFFF)
    rows *= np.float32(2.0**-24)
    return rows


class Stream:
    """Hands out the columns of a (B, N) array of random numbers one after the other.

    >>> import numpy as np
    >>> stream = Stream(np.array([[0.25, 0.5, 0.75]], dtype=np.float32))
    >>> stream.uniform(0.0, 4.0), stream.integer(10)
    (array([1.], dtype=float32), array([5]))
    """

    def __init__(self, rows: F32) -> None:
        self.rows = rows
        self.used = 0

    def block(self, *shape: int) -> F32:
        """The next numbers in [0, 1), as (B, *shape)."""
        size = math.prod(shape)
        if self.used + size > self.rows.shape[1]:
            have = self.rows.shape[1]
            raise ValueError(f"{self.used + size} random numbers asked of rows of {have}; draw longer rows")
        self.used += size
        return self.rows[:, self.used - size : self.used].reshape(-1, *shape)

    def uniform(self, low: float, high: float, *shape: int) -> F32:
        """Numbers in [low, high): (B, *shape)."""
        return np.float32(low) + self.block(*shape) * np.float32(high - low)

    def integer(self, stop: int) -> I64:
        """Integers in [0, stop): (B,)."""
        return (self.block() * np.float32(stop)).astype(np.int64)

    def chance(self, probability: float) -> npt.NDArray[np.bool_]:
        """True with the given probability: (B,)."""
        return self.block() < np.float32(probability)

    def direction(self, limit: float = 1.0) -> tuple[F32, F32]:
        """Cosine and sine (B,) of an angle whose half has a tangent in [-limit, limit)."""
        t = self.uniform(-limit, limit)
        scale = np.float32(1) / (np.float32(1) + t * t)
        return (np.float32(1) - t * t) * scale, np.float32(2) * t * scale


def column(values: F32, dims: int = 2) -> F32:
    """Values (B, ...) with axes of length 1 added for rows and columns."""
    return values.reshape(values.shape + (1,) * dims)


def unit(values: F32) -> F32:
    """Values cut to [0, 1]."""
    clipped: F32 = np.clip(values, np.float32(0), np.float32(1))
    return clipped


def _wave(phase: F32) -> F32:
    """Triangle wave of period 1 between -1 and 1."""
    part: F32 = phase - np.floor(phase)
    wave: F32 = np.float32(4) * np.abs(part - np.float32(0.5)) - np.float32(1)
    return wave


def upsample(lattice: F32) -> F32:
    """Smooth interpolation of a (B, k + 1, k + 1) lattice to (B, SIDE, SIDE)."""
    cells = lattice.shape[1] - 1
    place = (np.arange(SIDE, dtype=np.float32) + np.float32(0.5)) * np.float32(cells / SIDE)
    low = place.astype(np.int64)
    t = place - low.astype(np.float32)
    t = t * t * (np.float32(3) - np.float32(2) * t)
    rows: F32 = lattice[:, low] + (lattice[:, low + 1] - lattice[:, low]) * t[None, :, None]
    field: F32 = rows[:, :, low] + (rows[:, :, low + 1] - rows[:, :, low]) * t[None, None, :]
    return field


class Fields:
    """Grey textures with values in [0, 1]; all parameters are drawn first, textures computed on demand."""

    KINDS = ("gradient", "noise", "stripes", "checker", "voronoi", "blobs", "plasma", "grain")

    def __init__(self, stream: Stream, grain: bool = False) -> None:
        self.octaves = [stream.block(k + 1, k + 1) for k in (4, 8, 16)]
        self.persistence = stream.uniform(0.4, 0.9)
        self.cos, self.sin = stream.direction()
        self.frequency = stream.uniform(0.05, 0.22)
        self.ratio = stream.uniform(0.7, 1.4)
        self.phase = stream.block(2)
        self.sharpness = stream.uniform(1.0, 6.0)
        self.wobble = stream.uniform(0.0, 0.6)
        self.points = stream.uniform(-SIDE / 2, SIDE / 2, 10, 2)
        self.grey = stream.block(10)
        self.radius = stream.uniform(2.0, 7.0, 10)
        self.folds = stream.uniform(1.5, 4.0)
        self.grain = stream.block(SIDE, SIDE) if grain else None

    def compute(self, kinds: I64) -> F32:
        """One texture per image, of the kind numbered as in :attr:`KINDS`: (B, SIDE, SIDE)."""
        fields = np.empty((len(kinds), SIDE, SIDE), dtype=np.float32)
        for number, name in enumerate(self.KINDS):
            rows = np.flatnonzero(kinds == number)
            if len(rows):
                fields[rows] = getattr(self, f"_{name}")(rows)
        return fields

    def _along(self, rows: I64) -> tuple[F32, F32]:
        cos, sin = column(self.cos[rows]), column(self.sin[rows])
        return cos * X + sin * Y, cos * Y - sin * X

    def _noise(self, rows: I64) -> F32:
        p = column(self.persistence[rows])
        total = upsample(self.octaves[0][rows])
        total = total + p * (upsample(self.octaves[1][rows]) + p * upsample(self.octaves[2][rows]))
        mean: F32 = np.divide(total, np.float32(1) + p * (np.float32(1) + p))
        return unit((mean - np.float32(0.5)) * np.float32(1.8) + np.float32(0.5))

    def _gradient(self, rows: I64) -> F32:
        along, _ = self._along(rows)
        return unit(np.float32(0.5) + along * (column(self.folds[rows]) * np.float32(0.25 / SIDE)))

    def _edge(self, wave: F32, rows: I64) -> F32:
        edge: F32 = np.clip(wave * column(self.sharpness[rows]), np.float32(-1), np.float32(1))
        return edge

    def _stripes(self, rows: I64) -> F32:
        along, _ = self._along(rows)
        bend = upsample(self.octaves[0][rows]) * column(self.wobble[rows])
        wave = _wave(along * column(self.frequency[rows]) + bend + column(self.phase[rows, 0]))
        return np.float32(0.5) + np.float32(0.5) * self._edge(wave, rows)

    def _checker(self, rows: I64) -> F32:
        along, across = self._along(rows)
        frequency = column(self.frequency[rows])
        one = self._edge(_wave(along * frequency + column(self.phase[rows, 0])), rows)
        frequency = frequency * column(self.ratio[rows])
        two = self._edge(_wave(across * frequency + column(self.phase[rows, 1])), rows)
        return np.float32(0.5) + np.float32(0.5) * one * two

    def _distance(self, rows: I64, k: int) -> F32:
        dx = X - column(self.points[rows, k, 0])
        dy = Y - column(self.points[rows, k, 1])
        return dx * dx + dy * dy

    def _voronoi(self, rows: I64) -> F32:
        nearest = self._distance(rows, 0)
        field = np.broadcast_to(column(self.grey[rows, 0]), nearest.shape)
        for k in range(1, self.grey.shape[1]):
            distance = self._distance(rows, k)
            field = np.where(distance < nearest, column(self.grey[rows, k]), field)
            nearest = np.minimum(nearest, distance)
        return field

    def _blobs(self, rows: I64) -> F32:
        field = np.full((len(rows), SIDE, SIDE), 0.5, dtype=np.float32)
        for k in range(self.grey.shape[1]):
            inside = unit(column(self.radius[rows, k]) - np.sqrt(self._distance(rows, k)) + np.float32(0.5))
            field = field + (column(self.grey[rows, k]) - field) * inside
        return field

    def _plasma(self, rows: I64) -> F32:
        bands = self._noise(rows) * column(self.folds[rows]) + column(self.phase[rows, 0])
        return np.float32(0.5) + np.float32(0.5) * self._edge(_wave(bands), rows)

    def _grain(self, rows: I64) -> F32:
        assert self.grain is not None
        return self.grain[rows]
