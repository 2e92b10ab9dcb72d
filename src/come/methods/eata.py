"""EATA: reliable, non-redundant samples.

Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022.

    reliable    H_i < E0                                       E0 = margin * ln K
    redundant   |cos(p_i, average of used p)| >= redundancy
    loss        mean over used i of exp(E0 - H_i) H_i  +  beta * sum_j F_j (theta_j - theta0_j)^2
    F           mean over source batches of (d/dtheta  cross-entropy(f(x), argmax f(x)))^2

Adapts the affine parameters of normalization layers, with BatchNorm on batch statistics; needs source batches for F (none with
`beta=0`, which is the ETA of the paper); one forward and one backward per batch. H is the objective's entropy in the filter,
the weight and the loss; the redundancy filter uses softmax probabilities whatever the objective, as published.

Where the answer has positions (pixels), these are the samples i; one step is taken for all images of a batch.

Deviations from the published code: `reset()` also clears the average of probabilities, which survives there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from come.errors import ConfigError, InputError, require
from come.method import Context, Method, Step, masked_mean, register
from come.model.batchnorm import BatchStatistics
from come.model.inputs import Input, Inputs, at_least_float32
from come.model.positions import in_parts


@register
@dataclass(kw_only=True, eq=False)
class EATA(Method):
    """EATA, with any objective.

    Args:
        source: batches of unlabelled source data in the form of the test batches, read once and not kept; the paper uses 2,000
            images.
        margin: E0 as a share of ln K, > 0.
        redundancy: a sample is redundant from this absolute cosine on, > 0.
        beta: strength of the anti-forgetting term, >= 0; with 0 no source data is needed.

    Example:
        >>> import come
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> classifier = come.adapt(model, EATA(source=[torch.randn(16, 4)], margin=1.0))
        >>> classifier(torch.randn(10, 4)).shape
        torch.Size([10, 3])
    """

    name = "eata"
    by_stream: ClassVar[tuple[str, ...]] = ("margin", "redundancy")
    needs = "source"
    source: Iterable[Input] | None = None
    margin: float = 0.4
    redundancy: float = 0.05
    beta: float = 2000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.margin > 0, "margin", self.margin, "a positive share of ln K")
        require(self.redundancy > 0, "redundancy", self.redundancy, "a positive cosine")
        require(0 <= self.beta < math.inf, "beta", self.beta, ">= 0")

    def setup(self, ctx: Context) -> dict[str, Any]:
        """The Fisher matrix."""
        return {"fisher": self._fisher(ctx)} if self.beta else {}

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """No average yet."""
        return {
            "average": torch.zeros(ctx.classes(x), device=ctx.device),
            "averaged": torch.zeros((), dtype=torch.bool, device=ctx.device),
        }

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, filter, then one step down the weighted entropy plus the anti-forgetting term."""
        logits, entropy, used, loss = self.filtered(ctx, x)
        ctx.descend(loss, go=used.any())
        return Step(logits, entropy, used)

    def filtered(self, ctx: Context, x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits (B, K), entropies (B,), used samples (B,) and the loss, 0-d; takes the batch into the average."""
        logits = ctx.forward(x, sparing=True)
        entropy = self.objective.entropy(logits)
        margin = self.margin * math.log(logits.shape[1])
        average, averaged = ctx.state["average"], ctx.state["averaged"]

        def of_rows(logits: Tensor, reliable: Tensor) -> tuple[Tensor, Tensor]:
            """Which rows (N,) are used, and the sum of their probabilities (K,)."""
            probability = at_least_float32(logits).softmax(dim=1)
            redundant = averaged & (F.cosine_similarity(average[None], probability).abs() >= self.redundancy)
            used = reliable & ~redundant
            return used, torch.where(used[:, None], probability, 0).sum(dim=0)

        used, total = in_parts(of_rows, logits.detach(), ctx.valid & (entropy < margin))
        weight = (margin - entropy.detach()).exp()
        some = used.any()
        again = ctx.again(x, used, logits)
        loss = masked_mean(weight * (entropy if again is None else self.objective.entropy(again)), used)
        if self.beta:
            loss = loss + self.beta * (ctx.fixed["fisher"] * (ctx.weights - ctx.source).square()).sum()

        new = (total / used.sum().clamp_min(1)).to(average)
        kept = torch.where(averaged, 0.9 * average + 0.1 * new, new)
        ctx.state["average"] = torch.where(some, kept, average)
        ctx.state["averaged"] = averaged | some
        return logits, entropy, used, loss

    def _fisher(self, ctx: Context) -> Tensor:
        """Mean over the source batches of the squared gradient of the cross-entropy with the model's own prediction."""
        if self.source is None:
            raise ConfigError(
                f"eata needs source batches for its Fisher matrix (beta is {self.beta:g}): pass source=, an iterable of "
                "about 2,000 unlabelled source images in batches, or beta=0 to adapt without the anti-forgetting term"
            )
        total, batches = torch.zeros_like(ctx.source), 0
        for batch in self.source:
            try:
                logits = ctx.forward(ctx.model.read((batch,)), statistics=BatchStatistics())
            except (TypeError, InputError) as error:
                raise InputError(
                    f"source batches must be inputs of the model, which failed on one ({error}): if your loader gives "
                    "(images, labels), pass source=(x for x, _ in loader)"
                ) from error
            loss = F.cross_entropy(at_least_float32(logits), logits.argmax(dim=1))
            total += ctx.gradient(loss).square()
            batches += 1
        if not batches:
            raise ConfigError("source must hold about 2,000 images in batches, got no batch (an exhausted iterator?)")
        return total / batches
