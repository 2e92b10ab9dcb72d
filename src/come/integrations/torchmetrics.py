"""The metrics of `come.metrics` that torchmetrics lacks, as `Metric`s: for collections, Lightning, and several processes.

Every one takes logits (B, K) and labels (B,), -1 for an outlier; an `objective` ("come", "em", or a `come.Objective`), whose
confidence ranks the samples; and the options of `torchmetrics.Metric`. It computes a 0-d tensor in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    """Collects the confidence of each sample, and whether it counts as positive."""

    metric: Callable[[Tensor, Tensor], float]
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
        """Add logits (B, K) and labels (B,), -1 for an outlier."""
        self.confidence.append(self.objective.confidence(preds.detach()))
        self.positive.append(self._positive(preds, target))

    def _positive(self, preds: Tensor, target: Tensor) -> Tensor:
        return preds.argmax(dim=1) == target

    def compute(self) -> Tensor:
        """The metric of all samples so far, 0-d."""
        confidence = dim_zero_cat(self.confidence) if self.confidence else torch.zeros(0)
        positive = dim_zero_cat(self.positive) if self.positive else torch.zeros(0, dtype=torch.bool)
        return torch.tensor(self.metric(confidence, positive), device=self.device)


class FPR(_Confidence):
    """The paper's FPR, `come.metrics.fpr`: the share of wrong samples that pass where 95% of the correct ones do.

    Example:
        >>> metric = FPR(objective="em")
        >>> metric.update(torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, -1]))
        >>> metric.compute()
        tensor(0.)
    """

    metric = staticmethod(fpr)


class FPR95(_Confidence):
    """OpenOOD's FPR at 95% TPR, `come.metrics.fpr95`: the share of outliers that pass where 95% of the inliers do.

    Example:
        >>> metric = FPR95()
        >>> metric.update(torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1, -1]))
        >>> metric.compute()
        tensor(1.)
    """

    metric = staticmethod(fpr95)

    def _positive(self, preds: Tensor, target: Tensor) -> Tensor:
        return target >= 0


class AURC(_Confidence):
    """Area under the risk-coverage curve, `come.metrics.aurc`. An outlier is an error.

    Example:
        >>> metric = AURC()
        >>> metric.update(torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
        >>> metric.compute()
        tensor(0.2500)
    """

    metric = staticmethod(aurc)


class AbstentionAccuracy(_Confidence):
    """Accuracy on the most confident share in (0, 1], `come.metrics.abstention_accuracy`. An outlier is an error.

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
        self.metric = partial(abstention_accuracy, coverage=coverage)
