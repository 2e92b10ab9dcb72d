"""Random views of images: what several methods average over, or ask a model to agree on.

A view is a function of images and a generator. Each image of a batch gets its own random numbers from that generator, so the
generator's state determines the view, and torch's global generator is left alone. Nothing here loops over images, has a shape
that depends on the data, or waits for the device: an operation that only some images drew is computed for all of them and
selected. No gradient flows through a view.

    jitter    small changes of colour, place and sharpness     CoTTA, RoTTA, ROID
    augmix    a crop, then mixed chains of operations          MEMO
    crops     a crop and a flip                                TPT
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from come.errors import InputError, require, require_int

__all__ = ["Augment", "augmix", "crops", "jitter", "still"]

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Takes images (..., C, H, W) in [0, 1] and a generator on their device, returns a new tensor of the same shape, dtype and
range. For V views of a batch, pass `images.expand(V, *images.shape)`."""

Rows = tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The two rows of an affine map (A, b), three tensors (N,) each."""

# Largest changes of `jitter` at strength 1. Factors are drawn from [1 - d, 1 + d], all others from [-d, d].
BRIGHTNESS, CONTRAST, SATURATION, HUE, GAMMA = 0.4, 0.3, 0.5, 0.06, 0.3
DEGREES, SHIFT, SCALE = 15.0, 1 / 8, 0.1  # SHIFT: published as 1/16 of the image padded to twice its size
SIGMA = (0.001, 0.5)  # of the blur, in pixels

OPERATIONS = (
    "autocontrast", "equalize", "posterize", "rotate", "solarize", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
AUTOCONTRAST, EQUALIZE, POSTERIZE, ROTATE, SOLARIZE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y = range(len(OPERATIONS))
NOTHING = -1  # the operation of a chain that has ended

ASPECT = (3 / 4, 4 / 3)  # of a crop, width over height
TRIES = 10  # crops that are drawn before the centre is taken


@dataclass(frozen=True)
class jitter:  # noqa: N801 - reads as the value it is: augment=jitter(strength=0.5)
    """Small random changes of colour, place and sharpness, the view of CoTTA.

    In this order, with s = `strength`: brightness times a factor in 1 +- 0.4 s, contrast 1 +- 0.3 s, saturation 1 +- 0.5 s,
    hue turned by up to 0.06 s of the circle, gamma in 1 +- 0.3 s, clipped to [0, 1] after each; rotation by up to 15 s
    degrees, shift by up to s / 8 of each side and scale in 1 +- 0.1 s in one bilinear resampling of the image extended by its
    edge values; Gaussian blur of 5 x 5 pixels with sigma in [0.001, 0.5 s]; a horizontal flip; Gaussian noise; clip. Images
    that do not have 3 channels keep their saturation and hue.

    The published code draws one set of numbers for the whole batch, and the order of the colour changes with it. Here each
    image has its own numbers: the views of one batch are more diverse, and the view of an image does not depend on the other
    images. The order is fixed, because an order per image would cost five times as much.

    Args:
        strength: s, scales all ranges, in [0, 2]; 0.5 is about the published "soft" view, and 0 leaves only flip and noise.
        noise: standard deviation of the noise, >= 0.
        flip: probability of the flip, in [0, 1].
        move: whether to rotate, shift and scale. With move=False and flip=0 every pixel stays in its place, as it must where
            pixels are labelled.

    Example:
        >>> images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> views = jitter()(images.expand(8, *images.shape), torch.Generator().manual_seed(1))
        >>> views.shape  # 8 views of 4 images
        torch.Size([8, 4, 3, 32, 32])
        >>> still = jitter(strength=0, noise=0, flip=0)
        >>> torch.equal(still(images, torch.Generator()), images)
        True

    Reference: Wang et al., "Continual Test-Time Domain Adaptation", CVPR 2022.
    """

    strength: float = 1.0
    noise: float = 0.005
    flip: float = 0.5
    move: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.strength <= 2, "strength", self.strength, "in [0, 2]")
        require(0 <= self.noise < math.inf, "noise", self.noise, "a standard deviation, at least 0 and finite")
        require(0 <= self.flip <= 1, "flip", self.flip, "a probability, in [0, 1]")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of every image."""
        x = _flat(images, generator)
        if x.numel() == 0:
            return images.detach().clone()
        draws = _uniform((11, len(x)), x, generator)
        if self.strength:
            change = (2 * draws[:9] - 1) * self.strength  # in [-s, s]
            x = _recolour(x, change[:5])
            if self.move:
                x = _move(x, change[5:])
            x = _blur(x, SIGMA[0] + draws[9] * max(SIGMA[1] * self.strength - SIGMA[0], 0.0))
        if self.flip:
            x = torch.where(_each(draws[10] < self.flip), x.flip(-1), x)
        if self.noise:
            grain = torch.randn(x.shape, dtype=torch.float32, device=x.device, generator=generator)
            x = x + self.noise * grain
        return _like(x, images)


