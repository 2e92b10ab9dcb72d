"""The ImageNet-C image corruptions as batched torch functions, on CPU and CUDA.

    >>> import torch
    >>> from come.corruptions import corrupt
    >>> images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    >>> corrupt(images, "fog", severity=3).shape
    torch.Size([4, 3, 64, 64])

Fifteen standard corruptions in four groups and four extra ones (:func:`names`), at severities 1 to 5. The
randomness of an image depends only on the seed, the image's index, the corruption and the severity: batch size, order, number
of workers and device do not change it (up to float rounding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from come.errors import ConfigError, InputError, unknown

from . import blur, digital, noise, weather
from .draws import Draws
from .jpeg import jpeg_backend
from .tables import GROUPS, PARAMETERS, TABLES, table_for

__all__ = ["GROUPS", "TABLES", "corrupt", "jpeg_backend", "names"]

_FUNCTIONS: dict[str, Callable[[Tensor, Any, Draws], Tensor]] = {
    name: getattr(module, name) for module in (noise, blur, weather, digital) for name in module.__all__
}
_ON_BYTES = frozenset({"pixelate", "jpeg_compression"})
_SLACK = 1e-3
_LEAST_SIDE = 8

# Values of a batch that are processed at once: what stays in a CPU cache, and what easily fits a GPU.
_CHUNK_VALUES = {"cpu": 4 * 3 * 224 * 224}
_CHUNK_ELSEWHERE = 256 * 3 * 256 * 256


def names(group: str | None = None) -> tuple[str, ...]:
    """Names of a group of `GROUPS`, of the fifteen "standard" corruptions, or of all, in the usual order.

    Example:
        >>> names("noise")
        ('gaussian_noise', 'shot_noise', 'impulse_noise')
        >>> len(names("standard")), len(names())
        (15, 19)
    """
    if group is None:
        return tuple(name for members in GROUPS.values() for name in members)
    if group == "standard":
        return names()[:15]
    if group not in GROUPS:
        raise unknown("group of corruptions", str(group), ("standard", *GROUPS))
    return GROUPS[group]


def corrupt(
    images: Tensor,
    name: str,
    severity: int = 5,
    *,
    seed: int = 0,
    index: Tensor | None = None,
    table: str | None = None,
) -> Tensor:
    """Corrupt a batch of images: out_i = f_name(images_i, parameters(table, severity), randomness(seed, index_i)).

    8-bit results are truncated, not rounded, as in the published data sets (``np.uint8(value)``). Floating-point images are
    computed in float32; ``pixelate`` and ``jpeg_compression`` first round them to 8 bits.

    Args:
        images: (B, 3, H, W), at least 8 pixels a side, not changed; uint8 in [0, 255], or floating point in [0, 1] (values up
            to 0.001 outside, as resampling leaves them, are clipped; others are an error).
        name: one of :func:`names`.
        severity: 1 to 5.
        seed: any integer.
        index: integers (B,), the identity of each image in its data set; default 0, 1, ..., B - 1. Pass it when a data set is
            corrupted in batches, otherwise every batch gets the same noise.
        table: the parameters, ``"cifar"`` (made for 32 pixels), ``"tiny"`` (64), ``"imagenet"`` (224) or
            ``"imagenet_original"`` (see `come.corruptions.tables`); None chooses by the shorter side: up to 48, up to 96,
            larger.

    Returns:
        Tensor of the shape, dtype, device and range of ``images``.

    Raises:
        TypeError: an argument has the wrong type, or the images are neither uint8 nor floating point.
        ValueError: an argument is out of its range; the message names the range.

    Example:
        >>> images = torch.full((2, 3, 32, 32), 0.5)
        >>> noisy = corrupt(images, "gaussian_noise", 3, seed=1, index=torch.tensor([10, 11]))
        >>> again = corrupt(images[1:], "gaussian_noise", 3, seed=1, index=torch.tensor([11]))
        >>> bool(torch.equal(noisy[1:], again))
        True
    """
    check_choice(name, severity, seed, table)
    index = _check_images(images, index)
    function = _FUNCTIONS[name]
    parameters = PARAMETERS[table or table_for(*images.shape[-2:])][name][severity - 1]
    draws = Draws(seed, index, name, severity)
    batch = images.shape[0]
    limit = _CHUNK_VALUES.get(images.device.type, _CHUNK_ELSEWHERE)
    step = max(1, limit // (images[0].numel()))
    out = torch.empty_like(images)
    with torch.no_grad():
        for start in range(0, batch, step):
            part = images[start : start + step].contiguous()
            made = _run(function, part, parameters, draws.part(start, start + step), name in _ON_BYTES)
            out[start : start + step] = made
    return out


def _run(
    function: Callable[[Tensor, Any, Draws], Tensor], part: Tensor, parameters: Any, draws: Draws, on_bytes: bool
) -> Tensor:
    """Convert a chunk to the dtype that the function works on, corrupt it, and convert back."""
    if on_bytes:
        if part.dtype == torch.uint8:
            return function(part, parameters, draws)
        coded = part.float().mul(255.0).clamp_(0.0, 255.0).round_().to(torch.uint8)
        return function(coded, parameters, draws).to(torch.float32).div_(255.0)
    if part.dtype == torch.uint8:
        made = function(part.to(torch.float32).mul_(1.0 / 255.0), parameters, draws)
        # the addend keeps whole values whole under float rounding
        return made.mul(255.0).add_(1e-3).clamp_(0.0, 255.0).to(torch.uint8)
    work = part.to(torch.float32, copy=True).clamp_(0.0, 1.0)
    return function(work, parameters, draws).clamp(0.0, 1.0)


def check_choice(name: str, severity: int, seed: int, table: str | None) -> None:
    """Raise the errors of `corrupt` for these arguments."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, one of come.corruptions.names(), got a {type(name).__name__}")
    if name not in _FUNCTIONS:
        raise unknown("corruption", name, names())
    if isinstance(severity, bool) or not isinstance(severity, int):
        raise TypeError(f"severity must be an int from 1 to 5, got {severity!r} ({type(severity).__name__})")
    if not 1 <= severity <= 5:
        raise ConfigError(f"severity must be from 1 to 5, got {severity} (for no corruption, use the images unchanged)")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r} ({type(seed).__name__})")
    if table is not None and table not in TABLES:
        raise unknown("table of parameters", table, TABLES, hint="; None chooses by size")


