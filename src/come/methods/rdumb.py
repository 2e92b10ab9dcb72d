"""RDumb: EATA with a reset every 1000 batches.

Press et al., "RDumb: A simple approach that questions our progress in continual test-time adaptation", NeurIPS 2023.

    EATA without its anti-forgetting term (ETA), and reset() after every `reset_every` batches

Any other method does the same with `reset_every`: `come.adapt(model, "sar", reset_every=1000)`.

Adapts what EATA adapts; needs nothing; one forward and one backward per batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from come.method import Common
from come.methods.eata import EATA

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RDumb(EATA):
    """ETA with a periodic reset.

    Args:
        model: see `Method`.
        margin: see `EATA`.
        redundancy: see `EATA`.
        **common: see `Method`; `reset_every` is 1000 here.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> method = RDumb(model, reset_every=2)
        >>> for _ in range(3):
        ...     _ = method(torch.randn(10, 4))
        >>> method.count
        1
    """

    name = "rdumb"
    needs = "nothing"
    resets = 1000

    def __init__(
        self, model: nn.Module, *, margin: float = 0.4, redundancy: float = 0.05, **common: Unpack[Common]
    ) -> None:
        super().__init__(model, margin=margin, redundancy=redundancy, beta=0.0, **common)