still = jitter(move=False, flip=0)
"""`jitter` of colour and sharpness alone: every pixel stays in its place."""


@dataclass(frozen=True)
class augmix:  # noqa: N801
    r"""A random crop, then mixed chains of random operations: AugMix, as MEMO uses it.

    The image is cropped to a share of its area (uniform in `crop`) with an aspect ratio in [3/4, 4/3], resized back and
    flipped with probability `flip`: that is x. Then each of `width` chains applies 1 to `depth` operations to x, and

    .. math:: \mathrm{view} = m\, x + (1 - m) \sum_i w_i\, \mathrm{chain}_i(x),
        \quad w \sim \mathrm{Dirichlet}(\alpha, \dots, \alpha),\; m \sim \mathrm{Beta}(\alpha, \alpha)

    Operations are drawn uniformly, with a level L uniform in [0.1, `severity`] each and a random sign: autocontrast and
    equalize (per channel), posterize to 4 - int(0.4 L) bits, solarize from 256 - int(25.6 L) of 256 on, rotate by int(3 L)
    degrees, shear x or y by 0.03 L, translate x or y by int(L / 30 of the side) pixels. Photometric operations act on 256
    levels; what the geometric ones leave empty is black; both as in Pillow. Equalize changes nothing in a channel of fewer
    than 256 pixels.

    Args:
        severity: largest level, an integer from 1 to 10.
        width: number of chains, at least 1.
        depth: largest number of operations in a chain, at least 1.
        alpha: parameter of Dirichlet and Beta, > 0.
        crop: smallest and largest share of the area, 0 < low <= high <= 1; (1, 1) leaves the crop out.
        flip: probability of the flip, in [0, 1].

    Example:
        >>> images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> views = augmix(severity=3)(images.expand(8, *images.shape), torch.Generator().manual_seed(1))
        >>> views.shape  # 8 views of 4 images
        torch.Size([8, 4, 3, 32, 32])

    Reference: Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty", ICLR 2020;
    Zhang, Levine, Finn, "MEMO: Test Time Robustness via Adaptation and Augmentation", NeurIPS 2022.
    """

    severity: int = 1
    width: int = 3
    depth: int = 3
    alpha: float = 1.0
    crop: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5

    def __post_init__(self) -> None:
        for name in ("severity", "width", "depth"):
            require_int(name, getattr(self, name), 1)
        require(self.severity <= 10, "severity", self.severity, "an integer <= 10")
        require(1e-6 <= self.alpha < math.inf, "alpha", self.alpha, "at least 1e-6 and finite")
        _check_crop("crop", self.crop, self.flip)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of every image."""
        x = _flat(images, generator)
        if x.numel() == 0:
            return images.detach().clone()
        n, slots = len(x), (self.width, self.depth, len(x))
        x = _cropped(x, self.crop, self.flip, generator)
        operation = torch.randint(len(OPERATIONS), slots, device=x.device, generator=generator)
        length = torch.randint(1, self.depth + 1, (self.width, 1, n), device=x.device, generator=generator)
        slot = torch.arange(self.depth, device=x.device).view(1, -1, 1)
        operation = torch.where(slot < length, operation, NOTHING)
        level = 0.1 + (self.severity - 0.1) * _uniform(slots, x, generator)
        sign = 2 * (_uniform(slots, x, generator) < 0.5).to(x.dtype) - 1
        weight = _shares(self.alpha, (self.width, n), x, generator)
        kept = _shares(self.alpha, (2, n), x, generator)[0]

        mixed = torch.zeros_like(x)
        for i in range(self.width):
            chain = x
            for j in range(self.depth):
                chain = _operate(chain, operation[i, j], level[i, j], sign[i, j])
            mixed += _each(weight[i]) * chain
        return _like(torch.lerp(mixed, x, _each(kept)), images)


@dataclass(frozen=True)
class crops:  # noqa: N801
    """A random crop, resized back to the whole, and a flip: the views of TPT.

    Args:
        share: smallest and largest share of the area, 0 < low <= high <= 1.
        flip: probability of the flip, in [0, 1].

    Example:
        >>> images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> crops()(images.expand(8, *images.shape), torch.Generator().manual_seed(1)).shape  # 8 views of 4 images
        torch.Size([8, 4, 3, 32, 32])
    """

    share: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5

    def __post_init__(self) -> None:
        _check_crop("share", self.share, self.flip)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of every image."""
        x = _flat(images, generator)
        if x.numel() == 0:
            return images.detach().clone()
        return _like(_cropped(x, self.share, self.flip, generator), images)


