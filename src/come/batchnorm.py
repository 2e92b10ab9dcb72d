"""BatchNorm on other statistics than its own, inside one model and only while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from come.errors import InputError
from come.inputs import exact
from come.select import BATCH_NORMS


def batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """All BatchNorm layers of `model`.

    Example:
        >>> len(batch_norms(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))))
        1
    """
    # One type stands for all of them: what matters here, the running statistics, they have in common.
    return [cast(nn.BatchNorm2d, module) for module in model.modules() if isinstance(module, BATCH_NORMS)]


@contextmanager
def batch_statistics(layers: Sequence[nn.BatchNorm2d], batch: int) -> Iterator[None]:
    """Within the block `layers` normalise by the statistics of the batch and keep no running ones.

    The running statistics are put aside, not changed: torch's BatchNorm (and its subclasses) then normalises by the batch
    in evaluation mode too, so nothing else of the model has to leave that mode. On exit they are back, the same tensors.

    A layer that sees a single value per channel (a batch of one at 1x1 resolution) has no batch statistics; it keeps its
    running ones for that call.

    Args:
        layers: BatchNorm layers.
        batch: number of samples in the batch to come.

    Example:
        >>> import torch
        >>> layer = nn.BatchNorm1d(2).eval()
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        >>> with batch_statistics([layer], batch=2):
        ...     y = layer(x)
        >>> y.mean(0).abs().max() < 1e-6, layer.running_mean
        (tensor(True), tensor([0., 0.]))
    """
    aside = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    with ExitStack() as stack:
        try:
            for layer, mean, var in aside:
                layer.running_mean = layer.running_var = None
                if batch == 1:
                    hook = _single_value_hook(mean, var)
                    stack.enter_context(_hooked(layer.register_forward_pre_hook(hook)))
            yield
        finally:
            for layer, mean, var in aside:
                layer.running_mean, layer.running_var = mean, var


def _single_value_hook(mean: Any, var: Any) -> Any:
    def hook(layer: nn.BatchNorm2d, inputs: tuple[Tensor, ...]) -> None:
        single = inputs[0].numel() == inputs[0].shape[1]
        if single and mean is None:
            raise InputError(
                f"{layer} got one value per channel and has no running statistics: a batch of one has no variance; "
                "use a larger batch or a BatchNorm with track_running_stats=True"
            )
        layer.running_mean, layer.running_var = (mean, var) if single else (None, None)

    return hook


@contextmanager
def _hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


Statistics = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(number of the layer, its input) -> mean and variance that can be broadcast to the input."""


@contextmanager
def normalised_by(layers: Sequence[nn.BatchNorm2d], statistics: Statistics) -> Iterator[None]:
    """Within the block `layers` normalise by the mean and variance that `statistics` gives for their input.

    The input is normalised before the layer sees it, and the layer is given a mean of 0 and a variance of 1 (less its eps),
    so that subclasses which do more than normalise keep doing it. On exit the layers have the statistics they had.

    Example:
        >>> layer = nn.BatchNorm1d(1).eval()
        >>> with normalised_by([layer], lambda i, x: (torch.full((1, 1), 3.0), torch.ones(1, 1))):
        ...     y = layer(torch.tensor([[4.0], [2.0]]))
        >>> y.detach().flatten().round(decimals=3)
        tensor([ 1., -1.])
    """
    aside = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    with ExitStack() as stack:
        try:
            for number, (layer, _, _) in enumerate(aside):
                stack.enter_context(_hooked(layer.register_forward_pre_hook(_normalise(number, statistics))))
            yield
        finally:
            for layer, mean, var in aside:
                layer.running_mean, layer.running_var = mean, var


def _normalise(number: int, statistics: Statistics) -> Any:
    def hook(layer: nn.BatchNorm2d, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = exact(inputs[0])
        mean, var = statistics(number, x)
        like = inputs[0] if layer.weight is None else layer.weight.detach()
        layer.running_mean = like.new_zeros(x.shape[1])
        layer.running_var = like.new_full((x.shape[1],), 1 - layer.eps)
        return (((x - mean) * (var + layer.eps).rsqrt()).to(inputs[0].dtype), *inputs[1:])

    return hook


def by_group(groups: int) -> Statistics:
    """Statistics of each of `groups` equal parts of the batch by itself, as if they came one after the other.

    Example:
        >>> mean, _ = by_group(2)(0, torch.tensor([[1.0], [3.0], [10.0], [10.0]]))
        >>> mean.flatten()
        tensor([ 2.,  2., 10., 10.])
    """

    def statistics(_: int, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.unflatten(x, 0, (groups, -1))
        var, mean = torch.var_mean(parts, dim=[1, *range(3, parts.ndim)], correction=0, keepdim=True)
        each = parts.shape[1]
        return mean.flatten(0, 1).repeat_interleave(each, dim=0), var.flatten(0, 1).repeat_interleave(each, dim=0)

    return statistics


def by_selection(used: Tensor) -> Statistics:
    """Statistics of the samples in the mask `used` (B,) only, as if the others were not in the batch.

    Example:
        >>> by_selection(torch.tensor([True, True, False]))(0, torch.tensor([[1.0], [3.0], [10.0]]))
        (tensor([[2.]]), tensor([[1.]]))
    """

    def statistics(_: int, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = used.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        dims = [0, *range(2, x.ndim)]
        total = (weight.sum() * (x[0, 0].numel())).clamp_min(1)
        mean = (x * weight).sum(dim=dims, keepdim=True) / total
        return mean, ((x - mean).square() * weight).sum(dim=dims, keepdim=True) / total

    return statistics


def mixed(
    old: Sequence[tuple[Tensor, Tensor]], share: float, correction: int, new: list[Any] | None = None
) -> Statistics:
    """(1 - share) of the statistics `old`, one (mean, variance) for each layer, and `share` of the batch's own.

    No gradient flows through the batch's share.

    Args:
        old: mean (C,) and variance (C,) of each layer.
        share: in [0, 1].
        correction: 1 for the unbiased variance of the batch, 0 for the biased one.
        new: a list as long as `old` that receives the mixed statistics.

    Example:
        >>> old = [(torch.zeros(1), torch.ones(1))]
        >>> mixed(old, 0.5, 0)(0, torch.tensor([[1.0], [3.0]]))
        (tensor([[1.]]), tensor([[1.]]))
    """

    @torch.no_grad()
    def statistics(number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = old[number]
        several = x.numel() > x.shape[1]  # one value per channel has a mean, but no variance
        own_mean = x.mean(dim=[0, *range(2, x.ndim)])
        own_var = x.var(dim=[0, *range(2, x.ndim)], correction=correction) if several else var
        mean, var = torch.lerp(mean.to(x), own_mean, share), torch.lerp(var.to(x), own_var.to(x), share)
        if new is not None:
            new[number] = (mean, var)
        shape = (1, -1, *[1] * (x.ndim - 2))
        return mean.view(shape), var.view(shape)

    return statistics
