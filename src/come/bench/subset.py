"""A model restricted to some of its classes: z -> z[:, classes], before anything adapts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from come.bench.models import Model
from come.errors import ModelError
from come.model.heads import Head
from come.model.inputs import logits_of
from come.zero_shot import Prototypes


class Chosen(nn.Module):
    """A classifier whose logits (B, K) are those of `classes` (C,) only.

    Example:
        >>> Chosen(nn.Identity(), (2, 0))(torch.tensor([[5.0, 6.0, 7.0]]))
        tensor([[7., 5.]])
    """

    def __init__(self, module: nn.Module, classes: Sequence[int]) -> None:
        super().__init__()
        self.module = module
        self.classes: Tensor
        self.register_buffer("classes", torch.tensor(classes), persistent=False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The model's logits, (B, K) -> (B, C)."""
        return logits_of(self.module(x, *args, **kwargs), len(x))[:, self.classes]


def restricted(model: Model, classes: Sequence[int]) -> Model:
    """A model with the logits of some of its classes, so that objectives, methods and metrics know of no others.

    It is a copy with a smaller last layer, where one linear layer gives the logits: methods that look for that layer, such as
    T3A, find it. Any other model is wrapped in `Chosen`.

    Args:
        model: not changed.
        classes: places of the C classes among its K logits.

    Example:
        >>> from come.bench import models
        >>> small = restricted(models.load("fashion-resnet-bn"), (3, 5, 7))
        >>> small.num_classes, small.module(torch.zeros(2, 3, 32, 32)).shape
        (3, torch.Size([2, 3]))
    """
    narrowed = _narrowed(model, torch.tensor(classes))
    module = Chosen(model.module, classes).to(next(model.module.parameters()).device) if narrowed is None else narrowed
    return replace(model, module=module.eval(), num_classes=len(classes))


def _narrowed(model: Model, classes: Tensor) -> nn.Module | None:
    """A copy with a smaller last layer; None if that does not give the logits."""
    module = copy.deepcopy(model.module)
    try:
        head = Head(module)
    except ModelError:
        return None
    layer = head.linear
    if type(layer) not in (nn.Linear, Prototypes) or layer.out_features != model.num_classes:
        return None
    places = classes.to(layer.weight.device)
    layer.out_features = len(classes)
    layer.weight = nn.Parameter(layer.weight.detach()[places], layer.weight.requires_grad)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[places], layer.bias.requires_grad)
    weight = next(module.parameters())
    x = torch.rand(2, 3, *[model.preprocess.size] * 2, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        found, wanted = (logits_of(m(x), 2) for m in (module, model.module))
    wanted = wanted[:, places]
    return module if found.shape == wanted.shape and torch.allclose(found, wanted, 1e-3, 1e-3) else None
