r"""AdaDEM: entropy minimization with a normalized reward, held back by the running answer of each class.

Li, Ma and Xiang, "Decoupled Entropy Minimization", NeurIPS 2025.

The entropy of p = softmax z is :math:`-\sum_j p_j z_j + \log \sum_j e^{z_j}`: a term that pulls towards the leading class and
one that pushes back. AdaDEM divides by the size of the first term's gradient, and pushes back by what the stream has answered
for the predicted class k. With a matrix A (K, K), its rows 1/K at first, for each class c that the batch predicts

.. math:: A_c \leftarrow (1 - \pi) A_c + \pi \, \mathrm{mean}\{p_i : k_i = c\}, \qquad
          \delta = \sum_j \left| p_j \left(z_j - \sum_l p_l z_l + 1\right) \right|, \qquad
          L = -\frac1\delta \sum_j (p_j - A_{kj}) z_j

where the gradient flows through p and z, and A and :math:`\delta` are constants. :math:`\delta \ge 1`: the sum without the
bars is 1. With `variant="mec"` there is no division; with "norm" p takes the place of A, which is the gradient of the plain
entropy over :math:`\delta` (the value of L is then 0). L is negative, without a lower bound, and no entropy: `Step.loss` is the
objective's entropy.

Adapts the affine parameters of normalization layers, with BatchNorm on batch statistics; needs nothing; one forward and one
backward per batch. Memory: K x K numbers for each stream, 4 MB for 1,000 classes, 1.9 GB for 22,000. Nothing ages A but new
samples of a class, so a domain is remembered for about 1/pi batches that predict it.

With another objective, the mass m takes the place of softmax z, and its logarithm that of z, and A is (K, M): "em" is the
published loss, which does not change when all logits do.

A method, and not an objective, although the paper puts L in the place of the entropy in EATA, SAR and DeYO: A is memory, and an
objective here has none; and L can feed no margin, so these methods would need the entropy beside it, for which samples and with
which weights the paper does not say. `reward` and `remembered` are functions for a method of your own that decides that.

The optimizer is that of the code that was recorded, which is not the authors': SGD with Nesterov momentum. The paper's plain
variant is `optimizer=come.optim.sgd(momentum=0)` at 50 to 100 times the rate for a ViT-B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from come.errors import require
from come.method import Context, Method, Step, masked_mean, register
from come.model.inputs import Inputs
from come.objectives import MASKED
from come.optim import OptimizerFactory, adam, sgd

Variant = Literal["adadem", "mec", "norm"]


@register
@dataclass(kw_only=True, eq=False)
class AdaDEM(Method):
    """AdaDEM in the place of Tent; see the module.

    Args:
        variant: "adadem", "mec" (no division) or "norm" (the division alone).
        rate: pi, share of a batch in the rows of the classes that it predicts, in (0, 1].

    Example:
        >>> import come
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> classifier = come.adapt(model, AdaDEM(objective="em"))
        >>> _ = classifier(torch.randn(10, 4))
        >>> classifier.state["average"].shape
        torch.Size([3, 3])
    """

    name = "adadem"
    by_stream = ("rate",)
    optimizer: str | sgd | adam | OptimizerFactory = sgd(nesterov=True)
    variant: Variant = "adadem"
    rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        words = get_args(Variant)
        require(self.variant in words, "variant", self.variant, f"one of {', '.join(words)}")
        require(0 < self.rate <= 1, "rate", self.rate, "in (0, 1]")

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """Each class is answered evenly."""
        classes = ctx.classes(x)
        outcomes = self.objective.log_mass(torch.zeros(1, classes, device=ctx.device)).shape[1]
        return {"average": torch.full((classes, outcomes), 1 / outcomes, device=ctx.device)}

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, take the batch into the averages, then one step."""
        logits = ctx.forward(x)
        mass = self.objective.log_mass(logits)
        label = logits.detach().argmax(dim=1)
        average = remembered(ctx.state["average"], mass.detach().exp(), label, ctx.valid, self.rate)
        held = mass.detach().exp() if self.variant == "norm" else average[label].to(mass)
        loss = reward(mass, held, normalize=self.variant != "mec")
        ctx.descend(masked_mean(loss, ctx.valid), go=ctx.valid.any())
        ctx.state["average"] = average
        return Step(logits, -(mass.exp() * mass).sum(dim=1), ctx.valid)


def reward(mass: Tensor, held: Tensor, *, normalize: bool = True) -> Tensor:
    """The loss of each sample, (B,), of log-masses (B, M) and what holds each back, (B, M); divided by delta if `normalize`.

    Example:
        >>> mass = torch.tensor([[0.7, 0.2, 0.1]]).log()
        >>> reward(mass, torch.full((1, 3), 1 / 3))
        tensor([-0.5645])
    """
    p, known = mass.exp(), mass > MASKED / 2
    z = torch.where(known, mass, 0)  # a class that the model rules out neither pulls nor pushes
    loss = -((p - held) * z).sum(dim=1)
    if not normalize:
        return loss
    fixed, likely = z.detach(), p.detach()
    delta = (likely * (fixed - (likely * fixed).sum(dim=1, keepdim=True) + 1)).abs().sum(dim=1)
    return loss / delta


def remembered(average: Tensor, p: Tensor, label: Tensor, valid: Tensor, rate: float) -> Tensor:
    """The averages (K, M) with the masses p (B, M) of the `valid` samples (B,) in the rows of their labels (B,).

    Example:
        >>> p = torch.tensor([[0.8, 0.2], [0.6, 0.4]])
        >>> remembered(torch.full((2, 2), 0.5), p, torch.tensor([0, 0]), torch.tensor([True, True]), 0.5)
        tensor([[0.6000, 0.4000],
                [0.5000, 0.5000]])
    """
    weight = valid.to(average)
    count = average.new_zeros(len(average)).index_add(0, label, weight)[:, None]
    total = torch.zeros_like(average).index_add(0, label, torch.where(valid[:, None], p, 0).to(average))
    return torch.where(count > 0, average + rate * (total / count.clamp_min(1) - average), average)
