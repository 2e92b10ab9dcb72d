"""The classifier head of a model, and the features that go into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from come.errors import ConfigError, ModelError


class Head:
    """The linear layer that gives a model's logits.

    It is found by `get_classifier()` (timm), else as the last linear layer that the model registers (torchvision, transformers,
    most others); `pick` checks in a forward whether it really gives the logits.

    Args:
        model: the classifier.
        head: the name of the layer, the layer itself, or None to find it.

    Raises:
        ModelError: no linear layer was found.

    Example:
        >>> Head(nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))).name
        '3'
    """

    def __init__(self, model: nn.Module, head: str | nn.Module | None = None) -> None:
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        kind = self._kind = type(model).__name__
        if isinstance(head, str):
            if head not in dict(model.named_modules()):
                raise ConfigError(f"head must name a module of {kind}, got {head!r}")
            found: Any = model.get_submodule(head)
        elif head is not None:
            found = head
        else:
            public = getattr(model, "get_classifier", None)
            found = public() if callable(public) else next(reversed(linear.values()), None)
        names = [name for name, module in linear.items() if module is found]
        if not names:
            what = "no linear layer" if found is None else f"a {type(found).__name__} where its classifier should be"
            raise ModelError(
                f"{kind} has {what}; this method needs the linear layer that gives the logits: name it with head='...'"
                + (f", e.g. one of {', '.join(list(linear)[-3:])}" if linear else "")
            )
        self.name, self.linear = names[0], linear[names[0]]

    def pick(self, seen: Sequence[tuple[Tensor, Tensor]], logits: Tensor) -> Tensor:
        """The features (B, d) that gave the logits (B, K), from all (input, output) of the layer in a forward."""
        for features, out in seen:
            same = out is logits or (out.shape == logits.shape and torch.equal(out, logits))
            if same and features.ndim == 2:
                return features
        raise ModelError(
            f"the layer {self.name!r} of {self._kind} does not give its logits {tuple(logits.shape)} from one feature "
            "vector per sample; name the layer that does with head='...'"
        )
