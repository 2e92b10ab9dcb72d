"""Severity parameters of the 19 corruptions, for each of the published benchmarks.

The numbers are those of ImageNet-C (224 pixels), CIFAR-10-C (32 pixels) and Tiny-ImageNet-C (64 pixels), Hendrycks and
Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR 2019. Each entry has five
rows, for severities 1 to 5.

Two ImageNet tables are in use, which differ in the elastic transform. ``"imagenet"`` has the size-free form of the
`imagecorruptions` package (local distortion alone); ``"imagenet_original"`` has the parameters of the first release (a random
affine map as well, and very smooth fields at severities 1 and 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
        "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
        "weather": ("snow", "frost", "fog", "brightness"),
        "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
        "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
    }
)
"""Names of the corruptions in each group, in the usual order; the first four groups are the standard fifteen."""

TABLES: Final[tuple[str, ...]] = ("cifar", "tiny", "imagenet", "imagenet_original")
"""Names of the tables of parameters, for images of 32, 64, 224 and 224 pixels."""


def _zooms(step: float, count: int) -> tuple[float, ...]:
    """Zoom factors 1, 1 + step, 1 + 2 step, ... (count of them)."""
    return tuple(1.0 + step * i for i in range(count))


_SMALL_ZOOMS = (_zooms(0.01, 7), _zooms(0.01, 12), _zooms(0.01, 16), _zooms(0.01, 21), _zooms(0.01, 26))

_IMAGENET: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),  # standard deviation of the added noise
    "shot_noise": (60, 25, 12, 5, 3),  # photons at full white
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),  # share of values replaced
    "speckle_noise": (0.15, 0.2, 0.35, 0.45, 0.6),  # standard deviation, relative to the value
    "gaussian_blur": (1.0, 2.0, 3.0, 4.0, 6.0),  # sigma in pixels
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),  # disk radius, sigma of its antialias blur
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),  # sigma, reach of a swap, rounds
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),  # radius (2 r + 1 taps), sigma
    # zoom factors averaged with the image
    "zoom_blur": (_zooms(0.01, 12), _zooms(0.01, 16), _zooms(0.02, 11), _zooms(0.02, 13), _zooms(0.03, 11)),
    "snow": (  # mean and deviation of the flakes, zoom, threshold, blur radius, blur sigma, weight of the image
        (0.1, 0.3, 3.0, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2.0, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4.0, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    # weight of the image, weight of the frost, texture scale
    "frost": ((1.0, 0.4, 1.1), (0.8, 0.6, 1.1), (0.7, 0.7, 1.1), (0.65, 0.7, 1.1), (0.6, 0.75, 1.1)),
    # weight of the fog, decay of the fractal per level
    "fog": ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),  # added to V of HSV
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),  # factor on the deviation from the channel mean
    # displacement, sigma, affine jitter, all as shares of the shorter side
    "elastic_transform": tuple((0.005 * 250.0 * a, 0.01, 0.0) for a in (0.05, 0.065, 0.085, 0.1, 0.12)),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),  # share of the side kept
    "jpeg_compression": (25, 18, 15, 10, 7),  # JPEG quality
    "spatter": (  # mean and deviation of the liquid, its sigma, threshold, strength (water) or sigma (mud), is it mud
        (0.65, 0.3, 4.0, 0.69, 0.6, False),
        (0.65, 0.3, 3.0, 0.68, 0.6, False),
        (0.65, 0.3, 2.0, 0.68, 0.5, False),
        (0.65, 0.3, 1.0, 0.65, 1.5, True),
        (0.67, 0.4, 1.0, 0.65, 1.5, True),
    ),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),  # factor and offset on S of HSV
}

_IMAGENET_ORIGINAL: dict[str, tuple[Any, ...]] = {
    **_IMAGENET,
    "elastic_transform": tuple(
        tuple(share * 244 / 224 for share in row)
        for row in ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
    ),
}

_TINY: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": (250, 100, 50, 30, 15),
    "impulse_noise": (0.01, 0.02, 0.05, 0.08, 0.14),
    "speckle_noise": (0.15, 0.2, 0.25, 0.3, 0.35),
    "gaussian_blur": (0.5, 0.75, 1.0, 1.25, 1.5),
    "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "zoom_blur": _SMALL_ZOOMS,
    "snow": (
        (0.1, 0.2, 1.0, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1.0, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ),
    "frost": ((1.0, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
    "fog": ((0.4, 3.0), (0.7, 3.0), (1.0, 2.5), (1.5, 2.0), (2.0, 1.75)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (
        (0.0, 0.0, 0.08),
        (0.05, 0.3, 0.06),
        (0.1, 0.08, 0.06),
        (0.1, 0.03, 0.03),
        (0.16, 0.03, 0.02),
    ),
    "pixelate": (0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": (65, 58, 50, 40, 25),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.6, False),
        (0.65, 0.1, 0.8, 0.7, 0.6, False),
        (0.65, 0.3, 1.0, 0.69, 0.6, False),
        (0.65, 0.1, 0.7, 0.68, 0.6, True),
        (0.65, 0.1, 0.5, 0.67, 0.6, True),
    ),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (30.0, 0.2)),
}

_CIFAR: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": _SMALL_ZOOMS,
    "snow": (
        (0.1, 0.2, 1.0, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1.0, 0.2, 0.2), (1.0, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
    "fog": ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": (
        (0.0, 0.0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    ),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1.0, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
}

PARAMETERS: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "cifar": _CIFAR,
    "tiny": _TINY,
    "imagenet": _IMAGENET,
    "imagenet_original": _IMAGENET_ORIGINAL,
}


def table_for(height: int, width: int) -> str:
    """Name of the table for an image size, by the shorter side: up to 48, up to 96, or larger.

    Example:
        >>> table_for(32, 32), table_for(64, 80), table_for(224, 224)
        ('cifar', 'tiny', 'imagenet')
    """
    side = min(height, width)
    return "cifar" if side <= 48 else "tiny" if side <= 96 else "imagenet"
