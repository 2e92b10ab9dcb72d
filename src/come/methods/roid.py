"""ROID: weighted, and never far from the source.

Marsden, Döbler and Yang, "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior
Correction", WACV 2024.

    diversity   d_i = 1 - cos(average of p, p_i),  certainty c_i = -H_i,  both scaled to [0, 1] over the batch
    weight      w_i = exp(d_i c_i / T), and 0 where d_i is below its mean
    loss        sum_i w_i (S(m_i) + C(m(view of x_i), m_i)) / B
    S(m)        -sum_j p_j ln(p_j / (1 - p_j)),  p = exp m cut at 0.99      soft likelihood ratio
    theta      <- momentum theta + (1 - momentum) source                    weight ensembling
    answer      ln p + ln prior,  prior = smoothed mean of p over the batch

Adapts the affine parameters of normalization layers, with BatchNorm on batch statistics; needs images whose normalization is
known for the view of C (none with `consistency=False`). Two forwards and one backward per batch. The objective's masses m
replace the softmax in S, C and H: with "em" these are the published formulae.

Where the answer has positions (pixels), these are the samples i, and the view keeps every pixel in its place; the prior is of
batches of separate samples, so `prior_correction` must be False.

Deviations from the published code: the view is made of the whole batch and the weights mask it, where that code first cuts the
batch down (with BatchNorm its statistics are then of fewer samples); the prior multiplies probabilities, as in the paper,
where that code multiplies logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from come.errors import require
from come.images.augment import Augment, jitter
from come.images.normalization import MeanStd, Normalization
from come.method import Context, Method, Step, converted, masked_mean, register
from come.model.inputs import Inputs, at_least_float32


@register
@dataclass(kw_only=True, eq=False)
class ROID(Method):
    """ROID, with any objective.

    Args:
        normalization: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        consistency: also ask for the same answer on a view of each image.
        augment: makes views of images (1, B, C, H, W) in [0, 1] from a generator; None is a soft `come.images.augment.jitter`.
        momentum: how much of the adapted weights is kept at each step, in [0, 1].
        average: how much of the average of probabilities is kept at each step, in [0, 1].
        temperature: T of the weights, > 0.
        prior_correction: multiply the answer by the smoothed class prior of the batch.
        seed: of the views.

    Example:
        >>> import come
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 5))
        >>> come.adapt(model, ROID())(torch.rand(10, 3, 8, 8)).shape
        torch.Size([10, 5])
    """

    name = "roid"
    by_stream = ("momentum", "average", "temperature")
    needs = "images"
    cost = "2f 1b"
    paper_lr = (2.5e-4, 2.5e-4)
    normalization: converted[MeanStd, Normalization] = converted(Normalization.of, None)
    consistency: bool = True
    augment: Augment | None = None
    momentum: float = 0.99
    average: float = 0.9
    temperature: float = 1 / 3
    prior_correction: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum <= 1, "momentum", self.momentum, "in [0, 1]")
        require(0 <= self.average <= 1, "average", self.average, "in [0, 1]")
        require(self.temperature > 0, "temperature", self.temperature, "positive")

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:
        """The view needs images."""
        if self.consistency:
            self.normalization.check(x.image("roid's consistency"), "roid's consistency", first)

    @property
    def corrects(self) -> bool:
        """With `prior_correction`."""
        return self.prior_correction

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """A uniform average."""
        classes = ctx.classes(x)
        return {"average": torch.full((classes,), 1 / classes, device=ctx.device)}

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, weigh the samples, take one step, and go a little way back to the source."""
        logits = ctx.forward(x)
        probability = at_least_float32(logits.detach()).softmax(dim=1)
        weight = self._weight(ctx, probability, self.objective.entropy(logits.detach()))
        mass = self.objective.log_mass(logits)
        loss = soft_likelihood_ratio(mass)
        if self.consistency:
            images = self.normalization.images(x.image("roid"))
            augment = self.augment or jitter(strength=0.5, move=not ctx.positions, flip=0.0 if ctx.positions else 0.5)
            view = self.normalization.inputs(ctx.drawn(lambda one, generator: augment(one[None], generator)[0], images))
            loss = loss + self.objective.consistency(ctx.forward(x.with_image(view)), logits, symmetric=True)
        used = weight > 0
        ctx.descend((weight * loss).sum() / _counted(ctx).sum().clamp_min(1), go=used.any())
        ctx.weights = ctx.leaf(torch.lerp(ctx.weights, ctx.source, 1 - self.momentum))
        return Step(self._corrected(logits.detach()), loss, used)

    def _weight(self, ctx: Context, probability: Tensor, entropy: Tensor) -> Tensor:
        average, counted = ctx.state["average"], _counted(ctx)
        diversity = _unit(1 - F.cosine_similarity(average[None].to(probability), probability), counted)
        mean = masked_mean(probability, ctx.valid).to(average)
        ctx.state["average"] = torch.where(ctx.valid.any(), torch.lerp(mean, average, self.average), average)
        weight = (diversity * _unit(-entropy, counted) / self.temperature).exp()
        return torch.where(ctx.valid & (diversity >= masked_mean(diversity, counted)), weight, 0)

    def _corrected(self, logits: Tensor) -> Tensor:
        if not self.prior_correction:
            return logits
        log_p = at_least_float32(logits).log_softmax(dim=1)
        prior = log_p.exp().mean(dim=0)
        batch, classes = log_p.shape
        smooth = max(1 / batch, 1 / classes) / prior.max()
        prior = (prior + smooth) / (1 + smooth * classes)
        return (log_p + prior.log()).to(logits.dtype)


def soft_likelihood_ratio(mass: Tensor) -> Tensor:
    r"""Soft likelihood ratio of log-masses (..., M), :math:`-\sum_j p_j \ln(p_j / (1 - p_j))` with p cut at 0.99.

    Unlike the entropy it keeps a gradient for samples that are nearly certain.

    Example:
        >>> soft_likelihood_ratio(torch.tensor([0.5, 0.5]).log()).abs() < 1e-4
        tensor(True)
    """
    p = mass.exp().clamp_max(0.99)
    return -(p * (p / (1 - p) + 1e-5).log()).sum(dim=-1)


def _counted(ctx: Context) -> Tensor:
    """The rows (N,) that weights are relative to: all samples of the batch; of positions those that are not ignored."""
    return ctx.valid if ctx.positions else torch.ones_like(ctx.valid)


def _unit(values: Tensor, counted: Tensor) -> Tensor:
    """Scaled to [0, 1] over the rows in `counted`; 0 where all are equal."""
    low, high = (torch.where(counted, values, limit) for limit in (torch.inf, -torch.inf))
    low, high = low.amin(), high.amax()
    return (values - low) / (high - low).clamp_min(torch.finfo(values.dtype).tiny)
