"""`Method`: a configuration, and the function `adapt`, which predicts a batch and adapts to it through a `Context`."""

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
    """The result of one adaptation step; all tensors are detached."""

    logits: Tensor
    """(B, K), or (B, K, *P) with positions, such as the pixels (H, W) of an image: the prediction."""
    loss: Tensor | None = None
    """(B, *P): the objective of each sample, at each position; None if the method has none."""
    used: Tensor | None = None
    """(B, *P) bool: the samples, or positions, that drove the update; None if the method never updates."""
    valid: Tensor | None = None
    """(B,) bool: the samples with an answer; None without a guard. All logits of the others are -1e4: least certain."""
    abstain: Tensor | None = None
    """(B, *P) bool: the answers not to rely on; None before `Adapter.calibrate`."""


class Frozen(NamedTuple):
    """What `Adapter.export` puts into a copy of the model, so that it computes the same as `Method.predict`."""

    weights: Tensor
    """(P,) of the adapted parameters."""
    statistics: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({})
    """Mean and variance (C,) by the number of the BatchNorm layer, if the method has its own."""
    head: tuple[str, Tensor] | None = None
    """Name and new weights (K, d) of the linear layer that gives the logits; it gets no bias."""


Given = TypeVar("Given")
Kept = TypeVar("Kept")


class converted(Generic[Given, Kept]):  # noqa: N801 - reads as the value it is
    """A dataclass field that converts its values, and its default: `objective="em"` becomes a `Softmax()`."""

    def __init__(self, convert: Callable[[Given], Kept], default: Given) -> None:
        self.convert, self.default = convert, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, method: object | None, owner: type | None = None) -> Kept:
        """The converted value; of the class, the default."""
        found: Kept = self.default if method is None else getattr(method, self.name)  # type: ignore[assignment]
        return found

    def __set__(self, method: object, value: Given) -> None:
        """Convert and store."""
        setattr(method, self.name, self.convert(value))


def masked_mean(values: Tensor, used: Tensor) -> Tensor:
    """Mean of `values` (N, ...) over the rows in `used` (N,); 0, with a zero gradient, if there are none.

    Example:
        >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    mask = used if values.ndim == 1 else used.view(-1, *[1] * (values.ndim - 1))
    return torch.where(mask, values, 0).sum(dim=0) / used.sum().clamp_min(1)


@dataclass(kw_only=True, eq=False)
class Method(ABC):
    """A test-time adaptation method: a configuration, and the function `adapt`.

    To write one, subclass it, set `name` and write `adapt`; arguments of its own are dataclass fields. Memory between batches
    is `ctx.state`, which `initial_state` begins; `setup` computes what is needed once, such as statistics of source data.
    `come.testing.check_method` checks the contract.

    Args:
        objective: a name (`come.objectives.names()`) or an `Objective`.
        select: a function from the model to a dict of the parameters to adapt, by name, whether or not they require gradients.
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
