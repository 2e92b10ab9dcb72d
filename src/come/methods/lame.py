"""LAME: neighbours should have the same label.

Boudiaf et al., "Parameter-free Online Test-time Adaptation", CVPR 2022.

    minimise over the assignments z_i   sum_i KL(z_i || p_i) - sum_ij w_ij z_i . z_j
    by iterating                        z_i <- softmax(ln p_i + sum_j w_ij z_j)

with the affinity w of L2-normalised features: the indicator of the k nearest others (knn), exp(-d^2 / 2 s^2) with s the mean
distance to the k-th nearest (rbf), or the inner product (linear).

Adapts the output only; needs features (a model whose logits come from one linear layer) and more than k samples per batch.
One forward per batch, BatchNorm on its source statistics. The objective plays no part in it.

It returns log-probabilities, so that a softmax over its output gives them back: nothing is softmaxed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.errors import InputError, require
from come.heads import Head
from come.inputs import Input, exact
from come.method import Common, Method, Step
from come.select import nothing

if TYPE_CHECKING:
    from typing_extensions import Unpack

Affinity = Literal["knn", "rbf", "linear"]


class LAME(Method):
    """Laplacian adjusted maximum-likelihood estimation.

    Args:
        model: see `Method`.
        affinity: "knn", "rbf" or "linear".
        k: neighbours, at least 1; a batch needs more than k samples (knn), or at least k (rbf).
        symmetric: average the affinity with its transpose.
        iterations: at most so many, at least 1.
        tolerance: stop when the energy changes by less than this, relatively; not before the third iteration.
        head: the linear layer that gives the logits, or its name; None finds it.
        **common: see `Method`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> log_p = LAME(model, k=2)(torch.randn(10, 4))
        >>> bool(torch.allclose(log_p.exp().sum(dim=1), torch.ones(10)))
        True
    """

    name = "lame"
    needs = "features"
    cost = "1f"
    descends = False
    minimises = False
    batch_statistics = False
    selects = nothing()

    def __init__(
        self,
        model: nn.Module,
        *,
        affinity: Affinity = "knn",
        k: int = 5,
        symmetric: bool = True,
        iterations: int = 100,
        tolerance: float = 1e-8,
        head: str | nn.Module | None = None,
        **common: Unpack[Common],
    ) -> None:
        require(affinity in get_args(Affinity), "affinity", affinity, f"one of {', '.join(get_args(Affinity))}")
        require(isinstance(k, int) and k >= 1, "k", k, "a whole number, at least 1")
        require(isinstance(iterations, int) and iterations >= 1, "iterations", iterations, "a whole number, at least 1")
        require(tolerance >= 0, "tolerance", tolerance, "at least 0")
        self.affinity, self.k, self.symmetric = affinity, k, symmetric
        self.iterations, self.tolerance = iterations, tolerance
        self.head = Head(model, head)
        super().__init__(model, **common)

    @torch.no_grad()
    def adapt(self, x: Input) -> Step:
        """Predict, then let neighbours agree."""
        features, logits = self.head.features(lambda: self.forward(x))
        w = self._affinities(F.normalize(exact(features), dim=1))
        return Step(self._assign(exact(logits).softmax(dim=1), w))

    def _affinities(self, features: Tensor) -> Tensor:
        size = len(features)
        least = {"knn": self.k + 1, "rbf": self.k, "linear": 1}[self.affinity]
        if size < least:
            raise InputError(
                f"a batch of {size} is too small for LAME's {self.affinity} affinity with k = {self.k}: it needs at least "
                f"{least} samples; use larger batches, a smaller k, or affinity='linear'"
            )
        if self.affinity == "linear":
            w = features @ features.T
        else:
            distance = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
            if self.affinity == "rbf":
                width = distance.topk(self.k, largest=False).values[:, -1].mean()
                w = (-distance.square() / (2 * width.square())).exp()
            else:
                distance.fill_diagonal_(torch.inf)  # a sample is not its own neighbour
                w = torch.zeros_like(distance).scatter(1, distance.topk(self.k, largest=False).indices, 1)
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
            if i >= 2:  # the rule is read on the device: a GPU runs on, with the answer held, and nobody waits for it
                done = done | ((now - energy).abs() <= self.tolerance * energy.abs())
                if done.device.type == "cpu" and done:
                    break
            energy = now
        return log_z
