"""Pictures for tests."""

from __future__ import annotations

import numpy as np
from PIL import Image


def picture(seed, size=(40, 48)):
    """Random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def save_pictures(root, names, size=(40, 48)):
    """One picture for each name, `class/a.png`."""
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(seed, size).save(root / name)
