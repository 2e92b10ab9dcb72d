"""`Method`: a configuration, and the function `adapt`, which predicts a batch and adapts to it through a `Context`.

A method changes nothing in place: it assigns new tensors to `ctx.state` and calls `ctx.descend`. `come.step.transition` decides
whether they are kept.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from come import objectives
from come.errors import ConfigError, ModelError, require, require_int, require_number, shown
from come.model.batchnorm import BatchStatistics, Layer, Statistics, StatisticsRule
from come.model.functional import FunctionalModel
from come.model.heads import Head
from come.model.inputs import Inputs
from come.model.positions import Located, anywhere
from come.model.positions import masked_mean as masked_mean
from come.objectives import Objective
from come.optim import Moments, OptimizerFactory, Rule, adam, chosen, descended, sgd, still_finite
from come.registry import Registry
from come.registry import converted as converted
from come.select import Selector, named, norm_affine


class Step(NamedTuple):
    """The result of one adaptation step; all tensors are detached."""

    logits: Tensor
    """(B, K), or (B, K, ...) with positions, such as the pixels (H, W) of an image: the prediction."""
    loss: Tensor | None = None
    """(B, ...): the objective of each sample, at each position; None if the method has none."""
    used: Tensor | None = None
    """(B, ...) bool: the samples, or positions, that drove the update; None if the method never updates."""
    valid: Tensor | None = None
    """(B,) bool: the samples with an answer; None without a guard. All logits of the others are -1e4: least certain."""
    abstain: Tensor | None = None
    """(B, ...) bool: the answers not to rely on; None before `Adapter.calibrate`."""


class Frozen(NamedTuple):
    """What `Adapter.export` puts into a copy of the model, so that it computes the same as `Method.predict`."""

    weights: Tensor
    """(P,) of the adapted parameters."""
    statistics: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({})
    """Mean and variance (C,) by the number of the BatchNorm layer, if the method has its own."""
    head: tuple[str, Tensor] | None = None
    """Name and new weights (K, d) of the linear layer that gives the logits; it gets no bias."""
    bias: tuple[str, Tensor] | None = None
    """Name and new bias (K,) of the linear layer that gives the logits; it keeps its weights."""


Written = tuple[Tensor, Tensor, Tensor]
"""An entry of a method's memory, the rows of it that were overwritten, and what was in them."""


class NotCapturable(Exception):  # noqa: N818 - not an error: the step runs without a CUDA graph
    """A step that cannot be captured as a CUDA graph, and why."""


class Context(Located):
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
        seeded: Callable[[], torch.Generator],
        share: Tensor | float | None = None,
        dense_share: Tensor | float | None = None,
        guarded: bool = False,
        few: bool = False,
        written: list[Written] | None = None,
        ignore: Tensor | None = None,
        refuses: str = "",
    ) -> None:
        super().__init__(valid, ignore, refuses)
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
        self._count = count
        self._seeded = seeded
        self.share, self._dense_share = share, dense_share
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

    @cached_property
    def generator(self) -> torch.Generator:
        """Random numbers, seeded for this step: runs repeat, and a resumed stream draws the same."""
        return self._seeded()

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
            rows = self.rows(self.maps(x, weights, statistics=statistics, hooks=hooks, size=size))
            if "dense" not in self.fixed:  # the first logits that anybody has seen
                self.fixed["dense"] = self.dense
                if self.dense:
                    self.share = self._dense_share
                    if statistics == "own":
                        rows = self.rows(self.maps(x, weights, hooks=hooks, size=size))
            return rows

    def maps(
        self,
        x: Inputs,
        weights: Tensor | None = None,
        *,
        statistics: Statistics | Literal["own"] = "own",
        hooks: Sequence[Callable[[], Any]] = (),
        size: int | None = None,
    ) -> Tensor:
        """What `forward` returns as rows, in one piece: logits (B, K, ...); of views in other sizes, too."""
        rule = self.statistics if statistics == "own" else statistics
        weights = self.weights if weights is None else weights
        if self.model.ranks is not None:
            return self.model.ranks.forward(self.model, x, weights, rule, hooks)
        return self.model.logits(self.model.call(x, weights, rule, hooks), x.size if size is None else size)

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
        rows = anywhere(mask, self.positions).nonzero()[:, 0]
        if not len(rows):
            rows = torch.zeros(1, dtype=torch.int64, device=mask.device)  # so that there is a gradient, of zero
        if len(rows) == x.size:
            return self.forward(x, weights, **how)
        part = self.forward(x.take(rows), weights, **how)
        if self.positions:
            rows = torch.arange(len(mask), device=mask.device).view(x.size, -1)[rows].flatten()
        return part.new_zeros(len(mask), part.shape[1]).index_copy(0, rows, part)

    def again(self, x: Inputs, used: Tensor, logits: Tensor) -> Tensor | None:
        """Logits with a gradient where `used` (N,) is true, if `forward(x, sparing=True)` gave `logits` without one."""
        if not self.separate:
            return None
        self.selected = int(anywhere(used, self.positions).sum()) / x.size
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
            self.ok = self.model.fused(still_finite)(self.ok, found)
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
        step = self.model.fused(descended) if isinstance(self.rule, (sgd, adam)) else descended
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


