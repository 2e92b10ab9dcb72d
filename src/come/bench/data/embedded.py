"""The embedded benchmark: images drawn on the fly, nothing to download."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from come.bench.data.glyphs import GlyphOutliers, Glyphs
from come.bench.data.glyphs_textures import SIDE
from come.bench.data.source import Loaded, Source
from come.errors import InputError, unknown

SIZE = 1920
"""Images by default: 30 batches of 64, what the default run does in about two minutes on two cores."""
MAX_IMAGES = 1_000_000


class _Drawn(Source):
    _data: Glyphs | GlyphOutliers
    at_hand = True

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Images, 3 kB each, and labels, and which of them are drawn already."""
        size = len(self)
        images = torch.empty(size, 3, SIDE, SIDE, dtype=torch.uint8)
        return images, torch.empty(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_kept"}  # another process draws its own

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Draw, or look up what was drawn before."""
        chosen = torch.tensor(self._known(indices), dtype=torch.int64)
        images, labels, drawn = self._kept
        missing = torch.unique(chosen[~drawn[chosen]])
        if len(missing):
            images[missing], labels[missing] = self._data.batch(missing.tolist())
            drawn[missing] = True
        return Loaded(images[chosen], labels[chosen], chosen)


class GlyphSource(_Drawn):
    """Characters of 100 classes, (3, 32, 32).

    Example:
        >>> source = GlyphSource(size=200)
        >>> source.load([0, 1]).images.shape, source.num_classes
        (torch.Size([2, 3, 32, 32]), 100)
    """

    _data: Glyphs

    def __init__(self, name: str = "glyphs", size: int = SIZE) -> None:
        self.name = name
        self._data = Glyphs("test", size)
        self.num_classes = len(self._data.classes)

    def labels(self) -> Tensor:
        """The labels of all samples, (N,) int64; nothing is drawn for them."""
        return self._data.labels()

    def source_images(self, count: int) -> Tensor:
        """Images of the split that is kept for this, (count, 3, 32, 32) uint8."""
        if not 1 <= count <= MAX_IMAGES:
            raise InputError(f"source-size must be from 1 to {MAX_IMAGES}, got {count}")
        return Glyphs("source", count).batch(range(count))[0]


class GlyphOutlierSource(_Drawn):
    """Images of no class, (3, 32, 32): characters of other scripts ("near") or textures ("far").

    Example:
        >>> GlyphOutlierSource("glyph-outliers:far", "far", size=50).load([0]).labels
        tensor([-1])
    """

    num_classes = 0

    def __init__(self, name: str, kind: str, size: int = SIZE) -> None:
        if kind not in ("near", "far"):
            raise unknown("kind of glyph outliers", kind, ("near", "far"))
        self.name = name
        self._data = GlyphOutliers(kind, size)  # type: ignore[arg-type]
