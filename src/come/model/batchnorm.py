"""Which mean and variance BatchNorm layers normalize by, for one call of a model.

`statistics` of a call is one of

    None                the running statistics of the source model, as in evaluation mode
    BatchStatistics     a share of those of the batch, of its parts or of some of its samples, and the rest of the source's
    a function          (layer, input) -> mean and variance, (C,) or what broadcasts to the input, e.g. `following`

`normalize` computes the second for an eager or compiled model, for many streams (`come.streams.norms`), and on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import InputError
from come.model.inputs import WITHOUT_STATISTICS, at_least_float32

if TYPE_CHECKING:
    from come.model.ranks import RankRows


class Layer(NamedTuple):
    """A BatchNorm layer, its number in the model, and the running statistics of the source (None if it keeps none)."""

    module: nn.BatchNorm2d
    number: int
    mean: Tensor | None
    var: Tensor | None
    rank_rows: RankRows | None = None
    """Where a batch is divided over ranks, this rank's part of it: statistics are of all parts."""


StatisticsRule = Literal["batch", "mixed", "source"]
"""The rule by name: what the batch's statistics count for."""
Pair = tuple[Tensor, Tensor]
"""Mean and variance."""


@dataclass(frozen=True, eq=False)
class BatchStatistics:
    r"""`share` of the batch's statistics and the rest of the source's: :math:`\mu = (1 - s) \mu_0 + s \mu_B`.

    The gradient flows through the normalization by the batch, and takes what the source's share changes as constant. (Without a
    gradient through the statistics Tent at 30 times the paper's rate loses 20 points in 75 batches.)

    Args:
        share: s, or (groups,) of each part.
        groups: equal parts of the batch, each with statistics of its own.
        used: (B,) bool: the statistics are of these samples, or of all if there are none; no gradient flows through them.
    """

    share: Tensor | float = 1.0
    groups: int = 1
    used: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether they are of the batch as a whole."""
        return self.groups == 1 and self.used is None

    @property
    def of_batch_alone(self) -> bool:
        """Whether torch's BatchNorm in training mode uses the same."""
        return self.plain and isinstance(self.share, float) and self.share == 1


Estimate = Callable[[Layer, Tensor], Pair]
Statistics = Estimate | BatchStatistics | None


def normalize(
    x: Tensor,
    source: Pair | None,
    statistics: BatchStatistics,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    reduce: RankRows | None = None,
) -> Tensor:
    """Normalize the input (B, C, ...) of a BatchNorm layer.

    Args:
        x: the input.
        source: the source's running mean and variance (C,); None if it keeps none.
        statistics: what to normalize by; one value per channel has no variance and is normalized by the source's.
        eps: of the layer.
        weight: (C,) or (groups, C), applied afterwards.
        bias: the same.
        reduce: on several ranks, this rank's part of the batch.

    Example:
        >>> x, source = torch.tensor([[1.0], [3.0]]), (torch.zeros(1), torch.ones(1))
        >>> normalize(x, source, BatchStatistics(0.5), 1e-5).flatten().round(decimals=3)  # mean 1, variance 1
        tensor([0., 2.])
    """
    groups, used, share = statistics.groups, statistics.used, statistics.share
    if _values(reduce, x, groups) == 1:
        if source is None:
            raise InputError(f"a BatchNorm layer {WITHOUT_STATISTICS}")
        x32 = at_least_float32(x)
        y = F.batch_norm(x32, source[0].to(x32), source[1].to(x32), None, None, False, 0.0, eps)
        return _affine(y, weight, bias, groups).to(x.dtype)
    if used is None and reduce is None:
        scale_and_shift = None
        if source is not None and not (isinstance(share, float) and share == 1):
            scale_and_shift = _scale_and_shift(moments(x, eps, groups=groups), source, share, eps)
        return _normalized_by_torch(x, eps, *_combined(scale_and_shift, weight, bias), groups)
    x32 = at_least_float32(x)
    if used is not None:
        with torch.no_grad():
            own = moments(x, eps, used, groups) if reduce is None else reduce.moments(x, used)
        return _affine(_centred(x32, *toward(own, source, share), eps), weight, bias, groups).to(x.dtype)
    assert reduce is not None
    own = reduce.moments(x, groups=groups)  # with a gradient; (1 or B, C)
    y = _centred(x32, *own, eps)
    if source is not None:
        scale, shift = _scale_and_shift((own[0].detach(), own[1].detach()), source, share, eps)
        y = y * _per_row(scale, x) + _per_row(shift, x)
    return _affine(y, weight, bias, 1).to(x.dtype)