@dataclass(kw_only=True, eq=False)
class Method(ABC):
    """A test-time adaptation method: a configuration, and the function `adapt`.

    To write one, subclass it, set `name` and write `adapt`; arguments of its own are dataclass fields. Memory between batches
    is `ctx.state`, which `initial_state` begins; `setup` computes what is needed once, such as statistics of source data.
    `come.testing.check_method` checks the contract.

    Args:
        objective: a name (`come.objectives.names()`) or an `Objective`.
        select: a function from the model to a dict of the parameters to adapt, by name, whether or not they require gradients;
            or a name of `come.select.NAMED`, such as "head".
        lr: learning rate; None is the method's default, the paper's where there is one: for Tent 1e-3 x batch/64 for models
            with LayerNorm, GroupNorm and the like, 2.5e-4 for models with BatchNorm (x batch/32 for batches below 32).
        optimizer: "sgd", "adam", `come.optim.sgd(momentum=0.5)`, or a function (parameters, lr) -> torch optimizer.
        steps: updates per batch.
        episodic: reset before each batch.
        reset_every: reset whenever this many batches have passed.
        statistics: what BatchNorm normalizes by, in methods that use batch statistics. "source": the source's running
            statistics. "batch": those of the batch, as published. "mixed": n/(n + 16) of a batch of n and the rest of the
            source; with a guard, these or the source's alone, whichever make the model more confident (see
            `come.guard.verdict`). None is "mixed" with a guard; without one it is "batch", and "source" for Steady.

    Example:
        >>> import come
        >>> class Sharpen(come.Method):
        ...     name = "sharpen"
        ...     def adapt(self, ctx, x):
        ...         logits = ctx.forward(x)
        ...         loss = self.objective.entropy(logits)
        ...         ctx.descend(loss.mean())
        ...         return come.Step(logits, loss, ctx.valid)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> come.adapt(model, Sharpen(objective="em", lr=0.1))(torch.randn(5, 4)).shape
        torch.Size([5, 3])
    """

    name: ClassVar[str]
    """Name in the registry."""
    needs: ClassVar[str] = "nothing"
    """What it needs besides a model and batches: source batches, images, features."""
    cost: ClassVar[str] = "1f 1b"
    """Forwards (f) and backwards (b) per batch, at the default hyperparameters."""
    descends: ClassVar[bool] = True
    """Whether it changes parameters by gradient descent, and so needs some to be selected."""
    minimizes: ClassVar[bool] = True
    """Whether adaptation depends on the objective; if not, only scores do."""
    changes: ClassVar[bool] = True
    """Whether its answers can differ from the source model's."""
    batch_statistics: ClassVar[bool] = True
    """Whether BatchNorm layers use the statistics of the batch."""
    unguarded: ClassVar[StatisticsRule] = "batch"
    """What `statistics=None` means without a guard."""
    paper_lr: ClassVar[tuple[float, float]] = (1e-3, 2.5e-4)
    """Learning rates for `lr=None`: without and with BatchNorm."""
    scales_lr: ClassVar[bool] = True
    """Whether they scale with the batch size; False if a step is not taken on the batch as a whole."""
    on_host: ClassVar[tuple[str, ...]] = ()
    """Prefixes of names in `state` that stay on the CPU when the model moves."""
    waits: ClassVar[str] = ""
    """Why a step synchronizes with the device, if it does; such a step cannot be one CUDA graph."""
    by_stream: ClassVar[tuple[str, ...]] = ()
    """Arguments besides lr that may differ between the streams of a `come.Fleet`: they are then 0-d tensors in `adapt`."""
    vectors_only: ClassVar[str] = ""
    """Why it takes logits (B, K) only, without positions, if so."""
    undivided: ClassVar[str] = ""
    """Why its batches cannot be divided over ranks, if so."""
    unexported: ClassVar[str] = ""
    """Why no exported model can give its answers, if so; see `Adapter.export`."""
    alone: ClassVar[bool] = False
    """Whether it answers each sample by itself, from views of it that it makes."""
    once: ClassVar[tuple[str, ...]] = ("source",)
    """Arguments that only `setup` uses; they are not kept."""

    objective: converted[str | Objective, Objective] = converted(objectives.get, "come")
    select: Selector = norm_affine()
    lr: float | None = None
    optimizer: str | sgd | adam | OptimizerFactory = sgd()
    steps: int = 1
    episodic: bool = False
    reset_every: int | None = None
    statistics: StatisticsRule | None = None

    def __post_init__(self) -> None:
        self.select = named(self.select)
        limit = "a positive number, or None for the default"
        require(
            self.lr is None or (require_number("lr", self.lr, limit) and 0 < self.lr < torch.inf), "lr", self.lr, limit
        )
        require_int("steps", self.steps, 1)
        require(isinstance(self.episodic, bool), "episodic", self.episodic, "True or False")
        if self.reset_every is not None:
            require_int("reset_every", self.reset_every, 1, ", or None")
        rules = get_args(StatisticsRule)
        require(self.statistics in (None, *rules), "statistics", self.statistics, f"one of {', '.join(rules)}, or None")

    @property
    def corrects(self) -> bool:
        """Whether it corrects answers by the classes of the batch: predicting fewer is then no sign of a collapse."""
        return False

    # ---- what a method writes ----

    @abstractmethod
    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict the batch `x` and adapt to it, once. Gradients are on.

        `ctx.forward` gives a row of logits for each sample, or for each position of a sample (a pixel), and what is returned
        has as many rows; the user gets them in the shape of the model's logits.
        """

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """Logits (N, K) of the batch without adapting to it. Gradients are off."""
        return ctx.forward(x)

    def frozen(self, ctx: Context) -> Frozen:
        """What `predict` computes now, for `Adapter.export`; raises `ModelError` if no model can compute it by itself."""
        if self.unexported or type(self).predict is not Method.predict:
            why = self.unexported or "it has a predict() of its own, and no frozen() that says what it computes"
            raise ModelError(f"{self.name} cannot be exported: {why}")
        return Frozen(ctx.weights.detach())

    def setup(self, ctx: Context) -> dict[str, Any]:
        """Computed once for a model, and kept in `ctx.fixed`; may take long."""
        return {}

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """`ctx.state` before the first batch `x`, after construction or a reset; should be quick, and always finite."""
        return {}

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:  # noqa: B027 - most methods take any batch
        """Raise `InputError` if the batch cannot be used; `first`: after construction or a reset."""

    # ---- configuration ----

    @classmethod
    def hyperparameters(cls) -> dict[str, Any]:
        """Names and defaults of the constructor's arguments, own ones first.

        Example:
            >>> from come.methods import Tent
            >>> next(iter(Tent.hyperparameters().items()))
            ('keep', 1.0)
        """
        mine, all_of_them = (inspect.signature(kind).parameters.values() for kind in (cls, Method))
        taken = {p.name: p.default for p in mine if p.kind is p.KEYWORD_ONLY}
        common = {p.name: p.default for p in all_of_them if p.kind is p.KEYWORD_ONLY}
        own = {name: taken.pop(name) for name in list(taken) if name not in common}
        return own | (common if any(p.kind is p.VAR_KEYWORD for p in mine) else taken)

    def learning_rate(self, batch: int, batch_norm: bool) -> float:
        """The learning rate for a batch size, on a model with or without BatchNorm."""
        if self.lr is not None:
            return self.lr
        rate, scale = (self.paper_lr[1], min(1.0, batch / 32)) if batch_norm else (self.paper_lr[0], batch / 64)
        return rate * (scale if self.scales_lr else 1.0)


_registry: Registry[type[Method]] = Registry("method", entry_points="come.methods")
M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Make a method available under its `name`, in Python and on the command line; usable as a decorator."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ConfigError(f"register takes a subclass of come.Method, got {shown(method)}")
    if not isinstance(getattr(method, "name", None), str):
        raise ConfigError(f"{method.__name__} has no name; give the class an attribute name = '...'")
    _registry.add(method.name, method)
    return method
