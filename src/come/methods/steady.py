r"""Steady: COME that keeps its answers spread, stays near the source, and learns which classes come together.

With the masses m_i of a batch (the opinion's K + 1), their average :math:`\bar m` and a running average a of it:

.. math:: L = \frac1n \sum_i H(m_i) + \lambda \sum_k \bar m_k \ln a_k, \qquad
          \theta \leftarrow \theta - \eta \, \partial L, \qquad
          \theta \leftarrow \theta + \rho (\theta_0 - \theta)

The second term is the entropy of the averaged answer, negated: what all samples claim at once becomes dearer, so the collapse
into one class does not pay. The pull :math:`\rho` bounds how far a long stream can go. Together they allow ten times Tent's
rate.

The answer is corrected by what the batch says about its classes. Two samples of a batch agree more often than samples of
different batches if classes come together (frames of a video, a sorted list): that excess, :math:`r`, is the correlation within
a batch, and makes the classes of the batch a Dirichlet-multinomial with mean :math:`\mu` (the long-run average of p) and
:math:`\alpha = (1 - r) / r`. From the n - 1 others, counted by their own corrected answers q:

.. math:: \pi_{ik} = \frac{\alpha \mu_k + \sum_{j \ne i} q_{jk}}{\alpha + n - 1}, \qquad
          q_i = \mathrm{softmax}(f_i + \ln \pi_i - \ln \mu)

Where classes come at random r is 0 and the answer is the model's own.

Adapts the affine parameters of normalization layers, with BatchNorm on batch statistics; needs nothing; one forward and one
backward per batch. Any objective; made for "come". See docs/steady.md for how it was found, what each part does, and where it
fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from come.errors import ModelError, require, require_int
from come.inputs import Inputs, exact
from come.method import Context, Frozen, Method, Step, leaf, masked_mean, register

TINY = 1e-6


@register
@dataclass(kw_only=True, eq=False)
class Steady(Method):
    """Steady, see the module.

    Args:
        diversity: lambda, the weight of the averaged answer's entropy, >= 0.
        pull: rho, the share of the way back to the source at each step, in [0, 1].
        memory: how much of the running averages is kept at each step, in [0, 1).
        prior_correction: correct the answer by the classes of the batch.
        rounds: how often the correction counts again.

    Example:
        >>> import come
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> come.adapt(model, Steady())(torch.randn(10, 4)).shape
        torch.Size([10, 3])
    """

    name = "steady"
    by_stream = ("diversity", "pull", "memory")
    paper_lr = (1e-2, 2.5e-3)
    diversity: float = 2.0
    pull: float = 0.02
    memory: float = 0.9
    prior_correction: bool = True
    rounds: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.diversity >= 0, "diversity", self.diversity, ">= 0")
        require(0 <= self.pull <= 1, "pull", self.pull, "in [0, 1]")
        require(0 <= self.memory < 1, "memory", self.memory, "in [0, 1)")
        require_int("rounds", self.rounds, 1)

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """Nothing seen yet."""
        classes = ctx.classes(x)
        masses = self.objective.log_mass(torch.zeros(1, classes, device=ctx.device)).shape[1]
        start = {"answers": masses, "classes": classes, "alike": 2}
        return {"seen": torch.zeros((), device=ctx.device)} | {
            name: torch.zeros(size, device=ctx.device) for name, size in start.items()
        }

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, one step, a little way back to the source, and the corrected answer."""
        logits = ctx.forward(x)
        mass = self.objective.log_mass(logits)
        entropy = -(mass.exp() * mass).sum(dim=1)
        average = masked_mean(mass.exp(), ctx.valid)
        some = ctx.valid.any()
        answer, later = self._corrected(ctx, exact(logits.detach()))
        later["answers"] = self._later(ctx, "answers", average)
        common = (later["answers"] / later["seen"]).clamp_min(torch.finfo(average.dtype).tiny).log()
        ctx.descend(masked_mean(entropy, ctx.valid) + self.diversity * (average * common).sum(), go=some)
        ctx.weights = leaf(torch.where(some, ctx.weights + self.pull * (ctx.source - ctx.weights), ctx.weights))
        ctx.state |= {name: torch.where(some, value, ctx.state[name]) for name, value in later.items()}
        return Step(answer.to(logits.dtype), entropy, ctx.valid)

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """The corrected answer."""
        logits = ctx.forward(x)
        return self._corrected(ctx, exact(logits))[0].to(logits.dtype)

    def frozen(self, ctx: Context) -> Frozen:
        """The weights, if nothing corrects their answers."""
        if self.prior_correction:
            raise ModelError(
                "steady cannot be exported: its prior correction depends on the batch; adapt with prior_correction=False"
            )
        return Frozen(ctx.weights.detach())

    def _later(self, ctx: Context, name: str, value: Tensor) -> Tensor:
        """A running sum with one more value; divided by "seen" it is the average."""
        return ctx.state[name] * self.memory + value.detach().to(ctx.state[name])

    def _corrected(self, ctx: Context, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The answer under the classes of this batch, and what is known after it."""
        valid, classes = ctx.valid[:, None], logits.shape[1]
        count, before, known = ctx.valid.sum(), ctx.state["seen"], ctx.state["classes"]
        p = torch.where(valid, logits.softmax(dim=1), 0)
        votes = (valid & (p.argmax(dim=1)[:, None] == torch.arange(classes, device=p.device))).sum(dim=0).to(p)
        within = (votes * (votes - 1)).sum() / (count * (count - 1)).clamp_min(1)
        between = torch.where(before > 0, (votes * known).sum() / (count * before).clamp_min(TINY), within)
        alike = torch.stack([torch.where(count > 1, within, between), between])
        later = {
            "seen": before * self.memory + 1,
            "classes": self._later(ctx, "classes", p.sum(dim=0) / count.clamp_min(1)),
            "alike": self._later(ctx, "alike", alike),
        }
        if not self.prior_correction:
            return logits, later
        within, between = (later["alike"] / later["seen"]).unbind()
        excess = ((within - between) / (1 - between).clamp_min(TINY)).clamp(TINY, 1 - TINY)
        alpha, usual = (1 - excess) / excess, (known + 1 / classes) / (before + 1)
        q, shift = p, torch.zeros_like(p)
        for _ in range(self.rounds):
            prior = (alpha * usual + q.sum(dim=0) - q) / (alpha + (count - 1).clamp_min(0))
            shift = prior.log() - usual.log()
            q = torch.where(valid, (logits + shift).softmax(dim=1), 0)
        return logits + torch.where(valid, shift, 0), later
