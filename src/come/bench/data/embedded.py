"""The embedded data, nothing to download: photographs of clothes from Fashion-MNIST (Zalando, MIT licence)."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from importlib.resources import files

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from come.bench.data.source import MemorySource
from come.errors import InputError, require_int, unknown

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
"""Of Fashion-MNIST, in its order."""
OUTLIERS = {"near": "shirt", "far": "bag"}
"""Classes held out of training: shirts look like T-shirts, pullovers and coats, bags like no known class."""
KNOWN = tuple(name for name in CLASSES if name not in OUTLIERS.values())  # the eight classes of the embedded models
SIDE, BORDER = 28, 2


@lru_cache
def _sheet(part: str) -> tuple[Tensor, Tensor]:
    """Photographs (N, 28, 28) uint8, and labels (N,) among `CLASSES`, of the part "test", "outliers" or "source"."""
    folder = files("come.bench") / "embedded"
    labels = torch.tensor([int(digit) for digit in json.loads((folder / "fashion_labels.json").read_text())[part]])
    sheet = np.asarray(Image.open(io.BytesIO((folder / f"fashion_{part}.png").read_bytes())))
    rows, columns = (pixels // SIDE for pixels in sheet.shape)
    images = sheet.reshape(rows, SIDE, columns, SIDE).swapaxes(1, 2).reshape(-1, SIDE, SIDE)[: len(labels)]
    return torch.from_numpy(images.copy()), labels


@lru_cache
def _read(part: str) -> tuple[Tensor, Tensor]:
    """The same with a black border and three channels, (N, 3, 32, 32)."""
    photographs, labels = _sheet(part)
    return F.pad(photographs[:, None], [BORDER] * 4).expand(-1, 3, -1, -1), labels


def embedded_photographs(part: str) -> tuple[Tensor, Tensor]:
    """Photographs (N, 28, 28) uint8 of the known classes, and their labels (N,), of the part "test" or "source"."""
    photographs, labels = _sheet(part)
    return photographs, known(labels)


class FashionSource(MemorySource):
    """Test images of the eight known classes of Fashion-MNIST, (3, 32, 32): the first `size`, by default all.

    Example:
        >>> source = FashionSource(size=200)
        >>> source.load([0, 1]).images.shape, source.num_classes
        (torch.Size([2, 3, 32, 32]), 8)
    """

    def __init__(self, name: str = "fashion", size: int | None = None) -> None:
        images, labels = _read("test")
        if size is not None:
            require_int("size", size, 1)
            if size > len(labels):
                raise InputError(f"{name} asks for {size} images; the embedded data has {len(labels)}")
        super().__init__(name, images[:size], known(labels[:size]), len(KNOWN))

    def source_images(self, count: int) -> Tensor:
        """Training images that no embedded model was trained on, (N, 3, 32, 32) uint8; at most as many as there are."""
        return clean_source()[0][:count].clone()


class FashionOutlierSource(MemorySource):
    """Test images of the two held-out classes, (3, 32, 32); "near" and "far" are one of them each."""

    def __init__(self, name: str = "fashion-outliers", kind: str = "") -> None:
        if kind and kind not in OUTLIERS:
            raise unknown("kind of fashion outliers", kind, OUTLIERS)
        images, labels = _read("outliers")
        wanted = [OUTLIERS[kind]] if kind else list(OUTLIERS.values())
        chosen = torch.isin(labels, torch.tensor([CLASSES.index(name) for name in wanted]))
        super().__init__(name, images[chosen], torch.full((int(chosen.sum()),), -1), 0)


def clean_source() -> tuple[Tensor, Tensor]:
    """512 training images (N, 3, 32, 32) uint8 that no embedded model was trained on, and their labels (N,).

    For EATA's Fisher matrix, and to calibrate a threshold for abstaining.
    """
    images, labels = _read("source")
    return images, known(labels)


def known(labels: Tensor) -> Tensor:
    """Numbers of `CLASSES` -> numbers of `KNOWN`."""
    return torch.bucketize(labels, torch.tensor([CLASSES.index(name) for name in KNOWN]))
