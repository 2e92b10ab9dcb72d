"""A method is a configuration and one function, `adapt`. All that changes from step to step is in the `Context` it is given.

A step is a function of (weights, moments, state, batch) that returns new ones and a `Step`. A method changes nothing in
place: it assigns new tensors to `ctx.state`, and calls `ctx.descend`. Whether they are kept is decided around it, in
`come.adapter`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from come import objectives
from come.errors import ConfigError, ModelError, require, require_int, require_number, shown
from come.model.batchnorm import Layer, Statistics, StatisticsRule, mixed
from come.model.functional import FunctionalModel
from come.model.heads import Head
from come.model.inputs import Inputs, logits_of
from come.objectives import Objective
from come.optim import Moments, OptimizerFactory, Rule, adam, sgd
from come.registry import Registry
from come.select import Selector, norm_affine
from come.streams import vmap as stacked

Written = tuple[Tensor, Tensor, Tensor]
"""An entry of a method's memory, the rows of it that were overwritten, and what was in them."""

LOSS_SCALE = 256.0
"""Factor on the loss for models in float16, taken out of the gradient again: small gradients would be rounded to zero."""


class NotCapturable(Exception):  # noqa: N818 - not an error: the step runs in another way
    """A step that cannot be one CUDA graph, and why."""


class Step(NamedTuple):
    """What one adaptation step returns; all tensors are detached."""

    logits: Tensor
    """(B, K): the prediction, what is scored."""
    loss: Tensor | None = None
    """(B,): the objective of each sample, or None if the method has none."""
    used: Tensor | None = None
    """(B,) bool: which samples drove the update, or None if nothing is ever updated."""
    valid: Tensor | None = None
    """(B,) bool: which samples could be answered; None without a guard. The logits of the others are all -1e4: the least
    certain by every score."""
    abstain: Tensor | None = None
    """(B,) bool: which answers not to rely on; None before `Adapter.calibrate`."""


class Frozen(NamedTuple):
    """What `Method.predict` computes, as far as it can be put into a copy of the model."""

    weights: Tensor
    """(P,) of the adapted parameters."""
    statistics: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({})
    """Mean and variance (C,) by the number of the BatchNorm layer, where they are the method's own."""
    head: tuple[str, Tensor] | None = None
    """The name of the linear layer that gives the logits, and weights (K, d) to put there, without a bias."""


@contextmanager
def untracked() -> Iterator[None]:
    """No gradients, and ordinary tensors even where the user is in `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


Given = TypeVar("Given")
Kept = TypeVar("Kept")


class converted(Generic[Given, Kept]):  # noqa: N801 - reads as the value it is
    """A field of a dataclass that takes one type and keeps another: `objective="em"` becomes a `Softmax()`.

    Args:
        convert: what makes the one of the other.
        default: of the field, before it is converted.
    """

    def __init__(self, convert: Callable[[Given], Kept], default: Given) -> None:
        self.convert, self.default = convert, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, method: object | None, owner: type | None = None) -> Kept:
        """What is kept; of the class, the default."""
        found: Kept = self.default if method is None else getattr(method, self.name)  # type: ignore[assignment]
        return found

    def __set__(self, method: object, value: Given) -> None:
        """Convert and keep."""
        setattr(method, self.name, self.convert(value))


def leaf(values: Tensor) -> Tensor:
    """`values` as a tensor of its own that gradients can be taken with respect to."""
    return stacked.leaf(values) if stacked.stacking() else values.detach().requires_grad_()


class Context:
    """What a method works with during one step: the current weights, its memory, the model, the batch's circumstances."""

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
    ) -> None:
        self.model, self.rule, self.guarded = model, rule, guarded
        self.source = source
        """(P,): the adapted parameters of the source model."""
        self.fixed = fixed
        """What `Method.setup` has found."""
        self.weights = leaf(weights)
        """(P,): the adapted parameters now, in float32 or better. See `Context.named` for the single ones."""
        self.moments = moments
        """Moments of the optimizer."""
        self.state = dict(state)
        """What the method remembers. Assign new tensors; do not change them in place."""
        self.lr = lr
        """0-d: the learning rate of this step."""
        self.valid = valid
        """(B,) bool: which samples may drive an update."""
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
        if self.share is None:
            return None
        return "batch" if isinstance(self.share, float) and self.share == 1 else mixed(self.share)

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
        """Logits (B, K) of the model on `x`, checked.

        Args:
            x: the batch.
            weights: (P,) in place of `ctx.weights`, e.g. a teacher's or the source's.
            statistics: what BatchNorm normalizes by; "own" is the rule of this step.
            hooks: functions that register a hook and return its handle; they last for this call.
            size: how many rows the model returns, if not one for each sample.
            sparing: without a gradient if few samples will need one, see `again`.
        """
        rule = self.statistics if statistics == "own" else statistics
        with torch.no_grad() if sparing and self.few and self.separate else nullcontext():
            weights = self.weights if weights is None else weights
            if self.model.ranks is not None:
                return self.model.ranks.forward(self.model, x, weights, rule, hooks)
            out = self.model.call(x, weights, rule, hooks)
        return logits_of(out, x.size if size is None else size)

    @property
    def separate(self) -> bool:
        """Whether some samples can go through the model without the others.

        Not with BatchNorm on statistics of the batch, and not in a compiled step, whose shapes are fixed.
        """
        return self.share is None and self._count is not None and not self.model.compiled

    def forward_where(self, x: Inputs, mask: Tensor, weights: Tensor | None = None, **how: Any) -> Tensor:
        """Logits (B, K) that are right where the mask (B,) is true; elsewhere they may be zeros, to save work."""
        if not self.separate:
            return self.forward(x, weights, **how)
        rows = mask.nonzero()[:, 0]
        if len(rows) == len(mask):
            return self.forward(x, weights, **how)
        if not len(rows):
            rows = torch.zeros(1, dtype=torch.int64, device=mask.device)  # so that there is a gradient, of zero
        part = self.forward(x.take(rows), weights, **how)
        return part.new_zeros(len(mask), part.shape[1]).index_copy(0, rows, part)

    def again(self, x: Inputs, used: Tensor, logits: Tensor) -> Tensor | None:
        """Logits with a gradient where `used` (B,) is true, if `forward(x, sparing=True)` gave `logits` without one."""
        if not self.separate:
            return None
        self.selected = int(used.sum()) / len(used)
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
        if stacked.stacking():
            return stacked.drawn(draw, values, self.generator)  # type: ignore[arg-type]
        return draw(values, self.generator)

    # ---- descending ----

    def gradient(self, loss: Tensor, weights: Tensor | None = None) -> Tensor:
        """Gradient (P,) of the scalar `loss` with respect to `ctx.weights`, or to the `weights` that it was computed with."""
        weights = self.weights if weights is None else weights
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        scale = LOSS_SCALE if self.model.half or autocast else 1.0
        loss, found = loss * scale if scale != 1 else loss, None
        if stacked.stacking():
            found = stacked.gradient(loss, weights)
        elif loss.requires_grad:
            (found,) = torch.autograd.grad(loss, weights, allow_unused=True)
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
        self.weights = leaf(weights)
        if fine is not None:
            self.ok = self.ok & fine

    @torch.no_grad()
    def recover(self, where: Tensor, *, moments: bool = True) -> None:
        """Put the weights back to their source values, and the moments to zero, where the 0-d bool tensor is true."""
        self.weights = leaf(torch.where(where, self.source, self.weights))
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


