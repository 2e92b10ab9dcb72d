"""Which parameters adapt: chosen by their role and their depth, never by their names in a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from come.errors import require, unknown
from come.model.heads import Head

Selector = Callable[[nn.Module], dict[str, nn.Parameter]]
"""Takes a model, returns the parameters to adapt by name, in the model's order."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a normalization layer.

    True for torch's BatchNorm, LayerNorm, GroupNorm, RMSNorm and InstanceNorm and their subclasses, and for any class called
    "...Norm..." whose own parameters are all vectors (libraries write their own RMSNorm).

    Example:
        >>> is_norm(nn.LayerNorm(4)), is_norm(nn.Linear(4, 4))
        (True, False)
    """
    if isinstance(module, NORMS):
        return True
    own = list(module.parameters(recurse=False))
    return "norm" in type(module).__name__.lower() and bool(own) and all(p.ndim == 1 for p in own)


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """All normalization layers of `model` by name, in its order.

    Example:
        >>> list(norms(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))))
        ['1']
    """
    return {name: module for name, module in model.named_modules() if is_norm(module)}


def blocks(model: nn.Module) -> list[str]:
    """Names of the blocks that `model` stacks, first to last: a ViT's layers, a ResNet's stages; [] if there is no stack.

    A stack is three or more siblings that all contain normalization layers: the compound children of a `Sequential` or
    `ModuleList`, or children of any module whose names differ only in a number (`layer1`, `layer2`, ...). Of several stacks
    the one with the most normalization layers counts, the outermost first.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> blocks(nn.Sequential(nn.Linear(4, 4), nn.ModuleList([block(), block(), block()]), nn.LayerNorm(4)))
        ['1.0', '1.1', '1.2']
    """
    best: list[str] = []
    most = 0
    for parent_name, parent in model.named_modules():
        prefix = f"{parent_name}." if parent_name else ""
        compound = {name: len(norms(child)) for name, child in parent.named_children() if _has_children(child)}
        compound = {name: count for name, count in compound.items() if count}
        for family in _families(parent, list(compound)):
            covered = sum(compound[name] for name in family)
            if len(family) >= 3 and covered > most:
                best, most = [prefix + name for name in family], covered
    return best


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _families(parent: nn.Module, names: list[str]) -> list[list[str]]:
    if isinstance(parent, (nn.Sequential, nn.ModuleList)):
        return [names]
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return [family for pattern, family in families.items() if "#" in pattern]


@dataclass(frozen=True)
class norm_affine:  # noqa: N801 - reads as the verb it is: select=norm_affine(skip_last=0.25)
    """Select the weights and biases of normalization layers.

    Args:
        skip_last: share of the blocks, counted from the end, that does not adapt, in [0, 1); rounded to whole blocks, at least
            one when positive. The normalization layers behind the last block (the final norm) are left out with it. In a model
            without a recognizable stack of blocks it is the share of the normalization layers.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> list(norm_affine()(model))
        ['1.weight', '1.bias', '3.weight', '3.bias']
        >>> list(norm_affine(skip_last=0.25)(model))
        ['1.weight', '1.bias']
    """

    skip_last: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.skip_last < 1, "skip_last", self.skip_last, "in [0, 1)")

    def __call__(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Parameters of the chosen layers by name."""
        chosen = norms(model)
        if self.skip_last:
            late = self._late(model, list(chosen))
            chosen = {name: module for name, module in chosen.items() if name not in late}
        return {
            f"{name}.{key}" if name else key: parameter
            for name, module in chosen.items()
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.is_floating_point()
        }

    def _late(self, model: nn.Module, names: list[str]) -> set[str]:
        """Which of the norm layers `names` are in the last share of the blocks or behind them."""
        stack = blocks(model) or names
        skipped = stack[len(stack) - max(1, round(self.skip_last * len(stack))) :]
        position = {name: i for i, (name, _) in enumerate(model.named_modules())}
        end = max(i for name, i in position.items() if _inside(name, stack[-1])) if stack else -1
        return {n for n in names if position[n] > end or any(_inside(n, block) for block in skipped)}


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")


@dataclass(frozen=True)
class layers:  # noqa: N801
    """Select the weights and biases of all layers, but no class tokens, position embeddings, layer scales and the like.

    Example:
        >>> list(layers()(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __call__(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Floating-point parameters called `weight` or `bias` by name."""
        return {
            name: p
            for name, p in model.named_parameters()
            if name.rpartition(".")[2] in ("weight", "bias") and p.is_floating_point()
        }


@dataclass(frozen=True)
class everything:  # noqa: N801
    """Select every floating-point parameter.

    Example:
        >>> list(everything()(nn.Linear(2, 2)))
        ['weight', 'bias']
    """

    def __call__(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """All floating-point parameters by name."""
        return {name: p for name, p in model.named_parameters() if p.is_floating_point()}


@dataclass(frozen=True)
class nothing:  # noqa: N801
    """Select no parameter: for methods that do not descend.

    Example:
        >>> nothing()(nn.Linear(2, 2))
        {}
    """

    def __call__(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """No parameter."""
        return {}


@dataclass(frozen=True)
class head:  # noqa: N801
    """Select the weight of the linear layer that gives the logits: one vector for each class.

    In a zero-shot classifier (`come.zero_shot`) these are the prototypes, the embedded names of the classes.

    Args:
        layer: the layer's name; None finds it.

    Example:
        >>> list(head()(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))))
        ['2.weight']
    """

    layer: str | None = None

    def __call__(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """That weight by name."""
        found = Head(model, self.layer)
        return {f"{found.name}.weight" if found.name else "weight": found.linear.get_parameter("weight")}


NAMED: dict[str, Callable[[], Selector]] = {
    kind.__name__: kind for kind in (norm_affine, head, layers, everything, nothing)
}
"""Selectors by name, for the command line: `come bench --methods tent:select=head`."""


def named(select: str | Selector) -> Selector:
    """The selector of that name, or the selector itself.

    Example:
        >>> named("head")
        head(layer=None)
    """
    if not isinstance(select, str):
        return select
    if select not in NAMED:
        raise unknown("selector", select, NAMED)
    return NAMED[select]()
