"""Logits with positions, (B, K, ...), as rows (B * P, K): a step works on rows, so pixels need no second code path.

A classifier has no positions: its B samples are the rows, and nothing is moved or copied. An image of 512 x 1024 pixels with 19
classes has half a million rows of logits, 40 MB. What is computed of so many is computed in parts, in the backward once more,
so that beside the logits and their gradient no tensor of that size is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from come.errors import ConfigError, InputError

FEW_ROWS, PART = 2**14, 2**20
"""Up to so many rows, or so many logits, are computed at once; more in parts of so many logits."""


def rows_of(logits: Tensor) -> Tensor:
    """(B, K, ...) -> (B * P, K); a view for one image or for channels that are innermost.

    >>> rows_of(torch.zeros(2, 3, 4, 5)).shape
    torch.Size([40, 3])
    """
    return logits if logits.ndim == 2 else logits.flatten(2).transpose(1, 2).reshape(-1, logits.shape[1])


def by_sample(values: Tensor, samples: int, positions: tuple[int, ...]) -> Tensor:
    """(B * P, ...) with the positions as axes behind the samples.

    >>> by_sample(torch.zeros(40, 3), 2, (4, 5)).shape
    torch.Size([2, 4, 5, 3])
    """
    return torch.unflatten(values, 0, (samples, *positions)) if positions else values


def by_position(values: Tensor, positions: tuple[int, ...]) -> Tensor:
    """One value per sample, (B,), as one per row, (B * P,)."""
    return values[:, None].expand(-1, math.prod(positions)).reshape(-1) if positions else values


def anywhere(rows: Tensor, positions: tuple[int, ...]) -> Tensor:
    """In which samples (B,) any of the rows (B * P,) is true."""
    return rows.view(-1, math.prod(positions)).any(dim=1) if positions else rows


def everywhere(rows: Tensor, positions: tuple[int, ...]) -> Tensor:
    """In which samples (B,) all of the rows (B * P,) are true."""
    return rows.view(-1, math.prod(positions)).all(dim=1) if positions else rows


def masked_mean(values: Tensor, used: Tensor) -> Tensor:
    """Mean of `values` (N, ...) over the rows in `used` (N,); 0, with a zero gradient, if there are none.

    Example:
        >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    mask = used if values.ndim == 1 else used.view(-1, *[1] * (values.ndim - 1))
    return torch.where(mask, values, 0).sum(dim=0) / used.sum().clamp_min(1)


class Located:
    """Which rows of a step's logits may drive an update; where the positions are is known from its first logits.

    Args:
        valid: (B,) bool, the valid samples.
        ignore: (B, ...) bool, positions that drive nothing.
        refuses: why logits with positions cannot be taken, if so.
    """

    def __init__(self, valid: Tensor, ignore: Tensor | None = None, refuses: str = "") -> None:
        self.valid = valid
        """(N,) bool: which rows of the logits may drive an update; of the samples before the first `forward` of the step."""
        self.samples = valid
        """(B,) bool: which samples may."""
        self.positions: tuple[int, ...] = ()
        """The axes of the logits behind the classes, such as (H, W); () of a classifier, and before the first `forward`."""
        self._located = False
        self._ignore, self._refuses = ignore, refuses

    @property
    def dense(self) -> bool:
        """Whether a sample has several positions, so that they are no samples: classes come as images have them."""
        return math.prod(self.positions) > 1

    def count_valid(self) -> Tensor:
        """0-d: how many samples have a row that may drive an update."""
        return anywhere(self.valid, self.positions).sum()

    def rows(self, logits: Tensor) -> Tensor:
        """Logits (B, K, ...) as rows (N, K)."""
        positions = tuple(logits.shape[2:])
        if not self._located or positions != self.positions:
            self._locate(positions, logits.shape[1])
        return rows_of(logits)

    def _locate(self, positions: tuple[int, ...], classes: int) -> None:
        if positions and self._refuses:
            raise ConfigError(f"{self._refuses}, got positions {positions}")
        if self._located:
            raise InputError(f"the logits of a step must have the same positions, got {self.positions} and {positions}")
        self._located, self.positions, self.valid = True, positions, by_position(self.samples, positions)
        if self._ignore is not None:
            if tuple(self._ignore.shape[1:]) != positions:
                raise InputError(
                    f"ignore must have the shape of the logits without their {classes} classes, (B, {_listed(positions)}), got "
                    f"{tuple(self._ignore.shape)}; bring a mask of the image to the size of the logits"
                )
            self.valid = self.valid & ~self._ignore.reshape(-1).to(self.valid.device)


