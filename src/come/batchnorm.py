"""BatchNorm on the statistics of the current batch, inside one model and only while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor, nn

from come.errors import InputError
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