def _check_images(images: Tensor, index: Tensor | None) -> Tensor:
    """Check the images and the index; return the index as int64 on the device of the images."""
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a torch.Tensor, got a {type(images).__name__}: use torch.as_tensor(images)")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(
            f"images must be uint8 (0 to 255) or floating point (0 to 1), got {images.dtype}: use images.to(torch.uint8)"
        )
    shape = tuple(images.shape)
    if images.ndim != 4:
        fix = "add a batch axis with images.unsqueeze(0)" if images.ndim == 3 else "reshape them"
        raise InputError(f"images must have 4 axes, (B, 3, H, W), got shape {shape}: {fix}")
    if shape[1] != 3:
        fix = "use images.expand(-1, 3, -1, -1)" if shape[1] == 1 else "put the colour axis second and keep RGB alone"
        if shape[3] == 3:
            fix = "use images.permute(0, 3, 1, 2)"
        raise InputError(f"images must have 3 channels, (B, 3, H, W), got shape {shape}: {fix}")
    if shape[0] == 0:
        raise InputError(f"images must hold at least 1 image, got shape {shape}")
    if min(shape[2:]) < _LEAST_SIDE:
        raise InputError(
            f"the sides of images must be at least {_LEAST_SIDE} pixels, got shape {shape}: resize the images"
        )
    if images.is_floating_point():
        low, high = (float(v) for v in images.detach().aminmax())
        if low != low or high != high:
            raise InputError("images must be in [0, 1], got NaN: replace it, e.g. images.nan_to_num(0)")
        if low < -_SLACK or high > 1.0 + _SLACK:
            fix = "divide by 255" if high > 2.0 and low >= 0.0 else "undo the normalization or clamp to [0, 1]"
            raise InputError(f"floating-point images must be in [0, 1], got {low:.4g} to {high:.4g}: {fix}")
    if index is None:
        return torch.arange(shape[0], device=images.device)
    if not isinstance(index, Tensor):
        raise TypeError(f"index must be a LongTensor, got a {type(index).__name__}: use torch.tensor(index)")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"index must have an integer dtype, got {index.dtype}: use index.long()")
    if tuple(index.shape) != (shape[0],):
        raise InputError(f"index must have shape ({shape[0]},), one entry for each image, got {tuple(index.shape)}")
    return index.to(device=images.device, dtype=torch.int64)