@torch.no_grad()
def _scale_and_shift(own: Pair, source: Pair, share: Tensor | float, eps: float) -> Pair:
    """What turns a normalization by `own` statistics (G, C) into one by `share` of them and the rest of the source's."""
    mean, var = toward(own, source, share)
    width = (var + eps).rsqrt()
    return (own[1] + eps).sqrt() * width, (own[0] - mean) * width


def toward(own: Pair, source: Pair | None, share: Tensor | float) -> Pair:
    """`share` (or (G,) of them) of the statistics (G, C), and the rest of the source's (C,)."""
    if source is None or (isinstance(share, float) and share == 1):
        return own
    part = torch.as_tensor(share, dtype=own[0].dtype, device=own[0].device).reshape(-1, 1)
    return torch.lerp(source[0].to(own[0]), own[0], part), torch.lerp(source[1].to(own[1]), own[1], part)


def moments(x: Tensor, eps: float = 0.0, used: Tensor | None = None, groups: int = 1) -> Pair:
    """Mean and biased variance (groups, C) of equal parts of the input (B, C, ...), in float32 or better.

    Args:
        x: the input.
        eps: for the kernel that is fastest on a GPU.
        used: (B,) bool: of these samples, or of all of a part that has none.
        groups: how many parts.
    """
    if used is not None or groups > 1:
        parts = at_least_float32(x).reshape(groups, len(x) // groups, x.shape[1], -1)
    if used is not None:
        chosen = used.reshape(groups, -1)
        counted = (chosen | ~chosen.any(dim=1, keepdim=True)).to(parts.dtype)[:, :, None, None]
        total = counted.sum(dim=(1, 3)) * parts.shape[3]
        mean = (parts * counted).sum(dim=(1, 3)) / total
        return mean, ((parts - mean[:, None, :, None]).square() * counted).sum(dim=(1, 3)) / total
    if groups > 1:
        var, mean = torch.var_mean(parts, dim=(1, 3), correction=0)
        return mean, var
    if x.is_cuda and not torch.compiler.is_compiling() and _channels_last(x):  # `var_mean` takes three times as long
        mean, inverse = torch.batch_norm_stats(x, eps)
        return mean[None], (inverse.square().reciprocal() - eps).clamp_min(0)[None]
    # As torch's BatchNorm does it: a compiler then computes these once.
    var, mean = torch.var_mean(at_least_float32(x), dim=_dims(x), correction=0, keepdim=True)
    return mean.view(1, -1), var.view(1, -1)


def _channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _normalized_by_torch(x: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None, groups: int) -> Tensor:
    """Torch's kernel, with the channels of each part as channels of their own."""
    if groups == 1:
        return F.batch_norm(x, None, None, _row(weight), _row(bias), True, 0.0, eps)
    rows, c = len(x) // groups, x.shape[1]
    flat = x.reshape(groups, rows, c, -1).transpose(0, 1).reshape(rows, groups * c, -1)
    weight, bias = (None if value is None else value.expand(groups, c).flatten() for value in (weight, bias))
    y = F.batch_norm(flat, None, None, weight, bias, True, 0.0, eps)
    return y.view(rows, groups, c, -1).transpose(0, 1).reshape(x.shape)


def _row(value: Tensor | None) -> Tensor | None:
    """(1, C) or (C,) -> (C,)."""
    return None if value is None else value.reshape(-1)


def _combined(
    scale_and_shift: Pair | None, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """One weight and bias that does both: scale and shift (G, C) first, then weight and bias."""
    if scale_and_shift is None:
        return weight, bias
    scale, shift = scale_and_shift if weight is None else (value.to(weight.dtype) for value in scale_and_shift)
    if weight is not None:
        scale, shift = weight * scale, weight * shift
    return scale, shift if bias is None else shift + bias


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> Tensor:
    """weight * y + bias, for (C,), or (groups, C) of equal parts of the batch."""
    for value, apply in ((weight, torch.mul), (bias, torch.add)):
        if value is not None:
            each = value if value.ndim == 1 else value.repeat_interleave(len(y) // groups, dim=0)
            y = apply(y, _per_row(each if each.ndim == 2 else each[None], y))
    return y


def _per_row(value: Tensor, x: Tensor) -> Tensor:
    """(1 or B, C) -> a shape that broadcasts to x (B, C, ...)."""
    return value.view(*value.shape, *[1] * (x.ndim - 2))


def _centred(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """x (B, C, ...) normalized by (G, C)."""
    if len(mean) not in (1, len(x)):
        mean, var = (value.repeat_interleave(len(x) // len(value), dim=0) for value in (mean, var))
    return (x - _per_row(mean, x)) * _per_row((var + eps).rsqrt(), x)


def _values(rows: RankRows | None, x: Tensor, groups: int = 1) -> int:
    """How many values per channel there are in each of `groups` equal parts of the batch."""
    return x.numel() // (x.shape[1] * groups) if rows is None else rows.values(x, groups)


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


# ---- hooks on the layers of a model ----


def source_of(layer: Layer) -> Pair | None:
    """The running statistics of the source, if it keeps some."""
    return None if layer.mean is None or layer.var is None else (layer.mean, layer.var)


def rescaling(
    layer: Layer, statistics: BatchStatistics, weight: Tensor, bias: Tensor
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A forward pre-hook for a layer in torch's training mode: other weights give it a share of the source's statistics."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        source, found = source_of(layer), None
        if source is not None:
            eps = layer.module.eps
            found = _scale_and_shift(moments(inputs[0], eps), source, statistics.share, eps)
        combined = (_row(value) for value in _combined(found, weight, bias))
        module._parameters["weight"], module._parameters["bias"] = combined  # type: ignore[assignment]

    return hook


def normalizing(
    layer: Layer, statistics: Estimate | BatchStatistics
) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
    """A forward pre-hook for a layer that is called with `unit_statistics`.

    Statistics (C,) take the place of these, and torch's own kernel does the rest. Others, with a gradient or different for each
    sample, are applied to the input, so that subclasses that do more than normalize keep doing it.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x, eps = at_least_float32(inputs[0]), layer.module.eps
        if isinstance(statistics, BatchStatistics):
            y = normalize(x, source_of(layer), statistics, eps, reduce=layer.rank_rows)
            return (y.to(inputs[0].dtype), *inputs[1:])
        mean, var = statistics(layer, x) if layer.rank_rows is None else layer.rank_rows.estimated(layer, x, statistics)
        if mean.ndim == 1:
            norm = cast(nn.BatchNorm2d, module)
            norm.running_mean, norm.running_var = mean.to(norm.running_mean), var.to(norm.running_var)
            return None
        return (((x - mean) * (var + eps).rsqrt()).to(inputs[0].dtype), *inputs[1:])

    return hook


def unit_statistics(layer: Layer) -> Pair:
    """Running statistics that change nothing, a mean of 0 and a variance of 1 - eps, where a hook normalizes the input."""
    module = layer.module
    like = next((t for t in (layer.mean, module.weight) if t is not None), torch.ones(()))
    zeros = like.detach().new_zeros(module.num_features)
    return zeros, torch.full_like(zeros, 1 - module.eps)


# ---- functions that estimate statistics ----


def batch_statistics(layer: Layer, x: Tensor) -> Pair:
    """The statistics of the batch, with a gradient; one value per channel has none, and is normalized by the source's.

    Example:
        >>> layer = Layer(nn.BatchNorm1d(1), 0, torch.zeros(1), torch.ones(1))
        >>> batch_statistics(layer, torch.tensor([[1.0], [3.0]]))
        (tensor([[2.]]), tensor([[1.]]))
    """
    if _values(layer.rank_rows, x) == 1:
        source = source_of(layer)
        if source is None:
            raise InputError(f"{layer.module} {WITHOUT_STATISTICS}")
        mean, var = (value.to(x)[None] for value in source)
    else:
        mean, var = moments(x, layer.module.eps) if layer.rank_rows is None else layer.rank_rows.moments(x)
    return _per_row(mean, x), _per_row(var, x)


def following(old: Mapping[int, Pair], share: float, correction: int, new: dict[int, Pair] | None = None) -> Estimate:
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
    def estimate(layer: Layer, x: Tensor) -> Pair:
        mean, var = old[layer.number]
        values = _values(layer.rank_rows, x)  # one value per channel has a mean, but no variance
        if layer.rank_rows is None:
            own_mean = x.mean(dim=_dims(x))
            own_var = x.var(dim=_dims(x), correction=correction) if values > 1 else var
        else:
            (own_mean,), (biased,) = layer.rank_rows.moments(x)
            own_var = biased * (values / (values - correction)) if values > 1 else var
        mean, var = torch.lerp(mean.to(x), own_mean, share), torch.lerp(var.to(x), own_var.to(x), share)
        if new is not None:
            new[layer.number] = (mean, var)
        return mean, var

    return estimate
