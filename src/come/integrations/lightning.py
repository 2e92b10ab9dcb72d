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
    """Adapt the classifier of a LightningModule while a trainer predicts or tests.

    During `trainer.predict` or `trainer.test`, a call of the classifier (`self(x)`, or `self.model(x)` with model="model")
    returns the logits of an adapter and adapts it. The module is not changed, and afterwards, also after an error, it is
    called as before. Each run begins with the source model. The trainer may keep its inference mode: the adapter has its own
    gradients. Each of several processes adapts separately, unless ranks=True.

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
        >>> Adapt("tent", model="model", objective="come")
        Adapt('tent', model='model', objective='come')
    """

    def __init__(self, method: Any = DEFAULT, *, model: str = "", **options: Any) -> None:
        self.method, self.model, self.options = method, model, options
        self.classifier: Adapter | None = None
        """The adapter of the last run: `health()`, `save()`, `export()`."""
        self._target: nn.Module | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the adapter in the place of the classifier."""
        try:
            target = pl_module.get_submodule(self.model)
        except AttributeError as error:
            known = ", ".join(name for name, _ in pl_module.named_children())
            raise ConfigError(
                f"model must name a module of {type(pl_module).__name__} ({known}), got {shown(self.model)}"
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

    on_test_start = on_predict_start

    def on_predict_end(self, *_: Any, **__: Any) -> None:
        """Restore the classifier."""
        if self._target is not None:
            vars(self._target).pop("forward", None)
            self._target = None

    on_test_end = on_exception = on_predict_end

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Adapt({self.method!r}, model={self.model!r}{options})"
