"""A teacher who follows the student slowly: a second set of weights for the same modules, kept in the method's state."""

from __future__ import annotations

import torch
from torch import Tensor

from come.method import Method, untracked


def first(method: Method) -> dict[str, Tensor]:
    """What `state` holds of a teacher who begins as the source."""
    return {f"teacher.{name}": value.clone() for name, value in method.source_values.items()}


def weights(method: Method) -> dict[str, Tensor]:
    """The teacher's weights by parameter, as `Method.forward` takes them."""
    return {name: method.state[f"teacher.{name}"].to(p) for name, p in method.parameters.items()}


@untracked()
def follow(method: Method, share: float) -> None:
    """Move the teacher by `share` of the way to the student."""
    moved = torch._foreach_lerp(list(weights(method).values()), list(method.parameters.values()), share)
    method.state |= {f"teacher.{name}": value for name, value in zip(method.parameters, moved, strict=True)}
