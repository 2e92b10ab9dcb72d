r"""TDA: two small caches of the features seen so far correct the answer.

Karmanov et al., "Efficient Test-Time Adaptation of Vision-Language Models", CVPR 2024.

With the unit features v of the model's last layer and its answer p = softmax z, for the class c = argmax p of a sample:

.. math:: z' = z + \alpha_p \sum_{i \in P} e^{-\beta_p (1 - v \cdot v_i)} \, \mathrm{onehot}(c_i)
                 - \alpha_n \sum_{i \in N} e^{-\beta_n (1 - v \cdot v_i)} \, [p_i > \mathrm{floor}]

    P  for each class the `positive` samples of the lowest entropy H(p)
    N  the same, `negative` of them, of the samples of middling entropy: between 0.2 and 0.5 of the largest, ln K. Each speaks
       against all classes that it gave more than `floor`, since it was not sure of any

Made for CLIP, whose features are those of the image tower; works with every model whose logits come from one linear layer.
Adapts the answer, through the caches; no parameter of the model changes. One forward per batch, BatchNorm on its source
statistics. The objective is not used. Memory: K x (positive + negative) features and K x negative x K marks. A batch enters the
caches before it is answered, as a single sample does in the published code: with batches of one the two do the same.

Deviations from the published code: it divides entropies by log2 K instead of ln K, so that its bounds 0.2 and 0.5 are 0.29 and
0.72 of the largest, as with `quirks=True`; and on the shifts of ImageNet it averages the surest tenth of 64 AugMix views of an
image, where this has one. Its constants for ImageNet are the defaults here; it has others for each data set. `alpha` is in the
units of the logits: a model with a smaller logit scale, which is less sure, is corrected by more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import require, require_int
from come.method import Context, Method, Step, register
from come.methods.t3a import EMPTY, lowest
from come.model.heads import Head
from come.model.inputs import Inputs, at_least_float32
from come.objectives import Softmax
from come.select import Selector, nothing


@register
@dataclass(kw_only=True, eq=False)
class TDA(Method):
    """Training-free dynamic adapter.

    Args:
        positive: sure samples that each class keeps, at least 1.
        negative: doubtful samples that each class keeps, at least 1.
        alpha: weight of the sure ones, >= 0.
        beta: how fast their weight falls with the distance, >= 0.
        negative_alpha: weight of the doubtful ones, >= 0.
        negative_beta: how fast their weight falls with the distance, >= 0.
        low: least entropy of a doubtful sample, relative to the largest, in [0, 1].
        high: its largest entropy, in [low, 1].
        floor: least probability of a class that a doubtful sample speaks against, in [0, 1).
        quirks: measure the entropy as the published code does.
        head: the linear layer that gives the logits, or its name; None finds it.

    Example:
        >>> import come
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> classifier = come.adapt(model, TDA(positive=2))
        >>> classifier(torch.randn(10, 4)).shape
        torch.Size([10, 3])
        >>> classifier.state["sure_entropy"].shape  # a place for each class and sample; 1e9 where it is empty
        torch.Size([3, 2])
    """

    name = "tda"
    vectors_only = "its cache holds one feature vector per sample"
    unexported = "its answers compare features with those in its caches; it leaves the model as it is"
    needs = "features"
    cost = "1f"
    descends = False
    minimizes = False
    batch_statistics = False
    select: Selector = nothing()
    positive: int = 3
    negative: int = 2
    alpha: float = 2.0
    beta: float = 5.0
    negative_alpha: float = 0.117
    negative_beta: float = 1.0
    low: float = 0.2
    high: float = 0.5
    floor: float = 0.03
    quirks: bool = False
    head: str | nn.Module | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("positive", self.positive, 1)
        require_int("negative", self.negative, 1)
        for name in ("alpha", "beta", "negative_alpha", "negative_beta"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")
        require(0 <= self.low <= self.high <= 1, "low", self.low, f"in [0, 1] and at most high, {self.high}")
        require(0 <= self.floor < 1, "floor", self.floor, "in [0, 1)")

    def setup(self, ctx: Context) -> dict[str, Any]:
        """The layer whose input is compared."""
        return {"head": Head(ctx.model.model, self.head)}

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """Empty caches."""
        classes, width = ctx.fixed["head"].linear.weight.shape
        rows = at_least_float32(ctx.fixed["head"].linear.weight.detach())
        sizes = {"sure": self.positive, "doubtful": self.negative}
        empty = {name: rows.new_zeros(classes, size, width) for name, size in sizes.items()}
        empty |= {f"{name}_entropy": rows.new_full((classes, size), EMPTY) for name, size in sizes.items()}
        return empty | {"against": rows.new_zeros(classes, self.negative, classes)}

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """Correct the model's answer by the caches."""
        features, logits = ctx.features(x)
        return self._corrected(ctx.state, _unit(features), logits)

    @torch.no_grad()
    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Put the batch into the caches, then answer it."""
        features, logits = ctx.features(x)
        unit, p = _unit(features), at_least_float32(logits).softmax(dim=1)
        entropy, label = Softmax().entropy(logits), p.argmax(dim=1)
        share = entropy / (math.log2 if self.quirks else math.log)(p.shape[1])
        doubtful = ctx.valid & (share > self.low) & (share < self.high)
        ctx.state |= _with(ctx.state, "sure", label, torch.where(ctx.valid, entropy, EMPTY), {"sure": unit})
        entering = {"doubtful": unit, "against": (p > self.floor).to(p)}
        ctx.state |= _with(ctx.state, "doubtful", label, torch.where(doubtful, entropy, EMPTY), entering)
        return Step(self._corrected(ctx.state, unit, logits))

    def _corrected(self, state: dict[str, Tensor], unit: Tensor, logits: Tensor) -> Tensor:
        """The logits (B, K) with what the caches say of these unit features (B, d)."""
        sure = self.alpha * _affinity(state, "sure", unit, self.beta).sum(dim=2)
        doubtful = _affinity(state, "doubtful", unit, self.negative_beta)
        against = self.negative_alpha * doubtful.flatten(1) @ state["against"].to(unit).flatten(0, 1)
        return (at_least_float32(logits) + sure - against).to(logits)


def _unit(features: Tensor) -> Tensor:
    return F.normalize(at_least_float32(features), dim=1)


def _affinity(state: dict[str, Tensor], cache: str, unit: Tensor, beta: float) -> Tensor:
    """How near each sample is to those of a cache, (B, K, size) in [0, 1]; 0 to an empty place."""
    near = torch.einsum("bd,ksd->bks", unit, state[cache].to(unit))
    return torch.where(state[f"{cache}_entropy"] < EMPTY, torch.exp(beta * (near - 1)), 0)


def _with(
    state: dict[str, Tensor], cache: str, label: Tensor, entropy: Tensor, entering: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The entries of a cache after a batch."""
    kept, least = lowest(state[f"{cache}_entropy"], label, entropy)
    found = {f"{cache}_entropy": least}
    for name, rows in entering.items():
        found[name] = torch.cat([state[name].flatten(0, 1), rows.to(state[name])])[kept].view_as(state[name])
    return found
