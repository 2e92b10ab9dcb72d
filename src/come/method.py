"""The one base class. A method writes `adapt`; everything that must never go wrong is here, once.

step(x):  check the input -> batch statistics on, gradients on -> adapt(x) -> Step
reset():  weights, moments, averages, counters: as they were after construction
close():  the user's model, exactly as it was handed in
"""

from __future__ import annotations

import hashlib
import inspect
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from come import objectives, optim, state
from come.batchnorm import batch_norms, batch_statistics
from come.errors import ClosedError, ComeError, ConfigError, InputError, ModelError, require
from come.inputs import Input, batch_size, checked, expected_dims, logits_of, together
from come.objectives import Objective
from come.optim import OptimizerFactory
from come.select import Selector, norm_affine

if TYPE_CHECKING:
    from typing_extensions import Self

    from come.guard import Guard

LARGEST_GRADIENT = 1e15
"""A gradient beyond this is refused: Adam would square it."""


class Step(NamedTuple):
    """What one adaptation step returns; all tensors are detached."""

    logits: Tensor
    """(B, K): the prediction, what is scored."""
    loss: Tensor | None = None
    """(B,): the objective of each sample, or None if the method has none."""
    used: Tensor | None = None
    """(B,) bool: which samples drove the update, or None if nothing is ever updated."""
    valid: Tensor | None = None
    """(B,) bool: which samples were fit to be answered; None without a guard. The logits of the others are zero."""


class Common(TypedDict, total=False):
    """The hyper-parameters that every method takes; see `Method`."""

    objective: str | Objective
    select: Selector | None
    lr: float | None
    optimizer: str | OptimizerFactory | None
    steps: int
    episodic: bool
    reset_every: int | None


