"""Metrics of `come.metrics` that torchmetrics lacks, as its `Metric`s: for collections, for Lightning, over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from come import objectives
from come.errors import missing, require
from come.metrics import abstention_accuracy, aurc, fpr, fpr95
from come.objectives import Objective

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat
except ModuleNotFoundError as error:
    raise missing("come.integrations.torchmetrics", error, "lightning") from error


class _Confidence(Metric):
    """Keeps the confidence of each sample, and whether it counts as positive."""

    is_differentiable = False
    full_state_update = False
    higher_is_better = False
    confidence: list[Tensor]
    positive: list[Tensor]

    def __init__(self, objective: str | Objective = "come", **options: Any) -> None:
        super().__init__(**options)
        self.objective = objectives.get(objective)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("positive", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take in logits (B, K) and labels (B,), -1 for an outlier."""
        self.confidence.append(self.objective.confidence(preds.detach()))
        self.positive.append(self._positive(preds, target))

    def _positive(self, preds: Tensor, target: Tensor) -> Tensor:
        return preds.argmax(dim=1) == target

    def _of(self, metric: Callable[[Tensor, Tensor], float]) -> Tensor:
        confidence = dim_zero_cat(self.confidence) if self.confidence else torch.zeros(0)
        positive = dim_zero_cat(self.positive) if self.positive else torch.zeros(0, dtype=torch.bool)
        return torch.tensor(metric(confidence, positive), device=self.device)


class FPR(_Confidence):
    """The paper's FPR, `come.metrics.fpr`: the share of wrong samples that pass where 95% of the right ones do.

    Args:
        objective: whose confidence ranks the samples: "come", "em", or a `come.Objective`.
        **options: of `torchmetrics.Metric`.

    Example:
        >>> metric = FPR(objective="em")
        >>> metric.update(torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, -1]))
        >>> metric.compute()
        tensor(0.)
    """

    def compute(self) -> Tensor:
        """0-d, in [0, 1]."""
        return self._of(fpr)


class FPR95(_Confidence):
    """OpenOOD's FPR at 95% TPR, `come.metrics.fpr95`: the share of outliers that pass where 95% of the inliers do.

    Args:
        objective: as in `FPR`.
        **options: of `torchmetrics.Metric`.

    Example:
        >>> metric = FPR95()
        >>> metric.update(torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1, -1]))
        >>> metric.compute()
        tensor(1.)
    """

    def compute(self) -> Tensor:
        """0-d, in [0, 1]."""
        return self._of(fpr95)

    def _positive(self, preds: Tensor, target: Tensor) -> Tensor:
        return target >= 0


class AURC(_Confidence):
    """Area under the risk-coverage curve, `come.metrics.aurc`. An outlier is an error.

    Args:
        objective: as in `FPR`.
        **options: of `torchmetrics.Metric`.

    Example:
        >>> metric = AURC()
        >>> metric.update(torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
        >>> metric.compute()
        tensor(0.2500)
    """

    def compute(self) -> Tensor:
        """0-d, in [0, 1]."""
        return self._of(aurc)


class AbstentionAccuracy(_Confidence):
    """Accuracy on the most confident share, `come.metrics.abstention_accuracy`. An outlier is an error.

    Args:
        coverage: share of the samples that are answered, in (0, 1].
        objective: as in `FPR`.
        **options: of `torchmetrics.Metric`.

    Example:
        >>> metric = AbstentionAccuracy(0.5)
        >>> metric.update(torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
        >>> metric.compute()
        tensor(1.)
    """

    higher_is_better = True

    def __init__(self, coverage: float, objective: str | Objective = "come", **options: Any) -> None:
        require(0 < coverage <= 1, "coverage", coverage, "in (0, 1]")
        super().__init__(objective, **options)
        self.coverage = coverage

    def compute(self) -> Tensor:
        """0-d, in [0, 1]."""
        return self._of(lambda confidence, correct: abstention_accuracy(confidence, correct, self.coverage))
