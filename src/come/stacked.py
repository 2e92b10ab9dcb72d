"""One step for many streams at once: `torch.vmap` over everything but the model.

A step is written for one stream. For n streams with b samples each it runs once, on tensors that carry a hidden first dimension
of n. Three things leave that: the model, which gets all n x b samples in one call (`come.by_stream`); the gradient, one
backward of the sum of all losses, since the loss of a stream depends on no other stream's weights; and random numbers, drawn
stream by stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from come.batchnorm import Statistics, by_selection, mixed
from come.errors import ConfigError, ModelError
from come.inputs import Inputs, logits_of
from come.trees import leaves, like

if TYPE_CHECKING:
    from come.borrowed import Borrowed

_here = threading.local()


def stacking() -> bool:
    """Whether this thread is inside a step of many streams."""
    return bool(getattr(_here, "on", False))


@contextmanager
def stacked() -> Iterator[None]:
    """For a step of many streams."""
    _here.on = True
    try:
        yield
    finally:
        _here.on = False


def has_gradient(values: Tensor) -> bool:
    """Whether a gradient may flow through these values; inside of vmap torch does not tell."""
    return values.requires_grad or (stacking() and torch.is_grad_enabled())


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
    """See `come.method.leaf`."""

    def do(n: int, given: Value) -> Tensor:
        differs, value = given
        every: Tensor = value if differs else value.expand(n, *value.shape)
        return every.detach().requires_grad_()

    return outside(do, values)


def gradient(loss: Tensor, weights: Tensor) -> Tensor:
    """Gradient (P,) of each stream's loss with respect to its own weights, by one backward."""

    def do(n: int, loss: Value, weights: Value) -> Tensor:
        found = None
        if loss[1].requires_grad:
            (found,) = torch.autograd.grad(loss[1].sum(), weights[1], allow_unused=True)
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


class Stack:
    """A model as a step of many streams calls it; everything but a call is that of the model itself."""

    def __init__(self, model: Borrowed) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def call(self, x: Inputs, weights: Tensor, statistics: Statistics = None, hooks: Sequence[Any] = ()) -> Tensor:
        """Logits (b, K), see `Borrowed.call`."""
        if hooks:
            raise ConfigError(
                "this method looks into the model by hooks, which cannot tell streams apart; use one adapter for each stream"
            )
        if callable(statistics) and not isinstance(statistics, by_selection):
            raise ConfigError(
                "this method has BatchNorm statistics of its own, which a fleet cannot keep by stream; use one adapter for "
                "each stream"
            )
        tensors = leaves(tuple(x))
        known = vars(statistics) if isinstance(statistics, (mixed, by_selection)) else {}
        shares = {name: value for name, value in known.items() if isinstance(value, Tensor)}

        def do(n: int, weights: Value, *values: Value) -> Tensor:
            inputs, rest = values[: len(tensors)], values[len(tensors) :]
            flat: Inputs = Inputs(*like(tuple(x), [v.flatten(0, 1) if differs else v for differs, v in inputs]))
            own = {
                name: v if differs else v.expand(n, *v.shape) for name, (differs, v) in zip(shares, rest, strict=True)
            }
            rule = replace(statistics, **own) if isinstance(statistics, (mixed, by_selection)) else statistics
            out = self._model.call_streams(flat, weights[1], n, rule)
            logits = logits_of(out, flat.size)
            return logits.view(n, -1, logits.shape[1])

        return outside(do, weights, *tensors, *shares.values())


# ---- from one to many and back ----


def over(run: Callable[[Any, Inputs], Any], given: Any, x: Inputs, streams: int) -> Any:
    """`run(given, x)` of each stream at once.

    Args:
        run: from what one stream is given and its samples to a tree of tensors.
        given: a tree of tensors (n, ...).
        x: the samples, stream after stream.
        streams: n.

    Returns:
        the tree, of tensors (n, ...).
    """
    mine, batch = leaves(given), leaves(tuple(x))
    apart = [value.ndim > 0 and len(value) == x.size for value in batch]
    tensors = [v.view(streams, -1, *v.shape[1:]) if split else v for v, split in zip(batch, apart, strict=True)]
    dims = (*[0] * len(mine), *(0 if split else None for split in apart))
    made: list[Any] = []

    def one(*values: Tensor) -> tuple[Tensor, ...]:
        made.append(run(like(given, list(values[: len(mine)])), Inputs(*like(tuple(x), list(values[len(mine) :])))))
        return tuple(leaves(made[0]))

    with stacked():
        found = torch.vmap(one, in_dims=dims)(*mine, *tensors)
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


def to_host(values: Tensor | None) -> tuple[Tensor | None, Any]:
    """Signals (n, ...) on their way to the host, and what tells that they are there."""
    if values is None or values.device.type != "cuda":
        return values, None
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return there, arrived


def sent(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers as a tensor there, without a wait."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def index(rows: list[int], device: torch.device) -> Tensor:
    """Rows as a tensor there, without a wait."""
    return sent(rows, device, torch.int64)
