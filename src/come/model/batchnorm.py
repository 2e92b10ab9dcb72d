"""Which mean and variance BatchNorm layers normalize by, for one call of a model.

`statistics` of a call is one of

    None        the running statistics of the source model, as in evaluation mode
    "batch"     the statistics of the batch, as published TTA methods do
    mixed(s)    s of those of the batch, and the rest of the source's
    a function  (layer, input) -> mean and variance, (C,) or what broadcasts to the input: `by_group`, `by_selection`, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import InputError
from come.model.inputs import at_least_float32

if TYPE_CHECKING:
    from come.model.ranks import Part


class Layer(NamedTuple):
    """A BatchNorm layer, its number in the model, and the running statistics of the source (None if it keeps none)."""

    module: nn.BatchNorm2d
    number: int
    mean: Tensor | None
    var: Tensor | None
    part: Part | None = None
    """Where a batch is divided over ranks, this rank's part of it: statistics are of all parts."""


WITHOUT_STATISTICS = (
    "got one value per channel and has no running statistics; use a larger batch or a BatchNorm with "
    "track_running_stats=True"
)

StatisticsRule = Literal["batch", "mixed", "source"]
"""The rule by name: what the batch's statistics count for."""
Estimate = Callable[[Layer, Tensor], tuple[Tensor, Tensor]]
Statistics = Union[Estimate, "mixed", "by_selection", Literal["batch"], None]


def normalizing(
    layer: Layer, estimate: Estimate | mixed
) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
    """A forward pre-hook for a layer that is called with a mean of 0 and a variance of 1 - eps.

    Statistics (C,) take their place, and torch's own kernel does the rest. Others, with a gradient or of their own for each
    sample, are applied to the input, so that subclasses that do more than normalize keep doing it.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = at_least_float32(inputs[0])
        if isinstance(estimate, mixed):
            return (estimate.normalized(layer, x).to(inputs[0].dtype), *inputs[1:])
        mean, var = estimate(layer, x) if layer.part is None else layer.part.estimated(layer, x, estimate)
        if mean.ndim == 1:
            norm = cast(nn.BatchNorm2d, module)
            norm.running_mean, norm.running_var = mean.to(norm.running_mean), var.to(norm.running_var)
            return None
        return (((x - mean) * (var + layer.module.eps).rsqrt()).to(inputs[0].dtype), *inputs[1:])

    return hook


def unit_statistics(layer: Layer) -> tuple[Tensor, Tensor]:
    """Running statistics that change nothing, a mean of 0 and a variance of 1 - eps, where a hook normalizes the input."""
    module = layer.module
    like = next((t for t in (layer.mean, module.weight) if t is not None), torch.ones(()))
    zeros = like.detach().new_zeros(module.num_features)
    return zeros, torch.full_like(zeros, 1 - module.eps)


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """(C,) -> a shape that broadcasts to x (B, C, ...)."""
    return value.to(x).view(1, -1, *[1] * (x.ndim - 2))


def source_statistics(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The running statistics of the source."""
    if layer.mean is None or layer.var is None:
        raise InputError(f"{layer.module} {WITHOUT_STATISTICS}")
    return per_channel(layer.mean, x), per_channel(layer.var, x)


