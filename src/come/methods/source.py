"""No Adapt: the source model as it is.

Adapts nothing; needs nothing; one forward per batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from come.method import Context, Method, Step, register
from come.model.inputs import Inputs
from come.select import Selector, nothing


@register
@dataclass(kw_only=True, eq=False)
class Source(Method):
    """The source model in evaluation mode.

    Example:
        >>> import come
        >>> model = torch.nn.Linear(4, 3)
        >>> x = torch.randn(2, 4)
        >>> torch.equal(come.adapt(model, Source())(x), model(x).detach())
        True
    """

    name = "source"
    cost = "1f"
    descends = False
    minimizes = False
    changes = False
    batch_statistics = False
    select: Selector = nothing()

    @torch.no_grad()
    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict."""
        return Step(ctx.forward(x))
