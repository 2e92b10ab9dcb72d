"""Noise: gaussian, shot, impulse and speckle.

Functions as in `blur`, which may overwrite the images, and leave clipping to [0, 1] to the caller.
"""

from __future__ import annotations

from torch import Tensor

from .draws import Draws

__all__ = ["gaussian_noise", "impulse_noise", "shot_noise", "speckle_noise"]


def gaussian_noise(x: Tensor, sigma: float, draws: Draws) -> Tensor:
    """Add white noise: out = x + sigma z, z ~ N(0, 1) for each value."""
    return x.add_(draws.normal(0, *x.shape[1:]), alpha=sigma)


def shot_noise(x: Tensor, peak: int, draws: Draws) -> Tensor:
    """Count photons: out = min(k / peak, 1), k ~ Poisson(peak x) for each value.

    The counts are exact for 8-bit images; for floating-point images the rate is rounded to 1/2040 of white
    (:meth:`Draws.poisson`).

    Example:
        >>> import torch
        >>> noisy = shot_noise(torch.full((1, 3, 8, 8), 0.5), 5, Draws(0, torch.arange(1), "noise", 1))
        >>> sorted(set(noisy.mul(5).round().flatten().tolist())) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        True
    """
    return draws.poisson(0, x, peak).float().mul_(1.0 / peak)


def impulse_noise(x: Tensor, amount: float, draws: Draws) -> Tensor:
    """Replace a share of the values by white or black: P(out = 1) = P(out = 0) = amount / 2, else out = x."""
    # a steep ramp is 0 or 1 at every value u can take; much faster than masks on the CPU
    u = draws.uniform(0, *x.shape[1:])
    ramp = 2.0**27
    salt = (u * -ramp).add_(0.5 * amount * ramp).clamp_(0.0, 1.0)
    keep = u.mul_(-ramp).add_((1.0 - 0.5 * amount) * ramp).clamp_(0.0, 1.0)
    return x.clamp_(min=salt).clamp_(max=keep)


def speckle_noise(x: Tensor, sigma: float, draws: Draws) -> Tensor:
    """Add noise in proportion to the value: out = x + sigma x z, z ~ N(0, 1) for each value."""
    return x.mul_(draws.normal(0, *x.shape[1:]).mul_(sigma).add_(1.0))
