"""What goes into a model and what comes out of it, checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from come.errors import InputError

Input = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""A batch: a tensor, or a tuple or mapping of tensors that is handed on to the model as `model(*x)` or `model(**x)`."""


def checked(x: Input) -> Input:
    """`x` if it is a batch that can be handed to a model; inference tensors are copied, autograd cannot save them."""
    if isinstance(x, Tensor):
        if not x.is_floating_point():
            raise InputError(
                f"the input is {x.dtype}; it must be floating point: scale and normalise images first. Token ids and "
                "the like go in a mapping or tuple, e.g. {'input_ids': x}"
            )
        if x.ndim < 2:
            raise InputError(f"the input has {x.ndim} dimension(s), shape {tuple(x.shape)}; the first one is the batch")
    elif not isinstance(x, (tuple, list, Mapping)):
        raise InputError(f"the input is a {type(x).__name__}; give a tensor, or a tuple or mapping of tensors")
    if batch_size(x) < 1:
        raise InputError("the batch is empty; skip it")
    if isinstance(x, Mapping):
        return {key: _usable(value) for key, value in x.items()}
    return _usable(x) if isinstance(x, Tensor) else tuple(_usable(value) for value in x)


def _usable(value: Any) -> Any:
    with torch.inference_mode(False):
        return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def batch_size(x: Input) -> int:
    """Number of samples: the length of the first batched tensor."""
    if isinstance(x, Tensor):
        return x.shape[0]
    for value in x.values() if isinstance(x, Mapping) else x:
        if isinstance(value, Tensor) and value.ndim >= 1:
            return value.shape[0]
    raise InputError(f"the {type(x).__name__} holds no batched tensor; give a tensor, or a tuple or mapping of tensors")


def image_of(x: Input, who: str) -> Tensor:
    """The images (B, C, H, W) in a batch; `who` needs them and is named if there are none."""
    values = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
    found = [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 4]
    if len(found) == 1:
        return found[0]
    shapes = ", ".join(str(tuple(value.shape)) for value in values if isinstance(value, Tensor))
    raise InputError(
        f"{who} works on images, one floating-point tensor (B, C, H, W), but the batch holds {shapes or 'no tensor'}; "
        "for other data choose a method that needs no images ('come list methods' says what each needs)"
    )


def with_image(x: Input, images: Tensor) -> Input:
    """The batch `x` with other images, (V * B, C, H, W) for any V; what else has an entry per sample is repeated V times."""
    if isinstance(x, Tensor):
        return images
    size = batch_size(x)
    times = images.shape[0] // size

    def other(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.ndim >= 1 and len(value) == size):
            return value
        if value.is_floating_point() and value.ndim == 4:
            return images
        return value.repeat(times, *[1] * (value.ndim - 1))

    if isinstance(x, Mapping):
        return {key: other(value) for key, value in x.items()}
    return tuple(other(value) for value in x)


def take(x: Input, chosen: slice) -> Input:
    """Some samples of a batch; what has no entry per sample, such as a mask for all of them, stays as it is.

    Example:
        >>> some = take({"pixel_values": torch.zeros(4, 3), "heads": torch.ones(12)}, slice(0, 1))
        >>> some["pixel_values"].shape, some["heads"].shape
        (torch.Size([1, 3]), torch.Size([12]))
    """
    size = batch_size(x)

    def part(value: Any) -> Any:
        return value[chosen] if isinstance(value, Tensor) and value.ndim >= 1 and len(value) == size else value

    if isinstance(x, Tensor):
        return x[chosen]
    if isinstance(x, Mapping):
        return {key: part(value) for key, value in x.items()}
    return tuple(part(value) for value in x)


def exact(x: Tensor) -> Tensor:
    """`x` in float32 if it is in half precision, else as it is.

    Example:
        >>> exact(torch.zeros(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def together(values: Sequence[Tensor]) -> Tensor:
    """0-d tensors of any floating types as one vector in float64."""
    if len({value.dtype for value in values}) == 1:
        return torch.stack(list(values)).double()
    return torch.stack([value.double() for value in values])


def logits_of(out: Any, batch: int) -> Tensor:
    """The logits in what a model returned, checked."""
    if isinstance(out, Mapping) and "logits" in out:
        logits = out["logits"]
    else:
        logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the model returned a {type(out).__name__}; it must be a tensor (B, K) or have `logits`: wrap the model in a "
            "module that returns them"
        )
    if logits.ndim != 2 or logits.shape[0] != batch or logits.shape[1] < 2 or not logits.is_floating_point():
        raise InputError(
            f"the model returned {logits.dtype} of shape {tuple(logits.shape)} for a batch of {batch}; it must be floating "
            f"point of shape ({batch}, K) with K >= 2 classes"
        )
    return logits


def expected_dims(modules: list[nn.Module]) -> int | None:
    """How many dimensions the first convolution takes, the batch included; None without one."""
    for module in modules:
        for dims, kind in ((3, nn.Conv1d), (4, nn.Conv2d), (5, nn.Conv3d)):
            if isinstance(module, kind):
                return dims
    return None
