"""EATA: reliable, non-redundant samples.

Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022.

    reliable    H_i < E0                                       E0 = margin * ln K
    redundant   |cos(p_i, average of used p)| >= redundancy
    loss        mean over used i of exp(E0 - H_i) H_i  +  beta * sum_j F_j (theta_j - theta0_j)^2
    F           mean over source batches of (d/dtheta  cross-entropy(f(x), argmax f(x)))^2

Adapts the affine parameters of normalisation layers, with BatchNorm on batch statistics; needs source batches for F (none
with `beta=0`, which is the ETA of the paper); one forward and one backward per batch. H is the objective's entropy in the
filter, the weight and the loss; the redundancy filter uses softmax probabilities whatever the objective, as published.

Deviations from the published code: `reset()` also clears the average of probabilities, which survives there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import ConfigError, InputError, require
from come.inputs import Input, checked
from come.method import Common, Method, Step, masked_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EATA(Method):
    """EATA, with any objective.

    Args:
        model: see `Method`.
        source: batches of unlabelled source data, of the same form as the batches to come; the paper uses 2,000 images.
        margin: E0 as a share of ln K, > 0.
        redundancy: a sample is redundant from this absolute cosine on, > 0.
        beta: strength of the anti-forgetting term, >= 0; with 0 no source data is needed.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> method = EATA(model, source=[torch.randn(16, 4)], margin=1.0)
        >>> method.step(torch.randn(10, 4)).logits.shape
        torch.Size([10, 3])
    """

    name = "eata"
    needs = "source"

    def __init__(
        self,
        model: nn.Module,
        *,
        source: Iterable[Input] | None = None,
        margin: float = 0.4,
        redundancy: float = 0.05,
        beta: float = 2000.0,
        **common: Unpack[Common],
    ) -> None:
        require(margin > 0, "margin", margin, "positive: a share of ln K")
        require(redundancy > 0, "redundancy", redundancy, "positive: a cosine")
        require(0 <= beta < math.inf, "beta", beta, "at least 0")
        if beta and source is None:
            raise ConfigError(
                f"eata needs source batches for its Fisher matrix (beta is {beta:g}): pass source=, an iterable of about "
                "2,000 unlabelled source images in batches, or beta=0 to adapt without the anti-forgetting term"
            )
        self.source, self.margin, self.redundancy, self.beta = source, margin, redundancy, beta
        super().__init__(model, **common)

    def initial_state(self) -> dict[str, Tensor]:
        """No average yet; the Fisher matrix is estimated once and kept."""
        fisher = {name: value for name, value in self.state.items() if name.startswith("fisher.")}
        if self.beta and not fisher:
            fisher = self._fisher()
        return {**fisher, "averaged": torch.zeros((), dtype=torch.bool, device=self._device)}

    def adapt(self, x: Input) -> Step:
        """Predict, filter, then one step down the weighted entropy plus the anti-forgetting term."""
        logits = self.forward(x)
        entropy = self.objective.entropy(logits)
        margin = self.margin * math.log(logits.shape[1])
        probability = logits.detach().float().softmax(dim=1)
        average = self.state.get("average", torch.zeros_like(probability[0]))
        averaged = self.state["averaged"]

        redundant = averaged & (F.cosine_similarity(average[None], probability).abs() >= self.redundancy)
        used = self.valid & (entropy < margin) & ~redundant
        weight = (margin - entropy.detach()).exp()
        some = used.any()
        loss = masked_mean(weight * entropy, used)
        self.descend(loss + self._forgetting() if self.beta else loss, go=some)

        new = masked_mean(probability, used)
        kept = torch.where(averaged, 0.9 * average + 0.1 * new, new)
        self.state["average"] = torch.where(some, kept, average)
        self.state["averaged"] = averaged | some
        return Step(logits, entropy, used)

    def _forgetting(self) -> Tensor:
        """The anti-forgetting term: beta * sum F (theta - theta0)^2."""
        terms = [
            (self.state[f"fisher.{name}"] * (p - self.source_values[name]).square()).sum()
            for name, p in self.parameters.items()
        ]
        return self.beta * torch.stack(terms).sum()

    def _fisher(self) -> dict[str, Tensor]:
        """Mean over the source batches of the squared gradient of the cross-entropy towards the model's own prediction."""
        total = [torch.zeros_like(p) for p in self.parameters.values()]
        batches = 0
        for x in self.source or ():
            x = checked(x)
            try:
                logits = self.forward(x)
            except TypeError as error:
                raise InputError(
                    f"the model cannot take a source batch ({error}); source batches are handed to it as they are: if your "
                    "loader gives (images, labels), pass source=(x for x, _ in loader)"
                ) from error
            loss = F.cross_entropy(logits.float(), logits.argmax(dim=1))
            torch._foreach_add_(total, [g.square() for g in self.gradient(loss)])
            batches += 1
        if not batches:
            raise ConfigError(
                "source holds no batch (an exhausted iterator?); pass about 2,000 source images in batches"
            )
        return {f"fisher.{name}": value / batches for name, value in zip(self.parameters, total, strict=True)}
