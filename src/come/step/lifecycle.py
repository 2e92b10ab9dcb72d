"""`Lifecycle`: what an `Adapter` and a `Fleet` have in common."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from come.errors import ClosedError
from come.step.engine import Engine

if TYPE_CHECKING:
    from typing_extensions import Self


class Lifecycle:
    """One engine, until it is closed."""

    _engine: Engine
    _closed = False

    def uncertainty(self, logits: Tensor) -> Tensor:
        """How little is known of each answer, (B, K, ...) -> (B, ...) in [0, 1]; to abstain, `calibrate` a threshold."""
        return self._engine.objective.uncertainty(self._engine.classes_last(logits))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {self._engine.method.name} adapter is closed; adapt() the model again")

    def _end(self) -> None:
        self._engine.compiled.forget()
        self._closed = True

    def close(self) -> None:
        """End it; the model is as it was handed in."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Enter a `with` block, which closes it at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
