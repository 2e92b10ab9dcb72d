r"""NEO: subtracts the mean of the features that the stream has shown.

Murphy et al., "NEO: No-Optimization Test-Time Adaptation through Latent Re-Centering", ICLR 2026.

With features f, the classifier W f + b, and the running mean :math:`\bar f` of the features, this batch included, the answer is
:math:`W (f - \bar f) + b`. In logits z that is the same as

.. math:: z - c, \qquad c = \bar z - b, \qquad c \leftarrow c + s \left(\frac1n \sum_i (z_i - b) - c\right), \qquad
          s = \frac{n}{N + n + n_0} \text{ or } a

for a batch of n after N samples. So c is all that is remembered, K numbers, and starts at 0. The published cumulative mean has
:math:`n_0 = 0`, its continual variant a constant share a = 0.1 of each batch (`rate=0.1`; c then starts slowly).

Adapts a shift of the logits; no parameter of the model changes, and the objective is not used. Needs a model whose logits come
from one linear layer, for b. One forward per batch, BatchNorm on its source statistics.

* With :math:`n_0 = 0` the first batch is centred at itself: a single sample gets the answer b, whatever it shows, and so do
  equal samples. The default counts :math:`n_0 = 16` samples without a shift, which a stream of a few hundred forgets.
  `prior=0` is the published method.
* It takes the mean of the source's features to be the origin. Behind a ReLU it is not: there the average logit of the source
  is removed as well, a preference for the classes that the source predicts seldom.
* The mean holds the classes of the stream. On a stream of few classes, or sorted by class, what they have in common is
  subtracted with the shift, and the right class loses. Only the guard notices.

Deviation from the published code: `prior`, see above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from come.errors import require
from come.method import Context, Frozen, Method, Step, masked_mean, register
from come.model.heads import Head
from come.model.inputs import Inputs, at_least_float32
from come.select import Selector, nothing


@register
@dataclass(kw_only=True, eq=False)
class NEO(Method):
    """NEO; see the module.

    Args:
        prior: how many samples without a shift the running mean begins with, >= 0.
        rate: share of each batch in the running mean, in (0, 1]; None weighs all samples alike.
        head: the linear layer that gives the logits, or its name; None finds it.

    Example:
        >>> import come
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> classifier = come.adapt(model, NEO(prior=0), guard=False)
        >>> torch.allclose(classifier(torch.randn(10, 4)).mean(dim=0), model[2].bias, atol=1e-6)
        True
    """

    name = "neo"
    vectors_only = "its mean is of one feature vector per sample"
    by_stream = ("prior",)
    needs = "features"
    cost = "1f"
    descends = False
    minimizes = False
    batch_statistics = False
    select: Selector = nothing()
    prior: float = 16.0
    rate: float | None = None
    head: str | nn.Module | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.prior < torch.inf, "prior", self.prior, "a number of samples >= 0")
        require(self.rate is None or 0 < self.rate <= 1, "rate", self.rate, "in (0, 1], or None for all samples alike")

    def setup(self, ctx: Context) -> dict[str, Any]:
        """The layer whose bias is the answer to features of zero."""
        return {"head": Head(ctx.model.model, self.head)}

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:
        """Once, with one more forward: does that layer give the logits?"""
        if "checked" not in ctx.fixed:
            with torch.no_grad():
                ctx.features(x)
            ctx.fixed["checked"] = True

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """No shift."""
        return self._none(ctx)

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """The logits, shifted."""
        return self._shifted(ctx, ctx.forward(x))

    def frozen(self, ctx: Context) -> Frozen:
        """The shift as a part of the layer's bias."""
        shift = (ctx.state or self._none(ctx))["shift"]
        return Frozen(ctx.weights.detach(), bias=(ctx.fixed["head"].name, self._bias(ctx) - shift))

    @torch.no_grad()
    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Take the batch into the mean, then subtract it."""
        logits = ctx.forward(x)
        shift, seen, count = ctx.state["shift"], ctx.state["seen"], ctx.valid.sum()
        total = seen + count
        share = count / (total + self.prior).clamp_min(1) if self.rate is None else (count > 0) * self.rate
        values = at_least_float32(logits).masked_fill(logits.isneginf(), 0)  # a class that the model rules out stays so
        mean = (masked_mean(values, ctx.valid) - self._bias(ctx)).to(shift)
        ctx.state |= {"shift": shift + share * (mean - shift), "seen": total}
        return Step(self._shifted(ctx, logits))

    def _shifted(self, ctx: Context, logits: Tensor) -> Tensor:
        return (at_least_float32(logits) - ctx.state["shift"]).to(logits.dtype)

    def _none(self, ctx: Context) -> dict[str, Tensor]:
        bias = self._bias(ctx)
        return {"shift": torch.zeros_like(bias), "seen": bias.new_zeros(())}

    def _bias(self, ctx: Context) -> Tensor:
        """b, (K,); zeros without one."""
        linear: nn.Linear = ctx.fixed["head"].linear
        bias = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        return at_least_float32(bias)
