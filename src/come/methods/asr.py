r"""ASR: ETA with a reset of the output side when the answers concentrate.

Lim, Hwang and Lee, "When and Where to Reset Matters for Long-Term Test-Time Adaptation", ICLR 2026.

After each batch, with the weights theta:

    C        entropy of softmax(mean of the logits over the batch)           small where the answers concentrate
    phi      share of samples that the source model answers differently
    level    starts at ln(start K);  level <- mu level + (1 - mu) C,  mu = 1 - follow (1 - phi)
    reset    if C < level: tensor i of n stays as it is if  i < n max(keep - slope (level - C), 0),  the later ones go back to
             the source; momentum, ETA's average and the level begin anew
    F, M     mean of g^2, g the gradient of ETA's loss, and mean of the weights before the update, since the last reset; the
             first reset takes both as anchors, a later one mixes a tenth of them into the anchors
    loss     ETA's + lambda sum_j F_j (theta_j - M_j)^2,  lambda = anchoring phi^2 of the batch before

Adapts what ETA (EATA without its anti-forgetting term) adapts; needs nothing; two forwards, the second by the source model, and
one backward: the gradient of the penalty is 2 lambda F (theta - M). Memory: four vectors like the weights. H is the objective's
entropy; C and phi are of the softmax, whatever the objective.

The thresholds must suit the model: C depends on the scale of the logits, the size of the batch and the classes in it. Where
ln(start K) is above the C of healthy batches (few classes, small batches, a sorted stream), every batch resets, and what is
left is the source model. A batch of one has the C of its own answer. Choose `start` so that C stays above ln(start K) on a
stream without a shift; where start K < 1 the level begins negative and first rises towards C.

Published, in the names of that code: ResNet-50 m0 = follow 0.15, p0 = anchoring 5, a0 = start 0.5, r0 = keep 0.5, r1 = slope
20, which are the defaults; ViT-B/16 by the difficulty of the stream, hardest last: follow 0.99, 0.99, 0.9995, start 0.005,
slope 50, 50, 0.1. As there, `keep` is the share that stays where C = level.

Deviations from the published code:

* `reset()` restores the source model. There it raises after the first step, and the reset of a stream overwrites the state
  that it would restore.
* The penalty moves a weight by at most `pull` of the way to its anchor, before momentum. `pull=math.inf` is as published, and
  diverges where lr 2 lambda F exceeds 2.
* Batches of one are treated like all others; there they are never checked.

As there, a batch without a selected sample counts as a gradient of zero and takes no step. The variant on ROID is not here: as
published it resets ROID's copy of the source in place of the model that adapts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from come.errors import require
from come.method import Context, Step, masked_mean, register
from come.methods.eata import EATA
from come.model.inputs import Inputs, at_least_float32
from come.objectives import Softmax
from come.optim import OptimizerFactory, adam, sgd

SOFTMAX = Softmax()
MIXED = 0.1  # what a later reset adds to the anchors


@register
@dataclass(kw_only=True, eq=False)
class ASR(EATA):
    """ETA with adaptive, selective resets; see the module.

    Args:
        margin: see `EATA`.
        redundancy: see `EATA`.
        beta: see `EATA`; 0 here, so that no source data is needed.
        start: the level starts at ln(start K), > 0.
        follow: how far the level moves towards C where the source agrees with all answers, in [0, 1].
        anchoring: strength of the penalty where the source disagrees with all answers, >= 0.
        keep: share of the parameter tensors that a reset at C = level keeps, in [0, 1].
        slope: how much less it keeps for each nat below, >= 0.
        pull: the longest way to its anchor that the penalty may move a weight in a step, as a share, > 0.

    Example:
        >>> import come, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        >>> classifier = come.adapt(model, ASR(start=0.9))
        >>> for _ in range(3):
        ...     _ = classifier(torch.randn(10, 4))
        >>> int(classifier.state["resets"]) <= 3
        True
    """

    name = "asr"
    vectors_only = "it takes one class in most answers, which a background is, for a collapse"
    by_stream = (*EATA.by_stream, "follow", "anchoring", "keep", "slope")
    needs = "nothing"
    cost = "2f 1b"
    beta: float = 0.0
    optimizer: str | sgd | adam | OptimizerFactory = sgd(nesterov=True)
    start: float = 0.5
    follow: float = 0.15
    anchoring: float = 5.0
    keep: float = 0.5
    slope: float = 20.0
    pull: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.start < math.inf, "start", self.start, "a positive share of K")
        require(0 <= self.follow <= 1, "follow", self.follow, "in [0, 1]")
        require(0 <= self.anchoring < math.inf, "anchoring", self.anchoring, ">= 0")
        require(0 <= self.keep <= 1, "keep", self.keep, "in [0, 1]")
        require(0 <= self.slope < math.inf, "slope", self.slope, ">= 0")
        require(self.pull > 0, "pull", self.pull, "a positive share, or math.inf for no limit")

    def setup(self, ctx: Context) -> dict[str, Any]:
        """The number of the parameter tensor that each weight belongs to, (P,)."""
        tensors = ctx.named(ctx.source).values()
        numbers = [torch.full_like(tensor, i) for i, tensor in enumerate(tensors)]
        return super().setup(ctx) | {"number": ctx.model.join(numbers)}

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """No anchors, and the first level."""
        zero, classes = torch.zeros((), device=ctx.device), ctx.classes(x)
        vectors = {name: torch.zeros_like(ctx.source) for name in ("squares", "path", "fisher", "anchor")}
        return super().initial_state(ctx, x) | vectors | {
            "level": zero + self._first_level(classes),
            "penalty": zero,
            "steps": zero.long(),
            "anchored": zero.bool(),
            "resets": zero.long(),
        }  # fmt: skip

    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """One step of ETA, held at the anchors; then reset if the answers concentrate."""
        logits, entropy, used, loss = self.filtered(ctx, x)
        gradient, state = ctx.gradient(loss), ctx.state
        with torch.no_grad():
            self._take(ctx, gradient)
            strength = (2 * state["penalty"] * state["fisher"]).clamp_max(self.pull / ctx.lr)
            gradient = gradient + strength.to(gradient) * (ctx.weights - state["anchor"])
            ctx.descend_along(gradient, go=used.any())
            source = ctx.forward(x, ctx.source)
            self._watch(ctx, at_least_float32(logits), source)
        return Step(logits, entropy, used)

    def _first_level(self, classes: int) -> float:
        return math.log(self.start * classes)

    def _take(self, ctx: Context, gradient: Tensor) -> None:
        """Take the gradient and the weights into the means since the last reset."""
        steps = ctx.state["steps"] + 1
        for name, value in (("squares", gradient.square()), ("path", ctx.weights)):
            old = ctx.state[name]
            ctx.state[name] = old + (value.to(old) - old) / steps
        ctx.state["steps"] = steps

    def _watch(self, ctx: Context, logits: Tensor, source: Tensor) -> None:
        """Reset where the answers concentrate; the level and the penalty of the next batch."""
        state = ctx.state
        known = logits.masked_fill(logits.isneginf(), 0)
        mean = torch.where(logits.isneginf().all(dim=0), -math.inf, masked_mean(known, ctx.valid))
        spread = SOFTMAX.entropy(mean).to(state["level"])
        flips = masked_mean((logits.argmax(dim=1) != source.argmax(dim=1)).to(spread), ctx.valid)
        level = state["level"]
        reset = spread < level
        kept = (self.keep - self.slope * (level - spread)).clamp_min(0) * len(ctx.model.shapes)
        weights = torch.where(ctx.fixed["number"] < kept, ctx.weights, ctx.source)
        weights = torch.where(reset, weights, ctx.weights)
        ctx.recover(reset)
        ctx.weights = ctx.leaf(weights)

        share = torch.where(state["anchored"], MIXED, 1.0)
        for anchor, found in (("fisher", "squares"), ("anchor", "path")):
            mixed = state[anchor] + share.to(state[anchor]) * (state[found] - state[anchor])
            state[anchor] = torch.where(reset, mixed, state[anchor])
        move = self.follow * (1 - flips)
        first = self._first_level(logits.shape[1])
        state["level"] = torch.where(reset, first, level + move * (spread - level))
        state["penalty"] = self.anchoring * flips.square()
        state["anchored"] = state["anchored"] | reset
        state["averaged"] = state["averaged"] & ~reset
        state["steps"] = torch.where(reset, 0, state["steps"])
        state["resets"] = state["resets"] + reset