def masked_mean(values: Tensor, used: Tensor) -> Tensor:
    """Mean of `values` (B, ...) over the samples in `used` (B,); 0, with a zero gradient, where there are none.

    Example:
        >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    mask = used if values.ndim == 1 else used.view(-1, *[1] * (values.ndim - 1))
    return torch.where(mask, values, 0).sum(dim=0) / used.sum().clamp_min(1)


@dataclass(kw_only=True, eq=False)
class Method(ABC):
    """What adapts a classifier, and how: a configuration, and the function `adapt`.

    To write a method, subclass it, give it a `name` and write `adapt`. Arguments of its own are the fields of a dataclass.
    What it remembers between batches goes into `ctx.state`, whose first value `initial_state` returns; what it finds once,
    such as statistics of source data, `setup` returns. `come.testing.check_method` checks the contract.

    Args:
        objective: a name (`come.objectives.names()`) or an `Objective`.
        select: which parameters adapt: a function from the model to a dict of its parameters by name. Whether a parameter
            requires gradients plays no part.
        lr: learning rate; None is the method's default for the model's family, the paper's where there is one: for Tent 1e-3
            x batch/64 for models with LayerNorm, GroupNorm and the like, 2.5e-4 for models with BatchNorm (x batch/32 below a
            batch of 32).
        optimizer: "sgd", "adam", `come.optim.sgd(momentum=0.5)`, or a function (parameters, lr) -> torch optimizer.
        steps: how often each batch is adapted to.
        episodic: reset before each batch.
        reset_every: reset after this many batches, again and again.
        statistics: what BatchNorm normalizes by, in methods that use the batch's statistics. "source": the running statistics
            of the source. "batch": those of the batch, always, as published. "mixed": n/(n + 16) of those of a batch of n and
            the rest of the source's; with a guard, these or the source's alone, whichever make the model surer of its answers
            (see `come.guard.verdict`). None is "mixed" with a guard; without one it is "batch", and "source" for Steady.

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
    """The name in the registry."""
    needs: ClassVar[str] = "nothing"
    """What it needs beside a model and batches, in a few words: source batches, images, features."""
    cost: ClassVar[str] = "1f 1b"
    """What a batch costs: so many forwards (f) and backwards (b) of it, at the default hyperparameters."""
    descends: ClassVar[bool] = True
    """Whether the method changes parameters by gradient descent, and so needs some to be selected."""
    minimizes: ClassVar[bool] = True
    """Whether the objective matters to what the method does, and not only to how its output is scored."""
    changes: ClassVar[bool] = True
    """Whether its answers can differ from the source model's."""
    batch_statistics: ClassVar[bool] = True
    """Whether BatchNorm layers use the statistics of the batch."""
    unguarded: ClassVar[StatisticsRule] = "batch"
    """What `statistics=None` means without a guard."""
    paper_lr: ClassVar[tuple[float, float]] = (1e-3, 2.5e-4)
    """What `lr=None` means: for models without and with BatchNorm."""
    scales_lr: ClassVar[bool] = True
    """Whether that is scaled with the size of the batch; False where a step is not taken on the batch as a whole."""
    on_host: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names in `state` that stay on the CPU when the model moves."""
    waits: ClassVar[str] = ""
    """Why a step has to wait for the device, if it does; such a step cannot be one CUDA graph."""
    by_stream: ClassVar[tuple[str, ...]] = ()
    """Arguments that may differ between the streams of a `come.Fleet`, beside lr: in `adapt` they are then 0-d tensors."""
    undivided: ClassVar[str] = ""
    """Why its batches cannot be divided over ranks, if they cannot."""
    unexported: ClassVar[str] = ""
    """Why no model by itself can give its answers, if none can; see `Adapter.export`."""
    once: ClassVar[tuple[str, ...]] = ("source",)
    """Arguments that `setup` uses up; they are not kept."""

    objective: converted[str | Objective, Objective] = converted(objectives.get, "come")
    select: Selector = norm_affine()
    lr: float | None = None
    optimizer: str | sgd | adam | OptimizerFactory = sgd()
    steps: int = 1
    episodic: bool = False
    reset_every: int | None = None
    statistics: StatisticsRule | None = None

    def __post_init__(self) -> None:
        limit = "a positive number, or None for the default"
        require(
            self.lr is None or (require_number("lr", self.lr, limit) and 0 < self.lr < torch.inf), "lr", self.lr, limit
        )
        require_int("steps", self.steps, 1)
        require(isinstance(self.episodic, bool), "episodic", self.episodic, "True or False")
        if self.reset_every is not None:
            require_int("reset_every", self.reset_every, 1, ", or None")
        words = get_args(StatisticsRule)
        known = self.statistics is None or self.statistics in words
        require(known, "statistics", self.statistics, f"one of {', '.join(words)}, or None")

    @property
    def corrects(self) -> bool:
        """Whether answers are corrected by the classes of the batch, and may rightly name fewer than the model does."""
        return False

    # ---- what a method writes ----

    @abstractmethod
    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict the batch `x` and adapt to it, once. Gradients are on."""

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """Logits (B, K) of the batch without adapting to it. Gradients are off."""
        return ctx.forward(x)

    def frozen(self, ctx: Context) -> Frozen:
        """What `predict` computes with what is known now, for `Adapter.export`; a `ModelError` if no model by itself can."""
        if self.unexported or type(self).predict is not Method.predict:
            why = self.unexported or "it has a predict() of its own, and no frozen() that says what it computes"
            raise ModelError(f"{self.name} cannot be exported: {why}")
        return Frozen(ctx.weights.detach())

    def setup(self, ctx: Context) -> dict[str, Any]:
        """What is found once when the method is put around a model, and kept in `ctx.fixed`. May take long."""
        return {}

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """What `ctx.state` holds before the first batch `x`, after construction or a reset. Should be quick.

        All of it must be finite, always: a saved state that is not is refused.
        """
        return {}

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:  # noqa: B027 - most methods take any batch
        """Raise an `InputError` if the batch cannot be used; `first` after construction or a reset."""

    # ---- configuration ----

    @classmethod
    def hyperparameters(cls) -> dict[str, Any]:
        """Names and defaults of what the constructor takes, own ones first.

        Example:
            >>> from come.methods import Tent
            >>> next(iter(Tent.hyperparameters().items()))
            ('keep', 1.0)
        """
        taken = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
        common = [p for p in inspect.signature(Method).parameters.values() if p.kind is p.KEYWORD_ONLY]
        names = {p.name for p in common}
        own = [p for p in taken if p.name not in names]
        passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())
        rest = common if passes_on else [p for p in taken if p.name in names]
        return {p.name: p.default for p in (*own, *rest)}

    def learning_rate(self, batch: int, batch_norm: bool) -> float:
        """The learning rate for a batch of that size, on a model with or without BatchNorm."""
        if self.lr is not None:
            return self.lr
        without, with_batch_norm = self.paper_lr
        if batch_norm:
            return with_batch_norm * (min(1.0, batch / 32) if self.scales_lr else 1.0)
        return without * (batch / 64 if self.scales_lr else 1.0)


_registry: Registry[type[Method]] = Registry("method", entry_points="come.methods")
M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Make a method available under its `name`, here and on the command line; usable as a decorator."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ConfigError(f"register takes a subclass of come.Method, got {shown(method)}")
    if not isinstance(getattr(method, "name", None), str):
        raise ConfigError(f"{method.__name__} has no name; give the class an attribute name = '...'")
    _registry.add(method.name, method)
    return method
