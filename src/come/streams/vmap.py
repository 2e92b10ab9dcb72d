"""One step for many streams at once: `torch.vmap` over everything but the model.

A step is written for one stream. For n streams with b samples each it runs once, on tensors that carry a hidden first dimension
of n. Three things leave that: the model, which gets all n x b samples in one call (`come.streams.norms`); the gradient, one
backward of the sum of all losses, since the loss of a stream depends on no other stream's weights; and random numbers, drawn
stream by stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from come.errors import ModelError
from come.model.inputs import Inputs
from come.state.trees import leaves, like
from come.streams.rendezvous import ask, gradients

BARE_CALL, CALL, GRADIENT = range(3)
"""What groups of streams ask for, in this order: calls of the model without and with a gradient, and gradients."""


# ---- what leaves vmap ----


class _Outside(torch.autograd.Function):
    """Something that is done to all streams at once, on tensors whose first dimension is the stream."""

    @staticmethod
    def forward(*_: Any) -> Any:
        """Never called: there is a vmap around it always."""
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: the tensors inside have a history of their own."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], do: Callable[..., Tensor], *values: Any) -> tuple[Tensor, int]:
        """Call `do` with the number of streams and, for each value, whether it differs by stream, and the value."""
        moved = [
            (dim is not None, value.movedim(dim, 0) if isinstance(value, Tensor) and dim else value)
            for dim, value in zip(in_dims[1:], values, strict=True)
        ]
        return do(info.batch_size, *moved), 0


Value = tuple[bool, Any]
"""Whether a value differs by stream, and the value."""


def outside(do: Callable[..., Tensor], *values: Any) -> Tensor:
    """Leave vmap: `do(n, (differs, value), ...)` returns a tensor whose first dimension is the stream."""
    found: Tensor = _Outside.apply(do, *values)
    return found


def leaf(values: Tensor) -> Tensor:
    """`values` of each stream as a tensor of its own that gradients can be taken with respect to."""

    def do(n: int, given: Value) -> Tensor:
        differs, value = given
        every: Tensor = value if differs else value.expand(n, *value.shape)
        return every.detach().requires_grad_()

    return outside(do, values)


def gradient(loss: Tensor, weights: Tensor) -> Tensor:
    """Gradient (P,) of each stream's loss with respect to its own weights, by one backward."""

    def do(n: int, loss: Value, weights: Value) -> Tensor:
        found: Tensor | None = ask(GRADIENT, "gradient", gradients, (loss[1], weights[1]))
        if found is None:
            raise ModelError(
                "no gradient reaches the adapted parameters; does the model's forward run under no_grad, or detach its output?"
            )
        return found

    return outside(do, loss, weights)


def drawn(draw: Callable[[Tensor, torch.Generator], Tensor], values: Tensor, begin: Callable[[int], Any]) -> Tensor:
    """What a function draws for each stream; `begin(i)` gives the random numbers of stream i."""

    def do(n: int, given: Value) -> Tensor:
        differs, value = given
        return torch.stack([draw(value[i] if differs else value, begin(i)) for i in range(n)])

    return outside(do, values)


# ---- from one to many and back ----


def over(run: Callable[[Any, Inputs], Any], given: Any, x: Inputs) -> Any:
    """`run(given, x)` of each stream at once.

    Args:
        run: from what one stream is given and its samples to a tree of tensors.
        given: a tree of tensors (n, ...).
        x: the samples (n, b, ...), and what all streams share.

    Returns:
        the tree, of tensors (n, ...).
    """
    mine, batch = leaves(given), leaves(tuple(x))
    placed = (0 if key in x.samples else None for key, value in x.items() for _ in leaves(value))
    dims = (*[0] * len(mine), *placed)
    made: list[Any] = []

    def one(*values: Tensor) -> tuple[Tensor, ...]:
        made.append(run(like(given, list(values[: len(mine)])), Inputs(*like(tuple(x), list(values[len(mine) :])))))
        return tuple(leaves(made[0]))

    found = torch.vmap(one, in_dims=dims)(*mine, *batch)
    return like(made[0], list(found))


def joined(trees: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One tree for each stream -> one of tensors (n, ...)."""
    return {key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}


def parted(tree: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The other way; the tensors are copies."""
    parts = {key: apart(value) for key, value in tree.items()}
    return [{key: values[i] for key, values in parts.items()} for i in range(count)]


def apart(values: Tensor) -> list[Tensor]:
    """(n, ...) -> n tensors of their own, copied by few kernels."""
    rows = list(values.detach().unbind(0))
    own = [torch.empty_like(row, memory_format=torch.contiguous_format) for row in rows]
    torch._foreach_copy_(own, rows)
    return own


def sent(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers as a tensor there, without a wait."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def index(rows: list[int], device: torch.device) -> Tensor:
    """Rows as a tensor there, without a wait."""
    return sent(rows, device, torch.int64)
