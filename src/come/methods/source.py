"""No Adapt: the source model as it is.

Adapts nothing; needs nothing; one forward per batch.
"""

from __future__ import annotations

import torch

from come.inputs import Input
from come.method import Method, Step
from come.select import nothing


class Source(Method):
    """The source model in evaluation mode.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> x = torch.randn(2, 4)
        >>> torch.equal(Source(model)(x), model(x).detach())
        True
    """

    name = "source"
    cost = "1f"
    descends = False
    minimises = False
    batch_statistics = False
    selects = nothing()

    @torch.no_grad()
    def adapt(self, x: Input) -> Step:
        """Predict."""
        return Step(self.forward(x))