def _flat(images: Tensor, generator: torch.Generator) -> Tensor:
    """Checked images as (N, C, H, W), in float32 or better; may share memory with `images`."""
    if not images.is_floating_point():
        raise InputError(f"images must be floating point in [0, 1], got {images.dtype}; use images.float() / 255")
    if images.ndim < 3:
        raise InputError(f"images must have shape (..., C, H, W), got {tuple(images.shape)}")
    if generator.device.type != images.device.type:
        raise InputError(
            f"the generator must be on the device of the images, {images.device}, got {generator.device}; make it with "
            "torch.Generator(images.device)"
        )
    x = images.detach()
    x = x if x.dtype == torch.float64 else x.float()
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _like(x: Tensor, images: Tensor) -> Tensor:
    """`x` in [0, 1], in the shape and dtype of `images`; new memory, because of the clamp."""
    return x.clamp(0, 1).reshape(images.shape).to(images.dtype)


def _each(values: Tensor) -> Tensor:
    """One number per image, (N,), shaped to be multiplied with (N, C, H, W)."""
    return values.view(-1, 1, 1, 1)


def _uniform(shape: tuple[int, ...], x: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1), drawn in float32 so that all dtypes of `x` get the same view."""
    return torch.rand(shape, dtype=torch.float32, device=x.device, generator=generator).to(x.dtype)


def _shares(alpha: float, shape: tuple[int, int], x: Tensor, generator: torch.Generator) -> Tensor:
    """Dirichlet(alpha, ..., alpha) along the first axis; the first share of two is Beta(alpha, alpha).

    Shares are gamma variables over their sum. Those of a small alpha underflow, so they are drawn as logarithms: g u^(1 / a)
    with g ~ Gamma(a + 1) and u uniform is Gamma(a). Gamma(1) is the exponential distribution, which every device can draw.
    """
    log_u = torch.log1p(-_uniform(shape, x, generator))  # 1 - u is never 0
    if alpha == 1:
        return torch.softmax(log_u.neg().clamp_min(1e-30).log(), dim=0)
    above = torch.full(shape, alpha + 1, dtype=torch.float32, device=x.device)
    gamma = torch._standard_gamma(above, generator=generator).to(x.dtype)
    return torch.softmax(gamma.log() + log_u / alpha, dim=0)


def _warp(x: Tensor, rows: Rows, black: bool) -> Tensor:
    """Resample (N, C, H, W) bilinearly: the pixel at p reads the image at A p + b, both in pixels from the centre.

    Outside the image is black, as in Pillow, or the nearest edge value. The grid is made without a matrix product, which
    autocast and TF32 would round to parts of a pixel.
    """
    height, width = x.shape[-2:]
    right = torch.arange(width, dtype=x.dtype, device=x.device) - (width - 1) / 2
    down = torch.arange(height, dtype=x.dtype, device=x.device).view(-1, 1) - (height - 1) / 2
    grid = x.new_empty(len(x), height, width, 2)  # in halves of a side, as grid_sample has it
    for axis, size in enumerate((width, height)):
        a, b, c = (value.view(-1, 1, 1) * (2 / size) for value in rows[axis])
        torch.add(a * right + c, b * down, out=grid[..., axis])
    out = F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    if black:
        inside = (grid[..., 0].abs() <= 1) & (grid[..., 1].abs() <= 1)
        out.mul_(inside.unsqueeze(1))
    return out


def _grey(x: Tensor) -> Tensor:
    """Luminance (Rec. 601), (N, 1, H, W); the mean of the channels if there are not 3."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    r, g, b = x.unbind(dim=1)
    return (0.299 * r + 0.587 * g + 0.114 * b).unsqueeze(1)


