"""Converts between the normalized inputs of a model and images in [0, 1], on which augmentations act."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

import torch
from torch import Tensor

from come.errors import ConfigError, InputError, shown

SLACK = 0.02
"""How far beyond [0, 1] a pixel may lie: interpolation and half precision overshoot a little."""


MeanStd = Union[tuple[Sequence[float], Sequence[float]], "Normalization", None]
"""How inputs were normalized: (mean, std), or None if they are images in [0, 1]."""


@dataclass(frozen=True)
class Normalization:
    """The normalization of a model's inputs, :math:`x = (image - mean) / std`, with one number per channel or one for all.

    Example:
        >>> n = Normalization((0.5,), (0.5,))
        >>> n.images(torch.tensor([[[[-1.0, 1.0]]]])).flatten()
        tensor([0., 1.])
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, value: MeanStd) -> Normalization:
        """Convert a `Normalization`, a pair (mean, std), or None for inputs that are images in [0, 1]."""
        if value is None:
            return cls()
        if isinstance(value, Normalization):
            return value
        try:
            mean, std = (tuple(float(v) for v in part) for part in value)
        except (TypeError, ValueError):
            mean, std = (), ()
        if not mean or not std or not all(0 < s < math.inf for s in std) or not all(map(math.isfinite, mean)):
            raise ConfigError(
                "normalization must be (mean, std) with finite numbers per channel and std > 0, e.g. ((0.485, 0.456, 0.406), "
                f"(0.229, 0.224, 0.225)), or None if the inputs are images in [0, 1], got {shown(value)}"
            )
        return cls(mean, std)

    def images(self, x: Tensor) -> Tensor:
        """Model input (..., C, H, W) -> images in [0, 1]."""
        mean, std = self._like(x)
        return x * std + mean

    def inputs(self, images: Tensor) -> Tensor:
        """Images (..., C, H, W) -> model input."""
        mean, std = self._like(images)
        return (images - mean) / std

    def check(self, x: Tensor, who: str, first: bool) -> None:
        """Raise `InputError` if `x`, the `first` batch, is no images without its normalization; waits for the device."""
        if not first:
            return
        low, high = torch.aminmax(self.images(x.detach().float()))
        if not (low >= -SLACK and high <= 1 + SLACK):
            raise InputError(
                f"{who} needs images in [0, 1], but after undoing the normalization (mean {self.mean}, std {self.std}) the "
                f"input ranges from {low.item():.3g} to {high.item():.3g}; pass normalization=(mean, std) with what "
                "normalized it, or None if it was not normalized"
            )

    def _like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.mean) not in (1, x.shape[-3]) or len(self.std) not in (1, x.shape[-3]):
            raise InputError(
                f"normalization must have one mean and std, or one for each of the {x.shape[-3]} channels of the input, got "
                f"{len(self.mean)} means and {len(self.std)} stds"
            )
        return _channels(self.mean, x.device, x.dtype), _channels(self.std, x.device, x.dtype)


def same_size(images: Tensor, before: Tensor, where: str) -> None:
    """Raise `InputError` unless images (B, C, H, W) have the size of those `before`."""
    if before.shape[1:] != images.shape[1:]:
        raise InputError(
            f"images must have the size of those before, {tuple(before.shape[1:])}, as {where} holds one size, got "
            f"{tuple(images.shape[1:])}: resize them, or reset() between sizes"
        )


@lru_cache(maxsize=64)  # building a CUDA tensor from Python scalars synchronizes
def _channels(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1)
