"""What a method works with during one step: weights, memory, the model, the batch's circumstances.

A method changes nothing in place: it assigns new tensors to `ctx.state` and calls `ctx.descend`. `come.step.transition` decides
whether they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from come.errors import ConfigError, InputError, ModelError
from come.model.batchnorm import BatchStatistics, Layer, Statistics
from come.model.functional import FunctionalModel
from come.model.heads import Head
from come.model.inputs import Inputs
from come.model.positions import anywhere, by_position, rows_of
from come.optim import Moments, Rule, adam, sgd

Written = tuple[Tensor, Tensor, Tensor]
"""An entry of a method's memory, the rows of it that were overwritten, and what was in them."""


class NotCapturable(Exception):  # noqa: N818 - not an error: the step runs without a CUDA graph
    """A step that cannot be captured as a CUDA graph, and why."""


@contextmanager
def untracked() -> Iterator[None]:
    """No gradients, and ordinary tensors even where the user is in `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Context:
    """The current weights, the method's memory, the model, and the batch's circumstances."""

    def __init__(
        self,
        model: FunctionalModel,
        rule: Rule | None,
        source: Tensor,
        fixed: dict[str, Any],
        *,
        weights: Tensor,
        moments: Moments,
        state: dict[str, Tensor],
        lr: Tensor,
        valid: Tensor,
        count: int | None,
        generator: torch.Generator,
        share: Tensor | float | None = None,
        guarded: bool = False,
        few: bool = False,
        written: list[Written] | None = None,
        ignore: Tensor | None = None,
        refuses: str = "",
    ) -> None:
        self.model, self.rule, self.guarded = model, rule, guarded
        self.source = source
        """(P,): the adapted parameters of the source model."""
        self.fixed = fixed
        """What `Method.setup` has found."""
        self.leaf: Callable[[Tensor], Tensor] = model.leaf
        """Makes of values a tensor of their own that gradients can be taken with respect to."""
        self.weights = self.leaf(weights)
        """(P,): the adapted parameters now, in float32 or better. See `Context.named` for the single ones."""
        self.moments = moments
        """Moments of the optimizer."""
        self.state = dict(state)
        """What the method remembers. Assign new tensors; do not change them in place."""
        self.lr = lr
        """0-d: the learning rate of this step."""
        self.valid = valid
        """(N,) bool: which rows of the logits may drive an update; of the samples before the first `forward` of the step."""
        self.samples = valid
        """(B,) bool: which samples may."""
        self.positions: tuple[int, ...] | None = None
        """The axes of the logits behind the classes, such as (H, W); () of a classifier, None before the first `forward`."""
        self._ignore, self._refuses = ignore, refuses
        self._count = count
        self.generator = generator
        """Random numbers, seeded for this step: runs repeat, and a resumed stream draws the same."""
        self.share = share
        """Of the batch's statistics in what BatchNorm normalizes by; None: the source's alone."""
        self.ok = torch.ones((), dtype=torch.bool, device=valid.device)
        """0-d bool: whether every gradient and update so far was finite."""
        self.few = few
        """Whether so few samples drove the last update that a second forward of such few is cheaper than a whole backward."""
        self.selected: float | None = None
        """The share of the samples that `again` was asked for."""
        self.written: list[Written] = [] if written is None else written
        """What `put` has overwritten."""

    @property
    def count(self) -> int:
        """Batches before this one. A step that asks for it cannot be replayed as a CUDA graph, where it would not change."""
        if self._count is None:
            raise NotCapturable("it asks for the number of the batch")
        return self._count

    # ---- the model ----

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def batch_norms(self) -> list[Layer]:
        """The BatchNorm layers of the model with the source's statistics."""
        return self.model.layers()

    @property
    def statistics(self) -> Statistics:
        """What BatchNorm normalizes by in this step."""
        return None if self.share is None else BatchStatistics(self.share)

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """A vector (P,) as one tensor for each adapted parameter, by name."""
        return self.model.named(weights)

    def forward(
        self,
        x: Inputs,
        weights: Tensor | None = None,
        *,
        statistics: Statistics | Literal["own"] = "own",
        hooks: Sequence[Callable[[], Any]] = (),
        size: int | None = None,
        sparing: bool = False,
    ) -> Tensor:
        """Logits (N, K) of the model on `x`, checked: a row for each sample, and for each of its positions if it has any.

        Args:
            x: the batch.
            weights: (P,) in place of `ctx.weights`, e.g. a teacher's or the source's.
            statistics: what BatchNorm normalizes by; "own" is the rule of this step.
            hooks: functions that register a hook and return its handle; they last for this call.
            size: how many rows the model returns, if not one for each sample.
            sparing: without a gradient if few samples will need one, see `again`.
        """
        with torch.no_grad() if sparing and self.few and self.separate else nullcontext():
            logits = self.maps(x, weights, statistics=statistics, hooks=hooks, size=size)
        if self.positions != logits.shape[2:]:
            self._locate(tuple(logits.shape))
        return rows_of(logits)

    def maps(
        self,
        x: Inputs,
        weights: Tensor | None = None,
        *,
        statistics: Statistics | Literal["own"] = "own",
        hooks: Sequence[Callable[[], Any]] = (),
        size: int | None = None,
    ) -> Tensor:
        """What `forward` returns, as the model shapes it: logits (B, K, *P) of any positions."""
        rule = self.statistics if statistics == "own" else statistics
        weights = self.weights if weights is None else weights
        if self.model.ranks is not None:
            return self.model.ranks.forward(self.model, x, weights, rule, hooks)
        return self.model.logits(self.model.call(x, weights, rule, hooks), x.size if size is None else size)

    def _locate(self, shape: tuple[int, ...]) -> None:
        """Take in what the first logits (B, K, *P) of the step show: where the positions are, and which drive nothing."""
        positions = shape[2:]
        if positions and self._refuses:
            raise ConfigError(f"{self._refuses}, got logits of shape {shape}")
        if self.positions is not None:
            raise InputError(f"logits of one step must have the same positions, got {self.positions} and {positions}")
        self.positions, self.valid = positions, by_position(self.samples, positions)
        if self._ignore is not None:
            if tuple(self._ignore.shape[1:]) != positions:
                raise InputError(
                    f"ignore must have the shape of the answer without its classes, (B, *{positions}), got "
                    f"{tuple(self._ignore.shape)}; a mask of the image must be brought to the size of the logits"
                )
            self.valid = self.valid & ~self._ignore.reshape(-1).to(self.valid.device)

    @property
    def dense(self) -> bool:
        """Whether the logits have several positions, which are no samples of their own: classes come as images have them."""
        return self.positions is not None and math.prod(self.positions) > 1

    @property
    def separate(self) -> bool:
        """Whether some samples can go through the model without the others.

        Not with BatchNorm on statistics of the batch, and not in a compiled step, whose shapes are fixed.
        """
        return self.share is None and self._count is not None and not self.model.compiled

    def forward_where(self, x: Inputs, mask: Tensor, weights: Tensor | None = None, **how: Any) -> Tensor:
        """Logits (N, K) that are right where the mask (N,) is true; elsewhere they may be zeros, to save work."""
        if not self.separate:
            return self.forward(x, weights, **how)
        rows = anywhere(mask, self.positions or ()).nonzero()[:, 0]
        if len(rows) == x.size:
            return self.forward(x, weights, **how)
        if not len(rows):
            rows = torch.zeros(1, dtype=torch.int64, device=mask.device)  # so that there is a gradient, of zero
        part = self.forward(x.take(rows), weights, **how)
        if self.positions:
            each = torch.arange(len(mask), device=mask.device).view(x.size, -1)
            rows = each[rows].flatten()
        return part.new_zeros(len(mask), part.shape[1]).index_copy(0, rows, part)

    def again(self, x: Inputs, used: Tensor, logits: Tensor) -> Tensor | None:
        """Logits with a gradient where `used` (N,) is true, if `forward(x, sparing=True)` gave `logits` without one."""
        if not self.separate:
            return None
        self.selected = int(anywhere(used, self.positions or ()).sum()) / x.size
        return None if logits.requires_grad else self.forward_where(x, used)

    def features(self, x: Inputs, **how: Any) -> tuple[Tensor, Tensor]:
        """What goes into the classifier head (B, d), and the logits (B, K); `setup` must have put a `Head` into "head"."""
        head: Head = self.fixed["head"]
        if self.model.ranks is not None and not how:
            return self.model.ranks.features(self.model, x, self.weights, self.statistics, head)
        seen: list[tuple[Tensor, Tensor]] = []

        def register() -> Any:
            return head.linear.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], out)))

        logits = self.forward(x, hooks=[register, *how.pop("hooks", ())], **how)
        return head.pick(seen, logits), logits

    def classes(self, x: Inputs) -> int:
        """K: how many classes the model has; found by one forward, once."""
        if "classes" not in self.fixed:
            with torch.no_grad():
                self.fixed["classes"] = self.forward(x, statistics=None).shape[1]
            self.fixed["dense"] = self.dense
        found: int = self.fixed["classes"]
        return found

    def drawn(self, draw: Callable[[Tensor, torch.Generator], Tensor], values: Tensor) -> Tensor:
        """What `draw(values, generator)` makes of a tensor with the random numbers of this step."""
        return self.model.drawn(draw, values, self.generator)

    # ---- descending ----

    def gradient(self, loss: Tensor, weights: Tensor | None = None) -> Tensor:
        """Gradient (P,) of the scalar `loss` with respect to `ctx.weights`, or to the `weights` that it was computed with."""
        weights = self.weights if weights is None else weights
        scale = self.model.loss_scale
        found = self.model.gradient(loss * scale if scale != 1 else loss, weights)
        if found is None:
            raise ModelError(
                f"no gradient reaches the {len(self.model.shapes)} adapted parameter(s) of "
                f"{type(self.model.model).__name__}; does its forward run under no_grad, or detach its output?"
            )
        if self.guarded:
            self.ok = self.model.fused(_still_finite)(self.ok, found)
        return found / scale if scale != 1 else found

    def descend(self, loss: Tensor, go: Tensor | None = None) -> None:
        """One optimizer step down the gradient of the scalar `loss`.

        Where the 0-d bool tensor `go` is false nothing moves, neither weights nor moments; it is read on the device.
        """
        self.descend_along(self.gradient(loss), go)

    @torch.no_grad()
    def descend_along(self, gradient: Tensor, go: Tensor | None = None) -> None:
        """One optimizer step along a given gradient (P,); see `descend`."""
        assert self.rule is not None
        step = self.model.fused(_descended) if isinstance(self.rule, (sgd, adam)) else _descended
        largest = self.model.largest() if self.guarded else None
        weights, self.moments, fine = step(
            self.rule, self.weights.detach(), gradient, self.moments, self.lr, go, largest
        )
        self.weights = self.leaf(weights)
        if fine is not None:
            self.ok = self.ok & fine

    @torch.no_grad()
    def recover(self, where: Tensor, *, moments: bool = True) -> None:
        """Put the weights back to their source values, and the moments to zero, where the 0-d bool tensor is true."""
        self.weights = self.leaf(torch.where(where, self.source, self.weights))
        if moments:
            self.moments = chosen(where, {k: torch.zeros_like(v) for k, v in self.moments.items()}, self.moments)

    # ---- memory ----

    @torch.no_grad()
    def put(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Overwrite some rows of a large entry of `state` in place; undone if the step fails or is refused."""
        entry = self.state[name]
        self.written.append((entry, rows, entry[rows].clone()))
        entry[rows] = values.to(entry)

    @torch.no_grad()
    def keep_where(self, ok: Tensor) -> None:
        """Take back what `put` has written where the 0-d bool tensor is false."""
        for entry, rows, before in reversed(self.written):
            entry[rows] = torch.where(ok.to(entry.device), entry[rows], before)


@torch.no_grad()
def undo(written: list[Written]) -> None:
    """Take back all that `Context.put` has written, latest first; may be called again."""
    while written:
        entry, rows, before = written[-1]
        entry[rows] = before
        written.pop()


def _descended(
    rule: Rule,
    weights: Tensor,
    gradient: Tensor,
    moments: Moments,
    lr: Tensor,
    go: Tensor | None,
    largest: float | None,
) -> tuple[Tensor, Moments, Tensor | None]:
    """Weights and moments after a step of the optimizer, where it may go and is sound; and whether it was (0-d bool).

    Sound is what is finite and, for the weights, below `largest`; with None nothing is looked at.
    """
    new, later = rule.update(weights, gradient, moments, lr)
    fine = None
    if largest is not None:
        sound = _largest(new) < largest
        for moment in later.values():
            if moment.device == sound.device and moment.is_floating_point():
                sound = sound & (_largest(moment) < torch.inf)
        fine = sound if go is None else sound | ~go
        go = sound if go is None else go & sound
    if go is not None:
        new, later = torch.where(go, new, weights), chosen(go, later, moments)
    return new, later, fine


def _still_finite(ok: Tensor, values: Tensor) -> Tensor:
    """`ok` (0-d bool), and all values are finite."""
    return ok & (_largest(values) < torch.inf)


def _largest(values: Tensor) -> Tensor:
    """Largest entry by size, 0-d; NaN if there is one."""
    return values.abs().amax()


def chosen(where: Tensor, new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """`new` where the 0-d bool tensor is true, else `old`; read on the device, but for entries that are elsewhere.

    Example:
        >>> chosen(torch.tensor(False), {"a": torch.ones(1)}, {"a": torch.zeros(1)})
        {'a': tensor([0.])}
    """
    if new.keys() != old.keys():
        return new if bool(where) else old

    def one(name: str) -> Tensor:
        if new[name] is old[name]:
            return new[name]
        if new[name].device == where.device and new[name].shape == old[name].shape:
            return torch.where(where, new[name], old[name])
        return new[name] if bool(where) else old[name]

    return {name: one(name) for name in new}
