"""LAME: neighbours should have the same label.

Boudiaf et al., "Parameter-free Online Test-time Adaptation", CVPR 2022.

    minimize over the assignments z_i   sum_i KL(z_i || p_i) - sum_ij w_ij z_i . z_j
    by iterating                        z_i <- softmax(ln p_i + sum_j w_ij z_j)

with the affinity w of L2-normalized features: the indicator of the k nearest others (knn), exp(-d^2 / 2 s^2) with s the mean
distance to the k-th nearest (rbf), or the inner product (linear).

Adapts only the output; needs features (a model whose logits come from one linear layer) and more than k samples per batch. One
forward per batch, BatchNorm on its source statistics. The objective is not used. It returns log-probabilities, so a softmax
over its output gives the probabilities and nothing is normalized twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import InputError, require, require_int
from come.method import Context, Method, Step, masked_mean, register
from come.model.heads import Head
from come.model.inputs import Inputs, at_least_float32
from come.select import Selector, nothing

Affinity = Literal["knn", "rbf", "linear"]


@register
@dataclass(kw_only=True, eq=False)
class LAME(Method):
    """Laplacian adjusted maximum-likelihood estimation.

    Args:
        affinity: "knn", "rbf" or "linear".
        k: neighbours, at least 1; a batch needs more than k samples (knn), or at least k (rbf).
        symmetric: average the affinity with its transpose.
        iterations: the largest number, at least 1.
        tolerance: stop when the energy changes by less than this, relatively; not before the third iteration.
        head: the linear layer that gives the logits, or its name; None finds it.

    Example:
        >>> import come
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> log_p = come.adapt(model, LAME(k=2))(torch.randn(10, 4))
        >>> bool(torch.allclose(log_p.exp().sum(dim=1), torch.ones(10)))
        True
    """

    name = "lame"
    vectors_only = "it compares the features of whole samples"
    unexported = "its answers are an agreement between the samples of a batch; it leaves the model as it is"
    needs = "features"
    cost = "1f"
    descends = False
    minimizes = False
    batch_statistics = False
    select: Selector = nothing()
    affinity: Affinity = "knn"
    k: int = 5
    symmetric: bool = True
    iterations: int = 100
    tolerance: float = 1e-8
    head: str | nn.Module | None = None

    @property
    def corrects(self) -> bool:
        """Always."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        words = get_args(Affinity)
        require(self.affinity in words, "affinity", self.affinity, f"one of {', '.join(words)}")
        require_int("k", self.k, 1)
        require_int("iterations", self.iterations, 1)
        require(self.tolerance >= 0, "tolerance", self.tolerance, ">= 0")

    def setup(self, ctx: Context) -> dict[str, Any]:
        """The layer whose input is compared."""
        return {"head": Head(ctx.model.model, self.head)}

    def check(self, ctx: Context, x: Inputs, first: bool) -> None:
        """Each sample needs neighbours."""
        least = {"knn": self.k + 1, "rbf": self.k, "linear": 1}[self.affinity]
        if x.size < least:
            raise InputError(
                f"LAME's {self.affinity} affinity with k = {self.k} needs a batch of at least {least} samples, got {x.size}; "
                "use larger batches, a smaller k, or affinity='linear'"
            )

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """Predict, then make neighbours agree."""
        self.check(ctx, x, False)
        features, logits = ctx.features(x)
        w = self._affinities(F.normalize(at_least_float32(features), dim=1), ctx.valid)
        return self._assign(at_least_float32(logits).softmax(dim=1), w)

    @torch.no_grad()
    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """The same: LAME has no memory."""
        return Step(self.predict(ctx, x))

    def _affinities(self, features: Tensor, valid: Tensor) -> Tensor:
        """(B, B); an invalid sample, which a copy of a valid one replaces, is no neighbour of any sample."""
        both = valid & valid[:, None]
        if self.affinity == "linear":
            w = features @ features.T
        else:
            distance = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
            distance = torch.where(both, distance, torch.inf)
            if self.affinity == "rbf":
                farthest = distance.topk(self.k, largest=False).values[:, -1]
                width = masked_mean(farthest, farthest.isfinite()).clamp_min(torch.finfo(distance.dtype).tiny)
                w = (-distance.square() / (2 * width.square())).exp()
            else:
                distance.fill_diagonal_(torch.inf)  # a sample is not its own neighbour
                w = torch.zeros_like(distance).scatter(1, distance.topk(self.k, largest=False).indices, 1)
                both = distance.isfinite()
        w = torch.where(both, w, 0)
        return 0.5 * (w + w.T) if self.symmetric else w

    def _assign(self, probability: Tensor, w: Tensor) -> Tensor:
        unary = -(probability + 1e-10).log()
        log_z = (-unary).log_softmax(dim=1)
        energy = torch.full((), torch.nan, dtype=unary.dtype, device=unary.device)
        done = torch.zeros((), dtype=torch.bool, device=unary.device)
        for i in range(self.iterations):
            pairwise = w @ log_z.exp()
            new = (pairwise - unary).log_softmax(dim=1)
            z = new.exp()
            now = (z * (unary - pairwise + new)).sum()
            log_z = torch.where(done, log_z, new)
            if i >= 2:  # checked on the device: a GPU continues with the answer held, and the CPU does not wait
                done = done | ((now - energy).abs() <= self.tolerance * energy.abs())
                if done.device.type == "cpu" and done:
                    break
            energy = now
        return log_z