def batch_statistics(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics of the batch; one value per channel has none, and is normalized by the source's.

    Example:
        >>> layer = Layer(nn.BatchNorm1d(1), 0, torch.zeros(1), torch.ones(1))
        >>> batch_statistics(layer, torch.tensor([[1.0], [3.0]]))
        (tensor([[2.]]), tensor([[1.]]))
    """
    if _values(layer, x) == 1:
        return source_statistics(layer, x)
    if layer.part is not None:
        mean, var = layer.part.moments(x)
        return per_channel(mean, x), per_channel(var, x)
    var, mean = torch.var_mean(x, dim=_dims(x), correction=0, keepdim=True)
    return mean, var


def _values(layer: Layer, x: Tensor, groups: int = 1) -> int:
    """How many values per channel there are in each of `groups` equal parts of the batch."""
    return x.numel() // (x.shape[1] * groups) if layer.part is None else layer.part.values(x, groups)


def by_group(groups: int, share: Tensor | float = 1.0) -> Estimate:
    """Statistics of each of `groups` equal parts of the batch by itself, mixed with the source's as in `mixed`.

    Example:
        >>> layer = Layer(nn.BatchNorm1d(1), 0, None, None)
        >>> mean, _ = by_group(2)(layer, torch.tensor([[1.0], [3.0], [10.0], [10.0]]))
        >>> mean.flatten()
        tensor([ 2.,  2., 10., 10.])
    """

    def estimate(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        if _values(layer, x, groups) == 1:
            return source_statistics(layer, x)
        if layer.part is not None:
            return _mixed(layer, *layer.part.by_group(x, groups), share)
        parts = torch.unflatten(x, 0, (groups, -1))
        var, mean = torch.var_mean(parts, dim=[1, *range(3, parts.ndim)], correction=0, keepdim=True)
        each = parts.shape[1]
        mean, var = (value.flatten(0, 1).repeat_interleave(each, dim=0) for value in (mean, var))
        return _mixed(layer, mean, var, share)

    return estimate


@dataclass(frozen=True, eq=False)
class by_selection:  # noqa: N801 - reads as the value it is: statistics=by_selection(used)
    """Statistics of the samples in the mask `used` (B,), or of all if it is empty, mixed with the source's as in `mixed`.

    No gradient flows through them.

    Example:
        >>> layer = Layer(nn.BatchNorm1d(1), 0, None, None)
        >>> by_selection(torch.tensor([True, True, False]))(layer, torch.tensor([[1.0], [3.0], [10.0]]))
        (tensor([2.]), tensor([1.]))
    """

    used: Tensor
    share: Tensor | float = 1.0

    @torch.no_grad()
    def __call__(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (C,) for the input (B, C, ...) of a layer."""
        if layer.part is not None:
            return _mixed(layer, *layer.part.by_selection(x, self.used | ~self.used.any()), self.share)
        mean, var = _weighted(x.reshape(1, *x.shape[:2], -1), self.used[None])
        return _mixed(layer, mean[0], var[0], self.share)

    def by_stream(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (n, C) for (n, b, C, places), with a mask (n, b) of streams."""
        return _weighted(at_least_float32(x), self.used)


def _weighted(x: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (n, C) of the `used` (n, b) samples, or of all, of (n, b, C, places)."""
    weight = (used | ~used.any(dim=1, keepdim=True)).to(x.dtype)[:, :, None, None]
    total = weight.sum(dim=(1, 3)) * x.shape[3]
    mean = (x * weight).sum(dim=(1, 3)) / total
    var = ((x - mean[:, None, :, None]).square() * weight).sum(dim=(1, 3)) / total
    return mean, var


@dataclass(frozen=True, eq=False)
class mixed:  # noqa: N801 - reads as the value it is: statistics=mixed(0.5)
    r"""`share` of the batch's statistics and the rest of the source's: :math:`\mu = (1 - s) \mu_0 + s \mu_B`.

    It is computed as :math:`a z + b` from the input z that is normalized by the batch, with torch's kernel. The gradient flows
    through z, as it does with statistics of the batch alone, and takes a and b as constants. (Without a gradient through the
    statistics Tent at 30 times the paper's rate loses 20 points in 75 batches.)

    Example:
        >>> layer = Layer(nn.BatchNorm1d(1), 0, torch.zeros(1), torch.ones(1))
        >>> mixed(0.5).normalized(layer, torch.tensor([[1.0], [3.0]])).flatten().round(decimals=3)  # mean 1, variance 1
        tensor([0., 2.])
    """

    share: Tensor | float

    def affine(self, layer: Layer, x: Tensor, own: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor] | None:
        """a and b (C,), for the input (B, C, ...) of a layer whose statistics are `own`; None if the source has none."""
        if layer.mean is None or layer.var is None:
            return None
        eps = layer.module.eps
        with torch.no_grad():
            own_mean, own_var = own or _moments(x, eps)
            mean, var = _mixed(layer, own_mean, own_var, self.share)
            width = (var + eps).rsqrt()
            return (own_var + eps).sqrt() * width, (own_mean - mean) * width

    def normalized(self, layer: Layer, x: Tensor) -> Tensor:
        """The input (B, C, ...) of a layer, normalized."""
        eps = layer.module.eps
        if _values(layer, x) == 1:
            mean, var = source_statistics(layer, x)
            return (x - mean) * (var + eps).rsqrt()
        if layer.part is not None:
            own = layer.part.moments(x)
            z = (x - per_channel(own[0], x)) * per_channel((own[1] + eps).rsqrt(), x)
            found = self.affine(layer, x, own)
            return z if found is None else z * per_channel(found[0], x) + per_channel(found[1], x)
        scale, shift = self.affine(layer, x) or (None, None)
        return F.batch_norm(x, None, None, scale, shift, training=True, momentum=0.0, eps=eps)

    def weights(self, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias (C,) with which a layer on the statistics of the batch gives the same, in one pass less."""
        found = self.affine(layer, x)
        if found is None:
            return weight, bias
        scale, shift = (value.to(weight.dtype) for value in found)
        return weight * scale, weight * shift + bias


def _moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) of a batch, in float32 or better."""
    if (
        x.is_cuda and not torch.compiler.is_compiling() and _channels_last(x)
    ):  # then `var_mean` takes three times as long
        mean, inverse = torch.batch_norm_stats(x, eps)
        return mean, (inverse.square().reciprocal() - eps).clamp_min(0)
    # As torch's BatchNorm does it: a compiler then computes these once.
    var, mean = (v.flatten() for v in torch.var_mean(at_least_float32(x), dim=_dims(x), correction=0, keepdim=True))
    return mean, var


def _channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def rescaling(layer: Layer, rule: mixed, weight: Tensor, bias: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A forward pre-hook for a layer on the statistics of the batch, that makes it one on mixed statistics."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found = rule.weights(layer, inputs[0], weight, bias)
        module._parameters["weight"], module._parameters["bias"] = found  # type: ignore[assignment]

    return hook


def _mixed(layer: Layer, mean: Tensor, var: Tensor, share: Tensor | float) -> tuple[Tensor, Tensor]:
    """The source's statistics in part; `mean` and `var` have the channels along their last or second dimension."""
    if layer.mean is None or layer.var is None or (isinstance(share, float) and share == 1):
        return mean, var
    share = torch.as_tensor(share, dtype=mean.dtype, device=mean.device)
    old = (value.to(mean) if mean.ndim == 1 else per_channel(value, mean) for value in (layer.mean, layer.var))
    return tuple(torch.lerp(a, b, share) for a, b in zip(old, (mean, var), strict=True))  # type: ignore[return-value]


def following(
    old: Mapping[int, tuple[Tensor, Tensor]],
    share: float,
    correction: int,
    new: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> Estimate:
    """(1 - share) of the statistics `old` and `share` of the batch's own.

    No gradient flows through the batch's share.

    Args:
        old: mean (C,) and variance (C,) by the number of the layer.
        share: in [0, 1].
        correction: 1 for the unbiased variance of the batch, 0 for the biased one.
        new: receives the new statistics.

    Example:
        >>> layer = Layer(nn.BatchNorm1d(1), 0, None, None)
        >>> following({0: (torch.zeros(1), torch.ones(1))}, 0.5, 0)(layer, torch.tensor([[1.0], [3.0]]))
        (tensor([1.]), tensor([1.]))
    """

    @torch.no_grad()
    def estimate(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = old[layer.number]
        values = _values(layer, x)  # one value per channel has a mean, but no variance
        if layer.part is None:
            own_mean = x.mean(dim=_dims(x))
            own_var = x.var(dim=_dims(x), correction=correction) if values > 1 else var
        else:
            own_mean, biased = layer.part.moments(x)
            own_var = biased * (values / (values - correction)) if values > 1 else var
        mean, var = torch.lerp(mean.to(x), own_mean, share), torch.lerp(var.to(x), own_var.to(x), share)
        if new is not None:
            new[layer.number] = (mean, var)
        return mean, var

    return estimate
