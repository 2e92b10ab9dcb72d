"""Scenes of several garments on textured ground, for segmentation, composed from the embedded photographs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from come.bench.data.embedded import KNOWN, embedded_photographs
from come.bench.data.source import Loaded, Source
from come.errors import InputError, require_int
from come.seeds import derived_seed

CLASSES = ("ground", *KNOWN)
"""In the order of the labels."""
SIDE = 64
TOTAL = 2000
"""Scenes that there are; every one is composed from the 3,200 test photographs."""
SOURCE_TOTAL = 128
"""Scenes of the source domain, from the 512 training photographs that no embedded model was trained on."""
GARMENTS = (2, 5)
SIDES = (20, 40)
"""Pixels of a photograph in a scene, before its black border is cut away."""
LIT = 24
"""A photograph's pixels above this are of the garment."""


def compose(photographs: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """One scene: an image (3, 64, 64) uint8 and the class of each pixel (64, 64) uint8, 0 for the ground.

    Args:
        photographs: (N, 28, 28) uint8, of garments on black.
        labels: (N,), their classes, 0 to 7.
        seed: decides all: the ground, which garments, where, how large, and their tint. Later garments cover earlier ones.

    Example:
        >>> image, label = compose(*embedded_photographs("test"), seed=0)
        >>> image.shape, label.unique()
        (torch.Size([3, 64, 64]), tensor([0, 2, 3, 6], dtype=torch.uint8))
    """
    draw = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=draw)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    image = _ground(between)
    label = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    for _ in range(integer(*GARMENTS)):
        number, side = integer(0, len(labels) - 1), integer(*SIDES)
        top, left = integer(0, SIDE - side), integer(0, SIDE - side)
        photograph = photographs[number].flip(1) if integer(0, 1) else photographs[number]
        garment = F.interpolate(photograph[None, None].float(), (side, side), mode="bilinear", antialias=True)[0, 0]
        shape, tint = silhouette(garment > LIT), between(0.6, 1.0, 3, 1, 1)
        place = (..., slice(top, top + side), slice(left, left + side))
        image[place] = torch.where(shape, garment * tint, image[place])
        label[place] = torch.where(shape, labels[number].to(torch.uint8) + 1, label[place])
    return image.clamp(0, 255).round().to(torch.uint8), label


def _ground(between: Callable[..., Tensor]) -> Tensor:
    """A colour, noise at four scales, and stripes, (3, 64, 64) in [0, 255]."""
    found = between(40, 200, 3, 1, 1).expand(3, SIDE, SIDE)
    for cells in (2, 8, 16, 32):
        noise = between(-1, 1, 1, 3, cells, cells) * between(0, 30, 1, 3, 1, 1)
        found = found + F.interpolate(noise, (SIDE, SIDE), mode="bilinear")[0]
    angle, waves, strength = between(0, 3.1416, 1), between(2, 12, 1), between(0, 30, 3, 1, 1)
    along = torch.arange(SIDE) / SIDE
    phase = along[:, None] * angle.cos() + along * angle.sin()
    return found + strength * (2 * 3.1416 * waves * phase).sin()


def silhouette(lit: Tensor) -> Tensor:
    """Fills what is dark inside of a garment, (H, W) bool: pixels with a lit one above, below, to the left and to the right.

    Example:
        >>> ring = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]], dtype=torch.bool)
        >>> bool(silhouette(ring).all()), bool(silhouette(ring[:2]).all())  # open below
        (True, False)
    """
    so_far = [lit.flip(d).cummax(d).values.flip(d) if back else lit.cummax(d).values for d in (0, 1) for back in (0, 1)]
    return torch.stack(so_far).all(dim=0)


@lru_cache(maxsize=4)
def _scenes(part: str, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` scenes from a part of the embedded photographs."""
    photographs, labels = embedded_photographs(part)
    made = [compose(photographs, labels, derived_seed(0, "scene", part, i)) for i in range(count)]
    images, masks = zip(*made, strict=True)
    return torch.stack(images), torch.stack(masks)


class ScenesSource(Source):
    """Scenes of garments, (3, 64, 64), with a class for each pixel: ground and the eight of the embedded data.

    Example:
        >>> source = ScenesSource(size=10)
        >>> found = source.load([0, 1])
        >>> found.images.shape, found.labels.shape, source.class_names[:3]
        (torch.Size([2, 3, 64, 64]), torch.Size([2, 64, 64]), ('ground', 'T-shirt', 'trouser'))
    """

    at_hand = True
    dense = True
    num_classes = len(CLASSES)

    def __init__(self, name: str = "scenes", size: int = 200) -> None:
        require_int("size", size, 1)
        if size > TOTAL:
            raise InputError(f"{name} asks for {size} scenes; at most {TOTAL} can be composed")
        self.name, self.size, self.class_names = name, size, CLASSES

    def __len__(self) -> int:
        return self.size

    def load(self, indices: Sequence[int], corruption: str | None = None, severity: int = 5) -> Loaded:
        """Images, and labels (B, 64, 64)."""
        images, labels = _scenes("test", self.size)
        found = self._known(indices)
        return Loaded(images[found], labels[found].long(), torch.tensor(found))

    def source_images(self, count: int) -> Tensor:
        """Scenes from training photographs that no embedded model was trained on; at most 128."""
        return _scenes("source", SOURCE_TOTAL)[0][:count].clone()