def _turn_hue(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by `turn` (N,) of the circle, in the HSV hexcone."""
    r, g, b = x.unbind(dim=1)
    value = x.amax(dim=1)
    chroma = value - x.amin(dim=1)
    unit = torch.where(chroma > 0, chroma, 1)
    hue = torch.where(value == r, (g - b) / unit, torch.where(value == g, 2 + (b - r) / unit, 4 + (r - g) / unit))
    hue = hue + 6 * turn.view(-1, 1, 1)
    # Of six sectors, a channel is at its lowest in two, at its highest in two, and on a ramp in between.
    place = [(hue + start).remainder(6) for start in (5, 3, 1)]
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in place], dim=1)


def _recolour(x: Tensor, change: Tensor) -> Tensor:
    """Brightness, contrast, saturation, hue and gamma, in this order; `change` (5, N) is relative to the largest change."""
    brightness, contrast, saturation, hue, gamma = change
    x = (x * _each(1 + BRIGHTNESS * brightness)).clamp(0, 1)
    mean = _grey(x).mean(dim=(-2, -1), keepdim=True)
    x = torch.lerp(mean.expand_as(x), x, _each(1 + CONTRAST * contrast)).clamp(0, 1)
    if x.shape[1] == 3:
        x = torch.lerp(_grey(x).expand_as(x), x, _each(1 + SATURATION * saturation)).clamp(0, 1)
        x = _turn_hue(x, HUE * hue).clamp(0, 1)
    return x ** _each(1 + GAMMA * gamma)


def _move(x: Tensor, change: Tensor) -> Tensor:
    """Rotate about the centre, scale and shift; `change` (4, N) is relative to the largest change."""
    height, width = x.shape[-2:]
    turn, scale, right, down = change
    turn = turn * math.radians(DEGREES)
    cos, sin = turn.cos() / (1 + SCALE * scale), turn.sin() / (1 + SCALE * scale)
    right, down = right * (SHIFT * width), down * (SHIFT * height)
    # The inverse of p -> scale R p + shift, since it is read from there.
    first = (cos, -sin, sin * down - cos * right)
    second = (sin, cos, -sin * right - cos * down)
    return _warp(x, (first, second), black=False)


def _blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur over 5 x 5 pixels, with one `sigma` (N,) per image and the edges replicated."""
    side = [torch.exp(-0.5 * (i / sigma) ** 2) for i in (0, 1, 2)]
    total = side[0] + 2 * side[1] + 2 * side[2]
    centre, near, far = (_each(tap / total) for tap in side)
    for axis, margin in ((-1, (2, 2, 0, 0)), (-2, (0, 0, 2, 2))):
        size = x.shape[axis]
        a, b, c, d, e = (F.pad(x, margin, mode="replicate").narrow(axis, i, size) for i in range(5))
        x = centre * c + near * (b + d) + far * (a + e)
    return x


def _check_crop(name: str, share: tuple[float, float], flip: float) -> None:
    pair = isinstance(share, tuple) and len(share) == 2 and 0 < share[0] <= share[1] <= 1
    require(pair, name, share, "a pair of shares of the area, 0 < low <= high <= 1")
    require(0 <= flip <= 1, "flip", flip, "a probability, in [0, 1]")


def _cropped(x: Tensor, share: tuple[float, float], flip: float, generator: torch.Generator) -> Tensor:
    """A random part of each image, enlarged to the whole, and flipped with that probability."""
    if share[0] < 1:
        x = _crop(x, share, generator)
    if flip:
        x = torch.where(_each(_uniform((len(x),), x, generator) < flip), x.flip(-1), x)
    return x


def _crop(x: Tensor, share: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Crop a random part, (low, high) of the area, and enlarge it to the whole.

    A part that does not fit is drawn again, up to ten times; then the largest centred part with an allowed aspect ratio is
    taken. All ten are drawn at once and the first that fits is picked, which is equivalent and does not wait for the device.
    """
    height, width = x.shape[-2:]
    n = len(x)
    area = share[0] + (share[1] - share[0]) * _uniform((TRIES, n), x, generator)
    low, high = (math.log(ratio) for ratio in ASPECT)
    aspect = torch.exp(low + (high - low) * _uniform((TRIES, n), x, generator))
    wide = (area * aspect * (height * width)).sqrt()
    tall = (area / aspect * (height * width)).sqrt()
    fits = (wide <= width) & (tall <= height)
    first = fits.to(torch.uint8).argmax(dim=0, keepdim=True)  # the first of equals
    found = fits.any(dim=0)
    wide = torch.where(found, wide.gather(0, first)[0], min(width, height * ASPECT[1]))
    tall = torch.where(found, tall.gather(0, first)[0], min(height, width / ASPECT[0]))
    # Where its centre may lie, from the centre of the image; that of the last resort does not move.
    across, along = (2 * _uniform((2, n), x, generator) - 1) * found
    right, down = across * (width - wide) / 2, along * (height - tall) / 2
    none = torch.zeros_like(wide)
    return _warp(x, ((wide / width, none, right), (none, tall / height, down)), black=False)


def _operate(x: Tensor, operation: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """One slot of a chain: each image under the operation it drew, at `level` in [0.1, 10]; all three (N,).

    An operation is either a table of 256 levels per channel or an affine map, so the slot is one histogram, one lookup and one
    resampling, whatever was drawn.
    """
    levels = (x * 255).round().clamp(0, 255).to(torch.uint8).long()  # by way of uint8, not even NaN leaves the table
    table = _tables(_histogram(levels), operation, level)
    toned = table.gather(-1, levels.flatten(2)).view_as(x)
    moved = _warp(x, _maps(x, operation, level, sign), black=True)
    geometric = (operation == ROTATE) | (operation >= SHEAR_X)
    x = torch.where(_each(geometric | (operation == NOTHING)), x, toned)
    return torch.where(_each(geometric), moved, x)


def _histogram(levels: Tensor) -> Tensor:
    """How often each of 256 levels occurs: (N, C, H, W) to (N, C, 256), integers."""
    counts = torch.zeros(*levels.shape[:2], 256, dtype=torch.int32, device=levels.device)
    places = levels.flatten(2)
    return counts.scatter_add_(-1, places, counts.new_ones(()).expand_as(places))


def _tables(counts: Tensor, operation: Tensor, level: Tensor) -> Tensor:
    """The photometric operations as tables (N, C, 256) of values in [0, 1], in the dtype of `level`."""
    ramp = torch.arange(256, dtype=torch.int32, device=counts.device).expand_as(counts)
    kind, level = operation.view(-1, 1, 1), level.view(-1, 1, 1)
    drop = 4 + (level * 0.4).int()  # bits: 8 - (4 - int(0.4 L))
    table = torch.where(kind == POSTERIZE, (ramp >> drop) << drop, ramp)
    threshold = 256 - (level * 25.6).int()
    table = torch.where((kind == SOLARIZE) & (ramp >= threshold), 255 - ramp, table)
    table = torch.where(kind == AUTOCONTRAST, _autocontrast(counts, ramp), table)
    table = torch.where(kind == EQUALIZE, _equalize(counts, ramp), table)
    return table.to(level.dtype) / 255


def _autocontrast(counts: Tensor, ramp: Tensor) -> Tensor:
    """Stretch the levels that occur over 0 to 255; a channel of one level is unchanged."""
    low = torch.where(counts > 0, ramp, 255).amin(dim=-1, keepdim=True)
    high = torch.where(counts > 0, ramp, 0).amax(dim=-1, keepdim=True)
    stretched = ((ramp - low) * 255).div((high - low).clamp_min(1), rounding_mode="floor")
    return torch.where(high > low, stretched.clamp(0, 255), ramp)


def _equalize(counts: Tensor, ramp: Tensor) -> Tensor:
    """Give each level about as many pixels: level i becomes the share of pixels below it.

    As in Pillow, the pixels of the highest level do not count, and a step is a whole number of pixels; if that is 0, the
    channel is unchanged.
    """
    high = torch.where(counts > 0, ramp, 0).amax(dim=-1, keepdim=True)
    total = counts.sum(dim=-1, keepdim=True, dtype=torch.int32) - counts.gather(-1, high.long())
    step = total.div(255, rounding_mode="floor")
    below = counts.cumsum(dim=-1, dtype=torch.int32) - counts
    half = step.div(2, rounding_mode="floor")
    spread = (below + half).div(step.clamp_min(1), rounding_mode="floor").clamp(max=255)
    return torch.where(step > 0, spread, ramp)


def _maps(x: Tensor, operation: Tensor, level: Tensor, sign: Tensor) -> Rows:
    """The geometric operations as rows of affine maps from output to input, in pixels from the centre."""
    height, width = x.shape[-2:]

    def drawn(kind: int, amount: Tensor) -> Tensor:
        return torch.where(operation == kind, sign * amount, 0)

    turn = drawn(ROTATE, (level * 3).trunc() * (math.pi / 180))
    shear_x, shear_y = drawn(SHEAR_X, level * 0.03), drawn(SHEAR_Y, level * 0.03)
    # Shears fix the top left corner.
    right = drawn(TRANSLATE_X, (level * (width / 30)).trunc()) + shear_x * (height / 2)
    down = drawn(TRANSLATE_Y, (level * (height / 30)).trunc()) + shear_y * (width / 2)
    cos, sin = turn.cos(), turn.sin()
    return (cos, shear_x - sin, right), (shear_y + sin, cos, down)
