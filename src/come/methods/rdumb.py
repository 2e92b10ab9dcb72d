"""RDumb: EATA with a reset every 1000 batches.

Press et al., "RDumb: A simple approach that questions our progress in continual test-time adaptation", NeurIPS 2023.

    EATA without its anti-forgetting term (ETA), and reset() after every `reset_every` batches

Any other method does the same with `reset_every`: `come.adapt(model, "sar", reset_every=1000)`.

Adapts what EATA adapts; needs nothing; one forward and one backward per batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from come.method import register
from come.methods.eata import EATA


@register
@dataclass(kw_only=True, eq=False)
class RDumb(EATA):
    """ETA with a periodic reset.

    Args:
        margin: see `EATA`.
        redundancy: see `EATA`.
        beta: see `EATA`; 0 here, so that no source data is needed.
        reset_every: 1000 here.

    Example:
        >>> import come, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> classifier = come.adapt(model, RDumb(reset_every=2))
        >>> for _ in range(3):
        ...     _ = classifier(torch.randn(10, 4))
        >>> classifier.count
        1
    """

    name = "rdumb"
    needs = "nothing"
    beta: float = 0.0
    reset_every: int | None = 1000
