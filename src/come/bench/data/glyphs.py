"""The embedded benchmark data set: 100 classes of characters, drawn on the fly, nothing to download.

An image shows one character in one of 20 fonts, in a random size, place, rotation, shear, weight and colour,
on a textured background with clutter around it: 32 x 32 RGB. Item ``i`` of a split is a pure function of
``(split, seed, i)``; it does not depend on the process, on the batch it is drawn in, or on any global random
state. Outliers for open-world runs come in two kinds: characters of other scripts, and plain textures.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from come.bench.data.glyphs_fonts import CLASSES, NEAR, Atlas, find_fonts
from come.bench.data.glyphs_render import CHARACTER_NUMBERS, TEXTURE_NUMBERS, render_characters, render_textures
from come.bench.data.glyphs_textures import SIDE, random_rows

__all__ = ["MEAN", "STD", "GlyphOutliers", "Glyphs"]

MEAN: tuple[float, float, float] = (0.5, 0.5, 0.5)
"""Mean of the pixels (range 0 to 1) per channel, for normalization."""

STD: tuple[float, float, float] = (0.27, 0.26, 0.28)
"""Standard deviation of the pixels (range 0 to 1) per channel, for normalization."""

Split = Literal["train", "test", "source"]
Kind = Literal["near", "far"]
Indices = Sequence[int] | Tensor | npt.NDArray[np.int64]

_SPLITS = ("train", "test", "source")
_KINDS = ("near", "far")
_DOMAIN = 0x67_6C_79_70_68  # keeps these random streams apart from all others
_CHUNK = 64  # images rendered at a time: their intermediate arrays stay in the cache


@lru_cache(maxsize=8)
def _atlas(characters: tuple[str, ...], folder: Path) -> Atlas:
    return Atlas(characters, folder)


def _whole(name: str, value: object, low: int, high: int) -> int:
    """``value`` as an int between low and high, both allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        kind = type(value).__name__
        raise TypeError(f"{name} must be an integer from {low} to {high}, got {value!r} ({kind})")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}")
    return int(value)


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> int:
    """Place of ``value`` among the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return allowed.index(str(value))


class _Drawn(Dataset[tuple[Tensor, int]], ABC):
    """What both data sets share: the index arithmetic and the vectorized batch."""

    def __init__(self, size: int, seed: int, fonts: str | os.PathLike[str] | None) -> None:
        self.size = _whole("size", size, 1, 2**31)
        self.seed = _whole("seed", seed, 0, 2**63 - 1)
        self._fonts = find_fonts(fonts)

    @abstractmethod
    def _draw(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Images and labels of a few items."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image (3, 32, 32) uint8 and label of one item; a negative index counts from the end."""
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            kind = type(index).__name__
            raise TypeError(f"index must be an integer, got {index!r} ({kind}); for several use batch(indices)")
        images, labels = self.batch([int(index)])
        return images[0], int(labels[0])

    def _places(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Checked indices, negative ones counted from the end."""
        given = np.asarray(indices)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise TypeError(f"indices must be a flat sequence of integers, got {given.dtype} of shape {given.shape}")
        places = given.astype(np.int64)
        wrong = (places < -self.size) | (places >= self.size)
        if wrong.any():
            raise IndexError(
                f"index {places[wrong][0]} is out of range for a data set of {self.size} items; "
                f"stay below {self.size}, or build it with a larger size"
            )
        return np.where(places < 0, places + self.size, places)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Images (B, 3, 32, 32) uint8 and labels (B,) int64 of several items, bit for bit those of ``[i]``.

        Raises:
            TypeError: the indices are not integers.
            IndexError: an index lies outside the data set.
        """
        places = self._places(indices)
        images = np.empty((len(places), 3, SIDE, SIDE), dtype=np.uint8)
        labels = np.empty(len(places), dtype=np.int64)
        for start in range(0, len(places), _CHUNK):
            part = slice(start, start + _CHUNK)
            images[part], labels[part] = self._draw(places[part])
        return torch.from_numpy(images), torch.from_numpy(labels)


class Glyphs(_Drawn):
    """Characters of 100 classes on textured, cluttered backgrounds.

    Args:
        split: ``"train"``, ``"test"`` or ``"source"`` (further clean images, e.g. for Fisher matrices). The
            splits come from disjoint random streams and have the same distribution.
        size: number of images. Item ``i`` does not depend on it.
        seed: another seed is another draw of the whole split.
        plain: leave out texture and clutter and raise the contrast: the same characters on smooth backgrounds,
            an easier data set for a first stage of training. The benchmark does not use it.
        fonts: folder of the fonts; when not given, the environment variable ``COME_GLYPH_FONTS`` names it,
            else it is matplotlib's.

    Labels are balanced: each block of 100 items has every class once, in a shuffled order.

    >>> data = Glyphs("test", size=300, seed=0)
    >>> image, label = data[7]
    >>> image.shape, image.dtype, data.classes[label]
    (torch.Size([3, 32, 32]), torch.uint8, '\u00a7')
    >>> images, labels = data.batch([7, 8, 9])
    >>> images.shape, labels.dtype, bool((images[0] == image).all())
    (torch.Size([3, 3, 32, 32]), torch.int64, True)
    """

    def __init__(
        self,
        split: Split = "test",
        size: int = 2000,
        seed: int = 0,
        *,
        plain: bool = False,
        fonts: str | os.PathLike[str] | None = None,
    ) -> None:
        number = _choice("split", split, _SPLITS)
        super().__init__(size, seed, fonts)
        self.split: Split = split
        self.plain = bool(plain)
        self.classes: list[str] = list(CLASSES)
        self._key = (_DOMAIN, number, self.seed)
        _atlas(CLASSES, self._fonts)

    def labels(self, indices: Indices | None = None) -> Tensor:
        """Labels (B,) int64 of some or all items, without drawing any image.

        >>> Glyphs("test", size=1000).labels().bincount().tolist() == [10] * 100
        True
        """
        return torch.from_numpy(self._labels(self._places(range(self.size) if indices is None else indices)))

    def _labels(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        labels = np.empty(len(places), dtype=np.int64)
        blocks = places // len(CLASSES)
        for block in np.unique(blocks).tolist():
            rows = blocks == block
            labels[rows] = _shuffled((*self._key, block))[places[rows] % len(CLASSES)]
        return labels

    def _draw(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        labels = self._labels(indices)
        atlas = _atlas(CLASSES, self._fonts)
        rows = random_rows((*self._key, 1), indices, CHARACTER_NUMBERS)
        return render_characters(rows, labels, atlas, atlas, self.plain), labels


@lru_cache(maxsize=256)
def _shuffled(key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The order of the classes in one block of items."""
    raw = np.random.PCG64(np.random.SeedSequence([*key[:-1], 2, key[-1]])).random_raw(len(CLASSES))
    return np.argsort(raw, kind="stable").astype(np.int64)


class GlyphOutliers(_Drawn):
    """Images of no class, for open-world runs; every label is -1.

    Args:
        kind: ``"near"``: letters of other scripts and symbols that are not classes, drawn as :class:`Glyphs`
            draws its own; ``"far"``: textures without any character.
        size: number of images.
        seed: another seed is another draw.
        fonts: as for :class:`Glyphs`.

    >>> images, labels = GlyphOutliers("far", size=50).batch(range(4))
    >>> images.shape, labels.tolist()
    (torch.Size([4, 3, 32, 32]), [-1, -1, -1, -1])
    """

    def __init__(
        self,
        kind: Kind = "near",
        size: int = 2000,
        seed: int = 0,
        *,
        fonts: str | os.PathLike[str] | None = None,
    ) -> None:
        number = _choice("kind", kind, _KINDS)
        super().__init__(size, seed, fonts)
        self.kind: Kind = kind
        self._key = (_DOMAIN, len(_SPLITS) + number, self.seed)
        if kind == "near":
            _atlas(NEAR, self._fonts)

    def _draw(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        labels = np.full(len(indices), -1, dtype=np.int64)
        if self.kind == "far":
            return render_textures(random_rows((*self._key, 1), indices, TEXTURE_NUMBERS)), labels
        rows = random_rows((*self._key, 1), indices, CHARACTER_NUMBERS)
        # the last number of a row is not used by the drawing
        which = np.minimum((rows[:, -1] * np.float32(len(NEAR))).astype(np.int64), len(NEAR) - 1)
        classes = _atlas(CLASSES, self._fonts)
        return render_characters(rows, which, _atlas(NEAR, self._fonts), classes), labels
