"""ROID: weighted, and never far from the source.

Marsden, Döbler and Yang, "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior
Correction", WACV 2024.

    diversity   d_i = 1 - cos(average of p, p_i),  certainty c_i = -H_i,  both scaled to [0, 1] over the batch
    weight      w_i = exp(d_i c_i / T), and 0 where d_i is below its mean
    loss        sum_i w_i (S(m_i) + C(m(view of x_i), m_i)) / B
    S(m)        -sum_j p_j ln(p_j / (1 - p_j)),  p = exp m cut at 0.99      soft likelihood ratio
    theta      <- momentum theta + (1 - momentum) source                    weight ensembling
    answer      ln p + ln prior,  prior = smoothed mean of p over the batch

Adapts the affine parameters of normalisation layers, with BatchNorm on batch statistics; needs images whose normalisation is
known for the view of C (none with `consistency=False`). Two forwards and one backward per batch.

The objective's masses m take the place of the softmax in S, C and H: with "em" these are the published formulae.

Deviations from the published code: the view is made of the whole batch and the weights mask it, where that code cuts the batch
down first (with BatchNorm its statistics are then of fewer samples); the prior multiplies probabilities, as in the paper, where
that code multiplies logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.augment import Augment, jitter
from come.errors import require
from come.images import Normalisation
from come.inputs import Input, exact, image_of, with_image
from come.method import Common, Method, Step, untracked

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ROID(Method):
    """ROID, with any objective.

    Args:
        model: see `Method`.
        normalisation: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        consistency: also ask for the same answer on a view of each image.
        augment: what makes the view, (images (1, B, C, H, W) in [0, 1], generator) -> images; None is a soft
            `come.augment.jitter`.
        momentum: how much of the adapted weights is kept at each step, in [0, 1].
        average: how much of the average of probabilities is kept at each step, in [0, 1].
        temperature: T of the weights, > 0.
        prior_correction: multiply the answer by the smoothed class prior of the batch.
        seed: of the views.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 5))
        >>> ROID(model)(torch.rand(10, 3, 8, 8)).shape
        torch.Size([10, 5])
    """

    name = "roid"
    needs = "images"
    cost = "2f 1b"
    paper_lr = (2.5e-4, 2.5e-4)

    def __init__(
        self,
        model: nn.Module,
        *,
        normalisation: tuple[Sequence[float], Sequence[float]] | Normalisation | None = None,
        consistency: bool = True,
        augment: Augment | None = None,
        momentum: float = 0.99,
        average: float = 0.9,
        temperature: float = 1 / 3,
        prior_correction: bool = True,
        seed: int = 0,
        **common: Unpack[Common],
    ) -> None:
        require(0 <= momentum <= 1, "momentum", momentum, "in [0, 1]")
        require(0 <= average <= 1, "average", average, "in [0, 1]")
        require(temperature > 0, "temperature", temperature, "positive")
        self.normalisation = Normalisation.of(normalisation)
        self.consistency, self.momentum, self.average, self.temperature = consistency, momentum, average, temperature
        self.prior_correction, self.seed = prior_correction, seed
        self.augment: Augment = augment or jitter(strength=0.5)
        super().__init__(model, **common)

    def adapt(self, x: Input) -> Step:
        """Predict, weigh, one step, and a little way back to the source."""
        if self.consistency and not self.count:
            self.normalisation.check(image_of(x, "roid's consistency"), "roid's consistency")
        logits = self.forward(x)
        probability = exact(logits.detach()).softmax(dim=1)
        weight = self._weight(probability, self.objective.entropy(logits.detach()))
        mass = self.objective.log_mass(logits)
        loss = soft_likelihood_ratio(mass)
        if self.consistency:
            images = self.normalisation.images(image_of(x, "roid's consistency"))
            view = self.normalisation.inputs(self.augment(images[None], self.generator())[0])
            loss = loss + self.objective.consistency(self.forward(with_image(x, view)), logits, symmetric=True)
        used = weight > 0
        self.descend((weight * loss).sum() / len(weight), go=used.any())
        self._ensemble()
        return Step(self._corrected(logits, probability), loss, used)

    def _weight(self, probability: Tensor, entropy: Tensor) -> Tensor:
        uniform = torch.full_like(probability[0], 1 / probability.shape[1])
        average = self.state.get("average", uniform).to(probability)
        diversity = _unit(1 - F.cosine_similarity(average[None], probability))
        self.state["average"] = torch.lerp(probability.mean(dim=0), average, self.average)
        weight = (diversity * _unit(-entropy) / self.temperature).exp()
        return torch.where(self.valid & (diversity >= diversity.mean()), weight, 0)

    @untracked()
    def _ensemble(self) -> None:
        source = [self.source_values[name] for name in self.parameters]
        torch._foreach_lerp_(list(self.parameters.values()), source, 1 - self.momentum)

    def _corrected(self, logits: Tensor, probability: Tensor) -> Tensor:
        if not self.prior_correction:
            return logits
        prior = probability.mean(dim=0)
        batch, classes = probability.shape
        smooth = max(1 / batch, 1 / classes) / prior.max()
        prior = (prior + smooth) / (1 + smooth * classes)
        return (probability.log() + prior.log()).to(logits.dtype)


def soft_likelihood_ratio(mass: Tensor) -> Tensor:
    r"""Soft likelihood ratio of log-masses (..., M): :math:`-\sum_j p_j \ln(p_j / (1 - p_j))`, p cut at 0.99.

    Unlike the entropy it keeps a gradient for samples that are nearly certain.

    Example:
        >>> soft_likelihood_ratio(torch.tensor([0.5, 0.5]).log()).abs() < 1e-4
        tensor(True)
    """
    p = mass.exp().clamp_max(0.99)
    return -(p * (p / (1 - p) + 1e-5).log()).sum(dim=-1)


def _unit(values: Tensor) -> Tensor:
    """Scaled to [0, 1] over the batch; 0 where all are equal."""
    low, high = values.aminmax()
    return (values - low) / (high - low).clamp_min(torch.finfo(values.dtype).tiny)