@contextmanager
def untracked() -> Iterator[None]:
    """No gradients, and ordinary tensors even where the user is in `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


_adapted: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Method]] = weakref.WeakKeyDictionary()


class Method(ABC):
    """A classifier that adapts while it predicts.

    The model is adapted in place. It is given back as it was by `close()`, at the end of a `with` block, or when the adapter
    is garbage-collected. Dropout and drop-path stay off; BatchNorm uses the statistics of the batch during a step only.

    Args:
        model: any classifier that maps a batch to logits (B, K), or to an object or mapping with `logits`.
        objective: a name (`come.objectives.names()`) or an `Objective`.
        select: which parameters adapt; None is the method's own choice (`selects`).
        lr: learning rate; None is the paper's for the model's family: 1e-3 x batch/64 for models with LayerNorm, GroupNorm
            and the like, 2.5e-4 for models with BatchNorm (2.5e-4 x batch/32 below a batch of 32).
        optimizer: "sgd", "adam", or a function (parameters, lr) -> torch optimiser such as `come.optim.sgd(momentum=0.5)`;
            None is the method's own choice (`optimises`).
        steps: how often each batch is adapted to.
        episodic: reset before each batch.
        reset_every: reset after this many batches, again and again; None is the method's own choice (`resets`), mostly never.

    To write a method, subclass it, give it a `name` and write `adapt`; keep what it remembers in `self.state`, a dictionary
    of tensors, whose first value `initial_state` returns. Store your own arguments *before* calling `super().__init__`.
    `come.testing.check_method` checks the contract.

    Example:
        >>> class Sharpen(Method):
        ...     name = "sharpen"
        ...     def adapt(self, x):
        ...         logits = self.forward(x)
        ...         loss = self.objective.entropy(logits)
        ...         self.descend(loss.mean())
        ...         return Step(logits, loss, torch.ones_like(loss, dtype=torch.bool))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> with Sharpen(model, objective="em", lr=0.1) as method:
        ...     logits = method(torch.randn(5, 4))
        >>> logits.shape
        torch.Size([5, 3])
    """

    name: ClassVar[str]
    """The name in the registry."""
    needs: ClassVar[str] = "nothing"
    """What it needs beside a model and batches, in a few words: source batches, images, features."""
    cost: ClassVar[str] = "1f 1b"
    """What a batch costs: so many forwards (f) and backwards (b) of it, at the default hyper-parameters."""
    descends: ClassVar[bool] = True
    """Whether the method changes parameters by gradient descent, and so needs some to be selected."""
    minimises: ClassVar[bool] = True
    """Whether the objective matters to what the method does, and not only to how its output is scored."""
    batch_statistics: ClassVar[bool] = True
    """Whether BatchNorm layers use the statistics of the batch."""
    selects: ClassVar[Selector] = norm_affine()
    """What `select=None` means."""
    paper_lr: ClassVar[tuple[float, float]] = (1e-3, 2.5e-4)
    """What `lr=None` means: for models without and with BatchNorm."""
    scales_lr: ClassVar[bool] = True
    """Whether that goes with the size of the batch; False where a step is not taken on the batch as a whole."""
    optimises: ClassVar[optim.sgd | optim.adam] = optim.sgd()
    """What `optimizer=None` means."""
    resets: ClassVar[int | None] = None
    """What `reset_every=None` means."""
    stays: tuple[str, ...] = ()
    """Beginnings of the names in `state` that stay on the CPU when the model moves."""
    seed: int = 0
    """Where random numbers start, for methods that draw some; these take it as an argument."""

    def __init__(
        self,
        model: nn.Module,
        *,
        objective: str | Objective = "come",
        select: Selector | None = None,
        lr: float | None = None,
        optimizer: str | OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        reset_every: int | None = None,
    ) -> None:
        self.objective = objectives.get(objective)
        build = optim.get(type(self).optimises if optimizer is None else optimizer)
        require(lr is None or 0 < lr < math.inf, "lr", lr, "a positive number, or None for the paper's")
        require(isinstance(steps, int) and steps >= 1, "steps", steps, "a whole number, at least 1")
        whole = reset_every is None or (isinstance(reset_every, int) and reset_every >= 1)
        require(whole, "reset_every", reset_every, "a whole number of batches, at least 1, or None")
        self.lr, self.steps, self.episodic = lr, steps, episodic
        self.reset_every = self.resets if reset_every is None else reset_every

        self.model = model
        self.parameters = _selected(model, type(self).selects if select is None else select, self.name, self.descends)
        self._modules = list(model.modules())
        self.batch_norms = batch_norms(model)
        with untracked():
            self.source_values = {name: p.detach().clone() for name, p in self.parameters.items()}
            """The adapted parameters as they were handed in."""
        self._close = weakref.finalize(self, _give_back, self.parameters, self.source_values, _flags(model))
        self._close.atexit = False
        _adapted[model] = weakref.ref(self)

        self.count = 0
        """Batches seen since construction or reset."""
        self.state: dict[str, Tensor] = {}
        """What the method remembers between batches, beside weights and moments."""
        self.guard: Guard | None = None
        """Checks what arrives and undoes a collapse; `come.adapt` puts one here."""
        self.valid = torch.ones(0, dtype=torch.bool)
        """(B,) bool: which samples of the batch in hand may drive an update."""
        self._ok = torch.ones((), dtype=torch.bool)
        self._lock = threading.RLock()
        self._lr = 0.0
        self._inner = 0
        try:
            model.eval()
            model.requires_grad_(False)
            for p in self.parameters.values():
                p.requires_grad_(True)
            with self._running(batch=0):
                # The rate is set anew at each step, for the size of its batch.
                self.optimizer = build(list(self.parameters.values()), 1.0) if self.parameters else None
                if self.optimizer is not None:
                    optim.prepare(self.optimizer)
                self.state = self.initial_state()
        except BaseException:
            self.close()
            raise

    # ---- what a method writes ----

    @abstractmethod
    def adapt(self, x: Input) -> Step:
        """Predict the batch `x` and adapt to it, once. Called by `step` with gradients on."""

    def initial_state(self) -> dict[str, Tensor]:
        """What `state` holds before the first batch and after `reset`."""
        return {}

    # ---- what a method calls ----

    def forward(self, x: Input, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits (B, K) of the model on `x`, checked.

        With `weights`, these take the place of the adapted parameters of their names for this call, under `no_grad`.
        """
        if weights is None:
            return logits_of(self.call(x), batch_size(x))
        with torch.no_grad(), _exchanged([(self.parameters[name], value) for name, value in weights.items()]):
            return logits_of(self.call(x), batch_size(x))

    def call(self, x: Input) -> Any:
        """What the model returns for `x`."""
        inputs = (x,) if isinstance(x, Tensor) else x
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        try:
            return self.model(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            expected = expected_dims(self._modules)
            if isinstance(x, Tensor) and expected is not None and x.ndim != expected:
                raise InputError(
                    f"the input has {x.ndim} dimensions, shape {tuple(x.shape)}, but the model's convolutions take "
                    f"{expected}, the batch first; for a single image pass x[None]"
                ) from error
            if isinstance(error, ValueError) and not isinstance(
                error, ComeError
            ):  # such as a norm layer that is given one value per channel
                raise InputError(f"{type(self.model).__name__} cannot take a batch of this shape: {error}") from error
            raise

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """Gradient of the scalar `loss` with respect to the adapted parameters, in their order."""
        if not loss.requires_grad:
            raise ModelError(
                f"the loss does not depend on the {len(self.parameters)} selected parameter(s) of "
                f"{type(self.model).__name__}; does its forward run under no_grad or detach its output?"
            )
        params = list(self.parameters.values())
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]

    def descend(self, loss: Tensor, go: Tensor | None = None) -> None:
        """One optimiser step down the gradient of the scalar `loss`.

        Where the 0-d bool tensor `go` is false nothing moves, neither weights nor moments; it is read on the device.
        """
        self.descend_along(self.gradient(loss), go)

    def descend_along(self, gradient: list[Tensor], go: Tensor | None = None) -> None:
        """One optimiser step along a given gradient; see `descend`."""
        assert self.optimizer is not None
        params = self.parameters.values()
        if self.guard is not None:
            finite = self._bearable(gradient)
            self._ok = self._ok.to(finite.device) & finite
            go = finite if go is None else go & finite
        for p, g in zip(params, gradient, strict=True):
            # Fused kernels on a GPU want both laid out alike, and convolutions give gradients in their own order.
            p.grad = g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
        optim.step(self.optimizer, self._lr, go)
        for p in params:
            p.grad = None
        if torch.is_autocast_enabled(self._device.type):
            torch.clear_autocast_cache()  # it holds casts of the weights as they were before this step

    def generator(self) -> torch.Generator:
        """A random generator on the model's device, seeded by `seed` and the number of the batch: replays are exact."""
        digest = hashlib.sha256(f"{self.seed} {self.count} {self._inner}".encode()).digest()
        return torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "big"))

    @torch.no_grad()
    def _bearable(self, gradient: list[Tensor]) -> Tensor:
        """Whether a step along the gradient leaves finite weights, on the device: no NaN in it, nothing near an overflow."""
        params = [p.detach() for p in self.parameters.values()]
        slope, size = (together(torch._foreach_norm(part, math.inf)) for part in (gradient, params))
        room = _room(tuple(p.dtype for p in params), slope.device)
        return ((slope < LARGEST_GRADIENT) & ((slope + 1) * self._lr < room) & (size < room)).all()  # false for NaN

    @untracked()
    def recover(self, where: Tensor, *, moments: bool = True) -> None:
        """Put the weights back to their source values, and the moments to zero, where the 0-d bool tensor is true."""
        for name, p in self.parameters.items():
            p.copy_(torch.where(where, self.source_values[name], p))
        if moments and self.optimizer is not None:
            for value in (value for kept in self.optimizer.state.values() for value in kept.values()):
                if isinstance(value, Tensor):
                    value.masked_fill_(where.to(value.device), 0)

    # ---- what a user calls ----

    def __call__(self, x: Input) -> Tensor:
        """Adapt to the batch `x` and return its logits (B, K)."""
        return self.step(x).logits

    def step(self, x: Input) -> Step:
        """Adapt to the batch `x` and return logits, per-sample losses and which samples were used."""
        if not self._close.alive:
            raise ClosedError(
                f"this {self.name} adapter is closed and has given its model back; adapt() the model again"
            )
        x = checked(x)
        with self._lock:  # two threads take turns
            self._follow_device()
            if any(module.training for module in self._modules):
                self.model.eval()
            with self._running(batch_size(x)):
                if self.episodic or (self.reset_every is not None and self.count >= self.reset_every):
                    self.reset()
                out = self._step(x) if self.guard is None else self._guarded(x, self.guard)
            self.count += 1
            if self.guard is not None:
                self.guard.keep(self)
        return out

    def _step(self, x: Input) -> Step:
        self._lr = self.learning_rate(batch_size(x)) * (1.0 if self.guard is None else self.guard.scale)
        if self.guard is None:
            self.valid = torch.ones(batch_size(x), dtype=torch.bool, device=self._device)
        for inner in range(self.steps):
            self._inner = inner
            out = self.adapt(x)
        return Step(*(None if value is None else value.detach() for value in out))  # type: ignore[arg-type]

    def _guarded(self, x: Input, guard: Guard) -> Step:
        """A step as a transaction: what is not finite changes nothing."""
        guard.act(self)
        x, valid = guard.admit(x)
        everything = torch.ones(batch_size(x), dtype=torch.bool, device=self._device)
        self.valid = everything if valid is None else valid
        self._ok = torch.ones((), dtype=torch.bool, device=self._device)
        before = dict(self.state)
        if guard.frozen:
            with torch.no_grad():
                out = Step(self.forward(x), used=torch.zeros_like(self.valid))
        else:
            out = self._step(x)
        ok = self._ok & (out.logits.isfinite().all(dim=1) | ~self.valid).all()
        self._keep_where(ok, before)
        return guard.watch(self, x, out._replace(valid=self.valid), ok)

    @untracked()
    def _keep_where(self, ok: Tensor, before: dict[str, Tensor]) -> None:
        """Put the state back to what it was, where the step was not `ok`."""
        if ok.device.type == "cpu":  # asking it costs nothing
            if not ok:
                self.state = before
            return
        for name, value in self.state.items():
            old = before.get(name)
            if old is not value and value.device == ok.device:
                known = old is not None and old.shape == value.shape
                self.state[name] = torch.where(ok, value, old if known else torch.zeros_like(value))  # type: ignore[arg-type]

    def placed(self, name: str, value: Tensor) -> Tensor:
        """The entry `name` of `state` on the device where it belongs."""
        return value.to("cpu" if self.stays and name.startswith(self.stays) else self._device)

    def uncertainty(self, logits: Tensor) -> Tensor:
        """How little is known of each sample, (B, K) -> (B,) in [0, 1]; abstain where it is large."""
        return self.objective.uncertainty(logits)

    def learning_rate(self, batch: int) -> float:
        """The learning rate for a batch of that size."""
        if self.lr is not None:
            return self.lr
        without, with_batch_norm = self.paper_lr
        if self.batch_norms:
            return with_batch_norm * (min(1.0, batch / 32) if self.scales_lr else 1.0)
        return without * (batch / 64 if self.scales_lr else 1.0)

    @untracked()
    def reset(self) -> None:
        """Back to the state after construction: weights, moments, averages, counters."""
        with self._lock:
            for name, p in self.parameters.items():
                p.copy_(self.source_values[name])
            if self.optimizer is not None:
                self.optimizer.state.clear()
                optim.prepare(self.optimizer)
            self.state = self.initial_state()
            self.count = 0
            if self.guard is not None:
                self.guard.forget()

    def health(self) -> dict[str, float]:
        """Counters and gauges of the guard as flat numbers; waits for the device. Without a guard, the steps only."""
        with self._lock:
            return {"steps": float(self.count)} if self.guard is None else self.guard.health()

    def close(self, *, keep: bool = False) -> None:
        """Give the model back as it was handed in: weights, modes, gradient flags. May be called again.

        Args:
            keep: leave the adapted weights in the model.
        """
        if self._close.alive:
            if keep:
                self.source_values.update({name: p.detach().clone() for name, p in self.parameters.items()})
            self._close()
            _adapted.pop(self.model, None)

    def __enter__(self) -> Self:
        """Enter a `with` block; on its end the model is given back."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the model back."""
        self.close()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the model; what the method remembers follows."""
        self.model.to(*args, **kwargs)
        return self

    def eval(self) -> Self:
        """Do nothing: an adapter is always in evaluation mode. It is here so that it can stand where a model stood."""
        return self

    # ---- state ----

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next step depends on, as a flat dictionary of copied tensors."""
        with self._lock:
            return state.collect(self)

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict()` of an adapter of the same method on the same source model, bit for bit."""
        with self._lock, untracked():
            state.restore(self, saved)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file, whole or not at all."""
        with self._lock:
            state.save(self, path)

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a file that `save` wrote; a file that does not fit changes nothing."""
        with self._lock, untracked():
            state.load(self, path)

    # ---- configuration ----

    @classmethod
    def hyperparameters(cls) -> dict[str, Any]:
        """Names and defaults of what the constructor takes, own ones first: the constructor is the configuration."""
        found: dict[str, Any] = {}
        only_common = False
        for parent in cls.__mro__:
            if (
                "__init__" not in vars(parent)
                or not issubclass(parent, Method)
                or (only_common and parent is not Method)
            ):
                continue
            for p in inspect.signature(parent).parameters.values():
                if p.kind is inspect.Parameter.KEYWORD_ONLY:
                    found.setdefault(p.name, p.default)
                elif p.kind is inspect.Parameter.VAR_KEYWORD:
                    only_common = "Common" in str(p.annotation)  # what else its parent takes is not passed on
        return found

    def __repr__(self) -> str:
        """Method, objective, what adapts and at which learning rate."""
        if not self.descends:
            return f"{type(self).__name__}({type(self.model).__name__}, objective={self.objective!r})"
        if self.lr is not None:
            rate = f"{self.lr:g}"
        elif self.batch_norms:
            rate = f"{self.paper_lr[1]:g} (the paper's for BatchNorm models)"
        else:
            scale = " x batch/64" if self.scales_lr else ""
            rate = f"{self.paper_lr[0]:g}{scale} (the paper's for models without BatchNorm)"
        size = sum(p.numel() for p in self.parameters.values())
        return (
            f"{type(self).__name__}({type(self.model).__name__}, objective={self.objective!r}, lr={rate}, "
            f"adapts {size:,} values in {len(self.parameters)} tensors)"
        )

    # ---- inside ----

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @contextmanager
    def _running(self, batch: int) -> Iterator[None]:
        layers = self.batch_norms if self.batch_statistics else []
        with torch.inference_mode(False), torch.enable_grad(), batch_statistics(layers, batch):
            yield

    def _follow_device(self) -> None:
        """After the user has moved or cast the model, bring snapshots, moments and state along."""
        for name, p in self.parameters.items():
            if self.source_values[name].device == p.device and self.source_values[name].dtype == p.dtype:
                return  # the first one tells
            break
        for name, p in self.parameters.items():
            self.source_values[name] = self.source_values[name].to(p)
            moments = self.optimizer.state[p] if self.optimizer is not None else {}
            for key, value in moments.items():
                if isinstance(value, Tensor):
                    moments[key] = value.to(p) if value.shape == p.shape else value.to(p.device)
        self.state = {name: self.placed(name, value) for name, value in self.state.items()}


def masked_mean(values: Tensor, used: Tensor) -> Tensor:
    """Mean of `values` (B, ...) over the samples in `used` (B,); 0, with a zero gradient, where there are none.

    Example:
        >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    mask = used.view(-1, *[1] * (values.ndim - 1))
    return torch.where(mask, values, 0).sum(dim=0) / used.sum().clamp_min(1)


@lru_cache(maxsize=64)  # to copy numbers to a GPU is to wait for it: once is enough
def _room(dtypes: tuple[torch.dtype, ...], device: torch.device) -> Tensor:
    """How large a step or a weight of each type may be, with a thousand such steps to spare."""
    with torch.inference_mode(False):
        return torch.tensor([torch.finfo(dtype).max / 1e3 for dtype in dtypes], dtype=torch.float64, device=device)


# ---- checks ----


def _selected(model: nn.Module, select: Selector, method: str, descends: bool) -> dict[str, nn.Parameter]:
    """The parameters that `select` names in `model`, after checking that the model can be adapted at all."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}; come adapts a torch.nn.Module")
    owner = _adapted.get(model)
    if owner is not None and (alive := owner()) is not None:
        raise ModelError(
            f"this {type(model).__name__} is being adapted already, by {alive.name}; close() that adapter first, "
            "or adapt copy.deepcopy(model)"
        )
    if any(p.is_inference() for p in model.parameters()):
        raise ModelError(
            f"the parameters of {type(model).__name__} were made under torch.inference_mode and can never have a "
            "gradient; build or load the model outside of it"
        )
    if not callable(select):
        raise ConfigError(f"select is {select!r}; give a function from a model to its parameters by name")
    chosen = select(model)
    known = dict(model.named_parameters())
    for name, p in chosen.items():
        if known.get(name) is not p:
            raise ConfigError(f"select chose {name!r}, which is not a parameter of {type(model).__name__}")
        if not p.is_floating_point():
            raise ConfigError(f"select chose {name!r} of type {p.dtype}; only floating-point parameters can adapt")
    if descends and not chosen:
        raise ModelError(
            f"{method} has nothing to adapt: {select!r} finds no parameter in {type(model).__name__}. It needs "
            "normalisation layers with weights; or choose what adapts yourself, e.g. select=come.select.everything()"
        )
    return chosen


@contextmanager
def _exchanged(pairs: list[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    # Not torch.func.functional_call: a module that the model holds under two names does not come back from it.
    before = [p.data for p, _ in pairs]
    try:
        for p, value in pairs:
            p.data = value
        yield
    finally:
        for (p, _), value in zip(pairs, before, strict=True):
            p.data = value


# ---- giving the model back ----

Flags = tuple[list[tuple[nn.Parameter, bool, Tensor | None]], list[tuple[nn.Module, bool]]]


def _flags(model: nn.Module) -> Flags:
    return [(p, p.requires_grad, p.grad) for p in model.parameters()], [(m, m.training) for m in model.modules()]


@untracked()
def _give_back(params: dict[str, nn.Parameter], source: dict[str, Tensor], flags: Flags) -> None:
    for name, p in params.items():
        p.copy_(source[name])
    for p, requires_grad, grad in flags[0]:
        p.requires_grad_(requires_grad)
        p.grad = grad
    for module, training in flags[1]:
        module.training = training
