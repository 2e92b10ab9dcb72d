r"""Steady: keeps its answers diverse, stays near the source, and learns only while the stream has many classes.

With the class masses b_i of a batch (the objective's mass, "I do not know" divided evenly over the classes), their average
:math:`\bar b`, a running average a of it, and :math:`\hat g = g / \lVert g \rVert`:

.. math:: L = \frac1n \sum_i H(m_i) + \lambda \sum_k \bar b_k \ln a_k, \qquad
          \theta \leftarrow \theta - \eta \, s \, \lVert \theta_0 \rVert \, \hat g, \qquad
          \theta \leftarrow \theta + \rho (\theta_0 - \theta)

The second term is the entropy of the averaged answer, negated: predicting one class for every sample is penalized. The length
of a step is relative to the norm of the source's parameters, whatever the size of the gradient, so one rate serves differently
trained networks. The pull :math:`\rho` bounds how far a long stream can move the weights.

The term is right while classes come in about equal numbers, and pushes answers away from the truth on a long stretch of few
classes. So the step is scaled by how many classes are predicted, and by how uncertain the model is: with the probability c
that two recent answers agree, counted over pairs of samples, and the mean entropy of the softmax,

.. math:: s = \mathrm{clip}_0^1\left(\frac{1 / (K c) - 0.7}{0.15}\right)
              \mathrm{clip}_0^1\left(\frac{\bar H(p)}{0.3 \ln K}\right)

1/c is the effective number of classes. Below 0.7 K nothing is learned, whether few classes come or the model has begun to
collapse, and the pull leads back to the source. A model that is sure of everything has nothing to learn.

With `prior_correction` the answer is corrected by the classes of the batch. Two samples of a batch agree more often than
samples of different batches if classes come together (frames of a video, a sorted list): that excess, :math:`r`, is the
correlation within a batch, and makes the classes of the batch a Dirichlet-multinomial with mean :math:`\mu` (the long-run
average of p) and :math:`\alpha = (1 - r) / r`. From the n - 1 others, counted by their own corrected answers q:

.. math:: \pi_{ik} = \frac{\alpha \mu_k + \sum_{j \ne i} q_{jk}}{\alpha + n - 1}, \qquad
          q_i = \mathrm{softmax}(f_i + \ln \pi_i - \ln \mu)

A change of the domain also makes samples of a batch agree more, and cannot be told apart with certainty: r counts only where
agreement within a batch is at least twice that between batches, fully from 3.5 times on, and the correction is off by default.

Where the answer has positions, such as pixels, classes do not come in equal numbers: one may cover most of every image. There
what the source weights answer on the same images takes the place of equal numbers. With its running average :math:`a^0`, and
the effective numbers of classes :math:`C` and :math:`C^0` that adapted and source weights predict over the last images,

.. math:: L = \frac1n \sum_i H(m_i) + \lambda \sum_k \bar b_k \ln \frac{a_k}{a^0_k}, \qquad
          s = \mathrm{clip}_0^1\left(\frac{C / C^0 - 0.7}{0.15}\right)
              \mathrm{clip}_0^1\left(\frac{\bar H(p)}{0.3 \ln K}\right)

which costs one more forward. Batches, running averages and the pull count images.

Adapts the affine parameters of normalization layers, on the BatchNorm statistics that the guard chooses, and on the source's
without a guard: those of a batch with few classes mislead a model, and nothing here would notice. Needs nothing; one forward
and one backward per batch. Any objective; made for "invariant". Its nearest published neighbour is AdaDEM (arXiv 2511.03256),
which replaces a part of the entropy by a running class marginal. See docs/steady.md for how it was found, what each part does,
and where it fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from come import objectives
from come.errors import ModelError, require, require_int
from come.guard.signals import votes
from come.method import Context, Frozen, Method, Step, converted, masked_mean, register
from come.model.inputs import Inputs, at_least_float32
from come.model.positions import in_parts
from come.objectives import Objective, Softmax

TINY = 1e-6
WINDOW = 64  # samples that `memory`, `pull` and the learning rate refer to
SPREAD = (0.7, 0.85)  # effective number of classes, relative to K, from which the step is positive, and from which full
TOGETHER = (2.0, 3.5)  # agreement within batches, relative to that between, from which answers are corrected, and fully
OPEN = 0.3  # mean entropy of the softmax, relative to ln K, from which the step is full
CAUTIOUS = 5.0  # pairs that count as agreeing before any was seen: a stream must show that it has many classes
DOUBTED = 50.0  # pairs within batches that count as agreeing like those between batches


SOFTMAX = Softmax()


@register
@dataclass(kw_only=True, eq=False)
class Steady(Method):
    """Steady, see the module.

    Args:
        diversity: lambda, the weight of the averaged answer's entropy, >= 0.
        pull: rho, the share of the way back to the source for each 64 samples, in [0, 1].
        memory: how much of the running averages is kept over 64 samples, in [0, 1).
        prior_correction: correct the answer by the classes of the batch; for streams whose classes come together and whose
            domain changes rarely.
        rounds: iterations of the correction.

    Example:
        >>> import come
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> come.adapt(model, Steady())(torch.randn(10, 4)).shape
        torch.Size([10, 3])
    """

    name = "steady"
    by_stream = ("diversity", "pull", "memory")
    paper_lr = (1e-4, 2.5e-5)
    unguarded = "source"
    objective: converted[str | Objective, Objective] = converted(objectives.get, "invariant")
    diversity: float = 2.0
    pull: float = 0.02
    memory: float = 0.9
    prior_correction: bool = False
    rounds: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.diversity >= 0, "diversity", self.diversity, ">= 0")
        require(0 <= self.pull <= 1, "pull", self.pull, "in [0, 1]")
        require(0 <= self.memory < 1, "memory", self.memory, "in [0, 1)")
        require_int("rounds", self.rounds, 1)

    @property
    def corrects(self) -> bool:
        """With `prior_correction`."""
        return self.prior_correction

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """Sums over samples of class masses, probabilities and votes, and counts of agreeing and all pairs, all zero."""
        classes = ctx.classes(x)
        sizes = {"answers": classes, "votes": classes}
        if ctx.fixed["dense"]:
            sizes |= {"source_answers": classes, "source_votes": classes}
        else:
            sizes |= {"classes": classes, "pairs": 4}
        zeros = {name: torch.zeros(size, device=ctx.device) for name, size in sizes.items()}
        return {"seen": torch.zeros((), device=ctx.device)} | zeros

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Predict, take one step, go a little way back to the source, and correct the answer."""
        logits = ctx.forward(x)
        entropy, average = self._believed(logits, ctx.valid)
        count = ctx.count_valid()
        some, part = count > 0, count / WINDOW
        if "source_votes" in ctx.state:
            answer, later = logits.detach(), self._beside_source(ctx, x, logits.detach(), count)
        else:
            answer, later = self._corrected(ctx, at_least_float32(logits.detach()))

        later |= self._later(ctx, count, {"answers": count * average})
        common = self._log_mean(later["answers"], later["seen"])
        if "source_answers" in later:
            common = common - self._log_mean(later["source_answers"], later["seen"])
        gradient = ctx.gradient(masked_mean(entropy, ctx.valid) + self.diversity * (average * common).sum())

        scale = self._spread(later, logits.shape[1]) * self._open(logits.detach(), ctx.valid)
        length = scale * torch.linalg.vector_norm(ctx.source) / torch.linalg.vector_norm(gradient).clamp_min(1e-30)
        ctx.descend_along(gradient * length.to(gradient), go=some & (scale > 0))
        back = 1 - (1 - self.pull) ** part
        ctx.weights = ctx.leaf(torch.where(some, ctx.weights + back * (ctx.source - ctx.weights), ctx.weights))
        ctx.state |= {name: torch.where(some, value, ctx.state[name]) for name, value in later.items()}
        return Step(answer.to(logits.dtype), entropy, ctx.valid)

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """The corrected answer."""
        logits = ctx.forward(x)
        if not self.prior_correction:
            return logits
        return self._corrected(ctx, at_least_float32(logits))[0].to(logits.dtype)

    def frozen(self, ctx: Context) -> Frozen:
        """The weights, unless answers are corrected."""
        if self.prior_correction:
            raise ModelError(
                "steady cannot be exported: its prior correction depends on the batch; adapt with prior_correction=False"
            )
        return Frozen(ctx.weights.detach())

    def _believed(self, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The entropy of each row (N,), and the average of the class masses of the valid rows (K,)."""

        def of_rows(logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
            mass, classes = self.objective.log_mass(logits), logits.shape[1]
            beliefs = mass.exp()[:, :classes]
            beliefs = beliefs + (1 - beliefs.sum(dim=1, keepdim=True)) / classes
            return -(mass.exp() * mass).sum(dim=1), torch.where(valid[:, None], beliefs, 0).sum(dim=0)

        entropy, total = in_parts(of_rows, logits, valid)
        return entropy, total / valid.sum().clamp_min(1)

    def _beside_source(self, ctx: Context, x: Inputs, logits: Tensor, count: Tensor) -> dict[str, Tensor]:
        """The running sums after a batch with positions, of adapted and source weights."""
        with torch.no_grad():
            source = ctx.forward(x, ctx.source)
            expected = self._believed(source, ctx.valid)[1]
        each = count / ctx.valid.sum().clamp_min(1)
        found = {"votes": votes(logits, ctx.valid) * each, "source_votes": votes(source, ctx.valid) * each}
        return self._later(ctx, count, {"seen": count, "source_answers": count * expected} | found)

    @staticmethod
    def _log_mean(total: Tensor, count: Tensor) -> Tensor:
        return (total / count.clamp_min(1)).clamp_min(torch.finfo(total.dtype).tiny).log()

    def _spread(self, later: dict[str, Tensor], classes: int) -> Tensor:
        """The share of a full step by how many classes are predicted, in [0, 1]."""
        if "source_votes" in later:
            mine, theirs = (later[name].square().sum() for name in ("votes", "source_votes"))
            found = theirs / mine.clamp_min(TINY)
        else:
            within, pairs, between, others = later["pairs"].unbind()
            found = 1 / (classes * ((within + between + CAUTIOUS) / (pairs + others + CAUTIOUS)))
        return ((found - SPREAD[0]) / (SPREAD[1] - SPREAD[0])).clamp(0, 1)

    def _open(self, logits: Tensor, valid: Tensor) -> Tensor:
        """The share of a full step by how uncertain the model is, in [0, 1]."""
        left_open = masked_mean(SOFTMAX.entropy(logits), valid) / math.log(logits.shape[1])
        return (left_open / OPEN).clamp(0, 1)

    def _later(self, ctx: Context, count: Tensor, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Running sums over samples, with what this batch of `count` adds."""
        keep, state = self.memory ** (count / WINDOW), ctx.state
        return {name: state[name] * keep + value.detach().to(state[name]) for name, value in found.items()}

    def _corrected(self, ctx: Context, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The answer given the classes of this batch, and the running sums after it."""
        valid, classes, count = ctx.valid[:, None], logits.shape[1], ctx.valid.sum()
        seen, known = ctx.state["seen"], ctx.state["classes"]
        p = torch.where(valid, logits.softmax(dim=1), 0)
        votes = (valid & (p.argmax(dim=1)[:, None] == torch.arange(classes, device=p.device))).sum(dim=0).to(p)
        alike = (votes * (votes - 1)).sum(), count * (count - 1), (votes * ctx.state["votes"]).sum(), count * seen
        pairs = torch.stack([value.to(p) for value in alike])
        later = self._later(ctx, count, {"seen": count, "classes": p.sum(dim=0), "votes": votes, "pairs": pairs})
        if not self.prior_correction:
            return logits, later
        within, pairs, between, others = later["pairs"].unbind()
        usual_rate = (between / others.clamp_min(TINY)).clamp_min(TINY)
        within = (within + DOUBTED * usual_rate) / (pairs + DOUBTED)
        excess = (within - usual_rate) / (1 - usual_rate).clamp_min(TINY)
        excess = excess * ((within / usual_rate - TOGETHER[0]) / (TOGETHER[1] - TOGETHER[0])).clamp(0, 1)
        excess = torch.where(others > 0, excess, 0).clamp(TINY, 1 - TINY)
        alpha, usual = (1 - excess) / excess, (known + 1 / classes) / (seen + 1)
        q, shift = p, torch.zeros_like(p)
        for _ in range(self.rounds):
            prior = (alpha * usual + q.sum(dim=0) - q) / (alpha + (count - 1).clamp_min(0))
            shift = prior.log() - usual.log()
            q = torch.where(valid, (logits + shift).softmax(dim=1), 0)
        return logits + torch.where(valid, shift, 0), later
