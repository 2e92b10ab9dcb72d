"""Norm: BatchNorm statistics of the test batch.

Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation", NeurIPS 2020, and Nado et
al., "Evaluating prediction-time batch normalization for robustness under covariate shift", 2020.

Adapts the statistics of BatchNorm, no parameter; needs nothing; one forward per batch. A model without BatchNorm is unchanged.
A layer that gets one value per channel (a batch of one at 1x1 resolution) keeps its source statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

from come.method import register
from come.methods.source import Source


@register
@dataclass(kw_only=True, eq=False)
class Norm(Source):
    """The source model with the batch's own BatchNorm statistics.

    Example:
        >>> import come, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        >>> come.adapt(model, Norm(statistics="batch"))(torch.randn(64, 4) + 5).mean(0).abs().max() < 1e-5
        tensor(True)
    """

    name = "norm"
    changes = True
    batch_statistics = True
