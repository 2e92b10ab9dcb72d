"""`Method`: a configuration and one function, `adapt`, which predicts a batch and adapts to it by its `Context`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from come import objectives
from come.errors import ConfigError, ModelError, require, require_int, require_number, shown
from come.model.batchnorm import StatisticsRule
from come.model.inputs import Inputs
from come.objectives import Objective
from come.optim import OptimizerFactory, adam, sgd
from come.registry import Registry
from come.select import Selector, norm_affine
from come.step.context import Context as Context


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
