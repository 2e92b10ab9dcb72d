"""Adapt in `trainer.predict` and `trainer.test` of Lightning."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from come.adapter import Adapter, adapt
from come.errors import ConfigError, missing, shown
from come.methods import DEFAULT

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise missing("come.integrations.lightning", error, "lightning") from error


class Adapt(Callback):
    """Put test-time adaptation around the classifier of a LightningModule while a trainer predicts or tests.

    From the first batch to the last one of `trainer.predict` or `trainer.test`, a call of the classifier (`self(x)`, or
    `self.model(x)` with model="model") returns the logits of an adapter and adapts it. The module is not changed, and
    afterwards, also after an error, it is called as before. Each run begins with the source model. The trainer may keep its
    inference mode: the adapter has gradients of its own. Each process of several adapts by itself, unless ranks=True.

    Args:
        method: as in `come.adapt`.
        model: the name of the classifier in the LightningModule, "model" for `self.model`; "" is the module itself.
        **options: as in `come.adapt`: objective, guard, lr, ...

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> class Net(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        ...     def predict_step(self, batch):
        ...         return self.model(batch)
        >>> callback = Adapt("tent", model="model", objective="come")
        >>> callback
        Adapt('tent', model='model', objective='come')
    """

    def __init__(self, method: Any = DEFAULT, *, model: str = "", **options: Any) -> None:
        self.method, self.model, self.options = method, model, options
        self.classifier: Adapter | None = None
        """The adapter of the last run: `health()`, `save()`, `export()`."""
        self._target: nn.Module | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._begin(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._begin(pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End."""
        self._end()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End."""
        self._end()

    def _begin(self, module: LightningModule) -> None:
        try:
            target = module.get_submodule(self.model)
        except AttributeError as error:
            known = ", ".join(name for name, _ in module.named_children())
            raise ConfigError(
                f"model must name a module of {type(module).__name__} ({known}), got {shown(self.model)}"
            ) from error
        classifier = self.classifier = adapt(target, self.method, **self.options)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            del target.forward  # for the adapter, which calls the model: its own forward
            try:
                return classifier(*args, **kwargs)
            finally:
                target.forward = forward

        target.forward = forward
        self._target = target

    def _end(self) -> None:
        if self._target is not None:
            vars(self._target).pop("forward", None)
            self._target = None

    def __repr__(self) -> str:
        """As it was made."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Adapt({self.method!r}, model={self.model!r}{options})"
