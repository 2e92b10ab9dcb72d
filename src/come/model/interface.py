"""`LikeModel`: lets an adapter stand where its model stood."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from come.model.locks import exclusive

if TYPE_CHECKING:
    from typing_extensions import Self

READS = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "get_parameter", "get_buffer"})
"""Methods of a model that an adapter has, too: they give the source model's tensors, and run nothing."""
MOVES = frozenset(
    {
        *("float", "double", "half", "bfloat16", "type"),
        *("cpu", "cuda", "xpu", "ipu", "mtia", "share_memory", "requires_grad_"),
    }
)
"""Methods of a model that change it and return it, as `to`: those of an adapter do the same, and return the adapter."""


class LikeModel:
    """Has the public attributes of `model`, and those of its methods that neither run nor return it."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The classifier."""

    @exclusive
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the model; what the adapter remembers follows. So do `cuda`, `cpu`, `half` and the others in `MOVES`."""
        return self._moved("to", *args, **kwargs)

    @exclusive
    def _moved(self, name: str, *args: Any, **kwargs: Any) -> Self:
        getattr(self.model, name)(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Self:
        """Do nothing: an adapter always predicts in evaluation mode and adapts. Use `predict` to not adapt."""
        return self

    def eval(self) -> Self:
        """Do nothing, see `train`."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Other public attributes are those of the model, so that an adapter can stand where a model stood.

        Not so its methods, which would run the model without adaptation, or return it: only those in `READS` and `MOVES` are
        there.
        """
        if name.startswith("_") or "_engine" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.model, name)
        if name in MOVES:
            return partial(self._moved, name)
        if getattr(value, "__self__", None) is self.model and name not in READS:
            raise AttributeError(
                f"{name}() is a method of the unadapted {type(self.model).__name__}, and not of its adapter; if that is meant, "
                f"call it as classifier.model.{name}()"
            )
        return self if value is self.model else value