def _listed(positions: tuple[int, ...]) -> str:
    return ", ".join(map(str, positions))


def cuts_of(rows: Tensor) -> list[slice]:
    """Where to cut rows (N, K) so that no part has more than `PART` entries; nothing where there are few."""
    if rows.numel() <= PART or len(rows) <= FEW_ROWS:
        return []
    size = max(1, PART // rows.shape[1])
    return [slice(begin, begin + size) for begin in range(0, len(rows), size)]


def parts(*rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Tensors (N, ...) in parts; the first decides how many."""
    cuts = cuts_of(rows[0])
    return [tuple(values[cut] for values in rows) for cut in cuts] if cuts else [rows]


def by_rows(function: Callable[..., Tensor], *logits: Tensor) -> Tensor:
    """A function of rows, (..., K) -> (...,), in parts: `function(*logits)` with less memory.

    >>> x = torch.zeros(30_000, 40, requires_grad=True)
    >>> by_rows(lambda z: z.exp().sum(dim=-1), x).sum().backward()
    >>> bool((x.grad == 1).all())
    True
    """
    first = logits[0]
    if first.numel() <= PART or first.numel() // first.shape[-1] <= FEW_ROWS or len({z.shape for z in logits}) > 1:
        return function(*logits)
    found, _ = in_parts(lambda *z: (function(*z), z[0].new_zeros(())), *(z.flatten(0, -2) for z in logits))
    return found.view(first.shape[:-1])


def in_parts(function: Callable[..., tuple[Tensor, Tensor]], *rows: Tensor) -> tuple[Tensor, Tensor]:
    """`function(*rows)`, which gives one value per row (N,) and a sum over rows, of tensors (N, ...) in parts.

    The first tensor decides how many parts there are.
    """
    cuts = cuts_of(rows[0])
    if not cuts:
        return function(*rows)
    if torch.is_grad_enabled() and any(values.requires_grad for values in rows):
        found: tuple[Tensor, Tensor] = _InParts.apply(function, cuts, *rows)
        return found
    return _joined([function(*(values[cut] for values in rows)) for cut in cuts])


def _joined(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    values, sums = zip(*found, strict=True)
    return torch.cat(values), torch.stack(sums).sum(dim=0)


class _InParts(torch.autograd.Function):
    """Computes each part anew in the backward, where the gradient of all rows is written into one tensor."""

    @staticmethod
    def forward(function: Any, cuts: list[slice], *rows: Tensor) -> tuple[Tensor, Tensor]:
        return _joined([function(*(values[cut] for values in rows)) for cut in cuts])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, ctx.cuts, *rows = inputs
        ctx.save_for_backward(*rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        found = [torch.zeros_like(values) if want else None for values, want in zip(rows, wanted, strict=True)]
        for cut in ctx.cuts:
            with torch.enable_grad():
                own = [v[cut].detach().requires_grad_(want) for v, want in zip(rows, wanted, strict=True)]
                out = ctx.function(*own)
            known = [(o, g) for o, g in zip(out, (gradients[0][cut], gradients[1]), strict=True) if o.requires_grad]
            outputs, slopes_out = zip(*known, strict=True)
            slopes = torch.autograd.grad(outputs, [v for v in own if v.requires_grad], slopes_out, allow_unused=True)
            for place, slope in zip([f for f in found if f is not None], slopes, strict=True):
                if slope is not None:
                    place[cut] = slope
        return None, None, *found

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], function: Any, cuts: Any, *rows: Tensor) -> tuple[Any, tuple[int, int]]:
        """Stream by stream."""
        streams = [
            _InParts.apply(
                function, cuts, *(v if d is None else v.select(d, i) for v, d in zip(rows, dims[2:], strict=True))
            )
            for i in range(info.batch_size)
        ]
        return tuple(map(torch.stack, zip(*streams, strict=True))), (0, 0)
