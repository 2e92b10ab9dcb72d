"""The checks of arguments that all metrics share, and the counts that most of them are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from come.errors import InputError


def alike(**columns: Tensor) -> None:
    """Raise an `InputError` unless all columns are (N,) with one N."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        found = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"columns must be (N,), all of one length, got {found}")


def no_nan(column: Tensor, name: str = "confidence") -> None:
    """Raise an `InputError` if the column has a NaN, which cannot be ranked."""
    bad = int(column.isnan().sum())
    if bad:
        raise InputError(
            f"{name} is NaN for {bad} of {len(column)} samples; leave those samples out, or replace the NaN first (a "
            "confidence of -inf is the least confident)"
        )


def passing(confidence: Tensor, **flag: Tensor) -> tuple[Tensor, Tensor]:
    """Count the samples, and those with the flag, that pass each threshold, from none to all of them.

    There is one threshold per distinct confidence, and one above all: two int64 tensors of that length, on the CPU.
    """
    alike(confidence=confidence, **flag)
    no_nan(confidence)
    (flagged,) = flag.values()
    value, order = confidence.detach().sort(descending=True)
    last = torch.ones_like(value, dtype=torch.bool)
    last[:-1] = value[1:] != value[:-1]
    hits = flagged.bool()[order].long().cumsum(0)[last]
    zero = torch.zeros(1, dtype=torch.int64)
    return torch.cat([zero, last.nonzero()[:, 0].cpu() + 1]), torch.cat([zero, hits.cpu()])
