"""What goes into a model and what comes out of it, checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from come.errors import InputError

Input = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""A batch as people write it: a tensor, or the arguments of the model as a tuple or a mapping."""
UNKNOWN = -1e4
"""The logits of a sample that could not be answered: no class is favoured, and there is no evidence for any."""


class Inputs(NamedTuple):
    """One batch as the model is called with it: `model(*args, **kwargs)`.

    Example:
        >>> Inputs.of({"pixel_values": torch.zeros(4, 3)}).size
        4
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Inputs:
        """Read a call; a single mapping stands for keyword arguments, a single tuple or list for positional ones."""
        if len(args) == 1 and not kwargs:
            if isinstance(args[0], Mapping):
                return cls((), dict(args[0]))
            if isinstance(args[0], (tuple, list)):
                return cls(tuple(args[0]), {})
        return cls(args, kwargs)

    @property
    def size(self) -> int:
        """Number of samples: the length of the first batched tensor."""
        for value in self.values():
            if isinstance(value, Tensor) and value.ndim >= 1:
                return value.shape[0]
        given = ", ".join(type(value).__name__ for value in self.values()) or "nothing"
        raise InputError(f"the batch holds no tensor with a batch dimension, got {given}; pass a tensor (B, ...)")

    def values(self) -> list[Any]:
        """All arguments, positional ones first."""
        return [*self.args, *self.kwargs.values()]

    def map(self, change: Callable[[Any], Any]) -> Inputs:
        """Every argument replaced by what `change` makes of it."""
        return Inputs(tuple(map(change, self.args)), {key: change(value) for key, value in self.kwargs.items()})

    def per_sample(self) -> list[Tensor]:
        """The tensors that have one entry per sample; tables and masks that all samples share are not among them."""
        size = self.size
        return [value for value in self.values() if is_per_sample(value, size)]

    def take(self, chosen: slice | Tensor) -> Inputs:
        """Some of the samples; arguments that all samples share stay as they are.

        Example:
            >>> some = Inputs.of(torch.zeros(4, 3), heads=torch.ones(12)).take(slice(0, 1))
            >>> some.args[0].shape, some.kwargs["heads"].shape
            (torch.Size([1, 3]), torch.Size([12]))
        """
        size = self.size
        return self.map(lambda value: value[chosen] if is_per_sample(value, size) else value)

    def image(self, who: str) -> Tensor:
        """The images (B, C, H, W); `who` needs them and is named in the error if there are none."""
        found: list[Tensor] = [v for v in self.values() if _is_image(v)]
        if len(found) == 1:
            return found[0]
        shapes = ", ".join(str(tuple(value.shape)) for value in self.values() if isinstance(value, Tensor))
        raise InputError(
            f"{who} needs images, one floating-point tensor (B, C, H, W), got {shapes or 'no tensor'}; for other data "
            "choose a method that needs no images ('come list methods' shows what each needs)"
        )

    def with_image(self, images: Tensor) -> Inputs:
        """Other images, (V * B, C, H, W) for any V, in place of these; other per-sample tensors are repeated V times."""
        size = self.size
        times = images.shape[0] // size

        def other(value: Any) -> Any:
            if _is_image(value):
                return images
            if is_per_sample(value, size):
                return value.repeat(times, *[1] * (value.ndim - 1))
            return value

        return self.map(other)


def is_per_sample(value: Any, size: int) -> bool:
    """Whether it is a tensor with an entry for each of `size` samples."""
    return isinstance(value, Tensor) and value.ndim >= 1 and len(value) == size


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 4


def checked(x: Inputs, empty: bool = False) -> Inputs:
    """`x` if a model can be called with it; inference tensors are copied, because autograd cannot save them.

    `empty`: whether it may hold no sample.
    """
    for value in x.values():
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise InputError(f"the input has layout {value.layout}; pass a dense tensor: x.to_dense()")
        if isinstance(value, Tensor) and value.is_meta:
            raise InputError("the input is on the meta device and has no values; pass a tensor with data")
    if len(x.args) == 1 and not x.kwargs:
        (only,) = x.args
        if not isinstance(only, Tensor):
            raise InputError(f"the input is a {type(only).__name__}; pass a tensor, or a tuple or mapping of tensors")
        if not only.is_floating_point():
            raise InputError(
                f"the input must be floating point, got {only.dtype}: scale and normalize images first; pass token ids by "
                "name, e.g. input_ids=x"
            )
        if only.ndim < 2:
            raise InputError(f"the input must be (B, ...) with at least 2 dimensions, got shape {tuple(only.shape)}")
    if x.size < 1 and not empty:
        raise InputError("the batch is empty; skip it")
    with torch.inference_mode(False):
        return x.map(lambda value: value.clone() if isinstance(value, Tensor) and value.is_inference() else value)


def exact(x: Tensor) -> Tensor:
    """`x` in float32 if it is in half precision, else as it is.

    Example:
        >>> exact(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def answered(logits: Tensor) -> Tensor:
    """Which samples (B,) have usable logits: no NaN, no +inf, not all -inf. A class masked by -inf is fine.

    Example:
        >>> inf, nan = torch.inf, torch.nan
        >>> answered(torch.tensor([[0.0, -inf], [nan, 0.0], [-inf, -inf]]))
        tensor([ True, False, False])
    """
    most = logits.amax(dim=1)  # propagates NaN, and is -inf only if all are
    return (most - most) == 0  # finite, in fewer operations


def logits_of(out: Any, batch: int) -> Tensor:
    """The logits (B, K) in what a model returned, checked."""
    if isinstance(out, Mapping) and "logits" in out:
        logits = out["logits"]
    else:
        logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the model must return a tensor (B, K) or an object with `logits`, got {type(out).__name__}; wrap the model "
            "in a module that returns logits"
        )
    if logits.ndim != 2 or logits.shape[0] != batch or logits.shape[1] < 2 or not logits.is_floating_point():
        raise InputError(
            f"the model must return floating-point logits of shape ({batch}, K) with K >= 2 for a batch of {batch}, got "
            f"{logits.dtype} of shape {tuple(logits.shape)}"
        )
    return logits


def expected_dims(model: nn.Module) -> int | None:
    """How many dimensions the first convolution takes, the batch included; None without one."""
    for module in model.modules():
        for dims, kind in ((3, nn.Conv1d), (4, nn.Conv2d), (5, nn.Conv3d)):
            if isinstance(module, kind):
                return dims
    return None
